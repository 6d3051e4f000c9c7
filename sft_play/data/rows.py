"""Messages, rows, records that cannot be used, and how values are shown. Pure."""

import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

Json = dict[str, Any]  # a JSON object: a record, a message, a function, facts of a run

MAX_LISTED_ROWS = 5  # bad rows that an error lists
MAX_HELD_OUT_ROWS = 500  # more does not sharpen a loss, and every evaluation pays for it
MAX_VALUE_CHARACTERS = 60  # of a value that an error repeats
MAX_COLUMNS_CHARACTERS = 200  # of the columns that an error lists


class InvalidRowError(ValueError):
    """Why a record is no row."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, with the role system, user, assistant or tool."""

    role: str
    content: str
    reasoning: str | None = None  # what an assistant thinks before it answers
    tool_calls: tuple[Json, ...] = ()  # of an assistant, as `messages` parses them
    name: str | None = None  # of the tool that a tool message answers for
    tool_call_id: str | None = None
    is_trained: bool = True  # of an assistant: the answer carries loss


class Segment(NamedTuple):
    """A piece of a text, and whether it is trained."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation, plain text or segments; `origin` is `file:line` or `file[index]`."""

    messages: tuple[Message, ...]
    origin: str
    text: str | None = None  # plain text: then there are no messages, and every token is trained
    tools: tuple[Json, ...] = ()  # functions that the assistant may call: JSON schemas
    segments: tuple[Segment, ...] = ()  # a text in pieces: then there are no messages
    variables: Json | None = None  # of the chat template, for this row alone

    @property
    def plain_text(self) -> str:
        """The text of a row that is no conversation."""
        return self.text or "".join(segment.text for segment in self.segments)

    @property
    def begins_with_answer(self) -> bool:
        """Whether the assistant speaks before the first question, as in a greeting."""
        speakers = [message.role for message in self.messages[:2] if message.role != "system"]
        return speakers[:1] == ["assistant"]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that is no row: where it is, why, and its text, with broken UTF-8 escaped."""

    origin: str
    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A record of a file that is no object with keys: why, and its text."""

    reason: str
    raw: str


class NumberedRecord(NamedTuple):
    """One record of a text file, with its line or index and its size."""

    number: int
    record: Any
    characters: int


def shorten(value: Any, max_characters: int = MAX_VALUE_CHARACTERS) -> str:
    """Return a value as JSON, or a text as it is, shortened for an error."""
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


def list_columns(names: Iterable[str]) -> str:
    """Return the names of columns for an error."""
    return shorten(", ".join(map(str, names)), MAX_COLUMNS_CHARACTERS) or "none"


SHOWN_WHITESPACE = " \n\t\u3000"
# Join Persian and Indic letters, emoji, and the letters of flags
JOINERS = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}
HIDDEN_CATEGORIES = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"}


def make_visible(text: str) -> str:
    """Return a text with invisible and control characters written as `⟨U+202E⟩`."""
    visible = ""
    for character in text:
        is_shown = character in SHOWN_WHITESPACE or character in JOINERS
        if not is_shown and unicodedata.category(character) in HIDDEN_CATEGORIES:
            character = f"⟨U+{ord(character):04X}⟩"
        visible += character
    return visible
