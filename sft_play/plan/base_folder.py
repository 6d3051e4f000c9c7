"""What the files of a folder show: another kind of model, or one that is not complete.

Reads the names and sizes of files, and headers. Loads no torch and no weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.errors import EnvironmentFault
from sft_play.runs.model_folder import Header, read_headers

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
POINTER = b"version https://git-lfs"
POINTER_BYTES = 512  # one has some 130
EMBEDDERS = ("modules.json", "config_sentence_transformers.json")
CAUSAL = "set MODEL_NAME to a causal language model"


def refuse_other_folder(folder: Path, name: str) -> None:
    """Raise EnvironmentFault for a folder of something else, and for files that are missing."""
    _refuse_pointers(folder, name)
    files = {path.name for path in folder.iterdir()}
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


def read_weight_headers(folder: Path, name: str) -> list[Header]:
    """Return the tensors in the weight files that a folder has, of the hub's cache maybe not all.

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
    """Raise EnvironmentFault for a folder without weights, which can be planned alone."""
    if Path(name).is_dir() and not has_weights(Path(name)):
        raise EnvironmentFault(
            f"model.name={name}: the folder has a config.json and no weights ({SINGLE}); get the "
            "model again"
        )


def weight_files(folder: Path) -> list[str]:
    """Return the safetensors files that transformers reads. As there, a single one comes first."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE] if (folder / SINGLE).is_file() else []
    return sorted(set((_read(folder / INDEX).get("weight_map") or {}).values()))


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights under the names that transformers reads."""
    patterns = (SINGLE, INDEX, "pytorch_model*.bin*")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def packed_for_llama_cpp(name: str) -> str:
    """Say what a name of GGUF files is packed for, and what these were probably made from."""
    at = Path(name).name.lower().rfind("-gguf")
    original = f"{CAUSAL}, such as {Path(name).name[:at]}" if at > 0 else CAUSAL
    return f", packed for llama.cpp; {original}"


def _other_kind(folder: Path, files: set[str]) -> str | None:
    """Say what a folder is and what to type, None where it may be a model."""
    if ADAPTER in files:
        return _adapter(folder)
    if "model_index.json" in files:
        return f"a diffusion pipeline; {CAUSAL}"
    if any(file in files for file in EMBEDDERS):
        return f"a sentence-transformers model, which embeds texts; {CAUSAL}"
    if "config.json" not in files and any(file.startswith("consolidated.") for file in files):
        return (
            "in the format of Mistral's or Meta's own code, without config.json; set MODEL_NAME "
            "to the upload of the same model that has a config.json"
        )
    if any(file.endswith(".gguf") for file in files) and not has_weights(folder):
        return f"a folder of GGUF files{packed_for_llama_cpp(folder.name)}"
    return None


def _adapter(folder: Path) -> str:
    if has_weights(folder):  # to which transformers would add it without a word
        return f"a model with an adapter beside it; move {ADAPTER} out of the folder"
    base = _read(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return f"an adapter whose {ADAPTER} names no base; set MODEL_NAME to its base"
    is_path = base.startswith((".", "/", "~")) or base.count("/") > 1
    if is_path and not Path(base).is_dir():
        return (
            f"an adapter of {base}, which is not here; set MODEL_NAME to where that model is, or "
            "to its name on the hub"
        )
    return f"an adapter of {base}; set MODEL_NAME={base}"


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
    is_small = path.is_file() and path.stat().st_size <= POINTER_BYTES
    return is_small and path.read_bytes().startswith(POINTER)


def _read(path: Path) -> Mapping[str, Any]:
    """Return a JSON object. Raises: EnvironmentFault for a damaged file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvironmentFault(f"{path}: not valid JSON: {error}; get the model again") from None
    return found if isinstance(found, dict) else {}
