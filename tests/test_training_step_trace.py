"""TRAIN_PROFILE_STEPS: which steps the Chrome trace contains."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from sft_play.training.observers import StepTrace
from sft_play.training.state import Control, State


def train(trace: StepTrace, count: int, before: int = 0) -> None:
    """Call the callback as a run of `count` steps does; step N multiplies N x N matrices.

    `before` steps were trained before the run was resumed.
    """
    trace.on_train_begin()
    for step in range(1, count + 1):
        torch.ones(step, step) @ torch.ones(step, step)
        trace.on_step_end()
    trace.on_train_end(State(global_step=before + count), Control())


@pytest.mark.parametrize(("count", "recorded"), [(12, 3), (7, 2)], ids=["complete", "ended early"])
def test_the_trace_has_the_steps_from_the_sixth_on(tmp_path: Path, count: int, recorded: int):
    path = tmp_path / "profile" / "trace.json.gz"
    train(StepTrace(path, 3), count)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == recorded


@pytest.mark.parametrize(("count", "before", "needed"), [(4, 0, 8), (5, 0, 8), (5, 100, 108)])
def test_a_run_that_ends_before_the_sixth_step_warns(tmp_path, caplog, count, before, needed):
    train(StepTrace(tmp_path / "profile" / "trace.json.gz", 3), count, before)
    assert "train.profile_steps=3" in caplog.text and f"TRAIN_MAX_STEPS={needed}." in caplog.text
    assert not (tmp_path / "profile").exists()


def test_zero_steps_record_nothing(tmp_path):
    train(StepTrace(tmp_path / "profile" / "trace.json.gz", 0), 10)
    assert not (tmp_path / "profile").exists()
