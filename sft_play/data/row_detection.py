"""Which row format a file has, found in its first rows; where it has none, what to type."""

import difflib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from sft_play.data.bad_rows import refuse_bad_rows
from sft_play.data.column_paths import find_values, top_column
from sft_play.data.csv_files import DELIMITERS
from sft_play.data.files import Chunk, base_format, parse_records, read_chunks
from sft_play.data.row_formats import (
    FIELDS,
    OPTIONAL_FIELDS,
    PROMPT_FORMATS,
    ROW_FORMATS,
    RowFormat,
    match_format,
)
from sft_play.data.row_parsing import SystemPrompt, parse_record, parse_rows
from sft_play.data.rows import (
    BadRow,
    InvalidRowError,
    Json,
    Row,
    UnreadableRecord,
    list_columns,
)
from sft_play.data.suggestions import columns_setting, suggest_chosen, suggest_columns
from sft_play.errors import DataError

FIRST_RECORDS = 100  # of a file, from which its format is detected
PREFERENCE = frozenset(("chosen", "rejected"))
MESSAGE_TREE = frozenset(("message_id", "parent_id", "role", "text"))
ALL_FIELDS = frozenset((*FIELDS, *chain.from_iterable(OPTIONAL_FIELDS.values())))


def detect_format(path: Path, columns: Mapping[str, str]) -> RowFormat:
    """Return the row format of a file; `columns` gives fields the file's own column names.

    Raises: DataError for a file without rows, with rows of no known format, with good and bad
    answers to prefer among, or without one of `columns`.
    """
    chunk = next(read_chunks(path, FIRST_RECORDS), None)
    if chunk is None:
        raise DataError(f'{path}: no rows; a row is such as {{"question": "...", "answer": "..."}}')
    records = _readable_records(chunk)
    keys = list(dict.fromkeys(chain.from_iterable(records)))
    _check_columns(path, columns, records, keys)
    found = match_format(records, columns)
    if not columns:
        _refuse_other_training(path, records, keys, found)
    if found is None:
        raise DataError(_no_format(path, columns, records, keys))
    return found


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
        refuse_bad_rows(bad, len(rows) + len(bad))
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
        refuse_bad_rows(bad, len(bad))
    return readable


def _check_columns(
    path: Path, columns: Mapping[str, str], records: Sequence[Json], keys: list[str]
) -> None:
    for field, column in columns.items():
        if field not in ALL_FIELDS:
            near = difflib.get_close_matches(field, ALL_FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
            raise DataError(
                f"data.columns={dict(columns)}: no row format has a field {field!r}; {hint}"
            )
        if top_column(column, keys) not in keys:
            near = difflib.get_close_matches(column, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(
                f"{path}: no column {column!r}, which data.columns names as the {field}; "
                f"the columns are {list_columns(keys)}{hint}"
            )
        if column not in keys:
            _check_path(path, field, column, records)


def _check_path(path: Path, field: str, column: str, records: Sequence[Json]) -> None:
    """Raise DataError if a path leads to a value in none of the records."""
    reason = f"{column}: nothing is there"
    for record in records:
        try:
            found = find_values(record, column)
        except InvalidRowError as error:
            reason = str(error)
            continue
        if any(value is not None for value in found.values):
            return
    raise DataError(f"{path}: {reason}; data.columns names it as the {field}")


def _refuse_other_training(
    path: Path, records: Sequence[Json], keys: Sequence[str], found: RowFormat | None
) -> None:
    """Raise DataError for rows that are made for another training than on answers."""
    if MESSAGE_TREE.issubset(keys):
        raise DataError(
            f"{path}: each row is one message of a tree (message_id, parent_id), not a "
            "conversation; write each path through a tree as a row with messages, "
            "or take a set that has them, such as timdettmers/openassistant-guanaco"
        )
    if PREFERENCE.issubset(keys) and (found is None or not _works(records, found)):
        columns = suggest_chosen(records, lambda columns: _columns_work(records, columns))
        hint = (
            f"to train on chosen alone: {columns_setting(columns)}"
            if columns
            else ("to train on chosen alone, write it as messages")
        )
        raise DataError(
            f"{path}: chosen and rejected are a preference set, "
            f"and preference training is not here; {hint}"
        )
    labels = [record.get("label") for record in records]
    if found and found.name in PROMPT_FORMATS and all(isinstance(label, bool) for label in labels):
        raise DataError(
            f"{path}: label says which completions are good (KTO), "
            "and preference training is not here; to train on the good ones alone: "
            f"jq -c 'select(.label)' {path} > good.jsonl"
        )


def _works(records: Sequence[Json], row_format: RowFormat) -> bool:
    """Return whether most of the records can be read as rows of a format."""
    bad = 0
    for record in records:
        try:
            parse_record(record, row_format, "", SystemPrompt())
        except InvalidRowError:
            bad += 1
    return 2 * bad < len(records)


def _columns_work(records: Sequence[Json], columns: Mapping[str, str]) -> bool:
    row_format = match_format(records, columns)
    return row_format is not None and _works(records, row_format)


def _no_format(
    path: Path, columns: Mapping[str, str], records: Sequence[Json], keys: list[str]
) -> str:
    known = ", or ".join(" and ".join(required) for required in ROW_FORMATS.values())
    is_table = base_format(path) in DELIMITERS
    first_line = " (its first line)" if is_table else ""
    mapped = f" besides {dict(columns)}" if columns else ""
    found = f"{path}: the columns are {list_columns(keys)}{first_line}{mapped}"
    if "input_ids" in keys and not columns:
        return (
            f"{found}; tokens are not read, as another tokenizer's ids mean other texts; write the "
            "texts that they were made of, as messages or as prompt and completion"
        )
    suggested = suggest_columns(records, lambda columns: _columns_work(records, columns))
    if suggested and not columns:
        return (
            f"{found}; no row format has these. Say which hold what: {columns_setting(suggested)}"
        )
    return (
        f"{found}; a row has {known}. If other names hold them, say which: "
        'DATA_COLUMNS="{question: <column>, answer: <column>}"'
    )
