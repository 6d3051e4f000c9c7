"""Folders of weights: those that RUN names in place of a run, and what a base may be loaded from.

Reads the headers of safetensors files. Loads no torch.
"""

import copy
import hashlib
import json
import math
import operator
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, first_line
from sft_play.runs import seal, stamp
from sft_play.runs.adapter_options import why_not_usable
from sft_play.runs.files import Json, read_json
from sft_play.runs.folder import RunFolder

ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODELS = "models"  # the folder of what was asked of such weights, next to the runs

BITS = re.compile(r"(?:BF|[FIUC])(\d+)(?:_\w+)?|BOOL")  # of a number, in a dtype's name
COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_JSON_BYTES = 32 << 20  # the largest index of a known model has 12 MiB
MAX_TEXT_BYTES = 256 << 20  # the largest tokenizer.json has 34 MiB
ADDED = b'"single_word"'  # each added token has it
MAX_ADDED = 1 << 16  # models that speak have 30,000
TEXTS = (".json", ".jinja", ".txt", ".model")
OBJECTS = """
config.json generation_config.json tokenizer_config.json special_tokens_map.json added_tokens.json
processor_config.json
""".split()
NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}


@dataclass(frozen=True)
class ModelFolder(RunFolder):
    """A model of transformers, or an adapter of PEFT, from anywhere; it is never written to.

    What is written of it goes to outputs/models/.
    """

    output_dir: Path
    base: str | None  # of an adapter, as its adapter_config.json names it; None of a full model
    revision: str | None = None  # of that base

    @property
    def name(self) -> str:
        """Return `run-export-safetensors` for a folder in a run, for others one with a digest."""
        path = self.path.resolve()
        root = self.output_dir.resolve()
        if path.is_relative_to(root) and path != root:
            return "-".join(path.relative_to(root).parts)
        return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"

    @property
    def results(self) -> Path:
        return self.output_dir / MODELS / self.name

    @property
    def mode(self) -> str:
        """Return the mode of tuning whose weights are saved in this way."""
        return "full" if self.base is None else "lora"

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """Return the folder, or the hub's name and revision, with tokenizer and template."""
        has_own = any((self.path / name).is_file() for name in TOKENIZER_FILES[:2])
        if self.base is None or has_own:
            return str(self.path), None
        return self.base, self.revision

    def weights(self, mode: str) -> Path:
        return self.path

    def was_packed(self) -> bool:
        """Return whether it is the adapter of a run over 4-bit weights."""
        path = self.path / stamp.NAME
        return path.is_file() and read_object(path).get("mode") == "qlora"

    def refuse_damage(self) -> None:
        """Raise CheckpointError if files are not what they were sealed as."""
        manifest = self.path / seal.NAME
        if not manifest.is_file() or "sha256_of_files" not in read_object(manifest):
            return  # not sealed by this project
        damage = seal.find_damage(self.path, allows_more=True)
        if damage is not None:
            raise CheckpointError(f"{self.path}: {damage}; export, merge or fetch it again")


def find_model(named: str, output_dir: Path, base: str | None = None) -> ModelFolder | None:
    """Return the folder of weights that RUN names, None if there is no folder of that name.

    `base` is where the base of an adapter is now, None if it is where the adapter says.

    Raises: EnvironmentFault for a folder whose weights cannot be used, with what to type.
    """
    path = next((path for path in (Path(named), output_dir / named) if path.is_dir()), None)
    if path is None:
        return None
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path, output_dir, base)
    if (path / "config.json").is_file():
        _refuse_incomplete(path)
        return ModelFolder(path, output_dir, None)
    if any(path.glob("*.gguf")):
        raise EnvironmentFault(
            f"RUN={named}: contains gguf files, which llama.cpp runs; make export FORMAT=gguf has "
            "scored them, and FORMAT=safetensors writes what can be scored here"
        )
    raise EnvironmentFault(
        f"RUN={named}: neither a run (plan.json), a model (config.json) nor an adapter "
        f"({ADAPTER_CONFIG}); name a folder that contains one of these, or a run that `make runs` "
        "lists"
    )


def _refuse_incomplete(model: Path) -> None:
    """Raise EnvironmentFault for a model without weights that may be loaded, or a tokenizer."""
    pickled = pickled_weights(model)
    if pickled:
        raise EnvironmentFault(
            f"RUN={model}: its weights are {pickled[0]}, a pickle, which can run any code when it "
            "is loaded; save them as safetensors, as save_pretrained of transformers does"
        )
    if not any(model.glob("*.safetensors")):
        raise EnvironmentFault(f"RUN={model}: has no weights (*.safetensors); copy all its files")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise EnvironmentFault(
            f"RUN={model}: has no tokenizer; copy tokenizer.json and tokenizer_config.json of the "
            "model that it was made from into it"
        )


def _adapter(path: Path, output_dir: Path, moved_base: str | None) -> ModelFolder:
    """Return an adapter and its base. Raises EnvironmentFault if either is not there."""
    config = read_adapter_config(path)
    base = moved_base or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise EnvironmentFault(
            f"{path / ADAPTER_CONFIG}: names no base. Type MODEL_NAME=<its folder or hub name>."
        )
    # a name on the hub is `name` or `owner/name`
    is_local = base.startswith((".", "/", "~")) or base.count("/") > 1
    if is_local and not Path(base).is_dir():
        raise EnvironmentFault(
            f"{path / ADAPTER_CONFIG}: its base {base} is not there. Type MODEL_NAME=<folder> "
            "with the folder where it is now, or its hub name."
        )
    if (path / stamp.NAME).is_file() and Path(base).is_dir():
        trained = read_object(path / stamp.NAME).get("base_digest")
        now = stamp.digest_of_model(Path(base))
        if trained not in (None, now):
            raise EnvironmentFault(
                f"{path}: was trained over a base with digest {trained}, and {base} has {now}. "
                "Type MODEL_NAME=<folder of that base>."
            )
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise EnvironmentFault(
            f"{path}: has no {ADAPTER_WEIGHTS}; copy the whole adapter, and save a pickle "
            "(.bin), which can run any code when it is loaded, as safetensors"
        )
    revision = config.get("revision")
    return ModelFolder(path, output_dir, base, revision if isinstance(revision, str) else None)


class AdapterConfig(BaseModel):
    """What is read of an adapter_config.json, with its types."""

    r: Annotated[int, Field(strict=True, ge=1, le=1 << 14)] | None = None
    target_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None


def read_adapter_config(folder: Path) -> Json:
    """Return a PEFT adapter's config. Raises EnvironmentFault for values of other types."""
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    try:
        AdapterConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise EnvironmentFault(
            f"{path}: {first['loc'][0]}={repr(first['input'])[:100]} ({first['msg']}); get the "
            "adapter again"
        ) from None
    reason = why_not_usable(config, is_training=False)
    if reason is not None:
        raise EnvironmentFault(f"{path}: {reason}")
    return config


def read_object(path: Path) -> Json:
    """Return the object of a JSON file of a model, parsed once while the file does not change.

    Raises EnvironmentFault if it contains no object.
    """
    try:
        state = path.stat()
        if state.st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        found = copy.deepcopy(_parsed(path, state.st_mtime_ns, state.st_size))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"{path}: not valid JSON: {first_line(error)}; get the model again"
        ) from None
    if not isinstance(found, dict):
        raise EnvironmentFault(
            f"{path}: contains {type(found).__name__} rather than an object; get the model again"
        )
    return found


@lru_cache(maxsize=32)
def _parsed(path: Path, *state: int) -> Any:
    return read_json(path, _plain_number)


def _plain_number(item: Json) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}, or the item."""
    return float(str(item["__float__"])) if item.keys() == {"__float__"} else item


def refuse_odd_files(folder: Path) -> None:
    """Refuse what no file of a model is, before a library opens it: a pipe may never end.

    Raises: EnvironmentFault.
    """
    for path in folder.rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            what = "a pipe or a device"
        elif path.suffix in TEXTS and path.is_file() and path.stat().st_size > MAX_TEXT_BYTES:
            what = f"of more than {MAX_TEXT_BYTES >> 20} MiB"
        elif path.name != TOKENIZER_FILES[0] or not path.is_file():
            continue
        elif path.read_bytes().count(ADDED) > MAX_ADDED:
            what = f"a tokenizer with more than {MAX_ADDED} added tokens"
        else:
            continue
        raise EnvironmentFault(f"{path} is {what}; move it away, or get the model again")
    for name in OBJECTS:
        if (folder / name).exists():
            refuse_wrong_stops(folder / name, read_object(folder / name).get("eos_token_id"))


def refuse_wrong_stops(path: Path, ids: Any) -> None:
    """Raise EnvironmentFault for ids of stops that no tokenizer has: generation would fail."""
    for token in ids if isinstance(ids, list) else [ids]:
        if token is not None and (type(token) is not int or not 0 <= token < 1 << 31):
            raise EnvironmentFault(
                f"{path}: eos_token_id={repr(ids)[:100]} is no token's id; get the model again"
            )


def refuse_unsafe_base(config: Config) -> None:
    """Refuse pickled weights, and a hub model's code that is not pinned to a commit.

    Raises: ConfigError with the setting that allows it.
    """
    model = config.model
    folder = Path(model.name)
    if folder.is_dir():
        pickled = pickled_weights(folder)
        if pickled and not model.allow_pickled_weights:
            raise ConfigError(
                f"model.name={model.name}: its weights are {pickled[0]}, a pickle, which can run "
                "any code when it is loaded; save them as safetensors, or set "
                "MODEL_ALLOW_PICKLED_WEIGHTS=true if you trust who made it"
            )
        return
    if model.trust_remote_code and not COMMIT.fullmatch(model.revision or ""):
        raise ConfigError(
            f"model.trust_remote_code=true runs Python code of {model.name}, and "
            f"model.revision={model.revision or 'null'} may be other code tomorrow; set "
            "MODEL_REVISION to the commit that you have read, 40 digits"
        )


def pickled_weights(folder: Path) -> list[str]:
    """Return the pickled weight files of a folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return []
    names = {path.name for pattern in PICKLED for path in folder.glob(pattern)}
    return sorted(names - NO_WEIGHTS)


class Header(NamedTuple):
    """A tensor as a safetensors file describes it."""

    name: str
    dtype: str  # F32, BF16, F8_E4M3, I8 ...


def read_headers(files: Iterable[Path]) -> Iterator[Header]:
    """Yield the tensors of safetensors files. Raises: ValueError for a damaged one."""
    for path in files:
        try:
            yield from _headers(path)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ValueError(f"{path.name} is damaged, or ends too early") from None


def _headers(path: Path) -> list[Header]:
    """Return the tensors of a file, which follow each other without a gap, as its library asks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > min(size - 8, MAX_JSON_BYTES):
            raise ValueError
        described = json.loads(file.read(length))
    described.pop("__metadata__", None)
    place = 0
    for facts in sorted(described.values(), key=operator.itemgetter("data_offsets")):
        bits, (begin, end) = BITS.fullmatch(facts["dtype"].upper()), facts["data_offsets"]
        numbers = math.prod(map(operator.index, facts["shape"]))
        is_whole = min(facts["shape"], default=0) >= 0 and begin == place
        if not is_whole or numbers * int(bits[1] or 8) != 8 * (end - begin):
            raise ValueError
        place = end
    if place != size - 8 - length:
        raise ValueError
    return [Header(name, facts["dtype"].upper()) for name, facts in described.items()]
