"""sft_play.data: objects that a file has as JSON texts are read as the objects that they are."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from record_files import read_rows, to_table, without_origin, write_rows

Record = dict[str, Any]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": '{"not": "parsed"}'}},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
TURNS = [
    {"role": "user", "content": "1 + 0?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": [{"type": "text", "text": "one"}]},
]
SAID = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHAT = {"messages": TURNS, "tools": [TOOL]}
RECORDS: dict[str, Record] = {
    "messages": CHAT,
    "conversations": {"conversations": SAID, "tools": [TOOL]},
    "prompt": {"prompt": TURNS[:3], "completion": TURNS[3:], "tools": [TOOL]},
    "prompt_object": {"prompt": TURNS[0], "completion": {"role": "assistant", "content": "a"}},
    "pairs": {"conversation": [{"input": "q", "output": "a"}, {"input": "r", "output": "b"}]},
    "calls": {"query": "q", "tools": [TOOL], "answers": [{"name": "add", "arguments": {"a": 1}}]},
    "contents": {
        "contents": [
            {"role": "user", "parts": [{"text": "q"}]},
            {"role": "model", "parts": [{"text": "a"}]},
        ]
    },
    "history": {"instruction": "q", "output": "a", "history": [["r", "b"]]},
}


TEXTS = ("conversation.*", "history.*", "arguments.b")  # there, a text is a text


def positions(value: Any, path: str) -> Iterator[str]:
    """Yield the path of each object and list within a value; "*" is each element of a list."""
    if isinstance(value, dict | list) and not path.endswith(TEXTS):
        yield path
        items = value.items() if isinstance(value, dict) else [("*", one) for one in value]
        for key, held in items:
            yield from positions(held, f"{path}.{key}")


def all_positions() -> list[tuple[str, str]]:
    found = [
        (name, position)
        for name, record in RECORDS.items()
        for key, value in record.items()
        for position in positions(value, key)
    ]
    return list(dict.fromkeys(found))


def change(value: Any, path: list[str], how: Callable[[Any], Any]) -> Any:
    """The value with what lies at a path changed, wherever the path exists."""
    if not path:
        return how(value)
    key, *rest = path
    if isinstance(value, list) and key == "*":
        return [change(item, rest, how) for item in value]
    if isinstance(value, dict) and key in value:
        return {**value, key: change(value[key], rest, how)}
    return value


def read(path: Path) -> list[tuple[Any, ...]]:
    return without_origin(read_rows(path))


@pytest.mark.parametrize(("name", "position"), all_positions())
def test_a_json_text_is_read_as_the_value_that_it_has(name, position, tmp_path):
    expected = read(write_rows(tmp_path / "a.jsonl", RECORDS[name]))
    text = change(
        RECORDS[name],
        position.split("."),
        lambda value: value if isinstance(value, str) else json.dumps(value),
    )
    assert text != RECORDS[name]
    assert read(write_rows(tmp_path / "b.jsonl", text)) == expected
    (tmp_path / "c.csv").write_bytes(to_table([text]))
    assert read(tmp_path / "c.csv") == expected


def feature(value: Any, path: list[str]) -> Any:
    """The datasets type of a value, with Json at a path."""
    if not path:
        return datasets.Json()
    key, *rest = path
    if isinstance(value, list):
        return datasets.List(feature(value[0], rest if key == "*" else ["-"]))
    if isinstance(value, dict):
        return {k: feature(held, rest if k == key else ["-"]) for k, held in value.items()}
    return datasets.Value("string" if isinstance(value, str) else "int64")


@pytest.mark.parametrize(
    ("name", "position"),
    [
        *((name, column) for name, record in RECORDS.items() for column in record),
        ("conversations", "conversations.*"),
        ("prompt", "completion.*"),
        ("pairs", "conversation.*"),
        ("history", "history.*"),
        ("messages", "messages.*"),
        ("messages", "tools.*.function"),
        ("messages", "tools.*.function.parameters.properties.a.type"),
        ("calls", "answers.*.arguments"),
        ("contents", "contents.*.parts.*"),
        ("conversations", "conversations.*.value"),
    ],
)
def test_a_json_column_of_datasets_is_read_as_the_jsonl_of_its_rows(name, position, tmp_path):
    record = RECORDS[name]
    if position == "messages.*":  # the turns of a table have equal keys
        record = {**record, "messages": [TURNS[0], {**TURNS[0], "role": "gpt"}]}
    expected = read(write_rows(tmp_path / "a.jsonl", record))
    features = {
        key: feature(held, position.split(".")[1:])
        if key == position.split(".")[0]
        else datasets.Json()
        for key, held in record.items()
    }
    saved = datasets.Dataset.from_list([record], features=datasets.Features(features))
    path = tmp_path / "b.parquet"
    saved.to_parquet(str(path))
    assert read(path) == expected


def test_a_content_that_is_json_is_a_text_in_a_json_column_too(tmp_path):
    contents = ["12", '{"a": 1}', "true", '["x"]', "null and void", "[1, 2]"]
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]
    features = datasets.Features(
        {"messages": [{"role": datasets.Value("string"), "content": datasets.Json()}]}
    )
    saved = datasets.Dataset.from_list([{"messages": turns}], features=features)
    saved.to_parquet(str(tmp_path / "a.parquet"))
    (row,) = read_rows(tmp_path / "a.parquet")
    assert [message.content for message in row.messages] == contents
