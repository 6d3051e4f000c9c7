"""A config or a command line of another program, in the names of this one."""

import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sft_play.config.layers import plain_value
from sft_play.config.loader import nested
from sft_play.config.messages import VALUES, word
from sft_play.config.present import SettingLine
from sft_play.config.schema import Config, SourceSection, settings
from sft_play.config.unknown import ADVICE, Suggestion, suggest
from sft_play.config.yaml_source import Located, parse_scalar, read_mapping
from sft_play.errors import ConfigError
from sft_play.masking import mask_secrets

# Names whose value says what no setting here takes as it is: (name, value): setting, value
MODES = ("lora", "qlora", "full")
MEANINGS: dict[tuple[str, Any], tuple[str, Any]] = {
    ("load_in_4bit", True): ("tuning.mode", "qlora"),
    ("quantization_bit", 4): ("tuning.mode", "qlora"),
    ("load_in_8bit", True): ("tuning.base_dtype", "float8"),
    ("full_finetuning", True): ("tuning.mode", "full"),
    ("use_peft", True): ("tuning.mode", "lora"),
    ("lora_target_linear", True): ("tuning.lora.target_modules", "all-linear"),
    ("lora_target", "all"): ("tuning.lora.target_modules", "all-linear"),
    ("mask_history", True): ("data.train_on", "last"),
    ("flash_attention", True): ("train.fast_path", "auto"),
    ("flash_attn", "fa2"): ("train.fast_path", "auto"),
    ("flash_attn", "auto"): ("train.fast_path", "auto"),
    ("use_unsloth", True): ("tuning.backend", "unsloth"),
    **{("adapter", mode): ("tuning.mode", mode) for mode in MODES},
    **{("finetuning_type", mode): ("tuning.mode", mode) for mode in MODES},
}
SOURCE_NAMES = {"name": "subset"}  # of Axolotl's datasets
# With these a batch of another program counts packed sequences; ours counts rows
PACKING = ("sample_packing", "packing", "neat_packing", "pack_sequences")
PATHS = """
model.name model.adapter model.chat_template data.train_path data.val_path data.test_path
data.image_folder
""".split()
BATCH = ("train.batch_size", "train.grad_accum")
LENGTH = "model.max_seq_len"


class Translation(NamedTuple):
    """What of another program's config can be said here, and the rest with its reason."""

    lines: list[SettingLine]
    left: list[str]
    packed_tokens: int | None = None  # of a step on each device, if its batch is packed sequences


def translate(source: str) -> Translation:
    """Return the settings of a YAML file, or of words such as `trl sft --learning_rate 2e-4`.

    What is switched off or empty there says nothing here. A relative path belongs to the file's
    folder. Raises: ConfigError.
    """
    found: dict[str, SettingLine] = {}
    left = []
    is_packed = False
    for name, located in _given(source):
        value = plain_value(located)
        if value in (None, False, "", [], {}):
            continue
        is_packed |= name in PACKING
        said = _meant(name, value, Path(source).parent)
        if isinstance(said, str):
            line = f"{name}: {word(value)}: {said}"
            left.append(mask_secrets(" ".join(line.split())))  # as one line of a comment
            continue
        path, value = said
        if path not in found or path != "tuning.mode" or value == "qlora":  # lora over 4 bits
            found[path] = SettingLine(path, value, f"{located.origin}: {name}")
    batch = [found.pop(path) for path in BATCH if is_packed and path in found]
    packed_tokens = None
    if batch:
        numbers = [*(line.value for line in batch), LENGTH in found and found[LENGTH].value]
        if batch[0].path == BATCH[0] and all(type(number) is int for number in numbers):
            packed_tokens = math.prod(numbers)
        else:
            names = ", ".join(f"{line.comment}: {word(line.value)}" for line in batch)
            left.append(
                f"{names}: counts packed sequences there, and batch size or length are not given; "
                "set train.effective_batch_size to tokens of a step / tokens of a row"
            )
    lines = [found[path] for path in settings() if path in found]
    return Translation(lines, left, packed_tokens)


def _given(source: str) -> Iterator[tuple[str, Located]]:
    """Yield the names and values of a file, or of a command line."""
    path = Path(source)
    if path.is_file():
        yield from _flat(read_mapping(path), "")
        return
    words = shlex.split(source)
    if not any(each.startswith("--") for each in words):
        raise ConfigError(f"FROM={source}: no such file; write a YAML file, or 'trl sft --...'")
    starts = [at for at, each in enumerate(words) if each.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        name, has_value, value = words[start][2:].partition("=")
        values = [value] if has_value else words[start + 1 : end]
        parsed = [parse_scalar(each) for each in values] or [True]
        yield name.replace("-", "_"), Located(parsed if len(parsed) > 1 else parsed[0], "FROM")


def _flat(mapping: dict[str, Located], prefix: str) -> Iterator[tuple[str, Located]]:
    for name, located in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(located.value, dict) and path not in settings():
            yield from _flat(located.value, f"{path}.")
        else:
            yield path, located


def _meant(name: str, value: Any, folder: Path) -> tuple[str, Any] | str:
    """Return the setting and the value that are meant, or why none is."""
    key = name.rpartition(".")[2]
    if not isinstance(value, list | dict) and (key, value) in MEANINGS:
        return MEANINGS[key, value]
    found = Suggestion(name) if name in settings() else suggest(name, settings())
    if found is None or found.name is None or found.is_guess:
        return found.advice if found and found.advice else "no setting here takes it"
    path = found.name
    if path == "model.chat_template" and "." not in str(value):  # the name of one that they ship
        return ADVICE["template"]
    if path in PATHS:
        given = value if isinstance(value, list) else [value]
        placed = [_source(each, folder) for each in given]
        value = placed if isinstance(value, list) else placed[0]
    elif not isinstance(value, list | dict):
        value = VALUES.get((path, value), value)
    try:
        Config.model_validate(nested({path: value}))
    except ValidationError as error:
        return f"{path} takes no such value: {error.errors()[0]['msg']}"
    return path, value


def _placed(value: str, folder: Path) -> str:
    """Return a path of a file in `folder`; what is not there may be a name on the hub."""
    is_there = value.startswith(".") or (folder / value).exists()
    return os.path.normpath(folder / value) if is_there else value


def _source(given: Any, folder: Path) -> Any:
    """Return a path or a data set; how its rows are read is recognized by their columns."""
    if not isinstance(given, dict):
        return _placed(str(given), folder)
    renamed = {SOURCE_NAMES.get(name, name): value for name, value in given.items()}
    if "path" in renamed:
        renamed["path"] = _placed(str(renamed["path"]), folder)
    return {name: renamed[name] for name in renamed if name in SourceSection.model_fields}
