"""Reads JSON with comments and trailing commas; every key knows file:line:column. Knows no schema.

The standard library's parser cannot say where a key stands, and accepts a key that is given twice.
"""

import json
import math
import re
from dataclasses import dataclass
from json.decoder import scanstring
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError

SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
NUMBER = re.compile(
    r"(-?(?:0|[1-9][0-9]{0,17}))((?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9A-Za-z_.])"
)
BARE_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS = {"true": True, "false": False, "null": None}
END = "the end of the file"

JsonValue = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Document:
    """A parsed file."""

    value: JsonValue
    origin: dict[str, str]  # of each key: {"zero_optimization.stage": "configs/a.json:4:5"}


def read(path: Path) -> Document:
    """Return the document in a file. Raises ConfigError with file:line:column."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{path}:{line}: not UTF-8: byte 0x{byte:02x}; save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(text, str(path))


def parse(text: str, shown: str) -> Document:
    """Return the document in `text`; `shown` names the file in origins and messages.

    Raises: ConfigError with file:line:column for syntax errors and keys that are given twice.
    """
    parser = _Parser(text, shown)
    try:
        value = parser.value("")
    except RecursionError:
        raise ConfigError(f"{shown}: nested too deeply to read") from None
    parser.skip_space()
    if parser.at < len(text):
        raise parser.error(f"found {parser.here()} after the end of the value; delete it")
    return Document(value, parser.origin)


class _Parser:
    """A recursive descent parser of one text; `at` is the index of the next character."""

    def __init__(self, text: str, shown: str) -> None:
        self.text = text
        self.shown = shown
        self.at = 0
        self.origin: dict[str, str] = {}

    def value(self, path: str) -> JsonValue:
        """Return the value that begins here; `path` is its dotted name."""
        self.skip_space()
        match self.text[self.at : self.at + 1]:
            case "{":
                return self._members(path)
            case "[":
                return self._items(path)
            case '"':
                return self._string()
        if number := NUMBER.match(self.text, self.at):
            return self._number(number)
        bare = BARE_WORD.match(self.text, self.at)
        if bare and bare.group() in WORDS:
            self.at = bare.end()
            return WORDS[bare.group()]
        raise self.error(
            f"found {self.here()} where a value belongs; write true, false, null, a number, "
            "or a text in double quotes"
        )

    def skip_space(self) -> None:
        """Go on to the next character that is no space and no comment."""
        self.at = SPACE.match(self.text, self.at).end()
        if self.text.startswith("/*", self.at):
            raise self.error("a comment without an end; close it with */")

    def here(self) -> str:
        """Return what stands here, for a message."""
        if self.at >= len(self.text):
            return END
        bare = BARE_WORD.match(self.text, self.at)
        return repr(bare.group() if bare else self.text[self.at])

    def place(self, at: int) -> str:
        """Return `file:line:column` of a character."""
        line = self.text.count("\n", 0, at) + 1
        column = at - self.text.rfind("\n", 0, at)
        return f"{self.shown}:{line}:{column}"

    def error(self, sentence: str, at: int | None = None) -> ConfigError:
        return ConfigError(f"{self.place(self.at if at is None else at)}: {sentence}")

    def _members(self, path: str) -> dict[str, JsonValue]:
        members: dict[str, JsonValue] = {}
        opened_at = self.at
        self.at += 1
        while not self._closes("}", opened_at):
            start = self.at
            if self.text[start] != '"':
                raise self.error(
                    f"found {self.here()} where a key belongs; write keys in double quotes"
                )
            key = self._string()
            name = f"{path}.{key}" if path else key
            if key in members:
                raise self.error(
                    f'key "{key}" is given twice, first at {self.origin[name]}; keep one of them',
                    start,
                )
            self.origin[name] = self.place(start)
            self.skip_space()
            if not self.text.startswith(":", self.at):
                raise self.error(
                    f'found {self.here()} after the key "{key}"; '
                    "write a colon between key and value"
                )
            self.at += 1
            members[key] = self.value(name)
            self._skip_comma("}")
        return members

    def _items(self, path: str) -> list[JsonValue]:
        items: list[JsonValue] = []
        opened_at = self.at
        self.at += 1
        while not self._closes("]", opened_at):
            items.append(self.value(f"{path}[{len(items)}]"))
            self._skip_comma("]")
        return items

    def _closes(self, bracket: str, opened_at: int) -> bool:
        """Return whether `bracket` is next, and step over it. Raises ConfigError at the end."""
        self.skip_space()
        if self.at >= len(self.text):
            raise self.error(
                f"{self.text[opened_at]!r} without an end; close it with {bracket}", opened_at
            )
        if self.text[self.at] != bracket:
            return False
        self.at += 1
        return True

    def _skip_comma(self, bracket: str) -> None:
        """Step over the comma after a value; before the closing bracket it may be missing."""
        self.skip_space()
        if self.text.startswith(",", self.at):
            self.at += 1
        elif self.at < len(self.text) and self.text[self.at] != bracket:
            raise self.error(
                f"found {self.here()} after a value; "
                f"write a comma before it, or close with {bracket}"
            )

    def _number(self, found: re.Match[str]) -> int | float:
        whole, fraction = found.groups()
        value = float(whole + fraction) if fraction else int(whole)
        if not math.isfinite(value):
            raise self.error(f"{found.group()} is too large; write a finite number")
        self.at = found.end()
        return value

    def _string(self) -> str:
        try:
            value, self.at = scanstring(self.text, self.at + 1, True)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated"):
                raise self.error(
                    "a text without an end; close it with a double quote", error.pos
                ) from None
            raise self.error(
                "a text with a line break, a control character or a wrong \\ in it; "
                "write \\n, or \\\\ for one \\",
                error.pos,
            ) from None
        return value
