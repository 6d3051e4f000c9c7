"""Convert one turn of a conversation, in any program's format, to messages. Pure.

Supported are turns in logs of OpenAI, Anthropic, Bedrock and Gemini, and those of ShareGPT,
LLaMA-Factory, ms-swift, Harmony (gpt-oss), OLMo 3 and SWE agents. Reasons of errors continue
the name of the turn, e.g. "messages[3]" + ".content is empty".
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from sft_play.data.calls import parse_calls, parse_objects, parse_python_calls
from sft_play.data.image_parts import NO_ANSWER, is_image, name_image, name_images, refuse_media
from sft_play.data.row_formats import parse_json_text, parse_nested
from sft_play.data.rows import (
    FORMS,
    IMAGE_MARK,
    ImageFile,
    InvalidRowError,
    Json,
    Message,
    Objects,
    check_encodable,
    is_blank,
    is_given,
    parse_optional_text,
    parse_text,
    shorten,
)

CALL = "call"  # of the assistant: the turn contains only function calls
ROLES = FORMS["roles"]  # from a file, in lower case: our role
REASONING_KEYS = FORMS["turns"]["reasoning"]
CONTENT_KEYS = FORMS["turns"]["content"]
PART_TYPES = FORMS["turns"]["parts"]
# Harmony's channels whose turn is a part of the next answer
OPEN_CHANNELS = ("analysis", "commentary")
CALL_PARSERS = {
    "tool_calls": parse_calls,
    "function_call": parse_calls,  # OpenAI's format before tools
    "function_calls": parse_python_calls,
}
RESULT_KEYS = ("toolResult", "functionResponse", "function_response")
FUNCTION_PREFIX = "functions."  # of names in Harmony
THOUGHT_END = "</think>"
TOOL_CALL_MARK = re.compile(r"</?tool_call>")
CALL_START = re.compile(r"[\[{]")


def add_images(messages: list[Message], given: Any) -> list[Message]:
    """Return the messages of a turn with the images of its list. Raises InvalidRowError."""
    *results, message = messages
    images = name_images(given, ".images")
    content = IMAGE_MARK * len(images) + message.content
    return [*results, replace(message, content=content, images=(*images, *message.images))]


def parse_turn(record: Json) -> list[Message]:
    """Return the messages of a turn; several if it has tool results in addition to text.

    Raises InvalidRowError.
    """
    speaker = record.get("role") or record.get("from")
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if speaker is None:
        keys = ", ".join(record) or "none"
        raise InvalidRowError(f" is not an object with role and content; its keys are {keys}")
    if role is None:
        known = ", ".join(ROLES)
        raise InvalidRowError(f" has the role {shorten(speaker)!r}; roles are {known}")
    key = "content"
    if key not in record:
        key = next((other for other in CONTENT_KEYS if other in record), key)
    name = f".{key}"
    content = record.get(key)
    if isinstance(content, str) and content.startswith(("[{", "[ {")):
        parts = parse_nested(content)
        if key == "parts" or all(
            isinstance(part, dict) and part.get("type") in PART_TYPES for part in parts
        ):
            content = parts
    refusal = record.get("refusal")
    if refusal:
        if is_given(content):
            raise InvalidRowError(" has a content and a refusal; keep one of them")
        content = [{"type": "refusal", "refusal": refusal}]
    if isinstance(content, list):
        return _parse_parts(role, record, content, name)
    if role == CALL:
        return [_parse_call_turn(record, content, name)]
    if role == "assistant" and "channel" in record:
        return [_parse_channel(record, content, name)]
    if role == "system" and is_blank(content) and "system_prompt" in record:  # SWE agents
        content = record["system_prompt"]
    return [_build_message(role, record, content, name)]


def goes_on(record: Json, before: Json) -> bool:
    """Return whether a turn of the assistant belongs to the same answer as the turn before it.

    Calls may be in a separate turn, and so may each channel of Harmony.
    """
    speaker = record.get("role") or record["from"]
    return ROLES[speaker.lower()] == CALL or before.get("channel") in OPEN_CHANNELS


def join_answers(parts: Sequence[Message]) -> Message:
    """Return one answer that joins its parts."""
    return replace(
        parts[-1],
        content="\n\n".join(part.content for part in parts if part.content),
        reasoning="\n\n".join(part.reasoning for part in parts if part.reasoning) or None,
        tool_calls=tuple(chain.from_iterable(part.tool_calls for part in parts)),
    )


def _build_message(role: str, record: Json, content: Any, name: str) -> Message:
    """Return the message of a record whose content is called `name`."""
    speaker = record.get("name")
    if speaker is not None:
        speaker = parse_optional_text(speaker, ".name")
    if role == "user":
        return Message(role, parse_text(content, name), name=speaker)
    if role == "assistant":
        calls: Objects = ()
        for key, parse in CALL_PARSERS.items():
            if record.get(key):
                calls += parse(record[key], f".{key}")
        content = (content or "") if calls and is_blank(content) else parse_text(content, name)
        return Message(role, content, _find_reasoning(record), calls)
    # blank is allowed: a function may return nothing
    check_encodable(_require_text(content, name), name)
    if role == "system":
        return Message(role, content, name=speaker)
    ids = parse_nested(record.get("tool_call_ids")) or [None]
    call_id = parse_optional_text(record.get("tool_call_id") or ids[0], ".tool_call_id")
    tool = speaker and speaker.removeprefix(FUNCTION_PREFIX)
    return Message(role, content, name=tool, tool_call_id=call_id)


def _parse_call_turn(record: Json, content: Any, name: str) -> Message:
    """Return the calls of a turn, with reasoning and text before them in the same string."""
    reasoning = _find_reasoning(record)
    words = ""
    if isinstance(content, str):
        thought, _, rest = content.rpartition(THOUGHT_END)
        reasoning = thought.strip().removeprefix("<think>").strip() or reasoning
        rest = TOOL_CALL_MARK.sub("", rest)
        start = CALL_START.search(rest)
        words = rest[: start.start()].strip() if start else ""
        content = parse_json_text(rest[start.start() :] if start else rest, name)
    calls = parse_calls(content, name)
    if not calls:
        raise InvalidRowError(f"{name} calls no function")
    return Message("assistant", words, reasoning, calls)


def _parse_channel(record: Json, content: Any, name: str) -> Message:
    """Return a turn of the assistant in one of Harmony's channels."""
    recipient = record.get("recipient") or "all"
    if recipient != "all":
        call = {"name": recipient.removeprefix(FUNCTION_PREFIX), "arguments": content}
        return Message("assistant", "", None, parse_calls([call], name))
    if record["channel"] == "analysis":
        return Message("assistant", "", parse_text(content, name))
    return _build_message("assistant", record, content, name)


def _parse_parts(role: str, record: Json, parts: list[Any], name: str) -> list[Message]:
    """Return the messages of a turn whose content has parts: tool results come first."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    found: list[Message] = []
    images: list[ImageFile] = []
    is_refusal = False
    for number, given in enumerate(parts):
        part = parse_nested(given)
        where = f"{name}[{number}]"
        match part:
            case dict() if is_image(part) and role in ("assistant", CALL):
                raise InvalidRowError(f"{where} is an image, and {NO_ANSWER}")
            case (
                {"reasoningContent": {"reasoningText": {"text": thought}}}
                | {"type": "thinking" | "reasoning", "thinking": thought}
                | {"type": "thinking" | "reasoning", "text": thought}
                | {"thought": True, "text": thought}
            ):
                thoughts.append(join_texts(thought, where))
            case (
                {"type": "tool_use", "name": called, "input": arguments}
                | {"toolUse": {"name": called, "input": arguments}}
                | {"functionCall": {"name": called, "args": arguments}}
                | {"function_call": {"name": called, "args": arguments}}
            ):
                held = part.get("toolUse", part)
                call_id = held.get("id", held.get("toolUseId"))
                call = {"type": "function", "function": {"name": called, "arguments": arguments}}
                calls.append(call if call_id is None else {"id": call_id, **call})
            case (
                {"type": "tool_result", "content": result}
                | {"toolResult": {"content": result}}
                | {"functionResponse": {"response": result}}
                | {"function_response": {"response": result}}
            ):
                found.append(_read_result(part, result, where))
            case {"type": "refusal", "refusal": refusal}:
                texts.append(join_texts(refusal, where))
                is_refusal = True
            case str() | {"text": _} | {"type": "text" | "input_text" | "output_text"}:
                texts.append(_read_item(part, where, images))
            case dict() if is_image(part):
                texts.append(_read_item(part, where, images))
            case _:
                refuse_media(part, where)
                raise InvalidRowError(
                    f"{where} is {shorten(part)}; models here take texts and images, as "
                    "{'type': 'text', 'text': '...'} and {'type': 'image', 'image': '1.jpg'}"
                )
    if found and not texts:
        return found
    calls += parse_objects(record.get("tool_calls"), ".tool_calls")
    changed = {**record, "tool_calls": calls}
    if thoughts:
        changed["reasoning_content"] = "\n\n".join(thoughts)
    message = _build_message(role, changed, "".join(texts), name)
    return [*found, replace(message, images=tuple(images), is_refusal=is_refusal)]


def _read_result(part: Json, result: Any, name: str) -> Message:
    """Return a tool's answer in the parts of Anthropic, Bedrock and Gemini."""
    held = next((part[key] for key in RESULT_KEYS if key in part), part)
    result = parse_nested(result) if isinstance(result, list) else result
    images: list[ImageFile] = []
    if isinstance(result, list):
        result = "".join([_read_item(item, name, images) for item in result])
    if isinstance(result, dict):
        result = json.dumps(result, ensure_ascii=False)
    call_id = held.get("tool_use_id", held.get("toolUseId"))
    facts = {"name": held.get("name"), "tool_call_id": call_id}
    return replace(_build_message("tool", facts, result, name), images=tuple(images))


def _read_item(item: Any, name: str, images: list[ImageFile]) -> str:
    """Return the text of a part; an image is added to `images`, and its text is IMAGE_MARK."""
    refuse_media(item, name)
    if is_image(item):
        images.append(name_image(item, name))
        return IMAGE_MARK
    if isinstance(item, dict) and "json" in item:
        return json.dumps(item["json"], ensure_ascii=False)
    return join_texts([item], name)


def join_texts(value: Any, name: str) -> str:
    """Return a text, or the texts of a list of texts and of parts. Raises InvalidRowError."""
    value = value.get("parts", [value]) if isinstance(value, dict) else value
    if not isinstance(value, list):
        return _require_text(value, name)
    texts: Iterable[Any] = (item.get("text") if isinstance(item, dict) else item for item in value)
    return "".join(_require_text(text, name) for text in texts)


def _require_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRowError(f"{name} is {shorten(value)}, not a text")
    return value


def _find_reasoning(record: Json) -> str | None:
    for key in REASONING_KEYS:
        if record.get(key) is not None:
            return parse_optional_text(record[key], f".{key}")
    return None
