"""sft_play.data: keys of rows and messages that are not used are named once for each source."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from families import tokenizer
from record_files import read_rows
from renderings import CHATML

from sft_play.config.schema import Config
from sft_play.data.files import read_chunks
from sft_play.data.ledger import ledger_lines
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_detection import detect_format
from sft_play.data.row_parsing import parse_record_rows, unused_notes


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
def test_the_ledger_names_what_is_not_used(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    settings = {"train_path": str(path), "cache_dir": str(tmp_path / "cache"), "val_size": 0.1}
    config = Config.model_validate({"data": settings, "model": {"max_seq_len": 64}})
    data = build_run_data(config, tokenizer(CHATML))
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


def test_a_text_with_marked_turns_is_named_with_the_way_to_train_its_answers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"### Human: What is {n}?### Assistant: A number." for n in range(10)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    row_format = detect_format(path, {})
    unused: Counter[str] = Counter()
    (chunk,) = read_chunks(path)
    assert len(list(parse_record_rows(chunk, row_format, unused=unused))) == 10
    (note,) = unused_notes(unused, "a.jsonl")
    assert note == (
        "a.jsonl: Human: and Assistant: in the column text (10 rows) not used: every token is trained, "
        "also the questions'; to train the answers alone: DATA_COLUMNS='{messages: text}'"
    )
    rows = read_rows(path, {"messages": "text"})
    assert [message.content for message in rows[3].messages] == ["What is 3?", "A number."]
