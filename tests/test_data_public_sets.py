"""sft_play.data: public data sets whose columns need a setting load as their error says."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from record_files import contents, write_rows

from sft_play.config.loader import load
from sft_play.errors import DataError

Q, A = QA = ["Name a tree.", "An oak."]
ASKED, ANSWERED, WORSE = (
    [{"role": role, "content": text}]
    for role, text in (("user", Q), ("assistant", A), ("assistant", "A stone."))
)
SAID = [{"from": "human", "value": Q}]
HH = f"\n\nHuman: {Q}\n\nAssistant: {A}\n\nHuman: Why?\n\nAssistant: It is tall."
TURNS = {"data": {"turns": [*ASKED, *ANSWERED]}}
SETS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {  # a record, and the texts of its rows
    "squad": (
        {"title": "Park", "context": "An oak stands there.", "question": Q,
         "answers": {"text": ["An oak", "oak"], "answer_start": [0, 3]}},
        [[f"{Q}\n\nAn oak stands there.", "An oak"]]),
    "hh_rlhf": ({"chosen": HH, "rejected": HH.replace("tall", "a stone")},
                [[*QA, "Why?", "It is tall."]]),
    "ultrafeedback_binarized": (
        {"prompt": Q, "chosen": ASKED + ANSWERED, "rejected": ASKED + WORSE, "score_chosen": 8.5},
        [QA]),
    "orca_dpo_pairs": (
        {"system": "Be brief.", "question": Q, "chosen": A, "rejected": "A stone."},
        [["Be brief.", *QA]]),
    "trl_preference": ({"prompt": ASKED, "chosen": ANSWERED, "rejected": WORSE}, [QA]),
    "dpo_en_zh": (
        {"conversations": SAID, "chosen": {"from": "gpt", "value": A},
         "rejected": {"from": "gpt", "value": "A stone."}},
        [QA]),
    "self_instruct": (
        {"id": "seed_0", "instruction": Q,
         "instances": [{"input": "A park.", "output": A}, {"input": "A wood.", "output": "A fir."}]},
        [[f"{Q}\n\nA park.", A], [f"{Q}\n\nA wood.", "A fir."]]),
    "super_natural_instructions": (
        {"Definition": ["Name what is meant."],
         "Instances": [{"id": "1", "input": Q, "output": [A]},
                       {"id": "2", "input": "Why?", "output": ["It is tall."]}]},
        [[f"Name what is meant.\n\n{Q}", A], ["Name what is meant.\n\nWhy?", "It is tall."]]),
    "nested turns": (TURNS, [QA]),
}  # fmt: skip


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        contents(path)
    return str(error.value)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_public_set_loads_as_its_error_says(name, suffix, tmp_path):
    record, texts = SETS[name]
    path = write_rows(tmp_path / f"a.{suffix}", record, record)
    command = re.search(r"DATA_COLUMNS='[^']*'", refusal(path))
    variable, _, value = shlex.split(command[0])[0].partition("=")
    columns = load(None, {variable: value}).config.data.columns
    assert contents(path, columns) == texts * 2


def test_a_question_is_not_suggested_without_what_it_is_about(tmp_path):
    asked = {"question": "Which tree?", "answers": [{"text": "An oak."}, {"text": "Oak."}]}
    nested = {"title": "Park", "paragraphs": [{"context": "An oak.", "qas": [asked]}]}
    said = refusal(write_rows(tmp_path / "a.jsonl", nested))
    assert 'DATA_COLUMNS="{question: <column>, answer: <column>}"' in said


def test_no_text_of_turns_with_unknown_keys_is_suggested(tmp_path):
    unknown = [{"Speaker": "user", "Content": "Hi?"}, {"Speaker": "bot", "Content": "Hello."}]
    said = refusal(write_rows(tmp_path / "b.jsonl", {"Talk": unknown}))
    assert "no row format has these" in said and "text:" not in said


def test_two_columns_of_texts_are_suggested_by_their_position(tmp_path):
    path = tmp_path / "support.csv"
    lines = ["id,customer_message,agent_reply,score"]
    lines += [f"{n},My order {n} is late.,We look into it.,5" for n in range(3)]
    path.write_text("\n".join(lines))
    words = "DATA_COLUMNS='{question: customer_message, answer: agent_reply}'"
    assert words in refusal(path)
