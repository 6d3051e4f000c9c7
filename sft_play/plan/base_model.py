"""What lies under model.name, and why it may be no base to train. Reads no weights, loads no torch.

transformers would say so after the rows are tokenised, in words of its own, or not at all.
"""

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.model_shape import ModelConfigJson, find_file, known_config, load_model_config
from sft_play.plan.stored_as import refuse_untrainable, stored_as
from sft_play.runs.weight_headers import read_headers

INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
POINTER_BYTES = 1024  # no weights and no tokenizer are as small
FETCHED_BY_LFS = ("*.safetensors", "*.bin", "tokenizer.json", "tokenizer.model")
# transformers' tables of classes
TRAINED = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
ENCODERS = "MASKED_LM"
OF_ENDINGS = {
    "ForMaskedLM": "an encoder, which fills gaps in a text",
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "ForMultipleChoice": "a classifier",
    "RewardModel": "a reward model",
}
CAUSAL = "set MODEL_NAME to a causal language model"


def require_base(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse what cannot be trained, before anything is read of rows or weights.

    A well-known model of the hub that is not in the cache passes.

    Raises: EnvironmentFault for what lies there, ConfigError for a setting that does not go with
    it; both say what to type.
    """
    model = config.model
    if Path(model.name).is_file():
        raise EnvironmentFault(
            f"model.name={model.name} is a file, not a folder or a name of the hub; a GGUF file is "
            "packed for llama.cpp: set MODEL_NAME to the 16-bit model that it was made from"
        )
    found = find_file(model.name, "config.json", model.revision, environ)
    if found is None:
        other = find_file(model.name, "adapter_config.json", model.revision, environ)
        _refuse_other_folder(config, other.parent if other else Path(model.name))
        if known_config(model.name) is not None and not Path(model.name).is_dir():
            return
    declared = load_model_config(model.name, model.revision, environ)
    folder = found.parent if found else Path(model.name)
    _refuse_class(config, declared)
    _refuse_files(config, folder)
    headers = read_headers(sorted(folder.glob("model*.safetensors")))
    refuse_untrainable(config, stored_as(declared, headers))


def _refuse_other_folder(config: Config, folder: Path) -> None:
    """Refuse a folder without config.json, by what it holds instead."""
    where = f"model.name={config.model.name} is"
    if (folder / "adapter_config.json").is_file():
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = base.get("base_model_name_or_path")
        raise EnvironmentFault(f"{where} an adapter of {base}; set MODEL_NAME={base}")
    if (folder / "model_index.json").is_file():
        raise EnvironmentFault(f"{where} a diffusion pipeline; {CAUSAL}")
    if any(folder.glob("*.gguf")):
        raise EnvironmentFault(
            f"{where} a folder of GGUF files, packed for llama.cpp; set MODEL_NAME to the 16-bit "
            "model that they were made from"
        )
    if (folder / "params.json").is_file() and any(folder.glob("consolidated*")):
        raise EnvironmentFault(
            f"{where} in the format of Mistral's or Meta's own code, without config.json; get "
            "config.json and model*.safetensors of the same model, or set MODEL_NAME to its "
            "transformers version"
        )


def _refuse_files(config: Config, folder: Path) -> None:
    """Refuse a folder whose files are not all there, or are of another kind of model."""
    if (folder / "modules.json").is_file():
        raise EnvironmentFault(
            f"model.name={config.model.name} is a sentence-transformers model, which embeds texts; "
            f"{CAUSAL}"
        )
    for pattern in FETCHED_BY_LFS:
        for path in sorted(folder.glob(pattern)):
            if path.stat().st_size < POINTER_BYTES and path.read_bytes().startswith(POINTER):
                raise EnvironmentFault(
                    f"model.name={config.model.name}: {path.name} is a pointer of git LFS, not the "
                    f"file itself; run git lfs pull in {folder}"
                )
    index = folder / INDEX
    if not Path(config.model.name).is_dir() or not index.is_file():
        return
    if (folder / "model.safetensors").is_file():
        return
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise EnvironmentFault(
            f"model.name={config.model.name}: {len(missing)} of the {len(shards)} files that "
            f"{INDEX} names are not there, {missing[0]} first; get the model again"
        )


def _refuse_class(config: Config, declared: ModelConfigJson) -> None:
    """Refuse a model whose class does not predict the next token of a text."""
    kind = declared.get("model_type")
    name = (declared.get("architectures") or [""])[0]
    own_code = declared.get("auto_map") or {}
    if kind not in _known_types() and not (own_code and config.model.trust_remote_code):
        if own_code:
            raise ConfigError(
                f"model.name={config.model.name}: its class {name or kind} is Python code beside "
                "its weights; read it, then set MODEL_TRUST_REMOTE_CODE=true"
            )
        if kind:
            raise EnvironmentFault(
                f"model.name={config.model.name}: its config.json says model_type={kind}, which "
                f"transformers {importlib.metadata.version('transformers')} does not know; install "
                "a version that does, or set MODEL_NAME to a model of another type"
            )
    what = _why_not_causal(declared, kind, name)
    if what is not None:
        raise EnvironmentFault(
            f"model.name={config.model.name} is {what} ({name or kind}); {CAUSAL}"
        )


def _why_not_causal(declared: ModelConfigJson, kind: str | None, name: str) -> str | None:
    """Return what a model is that does not predict the next token, None for one that does."""
    if declared.get("is_encoder_decoder"):
        return "an encoder-decoder, which writes one text after another is read whole"
    for ending, words in OF_ENDINGS.items():
        if name.endswith(ending):
            return words
    if kind not in _known_types():
        return None  # code of its own
    trained = [_classes(table) for table in TRAINED]
    if not any(kind in classes for classes in trained):
        return "a model without a class that writes text after a prompt"
    is_encoder = kind in _classes(ENCODERS) and name
    if is_encoder and not any(name in classes.values() for classes in trained):
        return "an encoder"
    return None


@cache
def _known_types() -> frozenset[str]:
    """Return the model types of the installed transformers."""
    text = _auto("auto_mappings") + _auto("configuration_auto")
    return frozenset(re.findall(r'"([^"]+)"[:,] "\w+Config"', text))


@cache
def _classes(table: str) -> Mapping[str, str]:
    """Return the classes of a table of transformers by model type."""
    _, _, text = _auto("modeling_auto").partition(f"\nMODEL_FOR_{table}_MAPPING_NAMES = ")
    return dict(re.findall(r'\("([^"]+)", "(\w+)"\)', text.partition("\n)")[0]))


@cache
def _auto(module: str) -> str:
    """Return the source of a module of transformers' auto classes: an import takes seconds."""
    (root,) = importlib.util.find_spec("transformers").submodule_search_locations
    path = Path(root, "models", "auto", f"{module}.py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""
