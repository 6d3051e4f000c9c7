"""sft_play.data: which format the rows of a file have, and what of its rows is refused, and why."""

import json
import pickle
from typing import Any

import pytest
from record_files import format_of, parse_rows, read_rows, write_rows

from sft_play.config.loader import PROJECT_ROOT
from sft_play.data.files import read_chunks
from sft_play.data.row_formats import ROW_FORMATS
from sft_play.data.row_parsing import SystemPrompt
from sft_play.data.rows import BadRow, Message, Row
from sft_play.errors import DataError, ExitClass

S = Message("system", "s")
Q = Message("user", "q")
A = Message("assistant", "a")
QA = (Q, A)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def turn(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def said(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {
        "conversations": [{"from": speaker, "value": value} for speaker, value in turns],
        **more,
    }


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


ASK = turn("user", "q")
ANSWER = turn("assistant", "a")
BE_BRIEF = turn("system", "s")
ARGUMENTS = '{"a": 1, "b": [2, 3]}'
CALL_NOW = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}

SHAPED = [
    ("messages", chat(ASK, turn("assistant", "a", name="x", weight=1)), QA),
    ("messages", chat(turn("developer", "s"), ASK, ANSWER), (S, *QA)),
    ("messages", chat(ASK, ANSWER, system="s"), (S, *QA)),
    ("messages", {"messages": json.dumps([ASK, ANSWER])}, QA),
    ("messages", chat(turn("user", [part("q")]), turn("assistant", [part("a "), part("b")])),
     (Q, Message("assistant", "a b"))),
    ("messages", chat(ASK, turn("assistant", "a", reasoning_content="r")),
     (Q, Message("assistant", "a", "r"))),
    ("messages", chat(ASK, turn("assistant", "a", thinking="r", reasoning=None)),
     (Q, Message("assistant", "a", "r"))),
    ("messages",
     chat(ASK, turn("assistant", None, tool_calls=[CALL]),
          turn("tool", "6", name="add", tool_call_id="c1"), ANSWER),
     (Q, Message("assistant", "", tool_calls=(CALL,)),
      Message("tool", "6", name="add", tool_call_id="c1"), A)),
    ("messages",
     chat(ASK, turn("assistant", "", tool_calls=[{"name": "add", "arguments": ARGUMENTS}])),
     (Q, Message("assistant", "", tool_calls=(CALL,)))),
    ("messages",
     chat(ASK, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "now"}}]},
          turn("tool", ""), turn("tool", "2"), ANSWER),
     (Q, Message("assistant", "", tool_calls=(CALL_NOW,)),
      Message("tool", ""), Message("tool", "2"), A)),
    ("conversations", said(("human", "q"), ("gpt", "a")), QA),
    ("conversations", said(("system", "s"), ("user", "q"), ("assistant", "a")), (S, *QA)),
    ("conversations", said(("human", "q"), ("gpt", "a"), system="s"), (S, *QA)),
    ("conversations",
     said(("human", "q"), ("function_call", f'{{"name": "add", "arguments": {ARGUMENTS}}}'),
          ("observation", "6"), ("gpt", "a")),
     (Q, Message("assistant", "", tool_calls=(CALL,)), Message("tool", "6"), A)),
    ("conversations",
     said(("human", "q"), ("gpt", "<tool_call>add</tool_call>"), ("tool", "6"), ("gpt", "a")),
     (Q, Message("assistant", "<tool_call>add</tool_call>"), Message("tool", "6"), A)),
    ("instruction", {"instruction": "q", "output": "a"}, QA),
    ("instruction", {"instruction": "q", "input": " \n", "output": "a"}, QA),
    ("instruction", {"instruction": "q", "input": "of this ", "output": "a"},
     (Message("user", "q\n\nof this "), A)),
    ("prompt", {"prompt": [BE_BRIEF, ASK], "completion": [ANSWER]}, (S, *QA)),
    ("question", {"question": " q\n", "answer": "a\u2028b"},
     (Message("user", " q\n"), Message("assistant", "a\u2028b"))),
    ("user", {"system": "s", "user": "q", "assistant": "a"}, (S, *QA)),
    ("target", {"input": "q", "target": "a"}, QA),
    ("input", {"input": "q", "output": "a"}, QA),
    ("conversation", {"conversation": [{"input": "q", "output": "a"}]}, QA),
    ("instruction_response", {"instruction": "q", "context": "c", "response": "a"},
     (Message("user", "q\n\nc"), A)),
    ("prompt_response", {"prompt": "q", "response": "a"}, QA),
    ("question_response", {"system_prompt": "s", "question": "q", "response": "a"}, (S, *QA)),
    ("query", {"query": "q", "response": "a"}, QA),
    ("calls", {"query": "q", "tools": "[]", "answers": [{"name": "add", "arguments": ARGUMENTS}]},
     (Q, Message("assistant", "", tool_calls=(CALL,)))),
    ("input_content", {"input": "q", "reasoning_content": "r" * 9, "content": "a"},
     (Q, Message("assistant", "a", "r" * 9))),
    ("attempt", {"question": "q", "thinking_trajectories": ["I think."], "attempt": "a"},
     (Q, Message("assistant", "a", "I think."))),
    ("deepseek_attempt",
     {"question": "q", "deepseek_thinking_trajectory": "I think.", "deepseek_attempt": "a"},
     (Q, Message("assistant", "a", "I think."))),
    ("trajectory", {"trajectory": [BE_BRIEF, ASK, ANSWER]}, (S, *QA)),
    ("contents", {"contents": [{"role": "user", "parts": [{"text": "q"}]},
                               {"role": "model", "parts": [{"text": "a"}]}]}, QA),
    ("pretokenized",
     {"inputs": [1], "inputs_pretokenized": "q", "targets": [2], "targets_pretokenized": "a"}, QA),
    ("targets", {"inputs": "q", "targets": "a"}, QA),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "record", "messages"), SHAPED)
def test_the_keys_of_a_record_say_what_it_is(shape, record, messages, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", record)
    assert format_of(path).name == shape
    assert read_rows(path) == [Row(messages, f"{path}:1")]


@pytest.mark.parametrize("kind", ROW_FORMATS.values(), ids=ROW_FORMATS)
def test_the_documentation_has_each_format_with_a_row_that_is_one(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(kind.example + "\n")
    assert format_of(path).name == kind.name
    (row,) = read_rows(path)
    assert row.messages or row.text or row.segments
    line = f"| `{kind.name}` | `{kind.example}` | {kind.of} |\n"
    assert line in (PROJECT_ROOT / "docs" / "data.md").read_text(encoding="utf-8"), line


def test_every_row_format_of_conversations_has_an_example():
    assert {shape for shape, _, _ in SHAPED} == ROW_FORMATS.keys() - {"text", "segments"}


def test_plain_text_is_taken_as_it_stands_and_gets_no_system_prompt(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"text": " Once\n", "label": 1})
    assert read_rows(path, system_prompt="ours") == [Row((), f"{path}:1", text=" Once\n")]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_stand_beside_a_conversation(tools, tmp_path):
    (row,) = read_rows(
        write_rows(
            tmp_path / "a.jsonl", chat(turn("user", "q"), turn("assistant", "a"), tools=tools)
        )
    )
    assert row.tools == (TOOL,)
    for none in (None, [], "", "[]"):
        (row,) = read_rows(
            write_rows(tmp_path / "a.jsonl", {"question": "q", "answer": "a", "tools": none})
        )
        assert row.tools == ()


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ("text messages question answer", "messages"),
        ("conversations instruction output", "conversations"),
        ("instruction input output", "instruction"),
        ("prompt completion question answer", "prompt"),
        ("question answer text", "question"),
        ("system user assistant text", "user"),
        ("input target output", "target"),
        ("input output text", "input"),
    ],
)
def test_of_several_shapes_the_first_holds(keys, shape, tmp_path):
    assert (
        format_of(write_rows(tmp_path / "a.jsonl", dict.fromkeys(keys.split(), "x")), {}).name
        == shape
    )


def test_columns_say_what_a_file_calls_its_fields(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl",
        {"text": "t", "messages": "m", "problem": "q", "solution": "a", "persona": "s"},
    )
    columns = {"question": "problem", "answer": "solution", "system": "persona"}
    assert [row.messages for row in read_rows(path, columns)] == [(S, *QA)]
    turns = write_rows(
        tmp_path / "b.jsonl",
        {"dialogue": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    )
    assert [row.messages for row in read_rows(turns, {"conversations": "dialogue"})] == [QA]


def test_rows_of_token_ids_are_refused_with_what_to_write(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"input_ids": [1, 2], "labels": [-100, 2]})
    with pytest.raises(
        DataError, match=r"input_ids, labels; tokens are not read, .* as messages or"
    ):
        read_rows(path)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"question": "problm"}, "no column 'problm'.* problem, solution; did you mean problem"),
        ({"qestion": "problem"}, "'qestion'; did you mean question"),
        ({"xyz": "problem"}, "'xyz'; docs/data.md names the fields"),
        ({"question": "problem"}, "problem, solution besides {'question': 'problem'}"),
        ({"text": "problem", "answer": "solution"}, "problem, solution besides"),
        ({}, "DATA_COLUMNS='{question: problem, answer: solution}'"),
    ],
)  # fmt: skip
def test_columns_that_a_file_lacks_are_named_with_the_nearest(columns, words, tmp_path):
    with pytest.raises(DataError, match=words):
        format_of(write_rows(tmp_path / "a.jsonl", {"problem": "q", "solution": "a"}), columns)


def test_a_system_prompt_goes_before_rows_that_bring_none_or_before_all(tmp_path):
    own = chat(turn("system", "own"), turn("user", "q"), turn("assistant", "a"))
    path = write_rows(
        tmp_path / "a.jsonl",
        own,
        chat(turn("user", "q"), turn("assistant", "a")),
        chat(turn("user", "q"), turn("assistant", "a"), system="column"),
    )
    (chunk,), shape = read_chunks(path), format_of(path)

    def first(*how: Any) -> list[str]:
        return [
            row.messages[0].content
            for row in parse_rows(chunk, shape, SystemPrompt(*how))
            if isinstance(row, Row)
        ]

    assert first(None, False) == first("", False) == ["own", "q", "column"]
    assert first("ours", False) == ["own", "ours", "column"]
    assert first("ours", True) == ["ours", "ours", "ours"]
    assert first(None, True) == ["own", "q", "column"]


def test_a_shape_travels_to_other_processes(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"problem": "q", "answer": "a"}, {"problem": "q"})
    shape = format_of(path, {"question": "problem"})
    assert pickle.loads(pickle.dumps(shape)) == shape
    (chunk,) = read_chunks(path)
    assert list(parse_rows(pickle.loads(pickle.dumps(chunk)), shape)) == list(
        parse_rows(chunk, shape)
    )


CHAT = chat(turn("user"), turn("assistant"))
QUESTION = {"question": "q", "answer": "a"}
PROMPT = {"prompt": "q", "completion": "a"}
INSTRUCTION = {"instruction": "i", "input": "", "output": "o"}
SAID = said(("human", "q"), ("gpt", "a"))


def turns(*roles: str) -> dict[str, Any]:
    return chat(*(turn(role) for role in roles))


# A file's first row, and another whose reason is given.
BAD: list[tuple[dict[str, Any], Any, str]] = [
    (QUESTION, '{"question": "q", "answer": }', "not valid JSON: Expecting value at column 29"),
    (QUESTION, '{"question": "q", "answer": "a',
     "not valid JSON: Unterminated string starting at column 29"),
    (QUESTION, "[" * 100_000, "not valid JSON: nested too deeply"),
    (QUESTION, "1" * 5000, "not valid JSON: a number has too many digits"),
    (QUESTION, b'{"question": "\xff", "answer": "a"}',
     "not UTF-8 at byte 14; save the file as UTF-8"),
    (QUESTION, b'{"question": "q\0", "answer": "a"}', "not valid JSON: it holds NUL bytes"),
    (QUESTION, '{"question": "q", "question": "r", "answer": "a"}',
     "not valid JSON: the key 'question' stands twice in one object"),
    (QUESTION, '{"question": "q", "answer": NaN}', "answer is NaN, not a text"),
    (QUESTION, '{"question": "q", "answer": "a", "tools": [{"name": "f", "x": -Infinity}]}',
     "tools cannot be written as JSON"),
    (QUESTION, "[1]", "a row is a JSON object, not a list"),
    (QUESTION, '"text"', "a row is a JSON object, not a text"),
    (QUESTION, {"question": "q"}, "the keys are question; the rows of this file have"),
    (CHAT, QUESTION, "the keys are question, answer; the rows of this file have messages"),
    (QUESTION, {"question": "", "answer": "a"}, "question is empty"),
    (QUESTION, {"question": "q", "answer": " \n"}, "answer is empty"),
    (QUESTION, {"question": "\ud800", "answer": "a"}, "question holds half of a surrogate pair"),
    (QUESTION, {"question": "q\0", "answer": "a"}, "question holds a NUL character"),
    (QUESTION, {**QUESTION, "system": 3}, "system is 3, not a text"),
    (QUESTION, {**QUESTION, "tools": "x"},
     "tools is a text that is no JSON (not valid JSON: Expecting value at column 1): x"),
    (QUESTION, {**QUESTION, "tools": [1]}, "tools is [1], not a list of objects"),
    (PROMPT, {"prompt": "q", "completion": None}, "completion is null, not a text"),
    (PROMPT, {"prompt": [turn("user")], "completion": [turn("user")]},
     "completion[0], the last turn, is the user's; a row ends with an answer"),
    (INSTRUCTION, {"instruction": "i", "input": 5, "output": "o"}, "input is 5, not a text"),
    ({"text": "x"}, {"text": "\t"}, "text is empty"),
    (CHAT, chat(), "messages is [], not a list of turns"),
    (CHAT, {"messages": "hello"}, "messages is a text that is no JSON"),
    (CHAT, {"messages": [5]}, "messages[0] is 5, not an object"),
    (CHAT, {"messages": [{"speaker": "human", "value": "x"}]},
     "messages[0] is not an object with role and content; its keys are speaker, value"),
    (CHAT, turns("user", "robot"),
     "messages[1] has the role 'robot'; roles are system, developer, user, assistant, tool"),
    (CHAT, chat(turn("user"), {"role": "assistant"}), "messages[1].content is null, not a text"),
    (CHAT, chat(turn("user", [{"type": "text"}])),
     "messages[0].content[0] is null, not a text"),
    (CHAT, chat(turn("user", [{"type": "file", "file": "x"}])),
     'messages[0].content[0] is {"type": "file", "file": "x"}; models here take texts and images'),
    (CHAT, chat(turn("user"), turn("assistant", "")), "messages[1].content is empty"),
    (CHAT, chat(turn("user"), turn("assistant", reasoning=True)),
     "messages[1].reasoning is true, not a text"),
    (CHAT, chat(turn("user"), turn("assistant", tool_calls="f()")),
     "messages[1].tool_calls is a text that is no JSON"),
    (CHAT, chat(turn("user"), turn("assistant", tool_calls=[{"id": "1"}])),
     "messages[1].tool_calls[0] names no function"),
    (CHAT, chat(turn("user"), turn("assistant", tool_calls=[{"name": "f", "arguments": "[1]"}])),
     "messages[1].tool_calls[0].arguments is [1], not an object"),
    (CHAT,
     chat(turn("system"), turn("user"), turn("assistant"), system="s", tools=[], id=1),
     "a system column and a system message; keep one of them"),
    (CHAT, turns("user"),
     "messages[0], the last turn, is the user's; a row ends with an answer of the assistant"),
    (CHAT, turns("assistant"), "messages[0] answers nothing: no turn is the user's"),
    (CHAT, turns("assistant", "assistant", "user", "assistant"),
     "messages[1] is the second answer before the first question"),
    (CHAT, chat(turn("user"), turn("assistant", channel="analysis")),
     "messages[1] has reasoning and no answer"),
    (CHAT, turns("user", "tool", "assistant"),
     "messages[1] is a tool's answer, and the turn before it calls no tool"),
    (CHAT, chat(turn("user"), turn("assistant", tool_calls=[CALL]), turn("tool")),
     "messages[2], the last turn, is the tool's"),
    (SAID, said(("human", "q"), ("function_call", '{"name": "f", "arguments": "{\\"x\\": NaN}"}')),
     "conversations[1].value[0].arguments cannot be written as JSON"),
    (SAID, said(("human", "q"), ("function_call", "add(1)")),
     "conversations[1].value is a text that is no JSON"),
    (SAID, said(("human", "q"), ("function_call", "[]")),
     "conversations[1].value calls no function"),
]  # fmt: skip


def as_line(record: Any) -> bytes:
    return (
        record
        if isinstance(record, bytes)
        else (record if isinstance(record, str) else json.dumps(record)).encode()
    )


@pytest.mark.parametrize(("good", "bad", "reason"), BAD)
def test_a_bad_row_is_named_by_file_line_and_reason(good, bad, reason, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line(good) + b"\n\n" + as_line(bad) + b"\n" + as_line(good))
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:3: {reason}")
    assert error.value.exit_class == ExitClass.DATA
    (chunk,) = read_chunks(path)
    first, set_aside, last = parse_rows(chunk, format_of(path))
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert isinstance(set_aside, BadRow)
    assert set_aside.raw == as_line(bad).decode("utf-8", "backslashreplace")


def test_five_bad_rows_are_shown_and_the_others_counted(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", QUESTION, *[{}] * 8)
    with pytest.raises(DataError) as error:
        read_rows(path)
    *shown, more, remedy = str(error.value).splitlines()
    assert [line.split(": ")[0] for line in shown] == [f"{path}:{n}" for n in range(2, 7)]
    assert "3 more" in more and "DATA_ON_BAD_ROW=quarantine" in remedy
