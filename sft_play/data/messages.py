"""The turns of a conversation: who says what, in which order, and what of it is refused. Pure.

Texts are refused where nothing can be learned from them (blank questions and answers) or no tokenizer takes them (half a
surrogate pair); else they are taken as they stand.
"""

import json
from collections.abc import Sequence
from typing import Any

from sft_play.data import strict_json
from sft_play.data.rows import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
SPEAKERS = {  # `from` of ShareGPT
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",  # of the assistant
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
FOLLOWS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
VALUE_SHOWN = 60  # characters of a value that an error repeats


class NotRowError(ValueError):
    """Why a record is no row."""


def text(value: Any, name: str) -> str:
    """Return a text that is not blank. Raises NotRowError, which calls it `name`."""
    if not isinstance(value, str):
        raise NotRowError(f"{name} is {shown(value)}, not a text")
    if not value or value.isspace():
        raise NotRowError(f"{name} is empty")
    return _encodable(value, name)


def optional_text(value: Any, name: str) -> str | None:
    """Return a text, None for one that is null or blank. Raises NotRowError."""
    return (
        None
        if value is None or (isinstance(value, str) and not value.strip())
        else text(value, name)
    )


def shown(value: Any, length: int = VALUE_SHOWN) -> str:
    """Return a value as JSON has it, shortened; a text as it is."""
    whole = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    whole = whole.encode("utf-8", "backslashreplace").decode("utf-8")
    return whole if len(whole) <= length else f"{whole[:length]}..."


def turn_list(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, which may be written as a JSON text: a cell of CSV has no other way. Raises NotRowError."""
    turns = _from_text(value, name) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        raise NotRowError(f"{name} is {shown(turns)}, not a list of turns")
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise NotRowError(f"{name}[{number}] is {shown(turn)}, not an object")
    return turns


def function_list(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return objects that describe or call functions; none where the value is null or blank. Raises NotRowError."""
    if isinstance(value, str):
        value = _from_text(value, name) if value.strip() else None
    if not value and (value is None or isinstance(value, list)):
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotRowError(f"{name} is {shown(value)}, not a list of objects")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotRowError(f"{name} cannot be written as JSON: {error}") from None
    _encodable(written, name)
    return tuple(value)


def conversation(parts: Sequence[tuple[str, Any]], says_from: bool) -> tuple[Message, ...]:
    """Return the messages of lists of turns, (name, turns) each, that follow one another. Raises NotRowError, naming the turn."""
    messages: list[Message] = []
    read = _said if says_from else _message
    for name, value in parts:
        for number, turn in enumerate(turn_list(value, name)):
            try:
                messages.append(read(turn))
            except NotRowError as error:
                raise NotRowError(f"{name}[{number}]{error}") from None
    fault = _fault_of_order(messages, calls_in_text=says_from)
    if fault:
        names = [
            f"{name}[{number}]"
            for name, value in parts
            for number in range(len(turn_list(value, name)))
        ]
        raise NotRowError(f"{names[fault[0]]}{fault[1]}")
    return tuple(messages)


# What follows calls the turn "", so that a reason begins with its name whatever that is.


def _message(turn: dict[str, Any]) -> Message:
    role = turn.get("role")
    if role is None:
        raise NotRowError(
            f" is not an object with role and content; its keys are {', '.join(turn) or 'none'}"
        )
    if not isinstance(role, str) or role not in ROLES:
        raise NotRowError(f" has the role {shown(role)!r}; roles are {', '.join(ROLES)}")
    return _made(ROLES[role], turn, turn.get("content"), ".content")


def _said(turn: dict[str, Any]) -> Message:
    speaker = turn.get("from")
    if speaker is None:
        raise NotRowError(
            f" is not an object with from and value; its keys are {', '.join(turn) or 'none'}"
        )
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise NotRowError(f" is from {shown(speaker)!r}; turns are from {', '.join(SPEAKERS)}")
    value = turn.get("value")
    if speaker != "function_call":
        return _made(SPEAKERS[speaker], turn, value, ".value")
    called = _from_text(value, ".value") if isinstance(value, str) else value
    calls = _calls(called if isinstance(called, list) else [called], ".value")
    if not calls:
        raise NotRowError(".value calls no function")
    return Message("assistant", "", _reasoning(turn), calls)


def _made(role: str, turn: dict[str, Any], content: Any, name: str) -> Message:
    """Return the message of a turn whose content is called `name`."""
    if isinstance(content, list):
        content = _joined(content, name)
    if role == "user":
        return Message(role, text(content, name))
    if role == "assistant":
        calls = _calls(turn.get("tool_calls"), ".tool_calls")
        is_blank = content is None or (isinstance(content, str) and not content.strip())
        return Message(
            role,
            content or "" if calls and is_blank else text(content, name),
            _reasoning(turn),
            calls,
        )
    if not isinstance(content, str):
        raise NotRowError(f"{name} is {shown(content)}, not a text")
    _encodable(content, name)  # blank is fine: a function may return nothing
    if role == "system":
        return Message(role, content)
    return Message(
        role,
        content,
        name=optional_text(turn.get("name"), ".name"),
        tool_call_id=optional_text(turn.get("tool_call_id"), ".tool_call_id"),
    )


def _joined(parts: list[Any], name: str) -> str:
    """Return the text of a content that is given in parts."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise NotRowError(
                f"{name}[{number}] is {shown(part)}; models here take text, as {{'type': 'text', 'text': '...'}}"
            )
        texts.append(part.get("text"))
        if not isinstance(texts[-1], str):
            raise NotRowError(f"{name}[{number}].text is {shown(texts[-1])}, not a text")
    return "".join(texts)


def _reasoning(turn: dict[str, Any]) -> str | None:
    for key in REASONING:
        if turn.get(key) is not None:
            return optional_text(turn[key], f".{key}")
    return None


def _calls(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """Return calls as {"type": "function", "function": {"name", "arguments"}}, arguments as an object, which chat templates expect."""
    if value is None:
        return ()
    return tuple(
        _call(call, f"{name}[{number}]") for number, call in enumerate(function_list(value, name))
    )


def _call(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function", call)
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"].strip()
    ):
        raise NotRowError(
            f"{name} names no function; a call is {{'function': {{'name': ..., 'arguments': {{...}}}}}}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_text(arguments, f"{name}.arguments") if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise NotRowError(f"{name}.arguments is {shown(arguments)}, not an object")
    outer = {} if function is call else call
    return {**outer, "type": "function", "function": {**function, "arguments": arguments}}


def _fault_of_order(messages: Sequence[Message], calls_in_text: bool) -> tuple[int, str] | None:
    """Return the first turn that cannot stand where it does, and why; None if all can and the last is the assistant's.

    A tool answers calls. ShareGPT files may write those into the answer's text, where they cannot be seen.
    """
    before: Message | None = None
    for number, message in enumerate(messages):
        role = message.role
        if role not in (FOLLOWS[before.role] if before else ("system", "user")):
            return number, _why_not(role, before)
        if (
            role == "tool"
            and before
            and before.role == "assistant"
            and not before.tool_calls
            and not calls_in_text
        ):
            return number, " is a tool's answer, and the turn before it calls no tool"
        before = message
    if before is None or before.role != "assistant":
        return (
            len(messages) - 1,
            f", the last turn, is the {messages[-1].role}'s; a row ends with an answer of the assistant",
        )
    return None


def _why_not(role: str, before: Message | None) -> str:
    if role == "system":
        return " is a system message; it stands first, and once"
    if before is None:
        return f" is the {role}'s; a conversation begins with the user, or with a system message"
    return f" is the {role}'s; behind a turn of role {before.role} comes {' or '.join(FOLLOWS[before.role])}"


def _from_text(value: str, name: str) -> Any:
    try:
        return strict_json.load(value)
    except strict_json.NotJsonError as error:
        raise NotRowError(f"{name} is a text that is no JSON ({error}): {shown(value)}") from None


def _encodable(value: str, name: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise NotRowError(
                f"{name} holds half of a surrogate pair, which is no character"
            ) from None
    if "\0" in value:
        raise NotRowError(f"{name} holds a NUL character, which belongs to no text")
    return value
