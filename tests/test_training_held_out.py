"""The scores before training take a bounded time; those after it are of the same rows."""

import json
import time
from dataclasses import replace

import pytest
from marks import long
from rank_processes import train_on_two
from run_files import run_json

from sft_play.reporting.run_facts import RunFacts
from sft_play.training import held_out

ENDS = ("before.jsonl", "after.jsonl", "before.losses.jsonl", "after.losses.jsonl")


def score_few() -> None:
    """Prepare a rank: the least rows and answers are fewer than the tiny rows have."""
    held_out.LEAST_ROWS, held_out.LEAST_ANSWERS = 3, 1


def score_few_by_a_slow_clock() -> None:
    """Prepare a rank on a machine that seems to need 50 times as long."""
    score_few()
    clock = time.perf_counter
    time.perf_counter = lambda: 50 * clock()


SHORT = {
    "train.max_steps": 2,
    "train.eval_token_share": 0.01,
    "train.predict_with_generate": True,
    "train.eval_strategy": "steps",
    "train.eval_steps": 2,
}


@pytest.fixture
def few(train_run, monkeypatch):
    """A finished run that is too short to score all rows."""
    monkeypatch.setattr(held_out, "LEAST_ROWS", 3)
    monkeypatch.setattr(held_out, "LEAST_ANSWERS", 1)
    return train_run(SHORT)


def test_a_sample_is_scored_if_all_rows_have_too_many_tokens(few):
    log = (few.logs / "rank-0.log").read_text()
    for title in ("scores before and after training", "evaluations during training"):
        assert f"{title} use 3 of 6 rows and 1 of 4 answers: 0.01 of the training's tokens" in log
    assert "TRAIN_EVAL_TOKEN_SHARE=null scores all" in log
    metrics = run_json(few)["metrics"]
    assert metrics["before"]["rows"] == metrics["after"]["rows"] == 3
    lines = [(few.evaluation / name).read_text().splitlines() for name in ENDS]
    assert list(map(len, lines)) == [1, 1, 3, 3]
    before, after = ([json.loads(each)["origin"] for each in part] for part in lines[2:])
    assert before == after
    loss = RunFacts.read(few, few.read_report()).scores[0]
    assert loss.after.rows == 3


def test_all_rows_are_scored_without_a_limit(train_run, monkeypatch):
    monkeypatch.setattr(held_out, "LEAST_ROWS", 3)
    folder = train_run({**SHORT, "train.max_steps": 1, "train.eval_token_share": None})
    scored = run_json(folder)["metrics"]["after"]
    all_rows = folder.read_report().rows("validation")["samples"]
    assert (scored["rows"], scored["answers"]) == (all_rows, 4)
    assert "of the training's tokens" not in (folder.logs / "rank-0.log").read_text()


def test_a_run_that_resumes_in_its_folder_scores_the_rows_that_were_scored_before(
    plan_run, run_worker
):
    folder = plan_run({"train.max_steps": 1, "train.predict_with_generate": False})
    before = {"eval_loss": 9.0, "eval_loss_seconds": 1.0, "rows": 3}
    folder.write_report(replace(folder.read_report(), metrics={"before": before}))
    assert run_worker(folder) == 0
    assert run_json(folder)["metrics"]["after"]["rows"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", long("fsdp")])
def test_slow_ranks_score_the_rows_that_one_fast_process_scores(plan_run, few, strategy):
    folder = plan_run({**SHORT, "train.strategy": strategy}, num_gpus=2)
    train_on_two(folder, score_few_by_a_slow_clock)
    for name in ENDS[1::2]:
        files = [(each.evaluation / name).read_text().splitlines() for each in (few, folder)]
        one, two = ([json.loads(line)["origin"] for line in lines] for lines in files)
        assert one == two
