"""Strict JSON: unique keys, no NaN, UTF-8. Errors say what to correct. Pure; reads no files."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from sft_play.data.rows import Json, UnreadableRecord

TYPE_NAMES = {
    list: "a list",
    dict: "an object",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class InvalidJsonError(ValueError):
    """Why a text is not JSON."""


class ListElement(NamedTuple):
    """One element of a JSON list: the record, or why it is none, and where its text ends."""

    record: Json | UnreadableRecord
    start: int
    end: int

    @property
    def characters(self) -> int:
        return self.end - self.start


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises InvalidJsonError."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return _strict_decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidJsonError(_reason_of(error)) from None


def parse_json_line(line: bytes) -> Json | UnreadableRecord:
    """Return the object that a line of JSONL holds, or why it holds none."""
    try:
        record = parse_json(line.rstrip(b"\r\n"))
    except InvalidJsonError as error:
        reason = str(error)
        if line.strip() in (b"{", b"["):
            reason = "the line ends behind the first bracket; a row stands on one line, whole"
        elif not line.endswith(b"\n"):
            reason += "; the file ends with this line, perhaps cut off"
    else:
        if isinstance(record, dict):
            return record
        reason = not_an_object(record)
    return UnreadableRecord(reason, line.decode("utf-8", "backslashreplace").rstrip("\r\n"))


def not_an_object(value: Any) -> str:
    """Return why a JSON value that is no object is no row."""
    return f"a row is a JSON object, not {TYPE_NAMES[type(value)]}"


def parse_json_list(text: str) -> Iterator[ListElement]:
    """Yield the elements of a JSON list one by one. Raises InvalidJsonError."""
    position = _skip_whitespace(text, 0)
    assert text.startswith("[", position), "a list begins with ["
    position = _skip_whitespace(text, position + 1)
    while not text.startswith("]", position):
        element = _parse_element(text, position)
        yield element
        position = _skip_whitespace(text, element.end)
        following = _skip_whitespace(text, position + 1)
        if text.startswith(",", position) and not text.startswith("]", following):
            position = following
        elif position == len(text):
            raise InvalidJsonError(
                "not valid JSON: the list has no end; the file is perhaps cut off"
            )
        elif not text.startswith("]", position):
            raise InvalidJsonError(
                f"not valid JSON: no comma before this row, {_place(text, position)}"
            )
    if _skip_whitespace(text, position + 1) != len(text):
        raise InvalidJsonError(
            f"more text behind the end of the list, {_place(text, position + 1)}; "
            "a .json file holds one list of rows"
        )


def _parse_element(text: str, start: int) -> ListElement:
    try:
        record, end = _strict_decoder.raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidJsonError(_reason_of(error)) from None
    except ValueError as error:  # Python's own decoder accepts the text and tells where it ends
        _, end = _lenient_decoder.raw_decode(text, start)
        return ListElement(UnreadableRecord(_reason_of(error), text[start:end]), start, end)
    if not isinstance(record, dict):
        record = UnreadableRecord(not_an_object(record), text[start:end])
    return ListElement(record, start, end)


def _skip_whitespace(text: str, position: int) -> int:
    return _whitespace.match(text, position).end()


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"at line {line} column {column}"


class _StrictnessError(ValueError):
    """What Python reads, but the JSON standard does not define."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _StrictnessError(f"the key {repeated!r} stands twice in one object")
    return record


def _refuse_constant(word: str) -> None:
    raise _StrictnessError(f"{word} is no JSON value; write null")


_strict_decoder = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
_lenient_decoder = json.JSONDecoder(parse_int=str)
_whitespace = re.compile(r"[ \t\n\r]*")


def _reason_of(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"not UTF-8 at byte {error.start}; save the file as UTF-8"
        case json.JSONDecodeError() if error.doc.startswith("\ufeff"):
            return "begins with a byte order mark, as where files were joined; delete the mark"
        case json.JSONDecodeError() if "\0" in error.doc:
            return "not valid JSON: it holds NUL bytes; if the file is UTF-16, save it as UTF-8"
        case json.JSONDecodeError():
            place = f"column {error.colno}"
            if error.lineno != 1:
                place = f"line {error.lineno} {place}"
            return f"not valid JSON: {error.msg.removesuffix(' at')} at {place}"
        case RecursionError():
            return "not valid JSON: nested too deeply"
        case _StrictnessError():
            return f"not valid JSON: {error}"
        case _:  # int() of thousands of digits
            return "not valid JSON: a number has too many digits"
