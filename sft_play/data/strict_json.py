"""JSON as the standard has it, with reasons that a person can act on: every key once, no NaN, UTF-8. Pure; reads no files."""

import json
import re
from collections.abc import Iterator
from typing import Any

from sft_play.data.rows import Unreadable

NAMES = {
    list: "a list",
    dict: "an object",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class NotJsonError(ValueError):
    """Why a text is not JSON."""


def load(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises NotJsonError."""
    try:
        return _strict.decode(data.decode("utf-8") if isinstance(data, bytes) else data)
    except (ValueError, RecursionError) as error:
        raise NotJsonError(_reason(error)) from None


def load_row(data: bytes) -> dict[str, Any] | Unreadable:
    """Return the object that a line of JSONL holds, or why it holds none."""
    try:
        record = load(data.rstrip(b"\r\n"))
    except NotJsonError as error:
        if data.strip() in (b"{", b"["):
            reason = "the line ends behind the first bracket; a row stands on one line, whole"
        else:
            reason = (
                str(error)
                if data.endswith(b"\n")
                else f"{error}; the file ends with this line, perhaps cut off"
            )
    else:
        if isinstance(record, dict):
            return record
        reason = no_object(record)
    return Unreadable(reason, data.decode("utf-8", "backslashreplace").rstrip("\r\n"))


def no_object(record: Any) -> str:
    """Return why a JSON value is no row."""
    return f"a row is a JSON object, not {NAMES[type(record)]}"


def elements(text: str) -> Iterator[tuple[dict[str, Any] | Unreadable, int]]:
    """Yield the elements of a JSON list one by one, each with the characters it takes. Raises NotJsonError where it cannot go on."""
    position = _blanks.match(text).end()
    assert text.startswith("[", position), "a list begins with ["
    position = _blanks.match(text, position + 1).end()
    while not text.startswith("]", position):
        record, end = _element(text, position)
        yield record, end - position
        position = _blanks.match(text, end).end()
        following = _blanks.match(text, position + 1).end()
        if text.startswith(",", position) and not text.startswith("]", following):
            position = following
        elif not text.startswith("]", position):
            missing = (
                "the list has no end; the file is perhaps cut off"
                if position == len(text)
                else f"no comma before this row, {_place(text, position)}"
            )
            raise NotJsonError(f"not valid JSON: {missing}")
    if _blanks.match(text, position + 1).end() != len(text):
        raise NotJsonError(
            f"more text behind the end of the list, {_place(text, position + 1)}; a .json file holds one list of rows"
        )


def _element(text: str, position: int) -> tuple[dict[str, Any] | Unreadable, int]:
    """Return the record that begins at `position`, and where it ends."""
    try:
        record, end = _strict.raw_decode(text, position)
        return (
            record
            if isinstance(record, dict)
            else Unreadable(no_object(record), text[position:end])
        ), end
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotJsonError(_reason(error)) from None
    except ValueError as error:  # not strict, but one can tell where it ends
        _, end = _lenient.raw_decode(text, position)
        return Unreadable(_reason(error), text[position:end]), end


def _place(text: str, position: int) -> str:
    return f"at line {text.count(chr(10), 0, position) + 1} column {position - text.rfind(chr(10), 0, position)}"


class _NotStrictError(ValueError):
    """Python reads it; the standard does not have it, or leaves open what it means."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _NotStrictError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object"
        )
    return made


def _refuse_constant(word: str) -> None:
    raise _NotStrictError(f"{word} is no JSON value; write null")


_strict = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_lenient = json.JSONDecoder(parse_int=str)
_blanks = re.compile(r"[ \t\n\r]*")


def _reason(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"not UTF-8 at byte {error.start}; save the file as UTF-8"
        case json.JSONDecodeError() if "\0" in error.doc:
            return "not valid JSON: it holds NUL bytes; if the file is UTF-16, save it as UTF-8"
        case json.JSONDecodeError():
            place = (
                f"column {error.colno}"
                if error.lineno == 1
                else f"line {error.lineno} column {error.colno}"
            )
            return f"not valid JSON: {error.msg.removesuffix(' at')} at {place}"
        case RecursionError():
            return "not valid JSON: nested too deeply"
        case _NotStrictError():
            return f"not valid JSON: {error}"
        case _:  # int() of thousands of digits
            return "not valid JSON: a number has too many digits"
