"""Messages, rows, and records that cannot be used. Reads nothing, loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from sft_play.errors import DataError

Json = dict[str, Any]  # a JSON object: a record, a message, a function, facts of a run

MAX_LISTED_ROWS = 5  # bad rows that an error lists
MAX_HELD_OUT_ROWS = 500  # more does not sharpen a loss, and every evaluation pays for it


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, with the role system, user, assistant or tool."""

    role: str
    content: str
    reasoning: str | None = None  # what an assistant thinks before it answers
    tool_calls: tuple[Json, ...] = ()  # of an assistant, in OpenAI's format
    name: str | None = None  # of the tool that a tool message answers for
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation, or plain text to continue; `origin` is `file:line` or `file[index]`."""

    messages: tuple[Message, ...]
    origin: str
    text: str | None = None  # plain text: then there are no messages, and every token is trained
    tools: tuple[Json, ...] = ()  # functions that the assistant may call: JSON schemas


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


def raise_bad_rows(listed: Sequence[BadRow], total: int) -> NoReturn:
    """Raise DataError with the first of `total` bad rows and how to go on without them."""
    listed = listed[:MAX_LISTED_ROWS]
    lines = [f"{row.origin}: {row.reason}" for row in listed]
    if total > len(listed):
        lines.append(f"... and {total - len(listed)} more bad rows")
    lines.append(
        "correct them, or go on without: "
        "DATA_ON_BAD_ROW=quarantine sets them aside in the run's folder"
    )
    raise DataError("\n".join(lines))
