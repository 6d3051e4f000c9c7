"""The messages of a conversation: who says what and in which order, and which are refused. Pure.

Texts are refused where nothing can be learned from them (blank questions and answers) or no
tokenizer takes them (half a surrogate pair). All others are taken unchanged.

An answer that a flag excludes from loss stays in the conversation, so later answers follow it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sft_play.data.row_formats import parse_json_text, parse_message_list
from sft_play.data.rows import InvalidRowError, Json, Message, Segment, shorten

ROLES = {  # role in a file: ours
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's before tools
}
SPEAKERS = {  # ShareGPT's `from`: our role
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    **dict.fromkeys(("chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "function_call": "function_call",  # of the assistant
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
FIRST_ROLES = ("system", "user", "assistant")
FOLLOWING_ROLES = {
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
# Flag: the value that asks for loss; a weight may be any number from 0 up
LOSS_FLAGS = {"weight": 1, "train": 1, "training": 1, "loss": 1, "mask": 0}
PARTS_OF_ANSWERS = ("train_detail", "training_detail")  # Axolotl's, by characters
FLAG_KEYS = frozenset((*LOSS_FLAGS, *PARTS_OF_ANSWERS))


class MessageList(NamedTuple):
    """A list of messages in a record, and the name of its column."""

    name: str
    value: Any


def parse_text(value: Any, name: str) -> str:
    """Return a text that is not blank. Raises InvalidRowError, which calls it `name`."""
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        hint = f'; write it as a text, "{value}"' if is_number else ""
        raise InvalidRowError(f"{name} is {shorten(value)}, not a text{hint}")
    if not value or value.isspace():
        raise InvalidRowError(f"{name} is empty")
    _check_encodable(value, name)
    return value


def parse_optional_text(value: Any, name: str) -> str | None:
    """Return a text, or None if it is null or blank. Raises InvalidRowError."""
    return None if _is_blank(value) else parse_text(value, name)


def parse_weight(value: Any, name: str) -> float:
    """Return a weight in the loss; 1 for null. Raises InvalidRowError, which calls it `name`."""
    if value is None:
        return 1.0
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return float(value)  # True is 1
    raise InvalidRowError(
        f"{name} is {shorten(value)}; a weight is a number from 0 up, 1 as a rule"
    )


def parse_segments(value: Any, name: str) -> tuple[Segment, ...]:
    """Return Axolotl's [{"label": true or false, "text": "..."}]. Raises InvalidRowError."""
    segments = []
    for number, record in enumerate(parse_message_list(value, name)):
        text = record.get("text")
        label = record.get("label")
        if not isinstance(text, str) or label not in (0, 1):
            raise InvalidRowError(
                f"{name}[{number}] is {shorten(record)}; "
                'a segment is {"label": true or false, "text": "..."}'
            )
        _check_encodable(text, f"{name}[{number}].text")
        weight = parse_weight(record.get("weight"), f"{name}[{number}].weight")
        segments.append(Segment(text, label == 1 and weight > 0, weight))
    return tuple(segments)


def parse_functions(value: Any, name: str) -> tuple[Json, ...]:
    """Return objects that describe or call functions; () for null or blank.

    Raises InvalidRowError.
    """
    if _is_blank(value):
        return ()
    if isinstance(value, str):
        value = parse_json_text(value, name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRowError(f"{name} is {shorten(value)}, not a list of objects")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRowError(f"{name} cannot be written as JSON: {error}") from None
    _check_encodable(text, name)
    return tuple(value)


def parse_conversation(lists: Sequence[MessageList], is_sharegpt: bool) -> tuple[Message, ...]:
    """Return the messages of consecutive lists. Raises InvalidRowError, which names the message."""
    messages: list[Message] = []
    names: list[str] = []
    for name, value in lists:
        for number, record in enumerate(parse_message_list(value, name)):
            names.append(f"{name}[{number}]")
            try:
                message = _parse_message(record, is_sharegpt)
                if not FLAG_KEYS.isdisjoint(record):
                    message = apply_flags(message, record)
            except InvalidRowError as error:
                raise InvalidRowError(f"{names[-1]}{error}") from None
            messages.append(message)
    _check_order(messages, names, allows_calls_in_text=is_sharegpt)
    for index, message in enumerate(messages):
        if message.role == "user":
            break
        if message.role == "assistant":  # a greeting carries no loss
            messages[index] = replace(message, is_trained=False)
    return tuple(messages)


# The functions below leave out the name of the message: their reasons continue it, as in
# "messages[3]" + ".content is empty".


def _parse_message(record: Json, is_sharegpt: bool) -> Message:
    speaker_key, content_key, roles = "role", "content", ROLES
    if is_sharegpt:
        speaker_key, content_key, roles = "from", "value", SPEAKERS
    speaker = record.get(speaker_key)
    if speaker is None:
        keys = ", ".join(record) or "none"
        raise InvalidRowError(
            f" is not an object with {speaker_key} and {content_key}; its keys are {keys}"
        )
    if not isinstance(speaker, str) or speaker not in roles:
        found = f"has the role {shorten(speaker)!r}; roles are"
        if is_sharegpt:
            found = f"is from {shorten(speaker)!r}; turns are from"
        raise InvalidRowError(f" {found} {', '.join(roles)}")
    content = record.get(content_key)
    if roles[speaker] != "function_call":
        return _build_message(roles[speaker], record, content, f".{content_key}")
    if isinstance(content, str):
        content = parse_json_text(content, ".value")
    calls = _parse_calls(content if isinstance(content, list) else [content], ".value")
    if not calls:
        raise InvalidRowError(".value calls no function")
    return Message("assistant", "", _find_reasoning(record), calls)


def _build_message(role: str, record: Json, content: Any, name: str) -> Message:
    """Return the message of a record whose content is called `name`."""
    if isinstance(content, list):
        content = _join_parts(content, name)
    if role == "user":
        return Message(role, parse_text(content, name))
    if role == "assistant":
        calls = _parse_calls(record.get("tool_calls"), ".tool_calls")
        if record.get("function_call") is not None:  # OpenAI's before tools
            calls = (*calls, *_parse_calls([record["function_call"]], ".function_call"))
        content = (content or "") if calls and _is_blank(content) else parse_text(content, name)
        return Message(role, content, _find_reasoning(record), calls)
    if not isinstance(content, str):
        raise InvalidRowError(f"{name} is {shorten(content)}, not a text")
    _check_encodable(content, name)  # blank is fine: a function may return nothing
    if role == "system":
        return Message(role, content)
    ids = {key: parse_optional_text(record.get(key), f".{key}") for key in ("name", "tool_call_id")}
    return Message(role, content, **ids)


def _join_parts(parts: list[Any], name: str) -> str:
    """Return the text of a content that is given in parts."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRowError(
                f"{name}[{number}] is {shorten(part)}; "
                "models here take text, as {'type': 'text', 'text': '...'}"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRowError(f"{name}[{number}].text is {shorten(text)}, not a text")
        texts.append(text)
    return "".join(texts)


def _find_reasoning(record: Json) -> str | None:
    for key in REASONING_KEYS:
        if record.get(key) is not None:
            return parse_optional_text(record[key], f".{key}")
    return None


def _parse_calls(value: Any, name: str) -> tuple[Json, ...]:
    """Return calls of functions as {"type": "function", "function": {"name", "arguments"}}.

    Arguments become an object, which chat templates expect.
    """
    if value is None:
        return ()
    calls = parse_functions(value, name)
    return tuple(_parse_call(call, f"{name}[{number}]") for number, call in enumerate(calls))


def _parse_call(call: Json, name: str) -> Json:
    function = call.get("function", call)
    has_name = (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and function["name"].strip()
    )
    if not has_name:
        raise InvalidRowError(
            f"{name} names no function; "
            "a call is {'function': {'name': ..., 'arguments': {...}}}"
        )
    arguments = function.get("arguments")
    if _is_blank(arguments):
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_json_text(arguments, f"{name}.arguments")
        arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise InvalidRowError(f"{name}.arguments is {shorten(arguments)}, not an object")
    call_fields = {} if function is call else call
    return {**call_fields, "type": "function", "function": {**function, "arguments": arguments}}


def _check_order(
    messages: Sequence[Message], names: Sequence[str], allows_calls_in_text: bool
) -> None:
    """Raise InvalidRowError for a message out of order, or if the last is not the assistant's.

    A tool's answer needs a call before it. ShareGPT files may have calls in an answer's text, where
    they cannot be recognised.
    """
    previous: Message | None = None
    is_asked = False
    for message, name in zip(messages, names, strict=True):
        role = message.role
        allowed = FOLLOWING_ROLES[previous.role] if previous else FIRST_ROLES
        if previous and previous.role == "assistant" and not is_asked:
            allowed = ("user",)  # after a greeting
        is_asked = is_asked or role == "user"
        if role not in allowed:
            if role == "system":
                raise InvalidRowError(f"{name} is a system message; it stands first, and once")
            expected = "a conversation begins with the user, or with a system message"
            if previous:
                following = " or ".join(FOLLOWING_ROLES[previous.role])
                expected = f"behind a turn of role {previous.role} comes {following}"
            raise InvalidRowError(f"{name} is the {role}'s; {expected}")
        is_first_tool = role == "tool" and previous and previous.role == "assistant"
        if is_first_tool and not previous.tool_calls and not allows_calls_in_text:
            raise InvalidRowError(
                f"{name} is a tool's answer, and the turn before it calls no tool"
            )
        previous = message
    if previous is None or previous.role != "assistant":
        raise InvalidRowError(
            f"{names[-1]}, the last turn, is the {messages[-1].role}'s; "
            "a row ends with an answer of the assistant"
        )
    if not is_asked:
        raise InvalidRowError(f"{names[-1]} answers nothing: no turn is the user's")


def _is_blank(value: Any) -> bool:
    """Return whether a value is null or a text without a visible character."""
    return value is None or (isinstance(value, str) and not value.strip())


def _check_encodable(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRowError(
                f"{name} holds half of a surrogate pair, which is no character"
            ) from None
    if "\0" in text:
        raise InvalidRowError(f"{name} holds a NUL character, which belongs to no text")


def apply_flags(message: Message, record: Json) -> Message:
    """Return a message as the flags of its record ask: without loss, or with another weight.

    Raises InvalidRowError, whose reason continues the name of the message: for another value than
    true and false (1 and 0, of a weight any number from 0 up), for flags that contradict each
    other, and for a flag that asks for loss on a message that is no answer.
    """
    if any(record.get(key) for key in PARTS_OF_ANSWERS):
        raise InvalidRowError(
            " asks for loss on a part of the answer, which is not done here; "
            "write such rows as segments: [{label: true or false, text: ...}]"
        )
    asked: dict[str, bool] = {}
    for name, trained_value in LOSS_FLAGS.items():
        value = record.get(name)
        if value is None:
            continue
        if name == "weight":
            asked[name] = parse_weight(value, ".weight") > 0
            continue
        if value not in (0, 1):  # True equals 1
            raise InvalidRowError(
                f".{name} is {shorten(value)}; an answer is trained or not: write 1 or 0"
            )
        asked[name] = value == trained_value
    if len(set(asked.values())) > 1:
        raise InvalidRowError(f": {' and '.join(asked)} contradict each other; keep one")
    if message.role == "assistant":
        if False in asked.values():
            return replace(message, is_trained=False)
        return replace(message, weight=parse_weight(record.get("weight"), ".weight"))
    for name, is_trained in asked.items():
        if is_trained:
            raise InvalidRowError(
                f".{name} asks for loss on a message of the {message.role}; "
                "only answers of the assistant carry loss"
            )
    return message
