"""sft_play.data.row_formats: conversations in one text, as chat templates wrote them, or people."""

import re
from pathlib import Path

import pytest
from families import tokenizer
from record_files import cases, run_data, write_rows
from renderings import CHATML

from sft_play.data.row_formats import find_style

MARKED = {case["case"]: case["record"]["messages"] for case in cases("rows", "marked: ")}


@pytest.mark.parametrize("name", MARKED)
def test_a_text_with_the_marks_of_turns_has_a_style(name):
    assert find_style(MARKED[name])


@pytest.mark.parametrize(
    "text",
    [
        "A story of the USER: and of no one else.",
        "How ChatML looks: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>",
        "### Response:\nAn oak.",
        "<|im_start|>user\nName a tree.<|im_end|>\n",
        "<|im_start|>user\nName a tree.<|im_end|>\n<|im_start|>assistant\n",
        f"{'A long text. ' * 100} USER: Why? ASSISTANT: So.",
        '[{"role": "user", "content": "Say USER: Why? ASSISTANT: So."}]',
    ],
)
def test_a_text_that_is_no_answered_conversation_is_a_text(text):
    assert not find_style(text)


def notes_and_labels(path: Path, **data: object) -> tuple[list[str], list[str]]:
    """Return the notes of a run, and what its first rows train."""
    val = path.with_name("val.jsonl")
    write_rows(val, {"question": "Why?", "answer": "So."})
    tok = tokenizer(CHATML)
    run = run_data(path, tok, 512, val_path=str(val), **data)
    trained = [
        tok.decode([label for label in run.train[index].labels.tolist() if label >= 0])
        for index in range(len(run.train))
    ]
    return run.ledger.as_json()["notes"], trained


@pytest.mark.parametrize(
    ("name", "column"), [("marked: phi4", "formatted"), *((name, "text") for name in MARKED)]
)
def test_a_run_names_the_setting_that_trains_the_answers_alone_and_it_does(name, column, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{column: MARKED[name].replace("a tree", f"{n} trees")} for n in range(8)]
    write_rows(path, *rows)
    (note,), _ = notes_and_labels(path, columns={"text": column})
    assert "(8 rows) not used: every token is trained, also the questions'" in note
    setting = re.search(r"DATA_COLUMNS='\{(\w+): (\w+)\}'", note)
    notes, trained = notes_and_labels(path, columns={setting[1]: setting[2]})
    assert not notes and trained == ["An oak.<|im_end|>"] * 8
