"""What a model is asked: prompts from files of rows with answers or without. Loads no torch.

A file for questions has the row formats of training; what an answer would be may be missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.data.files import (
    base_format,
    format_origin,
    parse_records,
    read_chunks,
    refuse_bad_rows,
)
from sft_play.data.row_formats import (
    ROW_FORMATS,
    TEXT_FORMATS,
    TURN_FORMATS,
    match_format,
    parse_message_list,
)
from sft_play.data.row_parsing import SystemPrompt, parse_record
from sft_play.data.rows import (
    BadRow,
    InvalidRowError,
    Json,
    Message,
    UnreadableRecord,
    list_columns,
)

MISSING = "?"  # in place of an answer, so that the record is one of a row format


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked; `origin` is `file:line` or `file[index]`."""

    origin: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    expected: str | None = None  # the answer in the file

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1].content


def read_prompts(
    path: Path, columns: Mapping[str, str], system_prompt: SystemPrompt
) -> list[Prompt]:
    """Return the prompts of a file in order; each line of a .txt file is one.

    Raises: DataError for a file that cannot be read, and for records that ask nothing.
    """
    found: list[Prompt] = []
    bad: list[BadRow] = []
    read = _read_lines if base_format(path) == ".txt" else _read_records
    for origin, record, raw in read(path):
        try:
            if isinstance(record, UnreadableRecord):
                raise InvalidRowError(record.reason)
            found.append(prompt_of(record, columns, system_prompt, origin))
        except InvalidRowError as error:
            bad.append(BadRow(origin, str(error), raw))
    refuse_bad_rows(bad, len(found) + len(bad))
    return found


def prompt_of(
    record: Json, columns: Mapping[str, str], system_prompt: SystemPrompt, origin: str
) -> Prompt:
    """Return what a record asks, without its last answer. Raises InvalidRowError."""
    whole = _with_answer(record, columns)
    row_format = match_format([whole], columns)
    if row_format is None:
        raise InvalidRowError(_no_question(record))
    row = parse_record(whole, row_format, origin, system_prompt)[0]
    *messages, answer = row.messages
    expected = None if answer.content == MISSING else answer.content
    return Prompt(origin, tuple(messages), row.tools, expected)


def _with_answer(record: Json, columns: Mapping[str, str]) -> Json:
    """Return the record with an answer after its question, if it has none."""
    if record.keys() == {"text"}:
        record = {"prompt": record["text"]}
    for name, fields in ROW_FORMATS.items():
        if name in TEXT_FORMATS:
            continue
        names = [columns.get(field, field) for field in fields]
        *questions, answer = names
        if name in TURN_FORMATS and answer in record:
            return {**record, answer: _with_last_answer(record[answer], answer)}
        if questions and all(record.get(question) is not None for question in questions):
            return {**record, answer: record.get(answer) or MISSING}
    raise InvalidRowError(_no_question(record))


def _with_last_answer(value: Any, name: str) -> list[Json]:
    turns = parse_message_list(value, name)
    speaker, content = ("from", "value") if "from" in turns[0] else ("role", "content")
    if turns[-1].get(speaker) in ("assistant", "gpt", "function_call"):
        return turns
    return [*turns, {speaker: "assistant", content: MISSING}]


def _no_question(record: Json) -> str:
    return (
        f"the keys are {list_columns(record)}; a prompt has messages, prompt, question, "
        'instruction or input; other names go by DATA_COLUMNS="{question: <column>}"'
    )


def _read_lines(path: Path) -> Iterator[tuple[str, Json, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield format_origin(path, number), {"prompt": line.strip()}, line


def _read_records(path: Path) -> Iterator[tuple[str, Json | UnreadableRecord, str]]:
    for chunk in read_chunks(path):
        for position, record in enumerate(parse_records(chunk)):
            yield chunk.origin(position), record, chunk.raw(position)
