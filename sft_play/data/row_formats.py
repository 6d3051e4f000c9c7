"""The row formats of files, and the values inside their records. Pure: reads no files.

A file has one format: the first of ROW_FORMATS whose columns are in its first readable rows. A
column may also be a path like `answers.text.0`: its parts are keys of objects and indices of
lists, and a list without an index gives a row for each of its elements. A text on the path is read
as JSON.

The turns of a conversation are converted to one list of objects. They may be

- objects with role and content, or ShareGPT's from and value: taken as they are
- objects with input and output (Capybara), or other PAIRS: a question and an answer each
- pairs of texts ([question, answer]): the same
- texts (LIMA): the user's and the assistant's in turn
- one text with marks before its turns, as chat templates or people wrote them (HH-RLHF, Guanaco,
  ChatML): `Human: ... Assistant: ...`. It starts with a mark, all marks have one style, a question
  comes before an answer, and an answer ends it. Marks of bos and of ends of turns are removed
- an object with a list for each field: {role: [...], content: [...]} (a Sequence of datasets)
- JSON text of any of these, as in a CSV cell, or of each turn, as datasets writes its Json type;
  Python's way to write lists and objects counts as JSON
"""

import ast
import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

from sft_play.data.rows import FORMS, Columns, InvalidRowError, Json, shorten
from sft_play.data.text_files import InvalidJsonError, parse_json, split_columns

JSON_START = re.compile(r"\s*[\[{]")
PYTHON_START = re.compile(r"\s*[\[{][\[{\s]*'")  # a quote that JSON does not have
NUMPY_BREAK = re.compile(r"\}\n\s*\{")  # between the objects of an array, which lacks a comma
MAX_TURNS = 2000  # each is rendered with all previous turns
MAX_PYTHON_CHARACTERS = 1 << 20  # its syntax tree needs about 500 times as much
TURN_KEYS = frozenset(("role", "from"))  # one of them names the speaker of a turn
PAIRS = FORMS["pairs"]["keys"]
VARIABLES = "chat_template_kwargs"  # several variables of the chat template
MARKS = FORMS["marks"]
SPEAKERS = MARKS["roles"]
SYSTEM_MARKS = re.compile(r"<<SYS>>(.*?)<</SYS>>", re.DOTALL)
BEGINNINGS = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>|<BOS_TOKEN>|\[gMASK\]<sop>)*\s*"
)
# Reversed, for a text that is read from its end: a forward search would restart at each mark
REVERSED_ENDS = "|".join(re.escape(mark[::-1]) for mark in MARKS["ends"])
ENDS = re.compile(rf"(?:\s|{REVERSED_ENDS})*+")
ALPACA_HINT = "### Response:"
MAX_PREAMBLE_CHARACTERS = 1000  # of Vicuna and Alpaca, before the first mark


@dataclass(frozen=True)
class FormatKind:
    """One of the formats in formats.toml."""

    name: str
    columns: Sequence[str]  # that every row has
    kind: Literal["turns", "pair", "calls", "text", "segments"]
    example: str
    of: str = ""  # its origin, for the documentation
    extra: str | None = None  # an optional column whose text follows the question

    @cached_property
    def fields(self) -> list[str]:
        """The columns, then the optional ones."""
        fields = FORMS["fields"].items()
        optional = [name for name, facts in fields if self.kind in facts["kinds"].split()]
        return [*self.columns, *optional, *([self.extra] if self.extra else [])]


ROW_FORMATS = {facts["name"]: FormatKind(**facts) for facts in FORMS["formats"]}
VARIABLE_FIELDS = [name for name, facts in FORMS["fields"].items() if "is_variable" in facts]
LONGEST_FLAG = 5  # characters: "on", "off", "False" in a reasoning column are no reasoning
IMAGE_COLUMNS = frozenset(("image", "images"))
MEDIA_COLUMNS = frozenset((*IMAGE_COLUMNS, "audio", "audios", "video", "videos"))


def parse_message_list(value: Any, name: str) -> list[Json]:
    """Return the turns of a conversation as objects. Raises InvalidRowError."""
    if isinstance(value, str):
        turns = split_marked_text(value, name)
        if turns is not None:
            return turns
        value = parse_json_text(value, name)
    if isinstance(value, dict):
        value = split_columns(value)
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"{name} is {shorten(value)}, not a list of turns")
    if len(value) > MAX_TURNS:
        raise InvalidRowError(
            f"{name} has {len(value):,} turns, and a row has {MAX_TURNS:,} at most; split it"
        )
    kinds = set(map(type, value))
    if str in kinds:
        parsed = [parse_nested(turn) for turn in value]
        if any(is_turn(turn) for turn in parsed):
            value = parsed
    first = value[0]
    turns = []
    if isinstance(first, str):
        for number, text in enumerate(value):
            turns.append({"role": ("user", "assistant")[number % 2], "content": text})
        return turns
    if isinstance(first, list):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise InvalidRowError(f"{name} is {shorten(value)}, not a list of pairs of texts")
        value = [{"input": question, "output": answer} for question, answer in value]
        first = value[0]
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise InvalidRowError(f"{name}[{number}] is {shorten(message)}, not an object")
    if is_turn(first):
        return value
    keys = next((pair for pair in PAIRS if first.keys() >= {*pair}), None)
    if keys is None:
        return value
    for pair in value:
        for role, key in zip(("user", "assistant"), keys, strict=True):
            turns.append({"role": role, "content": pair.get(key)})
    return turns


class Style(NamedTuple):
    """Marks before turns."""

    name: str
    mark: str  # a regular expression with the speaker as its group
    hint: str = ""  # words without which a text has no such mark, if not its name
    has_preamble: bool = False  # words before the first mark


STYLES = [Style(**facts) for facts in MARKS["styles"]]


class MarkedText(NamedTuple):
    """A conversation in a text: its style, and its parts: speaker and words in turn."""

    style: Style
    before: str
    parts: list[str]


def find_marks(text: str) -> MarkedText | None:
    """Return the marks of a text that is a conversation, None if it is not."""
    for style in STYLES:
        if (style.hint or style.name) not in text:
            continue
        begun = text[BEGINNINGS.match(text).end() :]  # type: ignore[union-attr]
        before, *parts = re.split(style.mark, begun)
        roles = [SPEAKERS.get(speaker.lower()) for speaker in parts[::2]]
        may_begin = not before.strip()
        if style.has_preamble and len(before) <= MAX_PREAMBLE_CHARACTERS:
            may_begin = before.lstrip()[:1] not in ("[", "{")  # JSON that quotes marks
        is_answered = "user" in roles and "assistant" in roles[roles.index("user") :]
        if is_answered and None not in roles and may_begin:
            return MarkedText(style, before.strip(), parts)
    return None


def find_style(text: str) -> str | None:
    """Return the name of the marks of a conversation that ends with an answer, None for others."""
    found = find_marks(text)
    if found is None or SPEAKERS[found.parts[-2].lower()] != "assistant":
        return None
    return found.style.name if _without_ends(found.parts[-1]) else None


def _without_ends(words: str) -> str:
    return words[: len(words) - ENDS.match(words[::-1]).end()].lstrip()


def split_marked_text(text: str, name: str) -> list[Json] | None:
    """Return the turns of a conversation in one text, None if it is not one.

    Raises InvalidRowError for a text that ends before an answer.
    """
    found = find_marks(text)
    if found is None:
        return None
    turns: list[Json] = []
    thought: Json = {}
    is_alpaca = found.style.hint == ALPACA_HINT
    if found.before and not is_alpaca:
        turns.append({"role": "system", "content": found.before})
    for speaker, words in zip(found.parts[::2], found.parts[1::2], strict=True):
        role, content = SPEAKERS[speaker.lower()], _without_ends(words)
        system = SYSTEM_MARKS.match(content) if speaker == "[INST]" else None
        if system:
            turns.append({"role": "system", "content": system[1].strip()})
            content = content[system.end() :].strip()
        if speaker == "Input":  # Alpaca's, after its instruction
            turns[-1]["content"] += f"\n\n{content}"
            continue
        if role == "thought":
            thought = {"reasoning_content": content}
            continue
        turns.append({"role": role, "content": content, **thought})
        thought = {}
    if found.before and is_alpaca:
        turns[0]["content"] = f"{found.before}\n\n{turns[0]['content']}"
    if not turns[-1]["content"]:
        raise InvalidRowError(f"{name} ends with a mark before no words: {shorten(text[-40:])}")
    return turns


def is_turn(value: Any) -> bool:
    """Return whether a value is an object that names its speaker."""
    return isinstance(value, dict) and not TURN_KEYS.isdisjoint(value)


def parse_nested(value: Any) -> Any:
    """Return the object or list in a JSON text; any other value is unchanged."""
    if isinstance(value, str) and JSON_START.match(value):
        with contextlib.suppress(InvalidRowError):
            return parse_json_text(value, "")
    return value


def parse_json_text(text: str, name: str) -> Any:
    """Return the value of a JSON text, or of a list or object in Python's syntax.

    Raises InvalidRowError, which calls it `name`.
    """
    try:
        return parse_json(text)
    except InvalidJsonError as error:
        if len(text) < MAX_PYTHON_CHARACTERS and PYTHON_START.match(text):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                return ast.literal_eval(NUMPY_BREAK.sub("}, {", text.strip()))
        raise InvalidRowError(
            f"{name} is a text that is no JSON ({error}): {shorten(text)}"
        ) from None


class FoundValues(NamedTuple):
    """The values at a path; several if it leads through a list without an index."""

    values: list[Any]
    is_list: bool


def top_column(column: str, keys: Iterable[str]) -> str:
    """Return the column of a file in which a column or path starts."""
    return column if column in keys else column.partition(".")[0]


def find_values(record: Mapping[str, Any], path: str) -> FoundValues:
    """Return the values at a path, None if a key is absent.

    Raises InvalidRowError if the path is invalid.
    """
    return _follow(record, path.split("."), path)


def expand_record(record: Json, paths: Sequence[str]) -> list[Json]:
    """Return one record per element of the list in the paths, or the record itself without a list.

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
            raise InvalidRowError(f"{path}: {value!r} contains no {part!r}")
    return FoundValues([value], is_list=False)


@dataclass(frozen=True)
class RowFormat:
    """The format of a file's rows: one of ROW_FORMATS, and the file's column for each field."""

    name: str
    columns: Columns
    paths: tuple[str, ...] = ()  # those of `columns` that lead into a column
    media: frozenset[str] = frozenset()  # those of MEDIA_COLUMNS in the file's first rows
    group_by: str | None = None  # the column or path that data.split_by names
    # Keys of the turns of its rows so far, except those of plain turns
    turn_keys: set[str] = field(default_factory=set, compare=False)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The columns that every row must have."""
        return tuple(self.columns[field] for field in ROW_FORMATS[self.name].columns)

    @cached_property
    def kind(self) -> str:
        """The content of a row: turns, pair, calls, text or segments."""
        return ROW_FORMATS[self.name].kind

    @cached_property
    def file_columns(self) -> frozenset[str]:
        """The columns of the file that are read."""
        media = MEDIA_COLUMNS if "images" in self.columns else ()  # plain texts have none
        whole = {*self.columns.values(), *media}.difference(self.paths)
        paths = filter(None, (*self.paths, self.group_by))
        return frozenset((*whole, *(path.partition(".")[0] for path in paths)))

    @cached_property
    def variable_columns(self) -> dict[str, str]:
        """The columns with chat template variables, by the variables' names."""
        return {name: self.columns[name] for name in VARIABLE_FIELDS if name in self.columns}

    def is_plain(self, record: Json) -> bool:
        """Return whether a record contains only the texts of a conversation."""
        has_more = len(record) > len(self.required) or self.turn_keys or self.media or self.paths
        return not has_more and self.kind in ("turns", "pair")

    @cached_property
    def turn_column(self) -> str | None:
        """The column that contains all turns, if there is one."""
        return self.required[0] if self.kind == "turns" else None


def match_format(records: Sequence[Json], columns: Columns) -> RowFormat | None:
    """Return the format of a file's first records, None if there is none.

    `columns` maps fields to the file's column names, or paths.
    """
    keys = set(chain.from_iterable(records))
    flags = {key for key in keys if all(_is_flag(record.get(key)) for record in records)}
    cases = {key.lower(): key for key in keys} | dict(zip(keys, keys, strict=True))
    column_of = {
        name: _name_columns(kind.fields, columns, cases, flags)
        for name, kind in ROW_FORMATS.items()
    }
    for record in records:
        for name, named in column_of.items():
            required = (named[field] for field in ROW_FORMATS[name].columns)
            has_required = all(top_column(column, record) in record for column in required)
            if has_required and columns.keys() <= named.keys():
                paths = tuple(
                    column for column in named.values() if "." in column and column not in keys
                )
                return RowFormat(name, named, paths, MEDIA_COLUMNS.intersection(keys))
    return None


def _is_flag(value: Any) -> bool:
    """Return whether a value means only yes, no or nothing."""
    return len(str(value or "")) <= LONGEST_FLAG and not isinstance(value, list)


def _name_columns(
    fields: Iterable[str], columns: Columns, cases: Columns, flags: Collection[str]
) -> dict[str, str]:
    """Return the column of each field; `cases` maps the file's columns in any case."""
    column_of = {}
    for name in fields:
        names = [name, *FORMS["fields"].get(name, {}).get("names", ())]
        found = [cases[other] for other in (*names, *map(str.lower, names)) if other in cases]
        if name == "reasoning":
            found = [column for column in found if column not in flags] or ["no column"]
        column_of[name] = columns.get(name, (found or [name])[0])
    return column_of
