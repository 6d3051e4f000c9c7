"""The inputs of the benchmarks."""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from inputs import alpaca_rows

from sft_play.data.shapes import read_all


def test_alpaca_rows_are_the_same_each_time(tmp_path):
    for turn in ("first", "second"):
        alpaca_rows(tmp_path / f"{turn}-alpaca.jsonl", tmp_path / f"{turn}-messages.jsonl", rows=50)
    for shape in ("alpaca", "messages"):
        assert (tmp_path / f"first-{shape}.jsonl").read_bytes() == (tmp_path / f"second-{shape}.jsonl").read_bytes()


def test_alpaca_rows_say_the_same_in_both_shapes(tmp_path):
    alpaca_rows(tmp_path / "alpaca.jsonl", tmp_path / "messages.jsonl", rows=50)
    said = [[row.messages for row in read_all(tmp_path / f"{shape}.jsonl")] for shape in ("alpaca", "messages")]
    assert said[0] == said[1]


def test_alpaca_rows_have_the_lengths_of_alpaca(tmp_path):
    alpaca_rows(tmp_path / "alpaca.jsonl", tmp_path / "messages.jsonl", rows=2000)
    rows = [json.loads(line) for line in (tmp_path / "alpaca.jsonl").read_text(encoding="utf-8").splitlines()]
    words = [len(row["output"].split()) for row in rows]
    assert 40 <= statistics.median(words) <= 60
    assert max(words) > 6 * statistics.median(words), "a long tail"
    assert 0.35 < sum(bool(row["input"]) for row in rows) / len(rows) < 0.45
