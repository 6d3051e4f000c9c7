"""Reads files of conversations: JSONL or JSON in, rows that know their file and line out. Loads no torch, renders nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import DataError

ROLES = ("system", "user", "assistant")
SHOWN = 5  # bad rows named in an error
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Everything before the last answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The last answer."""
        return self.messages[-1].content


class _BadRow(ValueError):
    """Why one row cannot be used."""


def read_rows(path: Path, system_prompt: str | None = None) -> list[Row]:
    """Return the conversations of a .jsonl or .json file; `system_prompt` goes before rows that bring none.

    Raises: DataError that names file:line of the first five bad rows and says what a row looks like.
    """
    rows, bad = [], []
    for origin, parse in _records(path):
        try:
            rows.append(Row(_with_system(_conversation(parse()), system_prompt), origin))
        except _BadRow as error:
            bad.append(f"{origin}: {error}")
    if bad:
        more = f"\n... and {len(bad) - SHOWN} more bad rows" if len(bad) > SHOWN else ""
        raise DataError("\n".join(bad[:SHOWN]) + more)
    if not rows:
        raise DataError(f'{path}: no rows; a row is a JSON object such as {{"question": "...", "answer": "..."}}')
    return rows


def _records(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (origin, parser) of each record; parsing is the caller's, so that one bad line does not hide the next."""
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"{path}: a data file ends in .jsonl (one JSON object a line) or .json (a list of them)")
    try:
        data = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{path}: no such data file; set DATA_TRAIN_PATH, DATA_VAL_PATH or DATA_TEST_PATH to one that is there") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check who may read it") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", lambda line=line: _json(line)
        return
    try:
        records = _json(data)
    except _BadRow as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(records, list):
        raise DataError(f"{path}: a .json data file holds a list of rows, not {type(records).__name__}; one object a line is .jsonl")
    for index, record in enumerate(records):
        yield f"{path}[{index}]", lambda record=record: record


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 at byte {error.start} of the row") from None
    except json.JSONDecodeError as error:
        raise _BadRow(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _BadRow("not valid JSON: nested too deeply") from None
    except ValueError:  # int() of thousands of digits
        raise _BadRow("not valid JSON: a number has too many digits") from None


def _conversation(record: Any) -> tuple[Message, ...]:
    """Recognise the shape of a record by its keys."""
    if not isinstance(record, dict):
        raise _BadRow(f"a row is a JSON object, not {type(record).__name__}")
    if "messages" in record:
        return _messages(record["messages"])
    if "instruction" in record and "output" in record:
        is_blank = record.get("input") is None or str(record["input"]).strip() == ""  # most rows of such sets have no input
        question = [_text(record, "instruction"), *([] if is_blank else [_text(record, "input")])]
        return Message("user", "\n\n".join(question)), Message("assistant", _text(record, "output"))
    for question, answer in (("question", "answer"), ("prompt", "completion")):
        if question in record and answer in record:
            return Message("user", _text(record, question)), Message("assistant", _text(record, answer))
    keys = ", ".join(map(str, record)) or "none"
    raise _BadRow(f"keys are {keys}; a row has messages, question and answer, prompt and completion, or instruction and output")


def _messages(turns: Any) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise _BadRow("messages is not a list of turns")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
            raise _BadRow(f"messages[{number}] is not an object with role and content")
        if turn["role"] not in ROLES:
            raise _BadRow(f"messages[{number}] has the role {turn['role']!r}; roles are {', '.join(ROLES)}")
        messages.append(Message(turn["role"], _text(turn, "content", f"messages[{number}]")))
    _check_order(messages)
    return tuple(messages)


def _check_order(messages: list[Message]) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise _BadRow(f"messages[{roles.index('system', 1)}]: a system message stands first")
    if turns != ["user", "assistant"] * (len(turns) // 2) or not turns:
        raise _BadRow(f"turns are {', '.join(roles)}; user and assistant take turns, and the last is the assistant's")


def _text(record: dict[str, Any], key: str, where: str = "") -> str:
    value = record[key]
    name = f"{where}.{key}" if where else key
    if not isinstance(value, str):
        raise _BadRow(f"{name} is {json.dumps(value)[:40]}, not a text")
    if not value.strip():
        raise _BadRow(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow(f"{name} holds half of a surrogate pair, which is no character") from None
    return value


def _with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    if not system_prompt or messages[0].role == "system":
        return messages
    return Message("system", system_prompt), *messages
