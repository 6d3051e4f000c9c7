"""A log that is written during the next step says what one that is written at once says.

On a GPU logs are written late by themselves; here they are told to.
"""

import inspect
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from faults.numbers import poison
from run_files import run_json
from safetensors.torch import load_file
from transformers import Trainer

from sft_play.errors import ExitClass
from sft_play.runs.folder import RunFolder
from sft_play.training import late_log
from sft_play.training.late_log import EventClock, LateLog
from sft_play.training.nonfinite import StepFacts
from sft_play.training.trainer import SftTrainer

STEPS = 6
RUN = {"train.max_steps": STEPS, "train.logging_steps": 1}
OF_TIME = ("second", "runtime", "gib", "percent")  # in the names of what no two runs share


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


def shown(folder: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return the steps and values that `make watch` reads, but for times and memory."""
    lines = map(json.loads, folder.metrics.read_text().splitlines())
    logs = []
    for line in lines:
        values = line.get("values") or {}
        kept = {name: values[name] for name in values if not any(w in name for w in OF_TIME)}
        if kept:
            logs.append((line["step"], kept))
    return logs


@pytest.mark.parametrize(
    ("logging_steps", "experts"),
    [(1, None), (2, None), pytest.param(2, "mixtral", marks=pytest.mark.long)],
)
def test_runs_differ_in_nothing_but_the_moment(
    plan_run, run_worker, base_of, logging_steps, experts
):
    changes = {**RUN, "train.logging_steps": logging_steps, "train.grad_accum": 2}
    if experts is not None:
        changes |= {"model.name": base_of(experts), "train.router_aux_loss_coef": 0.01}
    folders, orders = [], []
    for is_late in (False, True):
        with logs_written(is_late) as happened:
            folders.append(plan_run(changes))
            assert run_worker(folders[-1]) == 0
        orders.append(happened)
    reports = [run_json(folder) for folder in folders]
    assert reports[0]["loss"] == reports[1]["loss"]
    logs = shown(folders[0])
    assert logs == shown(folders[1]) and len(logs) > STEPS // logging_steps
    names = {name for _, values in logs for name in values}
    assert {"loss", "grad_norm", "learning_rate", "epoch", "train_loss"} <= names
    assert ("router_aux_loss" in names) == (experts is not None)
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


def let_the_fifth_step(monkeypatch, fail) -> None:
    """Call `fail` with the trainer in a step in the middle of an epoch, whose end writes all."""
    own = SftTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 4:
            fail(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "compute_loss", compute_loss)


def test_what_was_put_off_is_written_where_the_next_step_fails(plan_run, run_worker, monkeypatch):
    def fail(trainer):
        raise RuntimeError("the fifth step fails")

    let_the_fifth_step(monkeypatch, fail)
    with logs_written(True):
        folder = plan_run(RUN)
        assert run_worker(folder) == ExitClass.UNEXPECTED
    report = run_json(folder)
    assert "the fifth step fails" in report["cause"]
    assert [entry["step"] for entry in report["history"] if entry.get("loss")] == [1, 2, 3, 4]


def test_the_last_log_of_an_epoch_is_written_at_its_end(plan_run, run_worker):
    with logs_written(True) as order:
        folder = plan_run(RUN | {"train.max_steps": None, "train.epochs": 2})
        assert run_worker(folder) == 0
    report = run_json(folder)
    steps = report["global_step"]
    assert order.index(("logged", steps // 2)) < order.index(("begun", steps // 2 + 1))
    assert [entry["step"] for entry in report["loss"]] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "norm", [1 / 3, torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64), None]
)
def test_a_norm_is_logged_with_all_its_digits(plan_run, run_worker, monkeypatch, norm):
    """DeepSpeed returns a number of the host."""
    own = LateLog.put_off
    monkeypatch.setattr(
        LateLog, "put_off", lambda self, loss, _, *rest: own(self, loss, norm, *rest)
    )
    with logs_written(True):
        folder = plan_run(RUN | {"train.max_steps": 2})
        assert run_worker(folder) == 0
    logged = run_json(folder)["history"][0].get("grad_norm")
    assert logged == (norm if norm is None else float(norm))


def test_a_divergence_is_told_though_the_step_after_it_fails(plan_run, run_worker, monkeypatch):
    def fail(trainer):
        trainer.guard._facts.append(StepFacts(4, torch.tensor([math.nan]), None, None, False))
        raise RuntimeError("an index that follows from NaN is out of range")

    let_the_fifth_step(monkeypatch, fail)
    with logs_written(True):
        folder = plan_run(RUN)
        assert run_worker(folder) == ExitClass.DIVERGED
    assert run_json(folder)["cause"].startswith("grad_norm=nan at step 4: the run has diverged")
    log = (folder.path / "logs" / "rank-0.log").read_text()
    assert "an index that follows from NaN is out of range" in log, "what it led to"


def test_trainer_hands_over_what_a_late_log_reads():
    names = list(inspect.signature(Trainer._maybe_log_save_evaluate).parameters)
    assert names[1:3] == ["tr_loss", "grad_norm"]
    assert names[-2:] == ["start_time", "learning_rate"]


def test_a_step_that_is_not_finite_still_ends_the_run(plan_run, run_worker, monkeypatch):
    monkeypatch.setattr(SftTrainer, "compute_loss", SftTrainer.compute_loss)
    poison({3})
    with logs_written(True):
        folder = plan_run(RUN)
        assert run_worker(folder) == ExitClass.DIVERGED
    assert run_json(folder)["cause"].startswith("loss=nan at step 3: the run has diverged")


class FakeEvent:
    """An event that a GPU reaches half a second of the host's clock after it was recorded."""

    now = 0.0  # seconds of the host's clock
    recorded_at: float  # the host's clock when the GPU reaches it

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.recorded_at = FakeEvent.now + 0.5  # half a second is still to be computed

    def query(self) -> bool:
        return FakeEvent.now >= self.recorded_at

    def synchronize(self) -> None:
        FakeEvent.now = max(FakeEvent.now, self.recorded_at)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.recorded_at - self.recorded_at) * 1e3


def test_a_step_is_dated_by_the_gpu_where_nobody_waited_for_its_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(late_log.time, "perf_counter", lambda: FakeEvent.now)
    clock = EventClock()
    FakeEvent.now = 10.0
    first = clock.record()
    assert FakeEvent.now == 10.5, "it waits for the first"
    FakeEvent.now = 10.7
    assert clock.seconds_since(first) == pytest.approx(0.2)
    FakeEvent.now = 20.0
    busy = clock.record()
    FakeEvent.now = 20.1  # the GPU sets the pace: the host waits
    assert clock.seconds_since(busy) == 0.0 and FakeEvent.now == 20.5
    FakeEvent.now = 30.0
    idle = clock.record()
    assert FakeEvent.now == 30.0, "an anchor is there"
    FakeEvent.now = 32.0  # the host sets the pace
    assert clock.seconds_since(idle) == pytest.approx(1.5)
    FakeEvent.now = 32.0 + late_log.ANCHOR_SECONDS
    clock.record()
    assert FakeEvent.now == 32.5 + late_log.ANCHOR_SECONDS, "an old anchor is no longer trusted"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_dates_what_it_has_computed():
    clock = EventClock()
    clock.record()
    event = clock.record()
    time.sleep(0.1)
    assert clock.seconds_since(event) >= 0.1
