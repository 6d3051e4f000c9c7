"""Records to rows: which shape a file has, and whether every row of it has that shape. Pure but for `recognise` and `read_all`, which read.

A file has one shape, the first of SHAPES whose columns its first readable rows have; other columns are left alone. Texts are
taken as they stand, blanks and all.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sft_play.data.files import TABLES, Chunk, format_of, parsed, read_chunks
from sft_play.data.messages import (
    NotRowError,
    conversation,
    function_list,
    optional_text,
    shown,
    text,
    turn_list,
)
from sft_play.data.rows import BadRow, Message, Row, Unreadable, refuse
from sft_play.errors import DataError

SAMPLE = 100  # rows of a file that are looked at for its shape
OPTIONAL = (
    "system",
    "tools",
)  # beside every shape but plain text: the system message, and the functions that may be called
# Most telling first: this is the order in which a file with the columns of several is taken.
SHAPES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),  # and perhaps input
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "user": ("user", "assistant"),
    "target": ("input", "target"),
    "input": ("input", "output"),
    "text": ("text",),
}
FIELDS = (*dict.fromkeys(field for required in SHAPES.values() for field in required), *OPTIONAL)


@dataclass(frozen=True)
class Shape:
    """What the rows of a file look like: one of SHAPES, and the column of the file that holds each of its fields."""

    name: str
    columns: Mapping[str, str]
    says_from: bool = False  # turns are from and value, as in ShareGPT, not role and content

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The columns that every row has."""
        return tuple(self.columns[field] for field in SHAPES[self.name])


def recognise(path: Path, columns: Mapping[str, str]) -> Shape:
    """Return the shape of a file; `columns` says which column holds a field whose name is another.

    Raises: DataError for a file without rows, with rows of no known shape, or without one of `columns`.
    """
    chunk = next(read_chunks(path, SAMPLE), None)
    if chunk is None:
        raise DataError(f'{path}: no rows; a row is such as {{"question": "...", "answer": "..."}}')
    records = list(parsed(chunk))
    sample = [record for record in records if not isinstance(record, Unreadable)]
    if not sample:
        refuse(
            [
                BadRow(chunk.origin(i), record.reason, record.raw)
                for i, record in enumerate(records)
                if isinstance(record, Unreadable)
            ],
            len(records),
        )
    keys = dict.fromkeys(key for record in sample for key in record)
    _check_columns(path, columns, keys)
    for record in sample:
        for name, required in SHAPES.items():
            fields = (
                *required,
                *(() if name == "text" else OPTIONAL),
                *(("input",) if name == "instruction" else ()),
            )
            column_of = {field: columns.get(field, field) for field in fields}
            if columns.keys() <= column_of.keys() and all(
                column_of[field] in record for field in required
            ):
                return Shape(
                    name, column_of, name == "conversations" and _says_from(sample, column_of[name])
                )
    known = ", or ".join(" and ".join(required) for required in SHAPES.values())
    mapped = f" besides {dict(columns)}" if columns else ""
    first_line = " (its first line)" if format_of(path).removesuffix(".gz") in TABLES else ""
    raise DataError(
        f"{path}: the columns are {_listed(keys)}{first_line}{mapped}; a row has {known}. "
        f'If other names hold them, say which: DATA_COLUMNS="{{question: <column>, answer: <column>}}"'
    )


def rows_of(
    chunk: Chunk, shape: Shape, system_prompt: str | None = None, replaces_system: bool = False
) -> Iterator[Row | BadRow]:
    """Yield every record of a chunk as a row of the file's shape, or why it is none; one for one.

    `system_prompt` goes before conversations that bring no system message; with `replaces_system` before all, in place of theirs.
    """
    build, required = _BUILDERS[shape.name], frozenset(shape.required)
    for position, record in enumerate(parsed(chunk, shape.columns.values())):
        origin = chunk.origin(position)
        if isinstance(record, Unreadable):
            yield BadRow(origin, record.reason, record.raw)
            continue
        try:
            if not record.keys() >= required:
                raise NotRowError(
                    f"the keys are {_listed(record)}; the rows of this file have {' and '.join(shape.required)}"
                )
            row = build(record, shape, origin)
            yield (
                row
                if row.text is not None
                else _with_system(
                    row, record.get(shape.columns["system"]), system_prompt, replaces_system
                )
            )
        except NotRowError as error:
            yield BadRow(origin, str(error), chunk.raw(position))


def read_all(
    path: Path, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[Row]:
    """Return all rows of a file, for files that fit into memory. Raises DataError."""
    shape = recognise(path, columns or {})
    found = [row for chunk in read_chunks(path) for row in rows_of(chunk, shape, system_prompt)]
    bad = [row for row in found if isinstance(row, BadRow)]
    if bad:
        refuse(bad, len(bad))
    return [row for row in found if isinstance(row, Row)]


def _check_columns(path: Path, columns: Mapping[str, str], keys: Mapping[str, None]) -> None:
    for field, column in columns.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
            raise DataError(f"data.columns={dict(columns)}: no shape has a field {field!r}; {hint}")
        if column not in keys:
            near = difflib.get_close_matches(column, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"{path}: no column {column!r}, which data.columns names as the {field}; the columns are {_listed(keys)}{hint}"
            )


def _listed(keys: Mapping[str, Any]) -> str:
    return shown(", ".join(map(str, keys)), 200) or "none"


def _says_from(sample: list[dict[str, Any]], column: str) -> bool:
    for record in sample:
        try:
            return "from" in turn_list(record.get(column), column)[0]
        except NotRowError:
            continue  # it will be named when its turn comes
    return False


def _of_turns(record: dict[str, Any], shape: Shape, origin: str) -> Row:
    column = shape.columns[shape.name]
    return Row(
        conversation([(column, record[column])], shape.says_from),
        origin,
        tools=_tools(record, shape),
    )


def _of_instruction(record: dict[str, Any], shape: Shape, origin: str) -> Row:
    instruction, output = shape.required
    question, extra = text(record[instruction], instruction), record.get(shape.columns["input"])
    if (extra := optional_text(extra, shape.columns["input"])) is not None:
        question = f"{question}\n\n{extra}"
    return Row(
        (Message("user", question), Message("assistant", text(record[output], output))),
        origin,
        tools=_tools(record, shape),
    )


def _of_pair(record: dict[str, Any], shape: Shape, origin: str) -> Row:
    question, answer = shape.required
    return Row(
        (
            Message("user", text(record[question], question)),
            Message("assistant", text(record[answer], answer)),
        ),
        origin,
        tools=_tools(record, shape),
    )


def _of_prompt(record: dict[str, Any], shape: Shape, origin: str) -> Row:
    prompt, completion = shape.required
    if isinstance(record[prompt], list) and isinstance(record[completion], list):
        turns = conversation(
            [(prompt, record[prompt]), (completion, record[completion])], says_from=False
        )
        return Row(turns, origin, tools=_tools(record, shape))
    return _of_pair(record, shape, origin)


def _of_text(record: dict[str, Any], shape: Shape, origin: str) -> Row:
    (column,) = shape.required
    return Row((), origin, text=text(record[column], column))


_BUILDERS: dict[str, Callable[[dict[str, Any], Shape, str], Row]] = {
    **dict.fromkeys(SHAPES, _of_pair),
    "messages": _of_turns,
    "conversations": _of_turns,
    "instruction": _of_instruction,
    "prompt": _of_prompt,
    "text": _of_text,
}


def _tools(record: dict[str, Any], shape: Shape) -> tuple[dict[str, Any], ...]:
    column = shape.columns["tools"]
    return function_list(record[column], column) if column in record else ()


def _with_system(row: Row, own: Any, system_prompt: str | None, replaces_system: bool) -> Row:
    """Return the row with its system column or the run's system prompt as its first message."""
    messages = row.messages
    if own is not None and (own := optional_text(own, "system")) is not None:
        if messages[0].role == "system":
            raise NotRowError("a system column and a system message; keep one of them")
        messages = (Message("system", own), *messages)
    if system_prompt and (replaces_system or messages[0].role != "system"):
        messages = (
            Message("system", system_prompt),
            *(messages[1:] if messages[0].role == "system" else messages),
        )
    return row if messages is row.messages else replace(row, messages=messages)
