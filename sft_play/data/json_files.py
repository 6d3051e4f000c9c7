"""Read the rows of .json files: a list, read in parts; one object; or one object per line."""

import codecs
import io
import json
import re
import shlex
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from sft_play.data import text_files
from sft_play.data.rows import Json, NumberedRecord, NumberedRecords
from sft_play.data.text_files import (
    BYTE_ORDER_MARK,
    TYPE_NAMES,
    InvalidJsonError,
    conversion_hint,
    explain_bad_json,
    parse_json,
    split_columns,
    without_long_lines,
)
from sft_play.errors import DataError

MAX_OBJECT_BYTES = 128 << 20  # of a file that is one object: it is parsed at once
READ_BYTES = 1 << 20  # of a list, at once
LITERAL = len("\\udead\\udead")  # characters: the longest that JSON has; others end it elsewhere
# Finds the end of a row; `parse_json_line` is stricter, also about numbers of many digits
SCANNER = json.JSONDecoder(parse_int=str)
WHITESPACE = re.compile(r"[ \t\n\r]*")


class JsonText:
    """The text of a JSON file read so far; it grows during parsing, and drops what was parsed."""

    def __init__(self, path: Path, begun: bytes, line: int, stream: IO[bytes]):
        self.path = path
        self.text = ""
        self.position = 0  # in the text
        self.row = ""  # [index] of the row there
        self.max_characters = text_files.MAX_LINE_BYTES
        self._begun, self._stream = begun, stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._line, self._column = line, 1  # start of the text in the file

    def grow(self) -> bool:
        """Read more, and return whether there was more. Raises DataError."""
        held = len(self.text) - self.position
        if held >= self.max_characters:
            raise DataError(
                f"{self.path}{self.row}: more than {self.max_characters >> 20} MiB without an end; "
                "split this row, or write one row a line, as a .jsonl file"
            )
        data = self._begun + self._stream.read(max(READ_BYTES, held))
        self._begun = b""
        try:
            more = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line, _ = self.place(len(self.text))
            line += error.object.count(b"\n", 0, error.start)
            hint = conversion_hint(self.path, io.BytesIO(data))
            raise DataError(
                f"{self.path}: not UTF-8 in line {line}; save the file as UTF-8; {hint}"
            ) from None
        self._line, self._column = self.place(self.position)
        self.text = self.text[self.position :] + more
        self.position = 0
        return bool(data)

    def show_place(self) -> str:
        """Return the line and the column of this position as text."""
        return "at line {} column {}".format(*self.place(self.position))

    def place(self, position: int) -> tuple[int, int]:
        """Return the line and the column of a position."""
        lines = self.text.count("\n", 0, position)
        column = position - self.text.rfind("\n", 0, position)
        return self._line + lines, column if lines else self._column + position

    def peek(self) -> str:
        """Skip whitespace, and return the next character, "" at the end of the file."""
        while True:
            self.position = WHITESPACE.match(self.text, self.position).end()
            if self.position < len(self.text) or not self.grow():
                return self.text[self.position : self.position + 1]

    def next_value(self) -> str:
        """Return the text of the JSON value at the position, and skip it. Raises DataError."""
        while True:
            try:
                _, end = SCANNER.raw_decode(self.text, self.position)
            except RecursionError as error:
                raise DataError(f"{self.path}{self.row}: {explain_bad_json(error)}") from None
            except json.JSONDecodeError as error:
                error.lineno, error.colno = self.place(error.pos)
                is_cut = (
                    error.msg.startswith("Unterminated") or error.pos > len(error.doc) - LITERAL
                )
                if is_cut and self.grow():
                    continue
                raise DataError(f"{self.path}{self.row}: {explain_bad_json(error)}") from None
            value = self.text[self.position : end]
            if end < len(self.text) or not self.grow():  # more digits of a number may follow
                self.position += len(value)
                return value


def iter_json_rows(path: Path, stream: IO[bytes]) -> NumberedRecords:
    """Yield the rows of a .json file: of a list, of one object, or of one object per line.

    Raises DataError.
    """
    lines = iter(partial(stream.readline, text_files.MAX_LINE_BYTES), b"")
    begun = next(lines, b"").removeprefix(BYTE_ORDER_MARK)
    first_line = 1
    while begun.isspace():
        begun = next(lines, b"")
        first_line += 1
    first = begun.strip()
    if first.startswith(b"{") and first.endswith(b"}"):
        second = next(filter(bytes.strip, lines), b"")
        if second.lstrip().startswith(b"{"):
            for index, line in enumerate(filter(bytes.strip, chain((begun, second), lines))):
                if len(line) == text_files.MAX_LINE_BYTES:
                    size = f"a line of more than {len(line) >> 20} MiB"
                    raise DataError(f"{path}[{index}]: {size}; {without_long_lines(path)}")
                yield NumberedRecord(index, line, len(line))
            return
        begun += second
    text = JsonText(path, begun, first_line, stream)
    first_character = text.peek()
    if first_character == "[":
        yield from _read_list(text)
    elif first_character:
        yield from _read_object(text)


def _read_list(text: JsonText) -> NumberedRecords:
    """Yield the elements of a JSON list one by one, as lines of JSONL."""
    for index in count():
        text.row = f"[{index}]"
        text.position += 1  # past the bracket, or a comma
        if text.peek() == "]" and not index:
            break
        row = text.next_value()
        yield NumberedRecord(index, f"{row}\n".encode(), len(row))
        text.row = f"[{index + 1}]"
        found = text.peek()
        if found == "]":
            break
        if not found:
            raise DataError(
                f"{text.path}{text.row}: not valid JSON: the list has no end; the file is perhaps "
                "cut off"
            )
        if found != ",":
            raise DataError(
                f"{text.path}{text.row}: not valid JSON: no comma before this row, "
                f"{text.show_place()}"
            )
    text.position += 1
    if text.peek():
        raise DataError(
            f"{text.path}{text.row}: more text after the end of the list, {text.show_place()}; "
            "a .json file contains one list of rows"
        )


def _read_object(text: JsonText) -> NumberedRecords:
    """Yield the rows of one object.

    It is `{"data": [...]}`, or an object of columns, as pandas and datasets write a table.
    """
    text.max_characters = MAX_OBJECT_BYTES
    while text.grow():
        pass
    path, whole = text.path, text.text
    try:
        value = parse_json(whole)
    except InvalidJsonError as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: a .json data file contains a list of rows, not {TYPE_NAMES[type(value)]}"
        )
    is_line = whole.endswith("\n") and "\n" not in whole.strip()  # as Spark writes one row
    for index, record in enumerate(_find_rows(path, value, is_line)):
        yield NumberedRecord(index, f"{json.dumps(record)}\n".encode(), characters=0)


def _find_rows(path: Path, value: Json, is_line: bool) -> list[Any]:
    """Return the rows in one object. Raises DataError."""
    lists = [key for key, held in value.items() if isinstance(held, list)]
    if lists == ["data"]:
        return value["data"]
    if lists == ["columns", "index", "data"]:  # pandas, orient="split"
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    held = list(value.values())
    if held and all(isinstance(column, dict) and column for column in held):
        if all(key.isdecimal() for key in value):  # pandas, orient="index"
            return held
        if all(column.keys() == held[0].keys() for column in held):  # pandas, orient="columns"
            value = {key: list(column.values()) for key, column in value.items()}
            lists = list(value)
    rows = split_columns(value)
    if rows is not value:
        return rows
    if is_line:
        return [value]
    found = f"the keys {', '.join(value) or 'none'}"
    if lists:
        source = shlex.quote(str(path))
        commands = "; ".join(f"jq -c '.{key}[]' {source} > {key}.jsonl" for key in lists)
        found = f"the lists {', '.join(lists)}; write each to its own file: {commands}"
    raise DataError(
        f'{path}: a .json data file contains a list of rows, or {{"data": [...]}} '
        f"and no other list; this is one object with {found}"
    )
