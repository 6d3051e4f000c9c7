"""The wording of config errors: the value as typed, and what to type instead. Pure."""

import math
import os
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter

from sft_play.config.schema import is_structured, kinds, settings
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError

PROBLEMS_SHOWN = 100
NOT_UTF8 = "is not UTF-8; rename it: names have to be UTF-8"
WORD_LENGTH = 80  # most characters of a value that a message repeats
# What JSON Schema calls bounds and types: the words for it
BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
    "array": "a list of names",
}


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with one problem a line, if there is any."""
    if not problems:
        return
    lines = problems[:PROBLEMS_SHOWN]
    if len(problems) > PROBLEMS_SHOWN:
        lines.append(f"... and {len(problems) - PROBLEMS_SHOWN} more")
    raise ConfigError("\n".join(lines))


def no_such_file(path: str) -> str:
    """Return that nothing has this path; of a link, where it leads."""
    if os.path.islink(path):
        return f"a link to {os.readlink(path)}, which leads to no file"
    return "no such file"


def word(value: Any, length: int = WORD_LENGTH) -> str:
    """Return a value as YAML and the shell spell it, such as `true` or `[q_proj, v_proj]`.

    A spelling longer than `length` characters is cut.
    """
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        if any(isinstance(part, Located) for part in value.values()):
            return "{...}"
        members = ", ".join(f"{word(key)}: {word(part)}" for key, part in value.items())
        return _shorten(f"{{{members}}}", length)
    if isinstance(value, list):
        # a list that aliases nest could spell out to gigabytes
        items = ["[...]" if isinstance(item, list) else word(item) for item in value[:length]]
        return _shorten(f"[{', '.join(items)}]", length)
    return _shorten(str(value), length) or '""'


def _shorten(text: str, length: int = WORD_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def is_switch(path: str) -> bool:
    """Return whether a setting takes true or false; the strategies read false as their `no`."""
    admitted = kinds(settings()[path].annotation)
    return bool in admitted or any("no" in typing.get_args(kind) for kind in admitted)


def has_no_name(value: Any) -> bool:
    """Return whether a path or name is empty, one of a list is, or one is not UTF-8."""
    return value == "" or (isinstance(value, list) and "" in value) or not_utf8(str(value))


def not_utf8(text: str) -> bool:
    """Return whether a text has bytes that are not UTF-8, as a file's name may have."""
    return re.search(r"[\ud800-\udfff]", text) is not None


# What others call a value of a setting
VALUES = {
    ("train.optim", "adamw_bnb_8bit"): "adamw_8bit",
    ("train.optim", "adamw_hf"): "adamw_torch",
    ("train.optim", "lion_32bit"): "lion",
    ("train.optim", "paged_adamw"): "paged_adamw_32bit",
    ("train.gradient_checkpointing", "unsloth"): True,
}
PLATEAU = (
    "its rates would depend on how often a run evaluates; write cosine_with_min_lr. "
    "TRAIN_EARLY_STOPPING_PATIENCE=3 with TRAIN_EVAL_STRATEGY=epoch ends a run that no longer "
    "improves"
)


def invalid(path: str, located: Located) -> str:
    """Return the message for a value that its setting does not take.

    `a.yaml:7: train.batch_size=two is not valid; write a whole number of at least 1, or auto`
    """
    value = located.value
    typed = word(value) if located.text is None else _shorten(located.text)
    known = VALUES.get((path, value)) if isinstance(value, str) else None
    write = f"write {wanted_value(path) if known is None else word(known)}"
    if value == "reduce_lr_on_plateau":
        write = PLATEAU
    if value is None and not typed:
        sentence = f" has no value; {write}, or delete the line"
    elif isinstance(value, dict) and not is_structured(path):
        sentence = f" takes one value, not settings below it; {write}"
    elif str in kinds(settings()[path].annotation) and isinstance(value, bool | int | float):
        kind = "a switch" if isinstance(value, bool) else "a number"
        name = path.rpartition(".")[2]
        sentence = f'={typed} is {kind}, not a text; put it in quotes: {name}: "{typed}"'
    elif isinstance(value, bool):
        sentence = f"={typed} is a switch; {write}"
    elif isinstance(value, float) and not math.isfinite(value):
        sentence = f"={typed} is not finite; {write}"
    elif value == "":
        sentence = f" is empty; {write}, or leave it out"
    elif not_utf8(str(value)):
        sentence = f"={typed} {NOT_UTF8}"
    elif _is_above(value, _limit(path)):
        sentence = f"={typed} is too large; write at most {_limit(path)}"
    else:
        sentence = f"={typed} is not valid; {write}"
    return f"{located.origin}: {path}{sentence}"


def _is_above(value: Any, limit: float) -> bool:
    """Return whether a value is a number above a limit; digits too many for a number are a text."""
    if isinstance(value, str) and value.isdecimal():
        value = float(value)
    return isinstance(value, int | float) and value > limit


def _limit(path: str) -> float:
    """Return the largest number that a setting takes, infinite if it has no limit."""
    return min((kind["maximum"] for kind in _kinds(path) if "maximum" in kind), default=math.inf)


def _kinds(path: str) -> list[Mapping[str, Any]]:
    """Return the types that a setting takes, in JSON Schema."""
    field = settings()[path]
    schema = TypeAdapter(typing.Annotated[field.annotation, field]).json_schema()
    return schema.get("anyOf", [schema])


def wanted_value(path: str) -> str:
    """Return what a setting takes, by the schema: `a whole number of at least 1, or auto`."""
    field = settings()[path]
    special = (field.json_schema_extra or {}).get("write")
    if special is None:
        return ", or ".join(map(_kind_words, _kinds(path)))
    return f"{special}, or null" if type(None) in kinds(field.annotation) else special


def _kind_words(kind: Mapping[str, Any]) -> str:
    if "const" in kind:
        return kind["const"]
    if "enum" in kind:
        *others, last = kind["enum"]
        return f"{', '.join(map(str, others))} or {last}"
    bounds = [f"{phrase} {kind[name]}" for name, phrase in BOUNDS.items() if name in kind]
    return f"{TYPE_WORDS[kind['type']]} {' and '.join(bounds)}".rstrip()
