"""What the data room is about: messages, rows, and rows that cannot be used. Types and their refusal; reads nothing, loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sft_play.errors import DataError

SHOWN = 5  # bad rows named in an error


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: role system, user, assistant or tool."""

    role: str
    content: str
    reasoning: str | None = None  # what an assistant thinks before it answers
    tool_calls: tuple[dict[str, Any], ...] = ()  # of an assistant, in OpenAI's shape
    name: str | None = None  # of the tool that a tool message answers for
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation, or plain text to continue; `origin` is `file:line` or `file[index]`."""

    messages: tuple[Message, ...]
    origin: str
    text: str | None = None  # then there are no messages, and every token is trained
    tools: tuple[dict[str, Any], ...] = ()  # functions that the assistant may call, as JSON schemas


@dataclass(frozen=True, slots=True)
class BadRow:
    """A record that is no row: where it stands, why, and its text, in which bytes that are no UTF-8 are escaped."""

    origin: str
    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record of a file that is no object with keys: why, and its text."""

    reason: str
    raw: str


def refuse(bad: Sequence[BadRow], count: int) -> NoReturn:
    """Raise DataError that names the first of `count` bad rows, how many more there are, and how to go on without them."""
    named = [f"{row.origin}: {row.reason}" for row in bad[:SHOWN]]
    more = [f"... and {count - len(named)} more bad rows"] if count > len(named) else []
    advice = "correct them, or go on without: DATA_ON_BAD_ROW=quarantine sets them aside in the run's folder"
    raise DataError("\n".join([*named, *more, advice]))
