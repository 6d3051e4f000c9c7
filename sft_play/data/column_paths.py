"""Values inside the columns of a record, by paths such as `answers.text.0`. Pure.

The parts of a path are keys of objects and indices of lists. A list without an index gives a row
for each of its elements. A text on the way is read as JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sft_play.data.rows import InvalidRowError, Json
from sft_play.data.turn_lists import parse_json_text


class FoundValues(NamedTuple):
    """The values at a path; several if it leads through a list without an index."""

    values: list[Any]
    is_list: bool


def top_column(column: str, keys: Iterable[str]) -> str:
    """Return the column of a file in which a column or path begins."""
    return column if column in keys else column.partition(".")[0]


def find_values(record: Mapping[str, Any], path: str) -> FoundValues:
    """Return the values at a path, None where a key is absent.

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
