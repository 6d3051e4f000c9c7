"""The wording of config errors: the value as typed, and what to type instead. Pure."""

import math
import os
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from sft_play.config.schema import is_structured, kinds, settings
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError

PROBLEMS_SHOWN = 8
WORD_LENGTH = 80  # most characters of a value that a message repeats
# annotated_types constraint: the words for it
BOUNDS = {"ge": "of at least", "gt": "above", "lt": "below"}
TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
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
        items = ", ".join(map(_item_word, value[:length]))
        return _shorten(f"[{items}]", length)
    return _shorten(str(value), length) or '""'


def _item_word(item: Any) -> str:
    # a list that aliases nest could spell out to gigabytes
    return "[...]" if isinstance(item, list) else word(item)


def _shorten(text: str, length: int = WORD_LENGTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def is_switch(path: str) -> bool:
    """Return whether a setting takes true or false; the strategies read false as their `no`."""
    admitted = kinds(settings()[path].annotation)
    return bool in admitted or any("no" in typing.get_args(kind) for kind in admitted)


def invalid(path: str, located: Located) -> str:
    """Return the message for a value that its setting does not take.

    `a.yaml:7: train.batch_size=two is not valid; write a whole number of at least 1, or auto`
    """
    value = located.value
    typed = word(value) if located.text is None else _shorten(located.text)
    write = f"write {wanted(path)}"
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
        sentence = f" is empty; {write}"
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
    """Return the largest number that a setting takes, infinite where it has no limit."""
    field = settings()[path]
    return min(_limits(field.annotation, field.metadata), default=math.inf)


def _limits(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[float]:
    for constraint in metadata:
        bound = getattr(constraint, "le", None)
        if bound is not None:
            yield bound
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *extra = typing.get_args(annotation)
        yield from _limits(inner, [part for item in extra for part in _constraints(item)])
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _limits(argument, metadata)


def wanted(path: str) -> str:
    """Return what a setting takes, by the schema: `a whole number of at least 1, or auto`."""
    field = settings()[path]
    special = (field.json_schema_extra or {}).get("write")
    if special is None:
        return _type_words(field.annotation, field.metadata)
    return f"{special}, or null" if type(None) in kinds(field.annotation) else special


def _type_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        inner, *extra = arguments
        return _type_words(inner, [part for item in extra for part in _constraints(item)])
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type_words(argument, metadata) for argument in arguments)
    if origin is typing.Literal:
        *others, last = map(str, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        return "a list of names"
    words = TYPE_WORDS[annotation]
    bounds = " and ".join(phrase for item in metadata for phrase in _bound_words(item))
    return f"{words} {bounds}" if bounds else words


def _constraints(item: Any) -> Iterable[Any]:
    """Return the constraints in one item of an Annotated: a pydantic FieldInfo holds several."""
    return getattr(item, "metadata", [item])


def _bound_words(constraint: Any) -> Iterator[str]:
    for name, phrase in BOUNDS.items():
        bound = getattr(constraint, name, None)
        if bound is not None:
            yield f"{phrase} {bound}"
