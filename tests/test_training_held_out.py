"""The scores before training take a bounded time; those after it are of the same rows."""

import json
import re
from dataclasses import replace

import pytest
from marks import long
from rank_processes import train_on_two
from run_files import run_json

from sft_play.reporting.run_facts import RunFacts
from sft_play.training import held_out

ENDS = ("before.jsonl", "after.jsonl", "before.losses.jsonl", "after.losses.jsonl")


@pytest.fixture
def hurried(train_run, monkeypatch):
    """A finished run in which no evaluation is free: its few steps leave time for some rows."""
    monkeypatch.setattr(held_out, "FREE_SECONDS", 0.0)
    budget = {"train.eval_time_budget": 0.01, "train.predict_with_generate": True}
    folder = train_run({"train.max_steps": 2, **budget})
    return folder


def test_a_sample_is_scored_before_and_after_training_if_all_rows_would_take_too_long(hurried):
    line = re.search(
        r"the scores before and after training use (\d+) of (\d+) held-out rows and (\d+) of 4 "
        r"answers: .*TRAIN_EVAL_TIME_BUDGET=null scores all",
        (hurried.logs / "rank-0.log").read_text(),
    )
    rows, all_rows, answers = map(int, line.groups())
    assert 1 <= rows < all_rows and answers < 4
    metrics = run_json(hurried)["metrics"]
    assert metrics["before"]["rows"] == metrics["after"]["rows"] == rows
    lines = [(hurried.evaluation / name).read_text().splitlines() for name in ENDS]
    assert list(map(len, lines)) == [answers, answers, rows, rows]
    before, after = ([json.loads(each)["origin"] for each in part] for part in lines[2:])
    assert before == after
    loss = RunFacts.read(hurried, hurried.read_report()).scores[0]
    assert loss.after.rows == rows


def test_all_rows_are_scored_without_a_budget(train_run, monkeypatch):
    monkeypatch.setattr(held_out, "FREE_SECONDS", 0.0)
    budget = {"train.eval_time_budget": None, "train.predict_with_generate": True}
    folder = train_run({"train.max_steps": 1, **budget})
    scored = run_json(folder)["metrics"]["after"]
    all_rows = folder.read_report().rows("validation")["samples"]
    assert (scored["rows"], scored["answers"]) == (all_rows, 4)
    assert "the scores before and after" not in (folder.logs / "rank-0.log").read_text()


def test_a_run_that_resumes_in_its_folder_scores_the_rows_that_were_scored_before(
    plan_run, run_worker
):
    folder = plan_run({"train.max_steps": 1, "train.predict_with_generate": False})
    before = {"eval_loss": 9.0, "eval_loss_seconds": 1.0, "rows": 3}
    folder.write_report(replace(folder.read_report(), metrics={"before": before}))
    assert run_worker(folder) == 0
    assert run_json(folder)["metrics"]["after"]["rows"] == 3


def leave_no_evaluation_free():
    """Prepare a rank."""
    held_out.FREE_SECONDS = 0.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", long("fsdp")])
def test_ranks_score_the_same_sample(plan_run, strategy):
    changes = {"train.max_steps": 2, "train.eval_time_budget": 0.01, "train.strategy": strategy}
    folder = plan_run(changes, num_gpus=2)
    train_on_two(folder, leave_no_evaluation_free)
    metrics = run_json(folder)["metrics"]
    rows = metrics["before"]["rows"]
    assert (
        1 <= rows == metrics["after"]["rows"] < folder.read_report().rows("validation")["samples"]
    )
    losses = (folder.evaluation / "after.losses.jsonl").read_text().splitlines()
    assert len({json.loads(line)["origin"] for line in losses}) == rows
