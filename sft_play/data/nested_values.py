"""Values inside a record: lists of turns in every form that files have, and values at a path. Pure.

The turns of a conversation become one list of objects. They may be

- objects with role and content, or ShareGPT's from and value: taken as they are
- objects with input and output (Capybara): a question and an answer each
- texts (LIMA): the user's and the assistant's in turn
- one text with marks (HH-RLHF, Guanaco): `Human: ... Assistant: ...`, with ### or without
- an object with a list for each field: {role: [...], content: [...]} (a Sequence of datasets)
- JSON text of any of these, as in a CSV cell

The parts of a path such as `answers.text.0` are keys of objects and indices of lists. A list
without an index gives a row for each of its elements. A text on the way is read as JSON.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sft_play.data.rows import InvalidRowError, Json, shorten
from sft_play.data.text_files import InvalidJsonError, parse_json

MARKED_TEXT = re.compile(r"\s*(?:### ?)?(?:Human|User): ?")
# A mark begins a paragraph, or stands after ###
TURN_MARK = re.compile(r"(?:^|\n\n|\s*###) ?(Human|User|Assistant): ?")
MARKED_ROLES = {"Human": "user", "User": "user", "Assistant": "assistant"}


def parse_message_list(value: Any, name: str) -> list[Json]:
    """Return the turns of a conversation as objects. Raises InvalidRowError."""
    if isinstance(value, str):
        if is_marked_text(value):
            return _split_marked_text(value, name)
        value = parse_json_text(value, name)
    if isinstance(value, dict):
        value = _split_columns(value)
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, not a list of turns")
    first = value[0]
    turns: list[Json] = []
    if isinstance(first, str):
        for number, text in enumerate(value):
            if not isinstance(text, str):
                raise InvalidRowError(f"{name}[{number}] is {shorten(text)}, and others are texts")
            turns.append({"role": ("user", "assistant")[number % 2], "content": text})
        return turns
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise InvalidRowError(f"{name}[{number}] is {shorten(message)}, not an object")
    if "input" not in first or "output" not in first:
        return value
    for number, pair in enumerate(value):
        if "input" not in pair or "output" not in pair:
            raise InvalidRowError(f"{name}[{number}] has no input and output, and others have")
        turns.append({"role": "user", "content": pair["input"]})
        turns.append({"role": "assistant", "content": pair["output"]})
    return turns


def _split_columns(value: Json) -> Any:
    """Return an object for each place of the lists of an object; other values as they are."""
    columns = list(value.values())
    if len(columns) < 2 or not all(isinstance(column, list) for column in columns):
        return value
    if len({len(column) for column in columns}) > 1:
        return value
    return [dict(zip(value, turn, strict=True)) for turn in zip(*columns, strict=True)]


def is_marked_text(text: str) -> bool:
    """Return whether a text is a conversation with marks before its turns."""
    return MARKED_TEXT.match(text) is not None and "Assistant:" in text


def parse_json_text(text: str, name: str) -> Any:
    """Return the value of a JSON text. Raises InvalidRowError, which calls it `name`."""
    try:
        return parse_json(text)
    except InvalidJsonError as error:
        raise InvalidRowError(
            f"{name} is a text that is no JSON ({error}): {shorten(text)}"
        ) from None


def _split_marked_text(text: str, name: str) -> list[Json]:
    before, *parts = TURN_MARK.split(text.strip())
    if before.strip():
        raise InvalidRowError(f"{name} has text before its first turn: {shorten(before)}")
    turns = []
    for mark, content in zip(parts[::2], parts[1::2], strict=True):
        turns.append({"role": MARKED_ROLES[mark], "content": content.strip()})
    return turns


class FoundValues(NamedTuple):
    """The values at a path; several if it leads through a list without an index."""

    values: list[Any]
    is_list: bool


def top_column(column: str, keys: Iterable[str]) -> str:
    """Return the column of a file in which a column or path begins."""
    return column if column in keys else column.partition(".")[0]


def find_values(record: Mapping[str, Any], path: str) -> FoundValues:
    """Return the values at a path, None if a key is absent.

    Raises InvalidRowError where it leads nowhere.
    """
    return _follow(record, path.split("."), path)


def expand_record(record: Json, paths: Sequence[str]) -> list[Json]:
    """Return a record for each element of the list through which paths lead, else the one record.

    Each has its values under the names of the paths. Raises InvalidRowError.
    """
    found = {path: find_values(record, path) for path in paths}
    lengths = {path: len(values.values) for path, values in found.items() if values.is_list}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise InvalidRowError(f"lists of different lengths: {counts}")
    rows = next(iter(lengths.values()), 1)
    if not rows:
        raise InvalidRowError(f"the list of {' and '.join(lengths)} is empty")
    expanded = []
    for row in range(rows):
        fields = dict(record)
        for path, values in found.items():
            fields[path] = values.values[row if values.is_list else 0]
        expanded.append(fields)
    return expanded


def _follow(value: Any, parts: Sequence[str], path: str) -> FoundValues:
    for number, part in enumerate(parts):
        if isinstance(value, str):
            value = parse_json_text(value, path)
        if value is None:
            break
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            if int(part) >= len(value):
                raise InvalidRowError(f"{path}: the list has {len(value)} elements")
            value = value[int(part)]
        elif isinstance(value, list):
            values: list[Any] = []
            for element in value:
                values += _follow(element, parts[number:], path).values
            return FoundValues(values, is_list=True)
        else:
            raise InvalidRowError(f"{path}: {value!r} holds no {part!r}")
    return FoundValues([value], is_list=False)
