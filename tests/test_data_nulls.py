"""sft_play.data: nulls that a table filled in are left out of tools and calls, others stay."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from record_files import format_of, read_rows, write_rows

from sft_play.data.files import read_chunks
from sft_play.data.row_parsing import NULL_ARGUMENTS, parse_record_rows, unused_notes

Record = dict[str, Any]
TEXT = {"type": "string"}


def tool(properties: Record, **more: Any) -> Record:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def record(arguments: Any, *tools: Record, **turn: Any) -> Record:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "q", **turn},
        {"role": "assistant", "content": "", "tool_calls": [call], **turn},
    ]
    return {"messages": turns, "tools": list(tools)}


def arguments_of(path: Path) -> list[Any]:
    return [row.messages[-1].tool_calls[0]["function"]["arguments"] for row in read_rows(path)]


CASES = [
    ({"a": "x", "b": None}, tool({"a": TEXT, "b": None}), {"a": "x"}),
    ({"a": "x", "b": None}, tool({"a": TEXT}), {"a": "x"}),
    ({"a": "x", "b": None}, tool({"a": TEXT, "b": TEXT}), {"a": "x", "b": None}),
    ({"a": "x", "b": None}, tool({}), {"a": "x", "b": None}),
    ({"a": {"c": 1, "d": None}}, tool({"a": {"type": "object", "properties": {"c": TEXT}}}),
     {"a": {"c": 1}}),
    ({"a": [{"c": 1, "d": None}]}, tool({"a": {"type": "array", "items": {"properties": {"c": {}}}}}),
     {"a": [{"c": 1}]}),
    ({"a": None}, {"name": "f", "parameters": {"a": {"type": "str"}}}, {"a": None}),
    ({"a": None, "b": None}, {"name": "f", "parameters": {"a": {"type": "str"}}}, {"a": None}),
    ('{"a": "x", "b": null}', tool({"a": TEXT, "b": TEXT}), {"a": "x", "b": None}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "given", "expected"), CASES)
def test_a_null_for_an_argument_that_the_tool_does_not_name_is_left_out(
    arguments, given, expected, tmp_path
):
    path = write_rows(tmp_path / "a.jsonl", record(arguments, given))
    assert arguments_of(path) == [expected]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tool({"a": TEXT, "b": None}), tool({"a": TEXT})),
        (tool({"a": {**TEXT, "enum": None, "default": None}}), tool({"a": TEXT})),
        (tool({"a": {**TEXT, "default": None}}), tool({"a": {**TEXT, "default": None}})),
        (tool({"a": {"enum": ["x", None]}}), tool({"a": {"enum": ["x", None]}})),
        (tool({"a": TEXT}, required=None), tool({"a": TEXT})),
    ],
)
def test_nulls_that_no_schema_can_have_are_left_out(given, expected, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", record({"a": "x"}, given))
    assert read_rows(path)[0].tools == (expected,)


def test_nulls_of_a_call_beside_its_arguments_are_left_out(tmp_path):
    row = record({"a": "x"}, name=None, tool_call_id=None, tool_calls=None)
    call = {"id": None, "index": None, "type": "function",
            "function": {"name": "f", "arguments": {"a": "x"}, "parameters": None}}  # fmt: skip
    row["messages"][1]["tool_calls"] = [call]
    (read,) = read_rows(write_rows(tmp_path / "a.jsonl", row))
    expected = {"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}
    assert read.messages[1].tool_calls == (expected,)


def test_a_key_that_no_row_of_a_table_has_a_value_for_was_meant(tmp_path):
    given = tool({"a": TEXT, "b": TEXT})
    rows = [record({"a": "x", "b": None}, given), record({"a": "y", "b": None}, given)]
    expected = [{"a": "x", "b": None}, {"a": "y", "b": None}]
    assert arguments_of(write_rows(tmp_path / "a.parquet", *rows)) == expected
    rows[0] = record({"a": "x", "b": "z"}, given)
    assert arguments_of(write_rows(tmp_path / "b.parquet", *rows)) == [
        {"a": "x", "b": "z"},
        {"a": "y"},
    ]


def test_rows_whose_calls_keep_a_null_are_counted(tmp_path):
    given = tool({"a": TEXT, "b": TEXT})
    rows = [record({"a": "x", "b": None}, given), record({"a": "x", "b": "y"}, given),
            record({"a": "x", "c": None}, given), record({"a": [{"d": None}]})]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", *rows)
    unused: Counter[str] = Counter()
    (chunk,) = read_chunks(path)
    list(parse_record_rows(chunk, format_of(path), unused=unused))
    assert unused == {NULL_ARGUMENTS: 2}
    assert "jq -c 'del(..|nulls)' rows.jsonl" in unused_notes(unused, "a.jsonl")[0]
