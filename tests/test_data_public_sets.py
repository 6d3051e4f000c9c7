"""sft_play.data: public data sets whose columns need a setting load as their error says."""

import re
import shlex
from pathlib import Path

import pytest
from record_files import cases, contents, write_rows

from sft_play.config.loader import load_merged
from sft_play.errors import DataError


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        contents(path)
    return str(error.value)


@pytest.mark.parametrize("case", cases("public_sets"), ids=lambda case: case["case"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_public_set_loads_as_its_error_says(case, suffix, tmp_path):
    path = write_rows(tmp_path / f"a.{suffix}", case["record"], case["record"])
    command = re.search(r"DATA_COLUMNS='[^']*'", refusal(path))
    variable, _, value = shlex.split(command[0])[0].partition("=")
    columns = load_merged(None, {variable: value}).config.data.columns
    assert contents(path, columns) == case["texts"] * 2


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
