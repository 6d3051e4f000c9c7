"""The best checkpoint: which one it is, early stopping, its weights at the end; the time budget."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults.files import flip
from run_files import run_json
from safetensors.torch import load_file

from sft_play.errors import ExitClass
from sft_play.evaluation.evaluator import EvaluationStopped
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training import worker
from sft_play.training.best import best_step, evaluations_since_best

HISTORY = [
    {"step": 1, "loss": 3.0},
    {"step": 1, "eval_loss": 2.0, "eval_rougeL": 0.5},
    {"step": 2, "eval_loss": 1.0, "eval_rougeL": 0.7},
    {"step": 3, "eval_loss": float("nan"), "eval_rougeL": 0.7},
    {"step": 4, "eval_loss": 1.5, "eval_rougeL": 0.6},
]


@pytest.mark.parametrize("metric, step, since", [("eval_loss", 2, 1), ("eval_rougeL", 2, 2)])
def test_the_best_step_is_the_first_with_the_best_score(metric, step, since):
    assert best_step(HISTORY, metric) == step
    assert evaluations_since_best(HISTORY, metric) == since
    assert best_step([], metric) is None and evaluations_since_best([], metric) == 0


@pytest.fixture(scope="module")
def worsened(train_run, taught_base):
    """A run from a good base that only gets worse: it ends early, with its first weights."""
    folder = train_run(
        {
            "model.name": taught_base,
            "train.max_steps": 8,
            "train.learning_rate": 0.01,
            "train.eval_strategy": "steps",
            "train.eval_steps": 1,
            "train.save_strategy": "steps",
            "train.save_steps": 1,
            "train.predict_with_generate": True,
            "train.metrics": "exact_match",
            "train.early_stopping_patience": 2,
            "train.load_best_model_at_end": True,
            "train.generation_max_new_tokens": 4,
        }
    )
    return folder


def test_training_ends_early_and_saves_the_best_weights(worsened):
    report = run_json(worsened)
    best = report["best"]
    assert best["metric"] == "eval_loss" and best["step"] < report["global_step"] < 8
    assert report["global_step"] == best["step"] + 2
    log = (worsened.path / "logs" / "rank-0.log").read_text()
    assert f"early stopping at step {report['global_step']} of 8: eval_loss was best" in log
    assert f"best step={best['step']} eval_loss={best['value']:.4f}: its weights are scored" in log
    saved = load_file(worsened.weights("lora") / "adapter_model.safetensors")
    name = "adapter_model.safetensors"
    kept = load_file(worsened.checkpoints / f"checkpoint-{best['step']}" / name)
    last = load_file(worsened.checkpoints / f"checkpoint-{report['global_step']}" / name)
    assert all(torch.equal(saved[key], kept[key]) for key in kept)
    assert not all(torch.equal(saved[key], last[key]) for key in last)
    after = report["metrics"]["after"]
    assert after["eval_loss"] == pytest.approx(best["value"]), "these rows are validated, too"
    assert after["exact_match"] == 0.25


def test_a_run_that_had_ended_early_takes_no_step_more_when_it_is_resumed(
    worsened, run_worker, tmp_path, monkeypatch
):
    again = RunFolder(shutil.copytree(worsened.path, tmp_path / "run"))
    shutil.rmtree(again.weights("lora"))
    planned = PlannedRun.read(again)
    changed = {"resume_from": str(again.path), "output_dir": str(tmp_path)}
    train = planned.config.train.model_copy(update=changed)
    replace(planned, config=planned.config.model_copy(update={"train": train})).write(again)
    whole = run_json(worsened)

    def stopped(*_):
        raise EvaluationStopped

    with monkeypatch.context() as changed:  # told to stop while it is scored at its end
        changed.setattr(worker.HeldOutEvaluation, "score", stopped)
        assert run_worker(again) == ExitClass.STOPPED
    assert run_json(again)["global_step"] == whole["global_step"]
    assert run_worker(again) == 0, run_json(again)["cause"]
    report = run_json(again)
    assert (report["global_step"], report["best"]) == (whole["global_step"], whole["best"])
    log = (again.logs / "rank-0.log").read_text()
    assert f"early stopping at step {whole['global_step']} of 8" in log
    name = "adapter_model.safetensors"
    published = (again.weights("lora") / name).read_bytes()
    assert published == (worsened.weights("lora") / name).read_bytes()


def test_the_answers_of_a_run_have_the_scores_that_were_asked_for(worsened):
    lines = (worsened.evaluation / "after.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["exact_match"] for line in lines) == [0, 0, 0, 1]


@pytest.mark.long
def test_a_best_checkpoint_that_is_damaged_is_named_and_the_last_weights_are_saved(
    train_run, worsened, monkeypatch
):
    asked = worsened.read_config().train
    take = worker.take_best

    def damaged(engine, state, train):
        flip(Path(engine.args.output_dir) / "checkpoint-1" / "adapter_model.safetensors")
        return take(engine, state, train)

    monkeypatch.setattr(worker, "take_best", damaged)
    names = ("eval_strategy", "eval_steps", "save_strategy", "save_steps", "max_steps")
    settings = {f"train.{name}": getattr(asked, name) for name in names}
    base = {"model.name": worsened.read_config().model.name, "train.max_steps": 3}
    folder = train_run({**settings, **base, "train.load_best_model_at_end": True})
    assert "best" not in run_json(folder)
    log = (folder.path / "logs" / "rank-0.log").read_text()
    assert "checkpoint-1: adapter_model.safetensors has SHA-256 " in log
    assert "the weights of the last step are saved, not the best" in log
