"""Records to rows and to prompts, in a file's row format. Texts keep their whitespace.

Unused keys are counted, and each source reports them once, so that no one assumes that a column
is used when it is not. A file of questions has the row formats of training, but its answers may be
missing. Loads no torch.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from sft_play.config.schema import Config
from sft_play.data.calls import check_json, drop_filled, has_null_arguments, parse_tools
from sft_play.data.file_kinds import format_origin
from sft_play.data.files import Chunk, parse_records, read_chunks, refuse_bad_rows
from sft_play.data.image_parts import attach_images
from sft_play.data.images import BESIDE_FILES, ImageReader
from sft_play.data.messages import parse_messages, parse_segments, parse_weight, tools_of_turns
from sft_play.data.row_formats import (
    ROW_FORMATS,
    VARIABLES,
    RowFormat,
    expand_record,
    find_style,
    find_values,
    match_format,
    parse_json_text,
    parse_message_list,
    parse_nested,
)
from sft_play.data.rows import (
    FORMS,
    BadRow,
    Columns,
    InvalidRowError,
    Json,
    Message,
    Messages,
    Objects,
    Row,
    Segment,
    is_blank,
    is_given,
    list_columns,
    parse_optional_text,
    parse_text,
    shorten,
)
from sft_play.data.turns import ROLES, join_texts

Part = TypeVar("Part", Message, Segment)
TURNS = FORMS["turns"]
USED_TURN_KEYS = frozenset((*TURNS["content"], *TURNS["reasoning"], *TURNS["others"]))
TURN_PREFIX = "messages[]."
IN_TEXT = " in the column "  # of marks before turns
NULL_ARGUMENTS = "arguments that are null"
MAX_LISTED = 12  # keys without a known meaning
TOO_DEEP = "nested too deeply; write it flatter"


def unused_keys(record: Json, row_format: RowFormat) -> set[str]:
    """Return the keys of a record and of its turns that have a value and are not used."""
    used = row_format.file_columns
    keys = {key for key, value in record.items() if key not in used and is_given(value)}
    if row_format.name == "text":
        column = row_format.required[0]
        text = record.get(column)
        style = find_style(text) if isinstance(text, str) else None
        if style:
            keys.add(f"{style}{IN_TEXT}{column}")
    turns = parse_nested(record.get(row_format.turn_column))
    for turn in map(parse_nested, turns if isinstance(turns, list) else ()):
        if isinstance(turn, dict):
            is_answer = ROLES.get(str(turn.get("role")).lower()) == "assistant"
            others = turn.keys() - (USED_TURN_KEYS - {"name"} if is_answer else USED_TURN_KEYS)
            keys |= {f"{TURN_PREFIX}{key}" for key in others if is_given(turn[key])}
    return keys


def unused_notes(unused: Mapping[str, int], source: str) -> list[str]:
    """Return notes on a source's unused keys, as sentences."""
    meanings = dict(FORMS["meanings"])
    for key in unused:
        _, is_marked, column = key.partition(IN_TEXT)
        if is_marked:
            meanings[key] = (
                "every token is trained, also the questions'; "
                f"to train only the answers: DATA_COLUMNS='{{messages: {column}}}'"
            )
    known = [key for key in sorted(unused) if key in meanings]
    others = [key for key in sorted(unused) if key not in (*meanings, NULL_ARGUMENTS)]
    notes = [f"{source}: {key} ({unused[key]:,} rows) not used: {meanings[key]}" for key in known]
    if others:
        more = len(others) - MAX_LISTED
        listed = ", ".join(others[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
        notes.append(f"{source}: not used: {listed}")
    if unused.get(NULL_ARGUMENTS):
        notes.append(
            f"{source}: {NULL_ARGUMENTS} ({unused[NULL_ARGUMENTS]:,} rows with calls): trained so; "
            "if a table filled them in, write the rows without: "
            "jq -c 'del(..|nulls)' rows.jsonl > without_nulls.jsonl"
        )
    return notes


@dataclass(frozen=True)
class SystemPrompt:
    """The system message that a run adds to conversations, and the location of their images."""

    text: str | None = None
    replaces_own: bool = False  # else existing system messages are kept
    images: ImageReader = BESIDE_FILES

    @classmethod
    def from_config(cls, config: Config, decodes: bool = True) -> Self:
        """Return the system message of data.system_prompt; `decodes` says how images are read."""
        data = config.data
        replaces_own = data.system_prompt_mode == "replace"
        return cls(data.system_prompt, replaces_own, ImageReader.from_config(config, decodes))

    def put(self, messages: Messages) -> Messages:
        """Return messages that start with the text. Raises InvalidRowError."""
        has_system = messages[0].role == "system"
        if has_system and not self.replaces_own:
            return messages
        if has_system and messages[0].images:
            raise InvalidRowError(
                "data.system_prompt_mode=replace would drop an image of the system message; set add"
            )
        rest = dropwhile(lambda message: message.role == "system", messages)
        return (Message("system", self.text or ""), *rest)


NO_SYSTEM_PROMPT = SystemPrompt()


def parse_record_rows(
    chunk: Chunk,
    row_format: RowFormat,
    system_prompt: SystemPrompt = NO_SYSTEM_PROMPT,
    unused: Counter[str] | None = None,
) -> Iterator[list[Row] | BadRow]:
    """Yield the rows of every record of a chunk, or why it has none, one item per record.

    A record has one row, or several if a path of data.columns leads through a list. Keys that are
    not used are counted in `unused`, by the rows that have a value for them.
    """
    for position, record in enumerate(parse_records(chunk)):
        if isinstance(record, BadRow):
            yield record
            continue
        origin = format_origin(chunk.path, chunk.numbers[position])
        try:
            rows = parse_record(record, row_format, origin, system_prompt)
            is_plain = row_format.is_plain(record)
            for index, row in () if is_plain else enumerate(rows):
                messages = system_prompt.images.open_images(row.messages, chunk.path)
                if messages is not row.messages:
                    rows[index] = replace(row, messages=messages)
            if row_format.group_by:
                group = find_group(record, row_format.group_by)
                if not group:
                    raise InvalidRowError(
                        f"no value in data.split_by={row_format.group_by}; set "
                        f"DATA_SPLIT_BY=prompt, or to one of {list_columns(record)}"
                    )
                rows = [replace(row, group=group) for row in rows]
        except (InvalidRowError, RecursionError) as error:
            reason = str(error) if isinstance(error, InvalidRowError) else TOO_DEEP
            if unused is not None:
                unused.update(unused_keys(record, row_format))
            yield BadRow(origin, reason, chunk.raw(position))
            continue
        if unused is not None and not is_plain:
            unused.update(unused_keys(record, row_format))
            if [row for row in rows if has_null_arguments(row.messages)]:
                unused[NULL_ARGUMENTS] += 1
        yield rows


def find_group(record: Json, column: str) -> str:
    """Return the values of a record in a column, or at a path, as one text; "" if there is none."""
    with contextlib.suppress(InvalidRowError):
        values = find_values(record, column).values
        if any(value not in (None, "") for value in values):
            return "\n".join(map(str, values))
    return ""


def parse_record(
    record: Json, row_format: RowFormat, origin: str, system_prompt: SystemPrompt
) -> list[Row]:
    """Return the rows of a record. Raises InvalidRowError."""
    expanded = expand_record(record, row_format.paths) if row_format.paths else [record]
    return [_parse_row(fields, row_format, origin, system_prompt) for fields in expanded]


def _parse_row(
    record: Json, row_format: RowFormat, origin: str, system_prompt: SystemPrompt
) -> Row:
    if not record.keys() >= {*row_format.required}:
        raise InvalidRowError(
            f"the keys are {list_columns(record)}; "
            f"the rows of this file have {' and '.join(row_format.required)}"
        )
    column = row_format.required[0]
    weight_column = row_format.columns["weight"]
    weight = parse_weight(record.get(weight_column), weight_column)
    if row_format.kind == "text":
        return Row((), origin, text=parse_text(record[column], column), weight=weight)
    if row_format.kind == "segments":
        segments = parse_segments(record[column], column)
        return Row((), origin, segments=weigh(segments, weight))
    messages = parse_messages(record, row_format)
    tools: Objects = ()
    variables = None
    if not row_format.is_plain(record):
        tools_column = row_format.columns["tools"]
        given = record.get(tools_column)
        if row_format.turn_column and is_blank(given):
            given = tools_of_turns(record[column])
        tools = parse_tools(given, tools_column)
        if tools:
            messages = drop_filled(messages, tools)
        messages = _put_system(messages, record, row_format.columns["system"])
        messages = attach_images(messages, record, row_format)
        variables = _parse_variables(record, row_format)
        messages = weigh(messages, weight)
    if system_prompt.text:
        messages = system_prompt.put(messages)
    return Row(messages, origin, tools=tools, variables=variables)


def _put_system(messages: Messages, record: Json, column: str) -> Messages:
    """Return messages with the system message of a column. Raises InvalidRowError."""
    system = record.get(column)
    if isinstance(system, list | dict):  # Gemini's parts, Anthropic's and Bedrock's blocks
        system = join_texts(system, column)
    system = parse_optional_text(system, column)
    if system is None:
        return messages
    has_system = messages[0].role == "system"
    if has_system and messages[0].content != system:
        raise InvalidRowError("a system column and a system message; keep one of them")
    return (Message("system", system), *messages[has_system:])


def _parse_variables(record: Json, row_format: RowFormat) -> Json | None:
    """Return the variables for the chat template in a record, None if there are none.

    A null counts as none: tables insert it if a row has no value. Raises InvalidRowError.
    """
    columns = row_format.variable_columns
    if record.keys().isdisjoint(columns.values()):
        return None
    given = {name: record[column] for name, column in columns.items() if column in record}
    for name, value in given.items():
        text = value.strip().lower() if isinstance(value, str) else ""
        if text[:1] in ("{", "[") and name != "custom_instructions":
            given[name] = parse_json_text(value, columns[name])
        elif text in ("true", "false"):
            given[name] = text == "true"
    several = given.pop(VARIABLES, None) or {}
    if not isinstance(several, dict):
        raise InvalidRowError(f"{columns[VARIABLES]} is {shorten(several)}, not an object")
    values = {**several, **given}
    found = {name: value for name, value in values.items() if value is not None and value == value}
    check_json(found, columns[VARIABLES])
    return found or None


def weigh(parts: tuple[Part, ...], weight: float) -> tuple[Part, ...]:
    """Return messages or segments with a row's weight; weight 0 excludes them from training."""
    if weight == 1:
        return parts
    return tuple(
        replace(part, weight=part.weight * weight, is_trained=part.is_trained and weight > 0)
        for part in parts
    )


MISSING = "?"  # replaces an answer, so that the record has a row format


class Prompt(NamedTuple):
    """A question for the model; `origin` is `file:line` or `file[index]`."""

    origin: str
    messages: Messages
    tools: Objects = ()
    expected: str | None = None  # the answer in the file
    variables: Json | None = None  # of the chat template

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1].content


def read_prompts(path: Path, columns: Columns, system_prompt: SystemPrompt) -> list[Prompt]:
    """Return the prompts of a file in order; each line of a .txt file is a prompt.

    Raises: DataError for a file that cannot be read, and for records without a question.
    """
    found: list[Prompt] = []
    bad: list[BadRow] = []
    for chunk in read_chunks(path, line_by_line=True):
        for position, record in enumerate(parse_records(chunk)):
            if isinstance(record, BadRow):
                bad.append(record)
                continue
            origin = format_origin(chunk.path, chunk.numbers[position])
            try:
                prompt = read_prompt(record, columns, system_prompt, origin)
                messages = system_prompt.images.open_images(prompt.messages, path)
                found.append(prompt._replace(messages=messages))
            except InvalidRowError as error:
                bad.append(BadRow(origin, str(error), chunk.raw(position)))
    refuse_bad_rows(bad, len(found) + len(bad))
    return found


def read_prompt(record: Json, columns: Columns, system_prompt: SystemPrompt, origin: str) -> Prompt:
    """Return the prompt of a record, without its last answer. Raises InvalidRowError."""
    whole = _with_answer(record, columns)
    row_format = match_format([whole], columns) if whole else None
    if row_format is None:
        raise InvalidRowError(
            f"the keys are {list_columns(record)}; a prompt has messages, prompt, question, "
            'instruction or input; other names go by DATA_COLUMNS="{question: <column>}"'
        )
    row = parse_record(whole, row_format, origin, system_prompt)[0]
    *messages, answer = row.messages
    expected = None if answer.content == MISSING else answer.content
    return Prompt(origin, tuple(messages), row.tools, expected, row.variables)


def _with_answer(record: Json, columns: Columns) -> Json | None:
    """Return the record with an answer after its question; None if it has no question."""
    if record.keys() == {"text"}:
        record = {"prompt": record["text"]}
    for row_format in ROW_FORMATS.values():
        if row_format.kind in ("text", "segments"):
            continue
        *questions, answer = (columns.get(field, field) for field in row_format.columns)
        if row_format.kind == "turns" and answer in record:
            return {**record, answer: _with_last_answer(record[answer], answer)}
        if questions and all(record.get(question) is not None for question in questions):
            return {**record, answer: record.get(answer) or MISSING}
    return None


def _with_last_answer(value: Any, name: str) -> list[Json]:
    turns = parse_message_list(value, name)
    speaker, content = ("from", "value") if "from" in turns[0] else ("role", "content")
    if ROLES.get(turns[-1].get(speaker)) in ("assistant", "call"):
        return turns
    return [*turns, {speaker: "assistant", content: MISSING}]
