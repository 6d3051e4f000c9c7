"""sft_play.data: the turns that programs and public sets write become the messages that they mean."""

import json
import shlex
from collections import Counter
from typing import Any

import pytest
from record_files import format_of, read_rows, write_rows

from sft_play.config.loader import load
from sft_play.data.files import read_chunks
from sft_play.data.row_parsing import parse_record_rows, unused_notes
from sft_play.data.rows import Message

Record = dict[str, Any]
Q = Message("user", "q")
A = Message("assistant", "a")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL_TEXT = '{"name": "add", "arguments": {"a": 1}}'
CALLED = Message("assistant", "", tool_calls=(CALL,))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USE = {"id": "t1", **CALL}


def chat(*turns: tuple[str, Any], **more: Any) -> Record:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def said(*turns: tuple[str, Any], **more: Any) -> Record:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def harmony(channel: str, content: str, **more: Any) -> Record:
    return {"role": "assistant", "channel": channel, "content": content, **more}


ANTHROPIC_TOOL = {"name": "add", "description": "d", "input_schema": {"type": "object"}}
READ = {
    "words before a call": (
        said(("human", "q"), ("gpt", "I add."), ("function_call", CALL_TEXT),
             ("observation", "1"), ("gpt", "a")),
        [Q, Message("assistant", "I add.", tool_calls=(CALL,)), Message("tool", "1"), A]),
    "a thought and words before a call in one text": (
        said(("human", "q"), ("function_call", f"<think>So.</think>I add: {CALL_TEXT}")),
        [Q, Message("assistant", "I add:", "So.", (CALL,))]),
    "several calls in one turn": (
        said(("human", "q"), ("function_call", f"[{CALL_TEXT}, {CALL_TEXT}]")),
        [Q, Message("assistant", "", tool_calls=(CALL, CALL))]),
    "several calls in turns of their own": (
        said(("human", "q"), ("function_call", CALL_TEXT), ("function_call", CALL_TEXT),
             ("observation", "1"), ("observation", "2"), ("gpt", "a")),
        [Q, Message("assistant", "", tool_calls=(CALL, CALL)), Message("tool", "1"),
         Message("tool", "2"), A]),
    "ms-swift's roles": (
        chat(("user", "q"), ("tool_call", CALL_TEXT), ("tool_response", "1"), ("assistant", "a")),
        [Q, CALLED, Message("tool", "1"), A]),
    "a call in marks": (
        chat(("user", "q"), ("tool_call", f"<tool_call>\n{CALL_TEXT}\n</tool_call>")), [Q, CALLED]),
    "other names of roles": (
        chat(("Human", "q"), ("AI", "a"), ("prompter", "q"), ("bot", "a")), [Q, A, Q, A]),
    "results by other names": (
        chat(("user", "q"), ("tool_call", CALL_TEXT), ("environment", "1"), ("ipython", "2"),
             ("tool_result", "3"), ("model", "a")),
        [Q, CALLED, *(Message("tool", text) for text in "123"), A]),
    "turns of one role, and a system message between": (
        chat(("user", "q"), ("user", "q"), ("system", "s"), ("assistant", "a"), ("assistant", "a")),
        [Q, Q, Message("system", "s"), A, A]),
    "a user's turn after a tool's": (
        chat(("user", "q"), ("tool_call", CALL_TEXT), ("tool", "1"), ("user", "q"),
             ("assistant", "a")),
        [Q, CALLED, Message("tool", "1"), Q, A]),
    "pairs": ({"messages": [["q", "a"], ["q", "a"]]}, [Q, A, Q, A]),
    "Harmony's channels": (
        {"messages": [{"role": "user", "content": "q"}, harmony("analysis", "So."),
                      harmony("commentary", '{"a": 1}', recipient="functions.add"),
                      {"role": "tool", "name": "functions.add", "content": "1"},
                      harmony("analysis", "Then."), harmony("commentary", "I am done."),
                      harmony("final", "a")]},
        [Q, Message("assistant", "", "So.", (CALL,)), Message("tool", "1", name="add"),
         Message("assistant", "I am done.\n\na", "Then.")]),
    "OLMo's calls": (
        {"messages": [{"role": "user", "content": "q", "function_calls": None},
                      {"role": "assistant", "content": None, "function_calls": "add(a=1)\nadd(a=1)"},
                      {"role": "environment", "content": "1"},
                      {"role": "assistant", "content": "a"}]},
        [Q, Message("assistant", "", tool_calls=(CALL, CALL)), Message("tool", "1"), A]),
    "arguments by other names": (
        {"messages": [{"role": "user", "content": "q"},
                      {"role": "assistant", "tool_calls": [{"name": "add", "parameters": {"a": 1}}]}]},
        [Q, CALLED]),
    "Anthropic's blocks": (
        {"system": [{"type": "text", "text": "s"}],
         "messages": [{"role": "user", "content": "q"},
                      {"role": "assistant", "content": [
                          {"type": "thinking", "thinking": "So.", "signature": "x"},
                          {"type": "text", "text": "I add."},
                          {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
                      {"role": "user", "content": [
                          {"type": "tool_result", "tool_use_id": "t1",
                           "content": [{"type": "text", "text": "1"}]},
                          {"type": "text", "text": "q"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
        [Message("system", "s"), Q, Message("assistant", "I add.", "So.", (USE,)),
         Message("tool", "1", tool_call_id="t1"), Q, A]),
    "Bedrock's blocks": (
        {"system": [{"text": "s"}],
         "messages": [{"role": "user", "content": [{"text": "q"}]},
                      {"role": "assistant", "content": [
                          {"reasoningContent": {"reasoningText": {"text": "So."}}},
                          {"toolUse": {"toolUseId": "t1", "name": "add", "input": {"a": 1}}}]},
                      {"role": "user", "content": [
                          {"toolResult": {"toolUseId": "t1", "content": [{"json": {"b": 1}}]}}]},
                      {"role": "assistant", "content": [{"text": "a"}]}]},
        [Message("system", "s"), Q, Message("assistant", "", "So.", (USE,)),
         Message("tool", '{"b": 1}', tool_call_id="t1"), A]),
    "Gemini's parts": (
        {"systemInstruction": {"parts": [{"text": "s"}]},
         "contents": [{"role": "user", "parts": [{"text": "q"}]},
                      {"role": "model", "parts": [{"text": "So.", "thought": True},
                                                  {"functionCall": {"name": "add", "args": {"a": 1}}}]},
                      {"role": "user", "parts": [
                          {"functionResponse": {"name": "add", "response": {"b": 1}}}]},
                      {"role": "model", "parts": [{"text": "a"}]}]},
        [Message("system", "s"), Q, Message("assistant", "", "So.", (CALL,)),
         Message("tool", '{"b": 1}', name="add"), A]),
    "Mistral's thinking": (
        chat(("user", "q"),
             ("assistant", [{"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
                            {"type": "text", "text": "a"}])),
        [Q, Message("assistant", "a", "So.")]),
    "SWE agents": (
        {"trajectory": [{"role": "system", "system_prompt": "s", "text": "", "mask": False},
                        {"role": "user", "text": "q", "mask": False},
                        {"role": "ai", "text": "a", "mask": False}]},
        [Message("system", "s"), Q, A]),
    "LLaMA-Factory's history": (
        {"instruction": "q", "input": "", "output": "a", "history": [["p", "b"], ["r", "c"]]},
        [Message("user", "p"), Message("assistant", "b"), Message("user", "r"),
         Message("assistant", "c"), Q, A]),
    "a history of objects": (
        {"instruction": "q", "output": "a", "history": [{"user": "p", "assistant": "b"}]},
        [Message("user", "p"), Message("assistant", "b"), Q, A]),
    "a history of turns": (
        {"prompt": "q", "response": "a",
         "chat_history": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "b"}]},
        [Message("user", "p"), Message("assistant", "b"), Q, A]),
    "objects of a question and its answer": (
        {"conversations": [{"human": "q", "assistant": "a"}, {"human": "q", "assistant": "a"}]},
        [Q, A, Q, A]),
    "turns beside an answer": (
        {"input": [{"role": "user", "content": "q"}], "output": "a", "reasoning": "off"}, [Q, A]),
    "an empty history": ({"instruction": "q", "output": "a", "history": []}, [Q, A]),
    "medical-o1's reasoning": (
        {"Question": "q", "Complex_CoT": "I think.", "Response": "a"},
        [Q, Message("assistant", "a", "I think.")]),
    "reasoning beside turns": (
        {"prompt": [{"role": "user", "content": "q"}], "thinking": "I think.", "completion": "a"},
        [Q, Message("assistant", "a", "I think.")]),
    "reasoning beside messages": (
        chat(("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a"),
             reasoning="I think."),
        [Q, A, Q, Message("assistant", "a", "I think.")]),
    "reasoning beside calls": (
        {"query": "q", "tools": [], "answers": CALL_TEXT, "thinking": "I think."},
        [Q, Message("assistant", "", "I think.", (CALL,))]),
    "reasoning that the answer has, too": (
        {"instruction": "q", "reasoning": "I think.", "output": "<think>I think.</think>a"},
        [Q, Message("assistant", "<think>I think.</think>a")]),
    "a switch by the name of reasoning": (
        {"question": "q", "reasoning": "on", "answer": "a"}, [Q, A]),
    "a system column that the messages repeat": (
        chat(("system", "s"), ("user", "q"), ("assistant", "a"), system="s"),
        [Message("system", "s"), Q, A]),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_shape_of_turns_is_read_as_its_messages(name, tmp_path):
    record, messages = READ[name]
    (row,) = read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert row.messages == tuple(messages)


FLAT = TOOL["function"]
TOOLS = {
    "flat": [FLAT],
    "flat with a type": [{"type": "function", **FLAT}],
    "without a type": [{"function": FLAT}],
    "one alone": FLAT,
    "texts": [json.dumps(FLAT)],
    "a text": json.dumps([FLAT]),
    "Anthropic's": [{"name": "add", "input_schema": FLAT["parameters"]}],
    "Bedrock's": [{"toolSpec": {"name": "add", "inputSchema": {"json": FLAT["parameters"]}}}],
    "Gemini's": [{"functionDeclarations": [FLAT]}],
    "filled by a table": [{**TOOL, "function": {**FLAT, "strict": None, "default": None}}],
}


@pytest.mark.parametrize("column", ["tools", "functions", "available_tools", "Tools"])
@pytest.mark.parametrize("name", TOOLS)
def test_every_way_to_write_a_tool_is_openais(name, column, tmp_path):
    record = chat(("user", "q"), ("assistant", "a"), **{column: TOOLS[name]})
    (row,) = read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert row.tools == (TOOL,)
    assert list(row.tools[0]) == ["type", "function"]


def test_tools_of_the_system_message_are_those_of_the_row(tmp_path):
    record = chat(("system", "s"), ("user", "q"), ("assistant", "a"))
    record["messages"][0]["functions"] = json.dumps([FLAT])
    (row,) = read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert row.tools == (TOOL,)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "q", "answer": "<think>So.</think>a", "reasoning": "Other."},
         "reasoning beside an answer with other reasoning; keep one of them"),
        ({"messages": [{"role": "user", "content": "q"},
                       {"role": "assistant", "content": "", "function_calls": "add(1)"}]},
         "messages[1].function_calls is add(1), not calls such as weather(city='Oslo'); "
         "write them as tool_calls"),
        ({"messages": [["q", "a", "b"]]}, "not a list of pairs of texts"),
        ({"system": "s", "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>"},
         "DATA_TRAIN_PATH=hiyouga/glaive-function-calling-v2-sharegpt"),
        ({"message_tree_id": "1", "prompt": {"text": "q", "role": "prompter", "replies": []}},
         "each row is a tree of messages (message_id, parent_id)"),
        (chat(("user", "q"), ("assistant", "a"), tools={"add": FLAT}),
         "which names no function; a tool is {'type': 'function'"),
        (chat(("user", "q"), ("assistant", [{"type": "redacted_thinking", "data": "x"}])),
         'messages[1].content[0] is {"type": "redacted_thinking", "data": "x"}; models here'),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(record, words, tmp_path):
    with pytest.raises(ValueError) as error:
        read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "record", [{"question": "q", "answer": "a"}, chat(("user", "q"), ("assistant", "a"))]
)
def test_a_column_that_may_be_reasoning_is_named_with_the_setting_that_trains_it(record, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {**record, "rationale": "I think."})
    unused: Counter[str] = Counter()
    (chunk,) = read_chunks(path)
    list(parse_record_rows(chunk, format_of(path), unused=unused))
    (note,) = unused_notes(unused, "a.jsonl")
    columns = load(None, {"DATA_COLUMNS": shlex.split(note.partition("DATA_COLUMNS=")[2])[0]})
    (row,) = read_rows(path, columns.config.data.columns)
    assert row.messages == (Q, Message("assistant", "a", "I think."))


def test_keys_of_turns_that_are_json_texts_are_named_too(tmp_path):
    turns = [
        {"role": "user", "content": "q", "agent": "main"},
        {"role": "assistant", "content": "a"},
    ]
    for number, value in enumerate((json.dumps(turns), list(map(json.dumps, turns)))):
        path = write_rows(tmp_path / f"{number}.jsonl", {"messages": value})
        unused: Counter[str] = Counter()
        (chunk,) = read_chunks(path)
        list(parse_record_rows(chunk, format_of(path), unused=unused))
        assert unused == {"messages[].agent": 1}
