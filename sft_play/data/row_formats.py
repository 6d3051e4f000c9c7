"""The row formats that files may have. Pure: reads no files.

A file has one format: the first of ROW_FORMATS whose columns its first readable rows have.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from sft_play.data.nested_values import find_values, parse_message_list, top_column
from sft_play.data.rows import InvalidRowError, Json

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
OPTIONAL_FIELDS = {
    **dict.fromkeys(ROW_FORMATS, SHARED_FIELDS),
    "instruction": (*SHARED_FIELDS, "input"),
    "instruction_response": (*SHARED_FIELDS, "context"),
    "calls": ("system",),
    **dict.fromkeys(TEXT_FORMATS, ()),
}
FIELDS = (
    *dict.fromkeys(chain.from_iterable(ROW_FORMATS.values())),
    *SHARED_FIELDS,
)
OTHER_NAMES = {"system": "system_prompt", "tools": "functions"}  # that an optional field may have
MEDIA_COLUMNS = frozenset(("image", "images", "audio", "audios", "video", "videos"))


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
