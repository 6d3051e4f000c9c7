"""A log that is written during the next step says what one that is written at once says.

On a GPU logs are written late by themselves; here they are told to.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from faults.numbers import poison
from run_files import run_json
from safetensors.torch import load_file

from sft_play.errors import ExitClass
from sft_play.training.late_log import LateLog
from sft_play.training.trainer import SftTrainer

STEPS = 6
RUN = {"train.max_steps": STEPS, "train.logging_steps": 1}
SAME = ("step", "loss", "grad_norm", "learning_rate", "epoch")


@contextmanager
def logs_written(is_late: bool) -> Iterator[list[tuple[str, int]]]:
    """Let logs be written late, or at once; yield what happens, with its step, in order."""
    happened: list[tuple[str, int]] = []
    own_start, own_log, own_step = LateLog.__init__, SftTrainer.log, SftTrainer.training_step

    def start(self, trainer):
        own_start(self, trainer)
        self.is_on = is_late

    def log(self, logs, start_time=None):
        kind = "evaluated" if "eval_loss" in logs else "logged"
        happened.append((kind, self.state.global_step))
        own_log(self, logs, start_time)

    def step(self, *args, **kwargs):
        happened.append(("begun", self.state.global_step + 1))
        return own_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateLog, "__init__", start)
        patch.setattr(SftTrainer, "log", log)
        patch.setattr(SftTrainer, "training_step", step)
        yield happened


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_runs_differ_in_nothing_but_the_moment(plan_run, run_worker, logging_steps):
    changes = {**RUN, "train.logging_steps": logging_steps, "train.grad_accum": 2}
    folders, orders = [], []
    for is_late in (False, True):
        with logs_written(is_late) as happened:
            folders.append(plan_run(changes))
            assert run_worker(folders[-1]) == 0
        orders.append(happened)
    reports = [run_json(folder) for folder in folders]
    assert reports[0]["loss"] == reports[1]["loss"]
    kept = [[{n: e.get(n) for n in SAME} for e in report["history"]] for report in reports]
    assert kept[0] == kept[1] and len(kept[0]) >= STEPS // logging_steps
    adapters = [load_file(folder.path / "adapter/adapter_model.safetensors") for folder in folders]
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())
    at_once, later = orders
    logged, after = ("logged", logging_steps), ("begun", logging_steps + 1)
    assert at_once.index(logged) < at_once.index(after)
    assert later.index(logged) > later.index(after)
    assert later.index(("logged", STEPS)) > later.index(("begun", STEPS)), "the last, at once"


def test_a_step_that_is_evaluated_or_saved_is_logged_before(plan_run, run_worker):
    changes = {"train.eval_strategy": "steps", "train.eval_steps": 2}
    changes |= {"train.save_strategy": "steps", "train.save_steps": 3}
    with logs_written(True) as order:
        folder = plan_run(RUN | changes)
        assert run_worker(folder) == 0
    assert order.index(("logged", 2)) < order.index(("evaluated", 2)) < order.index(("begun", 3))
    state = json.loads((folder.checkpoints / "checkpoint-3" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3]


def test_what_was_put_off_is_written_where_the_next_step_fails(plan_run, run_worker, monkeypatch):
    own = SftTrainer.compute_loss

    def fails(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise RuntimeError("the fourth step fails")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "compute_loss", fails)
    with logs_written(True):
        folder = plan_run(RUN)
        assert run_worker(folder) == ExitClass.UNEXPECTED
    report = run_json(folder)
    assert "the fourth step fails" in report["cause"]
    assert [entry["step"] for entry in report["history"] if entry.get("loss")] == [1, 2, 3]


def test_a_step_that_is_not_finite_still_ends_the_run(plan_run, run_worker, monkeypatch):
    monkeypatch.setattr(SftTrainer, "compute_loss", SftTrainer.compute_loss)
    poison({3})
    with logs_written(True):
        folder = plan_run(RUN)
        assert run_worker(folder) == ExitClass.DIVERGED
    assert run_json(folder)["cause"].startswith("loss=nan at step 3: the run has diverged")
