"""Check what model.name refers to, and if it can be trained. Reads no weights, loads no torch.

transformers would report problems after the rows are tokenized, in its own terms, or not at all.
Its model types are read from its source files: they are tables of strings, and importing
transformers would take seconds.
"""

import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.config_json import ModelConfigJson, find_file, known_model, load_model_config
from sft_play.plan.stored_as import refuse_untrainable, stored_as
from sft_play.runs.model_folder import Header, read_headers, read_object, refuse_odd_files

FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
# A statement that fills a table, and a row of it
TABLE = re.compile(r"^(\w+)_MAPPING_NAMES\b(.*?)(?=^\w|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r'"([^"]+)"[,:]\s*"([^"]+)"')
GENERATING = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM")


@cache
def type_tables() -> dict[str, dict[str, str]]:
    """Return the class of each model type in each of transformers' tables; {} without transformers.

    A table that starts with another table contains only its additions.
    """
    package = find_spec("transformers")
    folders = package.submodule_search_locations if package else None
    found: dict[str, dict[str, str]] = {}
    for file in FILES if folders else ():
        text = (Path(folders[0]) / "models" / "auto" / file).read_text(encoding="utf-8")
        for name, rows in TABLE.findall(text):
            found.setdefault(name, {}).update(ROW.findall(rows))
    return found


def is_known_type(model_type: str) -> bool:
    """Return whether transformers supports a model type."""
    return any(model_type in table for table in type_tables().values())


def model_classes(*names: str, model_type: str | None = None) -> set[str]:
    """Return the classes in some tables, of one model type or of all."""
    found = set()
    for name in names:
        for key, model_class in type_tables().get(name, {}).items():
            if model_type in (None, key):
                found.add(model_class)
    return found


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs"  # the content that git writes if git-lfs is not installed
POINTER_BYTES = 512  # a pointer has about 130
EMBEDDERS = ("modules.json", "config_sentence_transformers.json")
CAUSAL = "set MODEL_NAME to a causal language model"

# Of the metadata of a GGUF file
MADE_FROM = (
    "general.source.repo_url",
    "general.repo_url",
    "general.base_model.0.repo_url",
    "general.organization",
    "general.name",
)
GGUF_HEADER_BYTES = 1 << 16  # these come first, before the vocabulary
UNPACK = (
    'import transformers as t; s = {{"pretrained_model_name_or_path": "{folder}", '
    '"gguf_file": "{file}"}}; m = t.AutoModelForCausalLM.from_pretrained(**s, dtype="bfloat16"); '
    'm.hf_quantizer = None; del m.config.quantization_config; m.save_pretrained("unpacked"); '
    't.AutoTokenizer.from_pretrained(**s).save_pretrained("unpacked")'
)


def refuse_other_folder(folder: Path, name: str) -> None:
    """Raise EnvironmentFault if a folder is not a model, or if files are missing."""
    _refuse_pointers(folder, name)
    files = {path.name for path in folder.iterdir() if path.is_file() or path.is_dir()}
    what = _other_kind(folder, files)
    if what is not None:
        raise EnvironmentFault(f"model.name={name} is {what}")
    shards = weight_files(folder)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if not shards and INDEX in files:
        raise EnvironmentFault(f"model.name={name}: {INDEX} names no files; get the model again")
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: {len(missing)} of the {len(shards)} files that {INDEX} names are "
            f"not there, {missing[0]} first; get the model again"
        )


def model_inside(folder: Path) -> Path | None:
    """Return the only model inside a folder that is not a model itself, None if there is not one.

    In a repository of the hub's cache it is the snapshot of `main`.
    """
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    main = folder / "refs" / "main"
    if main.is_file():
        return folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    found = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    return found[0].parent if len(found) == 1 else None


def read_weight_headers(folder: Path, name: str) -> list[Header]:
    """Return the tensors in a folder's weight files; in the hub's cache some files may be missing.

    Raises: EnvironmentFault for a damaged file.
    """
    paths = [folder / file for file in weight_files(folder)]
    try:
        return list(read_headers(path for path in paths if path.is_file()))
    except ValueError as error:
        raise EnvironmentFault(
            f"model.name={name}: the weights could not be loaded: {error}; get the model again"
        ) from error


def refuse_missing_weights(name: str) -> None:
    """Raise EnvironmentFault for a folder without weights: it can only be planned."""
    if Path(name).is_dir() and not has_weights(Path(name)):
        raise EnvironmentFault(
            f"model.name={name}: the folder has a config.json and no weights ({SINGLE}); get the "
            "model again"
        )


def weight_files(folder: Path) -> list[str]:
    """Return the safetensors files that transformers reads; a single file takes precedence."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE] if (folder / SINGLE).is_file() else []
    files = read_object(folder / INDEX).get("weight_map") or {}
    names = list(files.values()) if isinstance(files, dict) else [files]
    for file in names:
        if not isinstance(file, str) or Path(file).name != file:
            raise EnvironmentFault(
                f"{folder / INDEX}: its weight_map names {str(file)[:100]!r}, which is no file of "
                "the folder; get the model again"
            )
    return sorted(set(names))


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights under the names that transformers reads."""
    patterns = (SINGLE, INDEX, "pytorch_model*.bin*")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def packed_for_llama_cpp(name: str, file: Path | None = None) -> str:
    """Describe what GGUF files are packed for, their original model, and how to unpack one."""
    if file and (named := made_from(file)):
        command = UNPACK.format(folder=file.parent, file=file.name)
        return (
            f", packed for llama.cpp; {CAUSAL} in 16 bits. The metadata of {file.name} has "
            f"{named}. If you cannot get the original model, this unpacks the rounded weights into "
            f"unpacked/:\n{sys.executable} -m pip install gguf\n{sys.executable} -c '{command}'"
        )
    at = Path(name).name.lower().rfind("-gguf")
    original = f"{CAUSAL}, such as {Path(name).name[:at]}" if at > 0 else CAUSAL
    return f", packed for llama.cpp; {original}"


def made_from(file: Path) -> str:
    """Return the original model that the header of a GGUF file names, "" if none.

    A key is followed by its type, which is 8 for a text, by 8 bytes of its length, and by the text.
    """
    with file.open("rb") as opened:
        header = opened.read(GGUF_HEADER_BYTES)
    named = []
    for key in MADE_FROM:
        found = re.search(re.escape(key.encode()) + rb"\x08\0{3}(.{8})", header, re.DOTALL)
        if found:
            text = header[found.end() :][: int.from_bytes(found[1], "little")]
            named.append(f"{key}={text.decode(errors='replace')}")
    return ", ".join(named)


def _other_kind(folder: Path, files: set[str]) -> str | None:
    """Return what a folder is and what to type, None if it may be a model."""
    if ADAPTER in files:
        return _adapter(folder)
    if "plan.json" in files and "adapter" in files:
        return (
            f"a run; leave MODEL_NAME out, and set MODEL_ADAPTER={folder} to continue from it; or "
            f"run make merge RUN={folder}, and set MODEL_NAME={folder / 'merged'}"
        )
    if "plan.json" in files and "model" in files:
        return f"a run; set MODEL_NAME={folder / 'model'}"
    if "model_index.json" in files:
        return f"a diffusion pipeline; {CAUSAL}"
    if any(file in files for file in EMBEDDERS):
        return f"a sentence-transformers model, which embeds texts; {CAUSAL}"
    if "config.json" not in files and any(file.startswith("consolidated.") for file in files):
        return (
            "in the format of Mistral's or Meta's code, without config.json; set MODEL_NAME "
            "to the upload of the same model that has a config.json"
        )
    packed = sorted(folder.glob("*.gguf"))
    if packed and not has_weights(folder):
        return f"a folder of GGUF files{packed_for_llama_cpp(folder.name, packed[0])}"
    return None


def _adapter(folder: Path) -> str:
    if has_weights(folder):  # transformers would add the adapter silently
        return f"a model with an adapter in the same folder; move {ADAPTER} out of the folder"
    base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return f"an adapter whose {ADAPTER} names no base; set MODEL_NAME to its base"
    is_path = base.startswith((".", "/", "~")) or base.count("/") > 1
    if is_path and not Path(base).is_dir():
        return (
            f"an adapter of {base}, which is not here; set MODEL_NAME to where that model is, or "
            "to its name on the hub"
        )
    return f"an adapter of {base}; set MODEL_NAME={base} MODEL_ADAPTER={folder} to continue from it"


def _refuse_pointers(folder: Path, name: str) -> None:
    """Raise EnvironmentFault for files that git LFS has not fetched."""
    pointers = sorted(path.name for path in folder.iterdir() if _is_pointer(path))
    if pointers:
        others = f", as are {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise EnvironmentFault(
            f"model.name={name}: {pointers[0]} is a pointer of git LFS, not the file itself"
            f"{others}; run git lfs pull in {folder}"
        )


def _is_pointer(path: Path) -> bool:
    is_small = path.is_file() and 0 < path.stat().st_size <= POINTER_BYTES  # not of /proc
    return is_small and path.read_bytes().startswith(POINTER)


ENCODER_DECODERS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ")
MASKED = "MODEL_FOR_MASKED_LM"
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OF_ENDINGS = {
    "ForMaskedLM": "an encoder, which fills gaps in a text",
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a classifier",
    "RewardModel": "a reward model",
}


def require_base(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse models that cannot be trained, before anything is read of rows or weights.

    A well-known model of the hub that is not in the cache passes.

    Raises: EnvironmentFault for the files found, ConfigError for a setting that does not fit them;
    both say what to type.
    """
    model = config.model
    path = Path(model.name)
    if path.is_file():
        packed = packed_for_llama_cpp(path.stem, path) if path.suffix == ".gguf" else f"; {CAUSAL}"
        raise EnvironmentFault(
            f"model.name={model.name} is a file, not a folder or a name of the hub{packed}"
        )
    if path.is_dir():
        if (path / "config.json").exists():  # else it is no model, and may have any other files
            refuse_odd_files(path)
        refuse_other_folder(path, model.name)
    elif (found := find_file(model.name, "config.json", model.revision, environ)) is not None:
        refuse_odd_files(found.parent)
    else:
        other = find_file(model.name, ADAPTER, model.revision, environ)
        if other is not None:
            refuse_other_folder(other.parent, model.name)
        if (known := known_model(model.name)) is not None:
            return refuse_untrainable(config, stored_as(known.config))
        if model.name.lower().endswith("-gguf"):
            packed = packed_for_llama_cpp(model.name)
            raise EnvironmentFault(f"model.name={model.name} is, by its name, GGUF files{packed}")
    declared = load_model_config(model.name, model.revision, environ)
    _refuse_class(config, declared)
    found = find_file(model.name, "config.json", model.revision, environ)
    headers = read_weight_headers(found.parent, model.name) if found else []
    try:
        stored = stored_as(declared, headers)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise EnvironmentFault(
            f"model.name={model.name}: its config.json says how it is quantized in no form that "
            f"is known ({error}); get the model again"
        ) from None
    refuse_untrainable(config, stored)


def _refuse_class(config: Config, declared: ModelConfigJson) -> None:
    """Refuse a model whose class does not predict the next token of a text."""
    model_type = declared.get("model_type")
    own_code = declared.get("auto_map") or {}
    if own_code and config.model.trust_remote_code:
        return
    if not isinstance(model_type, str) or not is_known_type(model_type):
        if own_code:
            raise ConfigError(
                f"model.name={config.model.name}: its model_type {model_type} is Python code "
                f"next to its weights ({next(iter(own_code.values()))}); read it, then set "
                f"MODEL_TRUST_REMOTE_CODE=true, or type {_install(declared)}, which may have the "
                "type itself"
            )
        if model_type and type_tables():
            raise EnvironmentFault(f"model.name={config.model.name}: {_unknown(declared)}")
        return
    what = _why_not_causal(declared)
    if what is not None:
        raise EnvironmentFault(f"model.name={config.model.name} is {what}; {CAUSAL}")


def _unknown(declared: ModelConfigJson) -> str:
    made_with = declared.get("transformers_version")
    by = f" (version {made_with} wrote it)" if made_with else ""
    return (
        f"its config.json{by} says model_type={declared['model_type']}, which transformers "
        f"{version('transformers')} does not know; type {_install(declared)}, which may know it, "
        "or set MODEL_NAME to a model of another type"
    )


def _install(declared: ModelConfigJson) -> str:
    """Return the command to install the transformers that wrote a config.json, or the newest."""
    made_with = re.fullmatch(r"5\.(\d+)\.\d+", str(declared.get("transformers_version")))
    is_newer = made_with and int(made_with[1]) > int(version("transformers").split(".")[1])
    return f"make install TRANSFORMERS={made_with[0] if is_newer else 'newest'}"


def _why_not_causal(declared: ModelConfigJson) -> str | None:
    """Return what a model of a known type is, None if it predicts the next token."""
    model_type = declared["model_type"]
    name = (declared.get("architectures") or [""])[0]
    shown = f"({name or model_type})"
    parts = (declared, declared.get("text_config") or {})
    if any(part.get("is_encoder_decoder") for part in parts):
        return f"an encoder-decoder {shown}"
    for ending, words in OF_ENDINGS.items():
        if name.endswith(ending):
            return f"{words} {shown}"
    if name in model_classes(*ENCODER_DECODERS) - model_classes(*GENERATING):
        return f"an encoder-decoder {shown}"
    # XLM may be either, depending on its weights: training checks this
    is_masked = model_classes(MASKED, model_type=model_type) and model_type != "xlm"
    if is_masked and not declared.get("is_decoder"):
        return f"an encoder {shown}, whose tokens see those that follow"
    if name in model_classes(*GENERATING):
        return None
    is_named_so = not name or name.endswith(GENERATORS)  # some uploads have other names
    if model_classes(*GENERATING, model_type=model_type) and is_named_so:
        return None
    return f"a model without a class that writes text after a prompt {shown}"
