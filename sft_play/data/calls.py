"""Functions that an assistant may call, and its calls, in any format of a row. Pure.

Both are converted to the format of OpenAI's chat API, which chat templates read. A table writes
missing keys of a row as null. Null keys that no schema can have, and arguments that the tool does
not name, are removed. Anything that should be an object or a list of objects may be a JSON text.
"""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft_play.data.row_formats import parse_json_text, parse_nested
from sft_play.data.rows import (
    InvalidRowError,
    Json,
    Message,
    Messages,
    Objects,
    check_encodable,
    is_blank,
    shorten,
)

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
SCHEMA_KEYS = ("input_schema", "inputSchema")  # Anthropic's and Bedrock's parameters
TEXT_KEYS = set("default const description name title pattern enum examples".split())
JSON_IN_TEXT = re.compile(r'": "[\[{]')
FILLED = re.compile(r'(?<!"default)(?<!"const)(?<!\\)": null')  # a null that only tables write
JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
MAX_DEPTH = 100  # of JSON
SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # required by Mistral's template


def parse_objects(value: Any, name: str) -> list[Json]:
    """Return the objects of a list, or a single object; [] for null or blank.

    Raises InvalidRowError.
    """
    if isinstance(value, str):
        value = parse_json_text(value, name) if value.strip() else None
    if value is None or value != value:
        return []
    items = list(map(parse_nested, value if isinstance(value, list) else [value]))
    if set(map(type, items)) - {dict}:
        raise InvalidRowError(f"{name} is {shorten(value)}, not a list of objects")
    check_json(items, name)
    return items


def check_json(value: Any, name: str) -> None:
    """Raise InvalidRowError for keys or values that no template can write as JSON."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                deeper += each.values()
            elif isinstance(each, list):
                deeper += each
        level = deeper
        if not level:
            break
    else:
        raise InvalidRowError(f"{name} is nested more than {MAX_DEPTH} deep; write it flatter")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRowError(f"{name} cannot be written as JSON: {error}") from None
    check_encodable(text.replace(r"\\", "").replace(r"\u0000", "\0"), name)


def parse_tools(value: Any, name: str) -> Objects:
    """Return functions as {"type": "function", "function": {...}}. Raises InvalidRowError."""
    tools: list[Json] = []
    for tool in parse_objects(value, name):
        declared = tool.get("functionDeclarations", tool.get("function_declarations"))  # Gemini's
        for function in parse_objects(declared, name) or [tool]:
            tools.append(_wrap_tool(function, name))
    if JSON_IN_TEXT.search(json.dumps(tools)):
        tools = [_parse_schema(tool) for tool in tools]
    return tuple(
        [_without_nulls(tool) if FILLED.search(json.dumps(tool)) else tool for tool in tools]
    )


def _wrap_tool(tool: Json, name: str) -> Json:
    tool = tool.get("toolSpec", tool)  # Bedrock's
    if "function" in tool:
        return {"type": "function", **tool, "function": parse_nested(tool["function"])}
    if not isinstance(tool.get("name"), str):
        raise InvalidRowError(
            f"{name} has {shorten(tool)}, which names no function; "
            "a tool is {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        )
    function = {key: value for key, value in tool.items() if key != "type"}
    for key in SCHEMA_KEYS:
        if key in function:
            schema = parse_nested(function.pop(key))
            function["parameters"] = schema.get("json", schema)
    return {"type": "function", "function": function}


def _parse_schema(value: Any, in_properties: bool = False) -> Any:
    """Return a schema whose JSON texts are parsed if it has objects, not texts."""
    value = parse_nested(value)
    if isinstance(value, list):
        return [_parse_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: held
        if key in TEXT_KEYS and not in_properties
        else _parse_schema(held, key == "properties" and not in_properties)
        for key, held in value.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(held) for key, held in value.items() if held is not None}


def parse_calls(value: Any, name: str) -> Objects:
    """Return calls as {"type": "function", "function": {"name", "arguments"}}.

    Arguments become an object, which chat templates expect. Raises InvalidRowError.
    """
    calls = enumerate(parse_objects(value, name))
    return tuple([_parse_call(call, f"{name}[{number}]") for number, call in calls])


def _parse_call(call: Json, name: str) -> Json:
    function = parse_nested(call.get("function", call))
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
    key = ([key for key in ARGUMENT_KEYS if key in function] or ["arguments"])[0]
    arguments = function.get(key)
    if is_blank(arguments):
        arguments = {}
    if isinstance(arguments, str):
        arguments = parse_json_text(arguments, f"{name}.arguments")
        check_json(arguments, f"{name}.arguments")
        arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise InvalidRowError(f"{name}.arguments is {shorten(arguments)}, not an object")
    kept = {} if "function" not in call else _without_nulls({**call, "function": None})
    function = _without_nulls({**function, key: None})
    return {**kept, "type": "function", "function": {**function, "arguments": arguments}}


def parse_python_calls(value: Any, name: str) -> Objects:
    """Return calls like `weather(city='Oslo')`, one per line (OLMo 3). Raises InvalidRowError."""
    if not isinstance(parse_nested(value), str) or is_blank(value):
        return parse_calls(value, name)
    calls: list[Json] = []
    try:
        for line in ast.parse(value.strip()).body:
            call = line.value
            if call.args:
                raise ValueError("an argument without a name")
            arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    except (SyntaxError, ValueError, AttributeError):
        raise InvalidRowError(
            f"{name} is {shorten(value)}, not calls such as weather(city='Oslo'); "
            "write them as tool_calls: [{'name': ..., 'arguments': {...}}]"
        ) from None
    return parse_calls(calls, name)


def drop_filled(messages: Sequence[Message], tools: Sequence[Json]) -> Messages:
    """Return messages with null arguments removed if the tool does not name the argument."""
    schemas = {tool["function"].get("name"): tool["function"].get("parameters") for tool in tools}
    kept = []
    for message in messages:
        calls = []
        for call in message.tool_calls:
            function = call["function"]
            schema = schemas.get(function["name"])
            arguments = _drop_unnamed(function["arguments"], schema)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        kept.append(replace(message, tool_calls=tuple(calls)))
    return tuple(kept)


def _drop_unnamed(value: Any, schema: Any) -> Any:
    """Return a value without nulls for keys that its schema does not name, if it names any."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_drop_unnamed(item, schema.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    named = schema.get("properties") or ({} if "type" in schema else schema)
    return {
        key: _drop_unnamed(held, named.get(key))
        for key, held in value.items()
        if held is not None or key in named or not named
    }


def has_null_arguments(messages: Sequence[Message]) -> bool:
    """Return whether a call has null for an argument, or inside of one."""
    for message in messages:
        if message.tool_calls:
            arguments = [call["function"]["arguments"] for call in message.tool_calls]
            if "null" in JSON_STRING.sub("", json.dumps(arguments)):
                return True
    return False


def with_short_ids(messages: Sequence[Json]) -> list[Json]:
    """Return messages, as templates read them, whose calls have ids of nine letters and digits.

    Valid ids are unchanged. A tool's answer has the id of its call; without one, that of the
    first call that no tool answered.
    """
    ids: dict[str, str] = {}
    waiting: list[str] = []
    number = 0
    changed: list[Json] = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                own = call.get("id") or ""
                made = own if SHORT_ID.fullmatch(own) else f"call{number:05}"
                number += 1
                ids[own or made] = made
                waiting.append(made)
                calls.append({**call, "id": made})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            made = ids.get(message.get("tool_call_id"), waiting[0])
            if made in waiting:
                waiting.remove(made)
            message = {**message, "tool_call_id": made}
        changed.append(message)
    return changed
