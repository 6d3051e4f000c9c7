"""sft_play.data: keys that are not used are named, and nulls that a table filled in left out."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from families import tokenizer
from record_files import read_rows, read_tasks, run_data, write_rows
from renderings import CHATML

from sft_play.config.loader import load_merged
from sft_play.data.ledger import ledger_lines
from sft_play.data.row_parsing import NULL_ARGUMENTS, parse_record_rows, unused_notes
from sft_play.errors import DataError

Record = dict[str, Any]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def row(number: int) -> Record:
    """A row of which three columns and two keys of messages are not used."""
    question = {"role": "user", "content": f"q{number}", "id": 7}
    answer = {"role": "assistant", "content": "a", "prefix": True, "weight": 1, "refusal": None}
    return {
        "messages": [question, answer],
        "score": 0 if number < 8 else None,
        "split": "train",
        "source": "x",
        "tools": None,
        "note": "",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_ledger_names_what_is_not_used(name, tmp_path):
    path = write_rows(tmp_path / name, *map(row, range(10)))
    data = run_data(path, tokenizer(CHATML), val_size=0.1)
    unused = data.ledger.as_json()["sources"][0]["unused"]
    expected = {"score": 8, "split": 10, "source": 10, "messages[].prefix": 10, "messages[].id": 10}
    assert {key: unused[key] for key in expected} == expected
    notes = [
        f"{path}: messages[].prefix (10 rows) not used: the whole answer is trained",
        f"{path}: score (8 rows) not used: no row is chosen or left out by it",
        f"{path}: split (10 rows) not used: all rows are read; "
        "name files of their own in data.train_path and data.val_path",
        f"{path}: not used: messages[].id, source",
    ]
    if name == "a.jsonl":  # Arrow knows that a column is no null, not that its texts are empty
        assert unused == expected
        assert data.ledger.as_json()["notes"] == notes
        assert ledger_lines(data.ledger)[-4:] == notes


NAMING = CHATML.replace("m['content']", "(m.name + ': ' if m.name else '') + m['content']")


def named(number: int) -> Record:
    """A conversation of a named user, and of an answer with a name."""
    question = {"role": "user", "name": "Anna", "content": f"q{number}"}
    return {"messages": [question, {"role": "assistant", "name": "Ben", "content": "a"}]}


def test_a_name_that_the_template_does_not_write_is_counted_and_else_it_is_in_the_text(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", *map(named, range(10)))
    of_answers = f"{path}: messages[].name (10 rows) not used: of the assistant: no prompt has it"
    silent, writing = (run_data(path, tokenizer(each), val_size=0.1) for each in (CHATML, NAMING))
    of_answer, of_user = silent.ledger.notes
    assert of_answer.startswith(of_answers) and writing.ledger.notes == [of_answer]
    assert of_user.startswith(f"{path}: 10 rows: messages[].name of the user is in no token: ")
    with_name, without = (data.train[0].ids.size for data in (writing, silent))
    assert with_name > without


REFUSAL = "I cannot say that."


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "refusal": REFUSAL},
        {"content": "", "refusal": REFUSAL},
        {"refusal": REFUSAL},
        {"content": [{"type": "refusal", "refusal": REFUSAL}]},
    ],
)
def test_a_refusal_without_a_content_is_what_the_answer_says(answer, tmp_path):
    turns = [TURNS[0], {"role": "assistant", **answer}]
    path = write_rows(tmp_path / "a.jsonl", {"messages": turns}, *map(named, range(9)))
    assert read_rows(path)[0].messages[1].content == REFUSAL
    notes = run_data(path, tokenizer(NAMING), val_size=0.1).ledger.notes
    assert notes[1].startswith(f"{path}: 1 rows: an answer is the text in `refusal`")


def test_a_refusal_next_to_a_content_is_refused(tmp_path):
    turns = [TURNS[0], {**TURNS[1], "refusal": REFUSAL}]
    path = write_rows(tmp_path / "a.jsonl", {"messages": turns})
    with pytest.raises(DataError, match=r"messages\[1\] has a content and a refusal; keep one"):
        run_data(path, tokenizer(CHATML))


def unused_in(path: Path) -> Counter[str]:
    unused: Counter[str] = Counter()
    ((_, chunk, row_format),) = read_tasks(path)
    list(parse_record_rows(chunk, row_format, unused=unused))
    return unused


@pytest.mark.parametrize("record", [{"question": "q", "answer": "a"}, {"messages": TURNS}])
def test_a_column_that_may_be_reasoning_is_named_with_the_setting_that_trains_it(record, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {**record, "rationale": "I think."})
    (note,) = unused_notes(unused_in(path), "a.jsonl")
    columns = load_merged(
        None, {"DATA_COLUMNS": shlex.split(note.partition("DATA_COLUMNS=")[2])[0]}
    )
    (row,) = read_rows(path, columns.config.data.columns)
    assert [message.reasoning for message in row.messages] == [None, "I think."]


def test_keys_of_turns_that_are_json_texts_are_named_too(tmp_path):
    turns = [{**TURNS[0], "agent": "main"}, TURNS[1]]
    for value in (json.dumps(turns), list(map(json.dumps, turns))):
        path = write_rows(tmp_path / "a.jsonl", {"messages": value})
        assert unused_in(path) == {"messages[].agent": 1}


# Nulls


def called(arguments: Any) -> Record:
    """A row that calls a function of the arguments a and b."""
    properties = {"a": {"type": "string"}, "b": {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": [TURNS[0], {**TURNS[1], "tool_calls": [call]}], "tools": [tool]}


def arguments_of(path: Path) -> list[Any]:
    return [row.messages[-1].tool_calls[0]["function"]["arguments"] for row in read_rows(path)]


def test_a_key_that_no_row_of_a_table_has_a_value_for_was_meant(tmp_path):
    given = [{"a": "x", "b": None}, {"a": "y", "b": None}]
    path = tmp_path / "a.parquet"
    assert arguments_of(write_rows(path, *map(called, given))) == given
    given[0]["b"] = "z"
    write_rows(path, *map(called, given))
    assert arguments_of(path) == [{"a": "x", "b": "z"}, {"a": "y"}]


def test_rows_whose_calls_keep_a_null_are_counted(tmp_path):
    given = [{"a": "x", "b": None}, {"a": "x", "b": "y"}, {"a": "x", "c": None}]
    rows = [*map(called, given), {**called({"a": [{"d": None}]}), "tools": []}]
    unused = unused_in(write_rows(tmp_path / "a.jsonl", *rows))
    assert unused == {NULL_ARGUMENTS: 2}
    assert "jq -c 'del(..|nulls)' rows.jsonl" in unused_notes(unused, "a.jsonl")[0]
