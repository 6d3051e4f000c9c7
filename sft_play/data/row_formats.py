"""The row formats that files may have, and records as rows.

Only `detect_format` and `read_rows` read files. A file has one format: the first of ROW_FORMATS
whose columns its first readable rows have. Other columns are ignored. Texts keep their whitespace.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from sft_play.data.csv_files import DELIMITERS
from sft_play.data.files import Chunk, file_format, parse_records, read_chunks
from sft_play.data.messages import (
    InvalidRowError,
    MessageList,
    parse_conversation,
    parse_functions,
    parse_message_list,
    parse_optional_text,
    parse_segments,
    parse_text,
    shorten,
)
from sft_play.data.rows import BadRow, Json, Message, Row, UnreadableRecord, raise_bad_rows
from sft_play.errors import DataError

FIRST_RECORDS = 100  # of a file, from which its format is detected
MAX_COLUMNS_CHARACTERS = 200  # of the columns that an error lists
# Format: its required columns. The most specific come first: a file with the columns of several
# formats has the first.
ROW_FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "segments": ("segments",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "user": ("user", "assistant"),
    "target": ("input", "target"),
    "input": ("input", "output"),
    "text": ("text",),
}
# Optional in every format but plain text: the system message, and the functions that may be called
SHARED_FIELDS = ("system", "tools")
OPTIONAL_FIELDS = {
    **dict.fromkeys(ROW_FORMATS, SHARED_FIELDS),
    "instruction": (*SHARED_FIELDS, "input"),
    "segments": (),
    "text": (),
}
FIELDS = (*dict.fromkeys(chain.from_iterable(ROW_FORMATS.values())), *SHARED_FIELDS)


@dataclass(frozen=True)
class RowFormat:
    """How a file holds its rows: one of ROW_FORMATS, and the file's column for each field."""

    name: str
    columns: Mapping[str, str]
    is_sharegpt: bool = False  # messages have from and value, not role and content

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The columns that every row has."""
        return tuple(self.columns[field] for field in ROW_FORMATS[self.name])


@dataclass(frozen=True)
class SystemPrompt:
    """The system message that a run puts before conversations."""

    text: str | None = None
    replaces_own: bool = False  # else conversations with a system message keep their own


def detect_format(path: Path, columns: Mapping[str, str]) -> RowFormat:
    """Return the row format of a file; `columns` gives fields the file's own column names.

    Raises: DataError for a file without rows, with rows of no known format, or without one of
    `columns`.
    """
    chunk = next(read_chunks(path, FIRST_RECORDS), None)
    if chunk is None:
        raise DataError(f'{path}: no rows; a row is such as {{"question": "...", "answer": "..."}}')
    records = _readable_records(chunk)
    keys = list(dict.fromkeys(chain.from_iterable(records)))
    _check_columns(path, columns, keys)
    for record in records:
        for name, required in ROW_FORMATS.items():
            fields = (*required, *OPTIONAL_FIELDS[name])
            column_of = {field: columns.get(field, field) for field in fields}
            has_required = all(column_of[field] in record for field in required)
            if has_required and columns.keys() <= column_of.keys():
                is_sharegpt = name == "conversations" and _is_sharegpt(records, column_of[name])
                return RowFormat(name, column_of, is_sharegpt)
    raise DataError(_no_format(path, columns, keys))


def parse_rows(
    chunk: Chunk, row_format: RowFormat, system_prompt: SystemPrompt | None = None
) -> Iterator[Row | BadRow]:
    """Yield every record of a chunk as a row, or why it is none, one for one."""
    system_prompt = system_prompt or SystemPrompt()
    required = frozenset(row_format.required)
    records = parse_records(chunk, row_format.columns.values())
    for position, record in enumerate(records):
        origin = chunk.origin(position)
        if isinstance(record, UnreadableRecord):
            yield BadRow(origin, record.reason, record.raw)
            continue
        try:
            if not record.keys() >= required:
                raise InvalidRowError(
                    f"the keys are {_list_columns(record)}; "
                    f"the rows of this file have {' and '.join(row_format.required)}"
                )
            yield _parse_row(record, row_format, origin, system_prompt)
        except InvalidRowError as error:
            yield BadRow(origin, str(error), chunk.raw(position))


def read_rows(
    path: Path, columns: Mapping[str, str] | None = None, system_prompt: str | None = None
) -> list[Row]:
    """Return all rows of a file that fits into memory. Raises DataError."""
    row_format = detect_format(path, columns or {})
    rows: list[Row] = []
    bad: list[BadRow] = []
    for chunk in read_chunks(path):
        for row in parse_rows(chunk, row_format, SystemPrompt(system_prompt)):
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                rows.append(row)
    if bad:
        raise_bad_rows(bad, len(bad))
    return rows


def _readable_records(chunk: Chunk) -> list[Json]:
    """Return the records of a chunk that can be read. Raises DataError if none can."""
    readable: list[Json] = []
    bad: list[BadRow] = []
    for position, record in enumerate(parse_records(chunk)):
        if isinstance(record, UnreadableRecord):
            bad.append(BadRow(chunk.origin(position), record.reason, record.raw))
        else:
            readable.append(record)
    if not readable:
        raise_bad_rows(bad, len(bad))
    return readable


def _check_columns(path: Path, columns: Mapping[str, str], keys: list[str]) -> None:
    for field, column in columns.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
            raise DataError(
                f"data.columns={dict(columns)}: no row format has a field {field!r}; {hint}"
            )
        if column not in keys:
            near = difflib.get_close_matches(column, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"{path}: no column {column!r}, which data.columns names as the {field}; "
                f"the columns are {_list_columns(keys)}{hint}"
            )


def _no_format(path: Path, columns: Mapping[str, str], keys: list[str]) -> str:
    known = ", or ".join(" and ".join(required) for required in ROW_FORMATS.values())
    is_table = file_format(path).removesuffix(".gz") in DELIMITERS
    first_line = " (its first line)" if is_table else ""
    mapped = f" besides {dict(columns)}" if columns else ""
    return (
        f"{path}: the columns are {_list_columns(keys)}{first_line}{mapped}; a row has {known}. "
        "If other names hold them, say which: "
        'DATA_COLUMNS="{question: <column>, answer: <column>}"'
    )


def _list_columns(names: Iterable[str]) -> str:
    return shorten(", ".join(map(str, names)), MAX_COLUMNS_CHARACTERS) or "none"


def _is_sharegpt(records: list[Json], column: str) -> bool:
    """Return whether the first list of messages that can be read is ShareGPT's."""
    for record in records:
        try:
            return "from" in parse_message_list(record.get(column), column)[0]
        except InvalidRowError:
            continue  # `parse_rows` reports it
    return False


def _parse_row(
    record: Json, row_format: RowFormat, origin: str, system_prompt: SystemPrompt
) -> Row:
    if row_format.name == "text":
        (column,) = row_format.required
        return Row((), origin, text=parse_text(record[column], column))
    if row_format.name == "segments":
        (column,) = row_format.required
        return Row((), origin, segments=parse_segments(record[column], column))
    messages = _MESSAGE_PARSERS[row_format.name](record, row_format)
    tools_column = row_format.columns["tools"]
    tools = parse_functions(record.get(tools_column), tools_column)
    own_system = parse_optional_text(record.get(row_format.columns["system"]), "system")
    if own_system is not None:
        if messages[0].role == "system":
            raise InvalidRowError("a system column and a system message; keep one of them")
        messages = (Message("system", own_system), *messages)
    return Row(_with_system_prompt(messages, system_prompt), origin, tools=tools)


def _with_system_prompt(
    messages: tuple[Message, ...], system_prompt: SystemPrompt
) -> tuple[Message, ...]:
    has_own = messages[0].role == "system"
    if not system_prompt.text or (has_own and not system_prompt.replaces_own):
        return messages
    rest = messages[1:] if has_own else messages
    return (Message("system", system_prompt.text), *rest)


def _parse_message_column(record: Json, row_format: RowFormat) -> tuple[Message, ...]:
    (column,) = row_format.required
    return parse_conversation([MessageList(column, record[column])], row_format.is_sharegpt)


def _parse_instruction(record: Json, row_format: RowFormat) -> tuple[Message, ...]:
    instruction, output = row_format.required
    question = parse_text(record[instruction], instruction)
    input_column = row_format.columns["input"]
    extra = parse_optional_text(record.get(input_column), input_column)
    if extra is not None:
        question = f"{question}\n\n{extra}"
    return Message("user", question), Message("assistant", parse_text(record[output], output))


def _parse_prompt(record: Json, row_format: RowFormat) -> tuple[Message, ...]:
    prompt, completion = row_format.required
    if isinstance(record[prompt], list) and isinstance(record[completion], list):
        lists = [MessageList(name, record[name]) for name in (prompt, completion)]
        return parse_conversation(lists, is_sharegpt=False)
    return _parse_pair(record, row_format)


def _parse_pair(record: Json, row_format: RowFormat) -> tuple[Message, ...]:
    question, answer = row_format.required
    return (
        Message("user", parse_text(record[question], question)),
        Message("assistant", parse_text(record[answer], answer)),
    )


_MESSAGE_PARSERS: dict[str, Callable[[Json, RowFormat], tuple[Message, ...]]] = {
    **dict.fromkeys(ROW_FORMATS, _parse_pair),
    "messages": _parse_message_column,
    "conversations": _parse_message_column,
    "instruction": _parse_instruction,
    "prompt": _parse_prompt,
}
