"""sft_play.data: files as public data sets lay them out load as they are, or as their error says."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_files import read_rows

from sft_play.config.loader import load
from sft_play.data.rows import Row
from sft_play.errors import DataError

Records = list[dict[str, Any]]


class PublicSet(NamedTuple):
    """A few rows in the columns of a public set, and what is read of the first."""

    records: Records
    roles: str  # of the messages, by their first letters; "" for plain text
    words: tuple[str, ...]  # that the first row holds, in their order
    needs_setting: bool = False
    rows: int = 2


def said(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text, **more} for who, text in turns]}


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


ASKED = chat(("user", "Name a tree."), ("assistant", "An oak."))
WORSE = chat(("user", "Name a tree."), ("assistant", "A stone."))
HH = "\n\nHuman: Name a tree.\n\nAssistant: An oak.\n\nHuman: Why?\n\nAssistant: It is tall."
CALLS = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
TOOLS = '[{"name": "weather", "description": "Now", "parameters": {"city": {"type": "str"}}}]'
QA = ("Name a tree.", "An oak.")

SETS = {
    "alpaca": PublicSet(
        [{"instruction": QA[0], "input": "In a park.", "output": QA[1], "text": "Below is ..."}],
        "ua", ("Name a tree.\n\nIn a park.", "An oak.")),
    "code_alpaca": PublicSet([{"instruction": QA[0], "input": "", "output": QA[1]}], "ua", QA),
    "dolly": PublicSet(
        [{"instruction": QA[0], "context": "A park.", "response": QA[1], "category": "open_qa"}],
        "ua", ("Name a tree.\n\nA park.", "An oak.")),
    "oasst1_guanaco": PublicSet(
        [{"text": "### Human: Name a tree.### Assistant: An oak."}], "", QA),
    "sharegpt_vicuna": PublicSet(
        [{"id": "x_0", **said(("human", QA[0]), ("gpt", QA[1]))},
         {"id": "x_1", **said(("gpt", "And so on."), ("human", "Why?"), ("chatgpt", "So."))}],
        "ua", QA),
    "ultrachat": PublicSet([{"prompt": QA[0], "prompt_id": "ab", "messages": ASKED}], "ua", QA),
    "openorca": PublicSet(
        [{"id": "flan.1", "system_prompt": "Be brief.", "question": QA[0], "response": QA[1]},
         {"id": "flan.2", "system_prompt": "", "question": QA[0], "response": QA[1]}],
        "sua", ("Be brief.", *QA)),
    "slimorca": PublicSet(
        [{"conversations": [{"from": "system", "value": "Be brief.", "weight": None},
                            {"from": "human", "value": QA[0], "weight": 0},
                            {"from": "gpt", "value": QA[1], "weight": 1}]}],
        "sua", ("Be brief.", *QA)),
    "flan": PublicSet([{"inputs": QA[0], "targets": QA[1], "task": "trees"}], "ua", QA),
    "p3": PublicSet(
        [{"inputs": [3, 4], "inputs_pretokenized": QA[0], "targets": [5],
          "targets_pretokenized": QA[1]}], "ua", QA),
    "gsm8k": PublicSet([{"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}], "ua", ("2 +", "4")),
    "metamath": PublicSet(
        [{"type": "MATH", "query": QA[0], "original_question": "?", "response": QA[1]}], "ua", QA),
    "squad": PublicSet(
        [{"id": "5", "title": "Park", "context": "An oak stands there.", "question": QA[0],
          "answers": {"text": ["An oak", "oak"], "answer_start": [0, 3]}}],
        "ua", ("Name a tree.\n\nAn oak stands there.", "An oak"), needs_setting=True),
    "wizardlm": PublicSet([{"instruction": QA[0], "output": QA[1]}], "ua", QA),
    "wizardlm_v2": PublicSet(
        [{"idx": "a", **said(("human", QA[0]), ("gpt", QA[1]))}], "ua", QA),
    "lima": PublicSet([{"conversations": list(QA), "source": "x"}], "ua", QA),
    "openhermes": PublicSet(
        [{**said(("human", QA[0]), ("gpt", QA[1]), weight=None), "source": "x", "topic": None}],
        "ua", QA),
    "tulu3": PublicSet([{"id": "1", "messages": ASKED, "source": "x"}], "ua", QA),
    "no_robots": PublicSet(
        [{"prompt": QA[0], "prompt_id": "1", "messages": ASKED, "category": "Chat"}], "ua", QA),
    "capybara": PublicSet(
        [{"source": "x", "conversation": [{"input": QA[0], "output": QA[1]},
                                          {"input": "Why?", "output": "It is tall."}]}],
        "uaua", (*QA, "Why?", "It is tall.")),
    "lmsys_chat": PublicSet([{"conversation_id": "1", "conversation": ASKED}], "ua", QA),
    "hh_rlhf": PublicSet(
        [{"chosen": HH, "rejected": HH.replace("tall", "a stone")}],
        "uaua", (*QA, "Why?", "It is tall."), needs_setting=True),
    "ultrafeedback_binarized": PublicSet(
        [{"prompt": QA[0], "chosen": ASKED, "rejected": WORSE, "score_chosen": 8.5}],
        "ua", QA, needs_setting=True),
    "orca_dpo_pairs": PublicSet(
        [{"system": "Be brief.", "question": QA[0], "chosen": QA[1], "rejected": "A stone."}],
        "sua", ("Be brief.", *QA), needs_setting=True),
    "trl_preference": PublicSet(
        [{"prompt": ASKED[:1], "chosen": ASKED[1:], "rejected": WORSE[1:]}],
        "ua", QA, needs_setting=True),
    "dpo_en_zh": PublicSet(
        [{**said(("human", QA[0])), "chosen": {"from": "gpt", "value": QA[1]},
          "rejected": {"from": "gpt", "value": "A stone."}}],
        "ua", QA, needs_setting=True),
    "xlam": PublicSet(
        [{"id": 0, "query": "Is it warm in Oslo?", "answers": CALLS, "tools": TOOLS}],
        "ua", ("Is it warm in Oslo?", "")),
    "natural_instructions": PublicSet(
        [{"task_name": "trees", "definition": "Name one.", "inputs": QA[0], "targets": QA[1]}],
        "ua", QA),
    "self_instruct": PublicSet(
        [{"id": "seed_0", "instruction": "Name a tree.",
          "instances": [{"input": "A park.", "output": "An oak."},
                        {"input": "A wood.", "output": "A fir."}]}],
        "ua", ("Name a tree.\n\nA park.", "An oak."), needs_setting=True, rows=4),
    "super_natural_instructions": PublicSet(
        [{"Definition": ["Name what is meant."],
          "Instances": [{"id": "1", "input": QA[0], "output": [QA[1]]},
                        {"id": "2", "input": "Why?", "output": ["It is tall."]}]}],
        "ua", ("Name what is meant.\n\nName a tree.", "An oak."), needs_setting=True, rows=4),
    "tinystories": PublicSet([{"text": "Once there was an oak."}], "", ("Once", "oak.")),
    "numina_math": PublicSet(
        [{"problem": QA[0], "solution": QA[1]}], "ua", QA, needs_setting=True),
}  # fmt: skip


def write_jsonl(path: Path, records: Records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def as_typed(error: str) -> dict[str, str]:
    """The data.columns of the command that an error printed, read as a shell and we read it."""
    command = re.search(r"DATA_COLUMNS='[^']*'", error)
    assert command, error
    variable, _, value = shlex.split(command[0])[0].partition("=")
    return load(None, {variable: value}).config.data.columns


def rows_as_the_error_says(path: Path, needs_setting: bool) -> list[Row]:
    if not needs_setting:
        return read_rows(path)
    with pytest.raises(DataError) as error:
        read_rows(path)
    return read_rows(path, as_typed(str(error.value)))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_public_set_loads_as_it_is_or_as_its_error_says(
    name: str, suffix: str, tmp_path: Path
) -> None:
    known = SETS[name]
    records = known.records * 2 if len(known.records) == 1 else known.records
    path = tmp_path / f"{name}{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, records)
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    rows = rows_as_the_error_says(path, known.needs_setting)
    assert len(rows) == known.rows
    assert "".join(message.role[0] for message in rows[0].messages) == known.roles
    texts = [message.content for message in rows[0].messages] or [rows[0].text or ""]
    position = 0
    for word in known.words:
        position = "\n".join(texts).index(word, position)
    if known.roles:
        assert texts == list(known.words) or name == "gsm8k"


def test_calls_of_functions_are_read_as_calls(tmp_path: Path) -> None:
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", SETS["xlam"].records))
    (call,) = row.messages[-1].tool_calls
    assert call["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert [tool["function"]["name"] for tool in row.tools] == ["weather"]


def test_functions_and_function_calls_are_read_as_tools(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [
        {"role": "user", "content": "Is it warm in Oslo?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "12 degrees"},
        {"role": "assistant", "content": "It is mild."},
    ]
    record = {"messages": turns, "functions": [{"name": "weather", "parameters": {}}]}
    (row,) = read_rows(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Oslo"}
    (tool,) = row.tools
    assert tool == {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi", "rank": None},
         "each row is one message of a tree (message_id, parent_id), not a conversation"),
        ({"prompt": "Hi", "completion": "Hello.", "label": True},
         "label says which completions are good (KTO), and preference training is not here; "
         "to train on the good ones alone: jq -c 'select(.label)'"),
        ({"video": "1.mp4", **said(("human", "<video>\nWhat is it?"), ("gpt", "An oak."))},
         "the column video is of a video; texts and images alone are read: write its frames"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "1.mp4"}]}]},
         "messages[0].content[0] is a video"),
    ],
)  # fmt: skip
def test_rows_for_another_training_are_refused(
    record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        read_rows(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": "data.txt"}, "data.txt: nothing is there; data.columns names it as the text"),
        ({"text": "data.text.3"}, "data.text.3: nothing is there"),
        ({"text": "dta.text"}, "no column 'dta.text', which data.columns names as the text"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_is_named(
    columns: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"data": {"text": None}}])
    with pytest.raises(DataError) as error:
        read_rows(path, columns)
    assert words in str(error.value)


def test_a_question_is_not_suggested_without_what_it_is_about(tmp_path: Path) -> None:
    asked = {"question": "Which tree?", "answers": [{"text": "An oak."}, {"text": "Oak."}]}
    nested = {"title": "Park", "paragraphs": [{"context": "An oak.", "qas": [asked]}]}
    with pytest.raises(DataError) as error:
        read_rows(write_jsonl(tmp_path / "a.jsonl", [nested]))
    assert 'DATA_COLUMNS="{question: <column>, answer: <column>}"' in str(error.value)


TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


def test_nested_turns_are_suggested_whole_and_no_text_of_theirs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA_COLUMNS='\{messages: data.turns\}'"):
        read_rows(write_jsonl(tmp_path / "a.jsonl", [{"data": {"turns": TURNS}}]))
    unknown = [{"Speaker": "user", "Content": "Hi?"}, {"Speaker": "bot", "Content": "Hello."}]
    with pytest.raises(DataError, match=r"a row has messages, or") as error:
        read_rows(write_jsonl(tmp_path / "b.jsonl", [{"Talk": unknown}]))
    assert "text:" not in str(error.value)


def test_turns_may_be_an_object_of_lists_as_datasets_writes_a_sequence(tmp_path: Path) -> None:
    columns = {"role": ["user", "assistant"], "content": ["Hi?", "Hello."]}
    as_lists = read_rows(write_jsonl(tmp_path / "a.jsonl", [{"messages": columns}]))
    as_objects = read_rows(write_jsonl(tmp_path / "b.jsonl", [{"messages": TURNS}]))
    assert [row.messages for row in as_lists] == [row.messages for row in as_objects]
    uneven = {"messages": {**columns, "content": ["Hi?"]}}
    with pytest.raises(DataError, match="not a list of turns"):
        read_rows(write_jsonl(tmp_path / "c.jsonl", [uneven]))
