"""sft_play.data: files as public data sets lay them out load as they are, or as their error says."""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from record_files import read_rows, write_rows

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
    "dolly": PublicSet(
        [{"instruction": QA[0], "context": "A park.", "response": QA[1], "category": "open_qa"}],
        "ua",
        ("Name a tree.\n\nA park.", "An oak."),
    ),
    "oasst1_guanaco": PublicSet(
        [{"text": "### Human: Name a tree.### Assistant: An oak."}], "", QA
    ),
    "sharegpt_vicuna": PublicSet(
        [
            {"id": "x_0", **said(("human", QA[0]), ("gpt", QA[1]))},
            {"id": "x_1", **said(("gpt", "And so on."), ("human", "Why?"), ("chatgpt", "So."))},
        ],
        "ua",
        QA,
    ),
    "openorca": PublicSet(
        [
            {"id": "flan.1", "system_prompt": "Be brief.", "question": QA[0], "response": QA[1]},
            {"id": "flan.2", "system_prompt": "", "question": QA[0], "response": QA[1]},
        ],
        "sua",
        ("Be brief.", *QA),
    ),
    "p3": PublicSet(
        [
            {
                "inputs": [3, 4],
                "inputs_pretokenized": QA[0],
                "targets": [5],
                "targets_pretokenized": QA[1],
            }
        ],
        "ua",
        QA,
    ),
    "squad": PublicSet(
        [
            {
                "id": "5",
                "title": "Park",
                "context": "An oak stands there.",
                "question": QA[0],
                "answers": {"text": ["An oak", "oak"], "answer_start": [0, 3]},
            }
        ],
        "ua",
        ("Name a tree.\n\nAn oak stands there.", "An oak"),
        needs_setting=True,
    ),
    "hh_rlhf": PublicSet(
        [{"chosen": HH, "rejected": HH.replace("tall", "a stone")}],
        "uaua",
        (*QA, "Why?", "It is tall."),
        needs_setting=True,
    ),
    "ultrafeedback_binarized": PublicSet(
        [{"prompt": QA[0], "chosen": ASKED, "rejected": WORSE, "score_chosen": 8.5}],
        "ua",
        QA,
        needs_setting=True,
    ),
    "orca_dpo_pairs": PublicSet(
        [{"system": "Be brief.", "question": QA[0], "chosen": QA[1], "rejected": "A stone."}],
        "sua",
        ("Be brief.", *QA),
        needs_setting=True,
    ),
    "trl_preference": PublicSet(
        [{"prompt": ASKED[:1], "chosen": ASKED[1:], "rejected": WORSE[1:]}],
        "ua",
        QA,
        needs_setting=True,
    ),
    "dpo_en_zh": PublicSet(
        [
            {
                **said(("human", QA[0])),
                "chosen": {"from": "gpt", "value": QA[1]},
                "rejected": {"from": "gpt", "value": "A stone."},
            }
        ],
        "ua",
        QA,
        needs_setting=True,
    ),
    "xlam": PublicSet(
        [{"id": 0, "query": "Is it warm in Oslo?", "answers": CALLS, "tools": TOOLS}],
        "ua",
        ("Is it warm in Oslo?", ""),
    ),
    "natural_instructions": PublicSet(
        [{"task_name": "trees", "definition": "Name one.", "inputs": QA[0], "targets": QA[1]}],
        "ua",
        QA,
    ),
    "self_instruct": PublicSet(
        [
            {
                "id": "seed_0",
                "instruction": "Name a tree.",
                "instances": [
                    {"input": "A park.", "output": "An oak."},
                    {"input": "A wood.", "output": "A fir."},
                ],
            }
        ],
        "ua",
        ("Name a tree.\n\nA park.", "An oak."),
        needs_setting=True,
        rows=4,
    ),
    "super_natural_instructions": PublicSet(
        [
            {
                "Definition": ["Name what is meant."],
                "Instances": [
                    {"id": "1", "input": QA[0], "output": [QA[1]]},
                    {"id": "2", "input": "Why?", "output": ["It is tall."]},
                ],
            }
        ],
        "ua",
        ("Name what is meant.\n\nName a tree.", "An oak."),
        needs_setting=True,
        rows=4,
    ),
}


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
def test_a_public_set_loads_as_it_is_or_as_its_error_says(name, suffix, tmp_path):
    known = SETS[name]
    records = known.records * 2 if len(known.records) == 1 else known.records
    path = tmp_path / f"{name}{suffix}"
    write_rows(path, *records)
    rows = rows_as_the_error_says(path, known.needs_setting)
    assert len(rows) == known.rows
    assert "".join(message.role[0] for message in rows[0].messages) == known.roles
    texts = [message.content for message in rows[0].messages] or [rows[0].text or ""]
    position = 0
    for word in known.words:
        position = "\n".join(texts).index(word, position)
    if known.roles:
        assert texts == list(known.words) or name == "gsm8k"


def test_functions_and_function_calls_are_read_as_tools(tmp_path):
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [
        {"role": "user", "content": "Is it warm in Oslo?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "12 degrees"},
        {"role": "assistant", "content": "It is mild."},
    ]
    record = {"messages": turns, "functions": [{"name": "weather", "parameters": {}}]}
    (row,) = read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Oslo"}
    (tool,) = row.tools
    assert tool == {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi", "rank": None},
         "message_id, parent_id"),
        ({"prompt": "Hi", "completion": "Hello.", "label": True},
         "jq -c 'select(.label)'"),
        ({"video": "1.mp4", **said(("human", "<video>\nWhat is it?"), ("gpt", "An oak."))},
         "column video"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "1.mp4"}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_rows_for_another_training_are_refused(record, words, tmp_path):
    with pytest.raises(DataError) as error:
        read_rows(write_rows(tmp_path / "a.jsonl", record))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": "data.txt"}, "data.txt: nothing is there; data.columns names it as the text"),
        ({"text": "data.text.3"}, "data.text.3: nothing is there"),
        ({"text": "dta.text"}, "no column 'dta.text', which data.columns names as the text"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_is_named(columns, words, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"data": {"text": None}})
    with pytest.raises(DataError) as error:
        read_rows(path, columns)
    assert words in str(error.value)


def test_a_question_is_not_suggested_without_what_it_is_about(tmp_path):
    asked = {"question": "Which tree?", "answers": [{"text": "An oak."}, {"text": "Oak."}]}
    nested = {"title": "Park", "paragraphs": [{"context": "An oak.", "qas": [asked]}]}
    with pytest.raises(DataError) as error:
        read_rows(write_rows(tmp_path / "a.jsonl", nested))
    assert 'DATA_COLUMNS="{question: <column>, answer: <column>}"' in str(error.value)


TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]


def test_nested_turns_are_suggested_whole_and_no_text_of_theirs(tmp_path):
    with pytest.raises(DataError, match=r"DATA_COLUMNS='\{messages: data.turns\}'"):
        read_rows(write_rows(tmp_path / "a.jsonl", {"data": {"turns": TURNS}}))
    unknown = [{"Speaker": "user", "Content": "Hi?"}, {"Speaker": "bot", "Content": "Hello."}]
    with pytest.raises(DataError, match=r"no row format has these") as error:
        read_rows(write_rows(tmp_path / "b.jsonl", {"Talk": unknown}))
    assert "text:" not in str(error.value)


def test_turns_may_be_an_object_of_lists_as_datasets_writes_a_sequence(tmp_path):
    columns = {"role": ["user", "assistant"], "content": ["Hi?", "Hello."]}
    as_lists = read_rows(write_rows(tmp_path / "a.jsonl", {"messages": columns}))
    as_objects = read_rows(write_rows(tmp_path / "b.jsonl", {"messages": TURNS}))
    assert [row.messages for row in as_lists] == [row.messages for row in as_objects]
    uneven = {"messages": {**columns, "content": ["Hi?"]}}
    with pytest.raises(DataError, match="not a list of turns"):
        read_rows(write_rows(tmp_path / "c.jsonl", uneven))


def test_two_columns_of_texts_are_suggested_by_their_position(tmp_path):
    path = tmp_path / "support.csv"
    lines = ["id,customer_message,agent_reply,score"]
    lines += [f"{n},My order {n} is late.,We look into it.,5" for n in range(3)]
    path.write_text("\n".join(lines))
    words = "DATA_COLUMNS='{question: customer_message, answer: agent_reply}'"
    with pytest.raises(DataError, match=words):
        read_rows(path)
