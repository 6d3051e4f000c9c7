"""sft_play.data: keys of rows and messages that are not used are named once for each source."""

from typing import Any

import pytest
from families import tokenizer
from record_files import run_data, write_rows
from renderings import CHATML

from sft_play.data.ledger import ledger_lines


def row(number: int) -> dict[str, Any]:
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


ROWS = [row(number) for number in range(10)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_ledger_names_what_is_not_used(name, tmp_path):
    path = tmp_path / name
    write_rows(path, *ROWS)
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
