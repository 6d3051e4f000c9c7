"""Weighted rows, and a run that continues from an adapter, on a GPU by the command that a user types."""

import json
from pathlib import Path
from typing import Any

import pytest
from make_runs import check_losses, losses, run_make

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = [1, 0.1, None, 0.5]  # of the rows by turns


def write_rows(path: Path, weights: list[float | None]) -> None:
    rows = (ROOT / "data" / "desk" / "train.jsonl").read_text().splitlines()[:192]
    with path.open("w") as file:
        for number, row in enumerate(rows):
            weighted = {**json.loads(row), "weight": weights[number % len(weights)]}
            file.write(json.dumps(weighted) + "\n")


def train(folder: Path, mode: str, weights: list[float | None], **variables: str) -> dict[str, Any]:
    """Run make train on rows that have these weights; return its run.json."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", weights)
    settings = {
        "CONFIG": "configs/tiny.yaml",
        "TUNING_MODE": mode,
        "DATA_TRAIN_PATH": str(folder / "rows.jsonl"),
        "TRAIN_MAX_STEPS": "6",
        "TRAIN_LEARNING_RATE": "3e-3",
        "TRAIN_LOGGING_STEPS": "1",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        **variables,
    }
    run_make("train", folder, 300, **settings)
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_weights_count_as_in_plain_torch_and_an_adapter_goes_on(mode, tmp_path):
    fast = train(tmp_path / "fast", mode, WEIGHTS)
    plain = train(tmp_path / "plain", mode, WEIGHTS, TRAIN_FAST_PATH="false")
    other = train(tmp_path / "other", mode, [None])
    assert "loss" in fast["fast_path"]["on"] and not plain["fast_path"]["on"]
    assert losses(fast)[0] == pytest.approx(losses(plain)[0], rel=1e-3)
    check_losses(losses(fast), losses(plain), rounding=5e-3)
    apart = [abs(a - b) / a for a, b in zip(losses(fast), losses(other), strict=True)]
    assert max(apart) > 0.02

    then = train(tmp_path / "then", mode, [None], MODEL_ADAPTER=str(tmp_path / "fast" / "run"))
    before, after = (then["metrics"][when]["eval_loss"] for when in ("before", "after"))
    assert before == pytest.approx(fast["metrics"]["after"]["eval_loss"], rel=2e-3)
    assert after < before
