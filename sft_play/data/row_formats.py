"""The row formats that files may have, and the values inside their records. Pure: reads no files.

A file has one format: the first of ROW_FORMATS whose columns its first readable rows have. A column
may also be named by a path such as `answers.text.0`: its parts are keys of objects and indices of
lists, and a list without an index gives a row for each of its elements. A text on the way is read
as JSON.

The turns of a conversation become one list of objects. They may be

- objects with role and content, or ShareGPT's from and value: taken as they are
- objects with input and output (Capybara): a question and an answer each
- texts (LIMA): the user's and the assistant's in turn
- one text with marks (HH-RLHF, Guanaco, ChatML): `Human: ... Assistant: ...`, see `marked_text`
- an object with a list for each field: {role: [...], content: [...]} (a Sequence of datasets)
- JSON text of any of these, as in a CSV cell
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from sft_play.data.marked_text import split_marked_text
from sft_play.data.rows import InvalidRowError, Json, shorten
from sft_play.data.text_files import InvalidJsonError, parse_json

# Format: its required columns. The most specific come first: a file with the columns of several
# formats has the first.
ROW_FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "question": ("question", "answer"),
    "user": ("user", "assistant"),
    "target": ("input", "target"),
    "input": ("input", "output"),
    "conversation": ("conversation",),
    "instruction_response": ("instruction", "response"),
    "prompt_response": ("prompt", "response"),
    "question_response": ("question", "response"),
    "query": ("query", "response"),
    "calls": ("query", "tools", "answers"),
    "pretokenized": ("inputs_pretokenized", "targets_pretokenized"),
    "targets": ("inputs", "targets"),
    "text": ("text",),
    "segments": ("segments",),
}
TURN_FORMATS = ("messages", "conversations", "conversation")  # one column has all turns
PROMPT_FORMATS = ("prompt", "prompt_response")  # two columns may have turns, in this order
TEXT_FORMATS = ("text", "segments")  # no chat template is used
# Optional in every format but plain text: the system message, and the functions that may be called
SHARED_FIELDS = ("system", "tools")
# Variables of the chat template, for one row: TRL's column of several, and some by their names
VARIABLES = "chat_template_kwargs"
VARIABLE_FIELDS = (
    *(VARIABLES, "enable_thinking", "reasoning_effort", "thinking_budget", "documents"),
    *("custom_instructions", "xml_tools", "python_tools", "builtin_tools", "model_identity"),
)
OPTIONAL_FIELDS = {
    **dict.fromkeys(ROW_FORMATS, (*SHARED_FIELDS, *VARIABLE_FIELDS)),
    "instruction": (*SHARED_FIELDS, *VARIABLE_FIELDS, "input"),
    "instruction_response": (*SHARED_FIELDS, *VARIABLE_FIELDS, "context"),
    "calls": ("system", *VARIABLE_FIELDS),
    **dict.fromkeys(TEXT_FORMATS, ()),
}
FIELDS = (
    *dict.fromkeys(chain.from_iterable(ROW_FORMATS.values())),
    *SHARED_FIELDS,
)
OTHER_NAMES = {"system": "system_prompt", "tools": "functions"}  # that an optional field may have
MEDIA_COLUMNS = frozenset(("image", "images", "audio", "audios", "video", "videos"))


def parse_message_list(value: Any, name: str) -> list[Json]:
    """Return the turns of a conversation as objects. Raises InvalidRowError."""
    if isinstance(value, str):
        turns = split_marked_text(value, name)
        if turns is not None:
            return turns
        value = parse_json_text(value, name)
    if isinstance(value, dict):
        value = _split_columns(value)
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, not a list of turns")
    first = value[0]
    turns = []
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


def parse_json_text(text: str, name: str) -> Any:
    """Return the value of a JSON text. Raises InvalidRowError, which calls it `name`."""
    try:
        return parse_json(text)
    except InvalidJsonError as error:
        raise InvalidRowError(
            f"{name} is a text that is no JSON ({error}): {shorten(text)}"
        ) from None


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


@dataclass(frozen=True)
class RowFormat:
    """How a file has its rows: one of ROW_FORMATS, and the file's column for each field."""

    name: str
    columns: Mapping[str, str]  # or a path into a column, such as answers.text.0
    is_sharegpt: bool = False  # messages have from and value, not role and content
    paths: tuple[str, ...] = ()  # those of `columns` that lead into a column
    media_column: str | None = None  # has images, sound or films

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The columns that every row has."""
        return tuple(self.columns[field] for field in ROW_FORMATS[self.name])

    @cached_property
    def file_columns(self) -> frozenset[str]:
        """The columns of the file that are read."""
        if not self.paths:
            return frozenset(self.columns.values())
        paths = frozenset(self.paths)
        whole = [column for column in self.columns.values() if column not in paths]
        return frozenset((*whole, *(path.partition(".")[0] for path in paths)))

    @cached_property
    def variable_columns(self) -> dict[str, str]:
        """The columns that have variables of the chat template, by the names of these."""
        return {name: self.columns[name] for name in VARIABLE_FIELDS if name in self.columns}

    @property
    def turn_column(self) -> str | None:
        """The column that has all turns, if one does."""
        return self.required[0] if self.name in TURN_FORMATS else None


def match_format(records: Sequence[Json], columns: Mapping[str, str]) -> RowFormat | None:
    """Return the format of a file's first records, None if they have none.

    `columns` gives fields the file's own column names, or paths.
    """
    keys = set(chain.from_iterable(records))
    column_of = {name: _name_columns(name, columns, keys) for name in ROW_FORMATS}
    for record in records:
        for name, required in ROW_FORMATS.items():
            named = column_of[name]
            has_required = all(top_column(named[field], record) in record for field in required)
            if has_required and columns.keys() <= named.keys():
                paths = (
                    column for column in named.values() if "." in column and column not in keys
                )
                has_turns = name in (*TURN_FORMATS, *PROMPT_FORMATS)
                return RowFormat(
                    name,
                    named,
                    is_sharegpt=has_turns and _is_sharegpt(records, named[required[0]]),
                    paths=tuple(paths),
                    media_column=min(MEDIA_COLUMNS.intersection(keys), default=None),
                )
    return None


def _name_columns(name: str, columns: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Return the column of each field of a format."""
    column_of = {field: columns.get(field, field) for field in ROW_FORMATS[name]}
    for field in OPTIONAL_FIELDS[name]:
        other = OTHER_NAMES.get(field)
        default = other if other in keys and field not in keys else field
        column_of[field] = columns.get(field, default)
    return column_of


def _is_sharegpt(records: Sequence[Json], column: str) -> bool:
    """Return whether the first list of messages that can be read is ShareGPT's."""
    for record in records:
        try:
            value = record[column] if column in record else find_values(record, column).values[0]
            return "from" in parse_message_list(value, column)[0]
        except (InvalidRowError, IndexError):
            continue  # `parse_rows` reports it
    return False
