"""Detect a file's row format from its first rows; if it has none, suggest what to type.

A suggestion is checked on the file's first rows before it is made.
"""

import difflib
import json
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.data.file_kinds import base_format
from sft_play.data.files import Chunk, parse_records, refuse_bad_rows
from sft_play.data.row_formats import ROW_FORMATS, RowFormat, find_values, match_format, top_column
from sft_play.data.row_parsing import SystemPrompt, parse_record
from sft_play.data.rows import FORMS, BadRow, Columns, InvalidRowError, Json, Records, list_columns
from sft_play.data.tables import DELIMITERS
from sft_play.errors import DataError

FIRST_RECORDS = 100  # of a file, from which its format is detected
PREFERENCE = frozenset(("chosen", "rejected"))
ALL_FIELDS = set(chain.from_iterable(one.fields for one in ROW_FORMATS.values()))
# Common names of a question, its context, and its answer in files; most likely first
QUESTIONS, EXTRAS, ANSWERS = (text.split() for text in FORMS["likely"].values())
MAX_DEPTH = 4
PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # written in YAML without quotes


class ChunkTask(NamedTuple):
    """A chunk of file number `file` of a source, and the row format of that file."""

    file: int
    chunk: Chunk
    row_format: RowFormat


def take_rows(tasks: Iterable[ChunkTask], positions: Sequence[int]) -> Iterator[ChunkTask]:
    """Yield chunks with only the rows at sorted positions among the rows of all tasks."""
    start = 0
    for task in tasks:
        end = start + len(task.chunk.records)
        first, last = bisect_left(positions, start), bisect_left(positions, end)
        if first < last:
            chosen = [position - start for position in positions[first:last]]
            yield task._replace(chunk=task.chunk.take(chosen))
        start = end


def detect_format(chunk: Chunk, columns: Columns) -> RowFormat:
    """Return the row format of a file, from its first chunk; `columns` names columns of fields.

    Raises: DataError for rows of unknown format, for rows with good and bad answers to compare, or
    for rows without one of `columns`.
    """
    path = chunk.path
    records = _readable_records(chunk)
    keys = list(dict.fromkeys(chain.from_iterable(records)))
    _check_columns(path, columns, records, keys)
    found = match_format(records, columns)
    if not columns:
        _refuse_other_training(path, records, keys, found)
    if found is None:
        raise DataError(_no_format(path, columns, records, keys))
    return found


def _readable_records(chunk: Chunk) -> list[Json]:
    """Return the records of a chunk that can be read. Raises DataError if none can."""
    positions = range(min(FIRST_RECORDS, len(chunk.numbers)))
    records = list(parse_records(chunk.take(positions)))
    readable = [record for record in records if not isinstance(record, BadRow)]
    if not readable:
        refuse_bad_rows(records, len(records))
    return readable


def _check_columns(path: Path, columns: Columns, records: Records, keys: list[str]) -> None:
    for field, column in columns.items():
        if field not in ALL_FIELDS:
            near = difflib.get_close_matches(field, ALL_FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/data.md names the fields"
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
        reason = None if column in keys else _explain_path(column, records)
        if reason is not None:
            raise DataError(f"{path}: {reason}; data.columns names it as the {field}")


def _explain_path(column: str, records: Records) -> str | None:
    """Return why a path leads to a value in no record, None if it leads to one."""
    reason = f"{column}: nothing is there"
    for record in records:
        try:
            if any(value is not None for value in find_values(record, column).values):
                return None
        except InvalidRowError as error:
            reason = str(error)
    return reason


def _refuse_other_training(
    path: Path, records: Records, keys: Sequence[str], found: RowFormat | None
) -> None:
    """Raise DataError for rows that are made for another kind of training than on answers."""
    for refused in FORMS["refused"]:
        missing = [column for column in refused["columns"] if column not in keys]
        if not any(_explain_path(column, records[:1]) for column in missing):
            raise DataError(f"{path}: {refused['reason']}")
    if PREFERENCE.issubset(keys) and (found is None or not _works(records, found)):
        columns = _suggest_chosen(records)
        hint = "to train only on chosen, write it as messages"
        if columns:
            hint = f"to train only on chosen: {columns_setting(columns)}"
        raise DataError(
            f"{path}: chosen and rejected are a preference set, "
            f"and preference training is not here; {hint}"
        )
    labels = [record.get("label") for record in records]
    has_prompt = found and ROW_FORMATS[found.name].columns[0] == "prompt"
    if has_prompt and all(isinstance(label, bool) for label in labels):
        raise DataError(
            f"{path}: label says which completions are good (KTO), "
            "and preference training is not here; to train only on the good ones: "
            f"jq -c 'select(.label)' {path} > good.jsonl"
        )


def _works(records: Records, row_format: RowFormat) -> bool:
    """Return whether most of the records can be read as rows of a format."""
    bad = 0
    for record in records:
        try:
            parse_record(record, row_format, "", SystemPrompt())
        except InvalidRowError:
            bad += 1
    return 2 * bad < len(records)


def _find_columns(records: Records, candidates: Iterable[Columns]) -> Columns | None:
    """Return the first columns with which most of the records are rows, None if there are none."""
    for columns in candidates:
        row_format = match_format(records, columns)
        if row_format is not None and _works(records, row_format):
            return columns
    return None


def _no_format(path: Path, columns: Columns, records: Records, keys: list[str]) -> str:
    is_table = base_format(path) in DELIMITERS
    first_line = " (its first line)" if is_table else ""
    mapped = f" besides {dict(columns)}" if columns else ""
    found = f"{path}: the columns are {list_columns(keys)}{first_line}{mapped}"
    if "input_ids" in keys and not columns:
        return (
            f"{found}; tokens are not read, as another tokenizer's ids mean other texts; write the "
            "texts that they were made of, as messages or as prompt and completion"
        )
    if not columns and (suggested := _find_columns(records, _candidates(records[0]))):
        return f"{found}; no row format has these. Name the columns: {columns_setting(suggested)}"
    if not columns and (suggested := _find_columns(records, _by_position(records, keys))):
        return (
            f"{found}; no row format has these. Name the columns (a guess from their order): "
            f"{columns_setting(suggested)}"
        )
    return (
        f"{found}; no row format has these, and docs/data.md lists the formats. If other names "
        "contain a question and its answer, name the columns: "
        'DATA_COLUMNS="{question: <column>, answer: <column>}"'
    )


def _by_position(records: Records, keys: Sequence[str]) -> Iterator[Columns]:
    """Yield the only two columns with texts as question and answer.

    Other columns may have single words, or numbers, if these two have several words.
    """
    names = [key for key in keys if PLAIN_NAME.fullmatch(key)]  # else perhaps a first row
    for is_text in (lambda text: " " in text, lambda text: any(map(str.isalpha, text))):
        texts = [key for key in names if 2 * sum(map(is_text, _texts(records, key))) > len(records)]
        if len(texts) == 2:
            yield {"question": texts[0], "answer": texts[1]}


def _texts(records: Records, key: str) -> Iterator[str]:
    return (str(record.get(key) or "").strip() for record in records)


class Leaf(NamedTuple):
    """A text in a record: its path, and the names along the path, the innermost first."""

    path: str
    names: tuple[str, ...]
    is_in_list: bool  # of objects


def columns_setting(columns: Columns) -> str:
    """Return data.columns as typed in a shell.

    >>> columns_setting({"question": "problem", "answer": "a.0"})
    "DATA_COLUMNS='{question: problem, answer: a.0}'"
    """
    pairs = []
    for field, column in columns.items():
        is_plain = PLAIN_NAME.fullmatch(column)
        pairs.append(f"{field}: {column if is_plain else json.dumps(column, ensure_ascii=False)}")
    return "DATA_COLUMNS=" + shlex.quote("{" + ", ".join(pairs) + "}")


def _suggest_chosen(records: Records) -> Columns | None:
    """Return columns that train only the preferred answers of a preference set."""
    candidates: list[Columns] = [{"messages": "chosen"}]
    for name in (*QUESTIONS, "messages", "conversations"):
        if name in records[0]:
            candidates.append({"prompt": name, "completion": "chosen"})
    candidates.append({"text": "chosen"})
    return _find_columns(records, candidates)


def _candidates(record: Json) -> Iterator[Columns]:
    for path in _turn_lists(record, ""):
        yield {"messages": path}
    leaves = list(_leaves(record, "", ()))
    question = _first_named(leaves, QUESTIONS, ())
    if question is None:
        for leaf in leaves:
            if leaf.names[0] in ("text", "content") and not leaf.is_in_list:  # perhaps a turn's
                yield {"text": leaf.path}
        return
    answer = _first_named(leaves, ANSWERS, (question,))
    if answer is None:
        return
    extra = _first_named(leaves, EXTRAS, (question, answer))
    if extra is None:
        yield {"question": question.path, "answer": answer.path}
    else:  # without it, the question could not be answered
        yield {"instruction": question.path, "input": extra.path, "output": answer.path}


def _turn_lists(record: Json, place: str) -> Iterator[str]:
    """Yield the paths of lists of turns, including those in objects of the record."""
    for name, value in record.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and ({"role", "content"} <= first.keys() or "from" in first):
            yield f"{place}{name}"
        elif isinstance(value, dict) and "." not in name:
            yield from _turn_lists(value, f"{place}{name}.")


def _leaves(
    value: Any, path: str, names: tuple[str, ...], is_in_list: bool = False
) -> Iterator[Leaf]:
    """Yield the texts of a value; of a list of texts the first, of a list of objects all."""
    if isinstance(value, str):
        yield Leaf(path, names or ("",), is_in_list)
    elif len(names) == MAX_DEPTH:
        return
    elif isinstance(value, dict):
        for name, held in value.items():
            if "." not in name:
                inner = f"{path}.{name}" if path else name
                yield from _leaves(held, inner, (name.strip().lower(), *names), is_in_list)
    elif isinstance(value, list) and value:
        has_objects = isinstance(value[0], dict)
        inner = path if has_objects else f"{path}.0"
        yield from _leaves(value[0], inner, names, is_in_list or has_objects)


def _first_named(
    leaves: Sequence[Leaf], wanted: Sequence[str], taken: Sequence[Leaf]
) -> Leaf | None:
    """Return the leaf with the most likely name; its name takes precedence over outer names."""
    for depth in (1, None):
        for name in wanted:
            for leaf in leaves:
                if leaf not in taken and name in leaf.names[:depth]:
                    return leaf
    return None
