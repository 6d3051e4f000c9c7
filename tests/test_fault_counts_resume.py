"""Resumed runs that end bit for bit as if nothing had stopped them: a part of `make test-faults`."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.bench import EVERY_STEP
from faults.counting import MOST, noted, up_to
from rank_processes import start_rank, wait_for, work
from run_files import run_json
from safetensors.torch import load_file, save_file

from sft_play.plan.launch import free_port
from sft_play.runs import seal
from sft_play.runs.folder import RunFolder
from sft_play.training.loop import TrainingLoop

Start = Callable[..., tuple[RunFolder, list]]
pytestmark = pytest.mark.faults

SOME = {**EVERY_STEP, "train.max_steps": 6}
CONFIGS: list[dict[str, Any]] = [
    {"tuning.mode": mode, "train.packing": packing, "tuning.lora.dropout": dropout, **more}
    for mode, dropout in (("lora", 0.0), ("lora", 0.2), ("full", 0.0))
    for packing in (True, False)
    for more in (
        {},
        {"train.lr_scheduler_type": "cosine", "train.warmup_steps": 2},
        {"train.optim": "adamw_torch", "train.weight_decay": 0.1},
        {"train.neftune_noise_alpha": 5.0, "train.seed": 7},
        {"train.eval_strategy": "steps", "train.eval_steps": 1, "train.data_seed": 3},
    )
]


def by_setting(start: Start, settings: dict[str, Any], at: int) -> RunFolder:
    """Stop a run by train.stop_after."""
    run, ranks = start({**settings, "train.stop_after": at})
    assert [wait_for(rank) for rank in ranks] == [75]
    return run


def by_signal(number: signal.Signals) -> Callable[[Start, dict[str, Any], int], RunFolder]:
    """Return what stops a run by a signal."""

    def stop(start, settings, at):
        run, ranks = start(settings, slow_steps)
        log = run.logs / "rank-0.log"
        while not (log.exists() and f"step {at}/" in log.read_text()):
            assert ranks[0].is_alive()
            time.sleep(0.005)
        os.kill(ranks[0].pid, number)
        assert wait_for(ranks[0]) in (75, -signal.SIGKILL)
        return run

    return stop


def slow_steps() -> None:
    """Make a step take as long as a signal needs to come."""
    compute_loss = TrainingLoop.compute_loss

    def slowly(self, *arguments, **options):
        time.sleep(0.05)
        return compute_loss(self, *arguments, **options)

    TrainingLoop.compute_loss = slowly


STOPS = {
    "train.stop_after": by_setting,
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGKILL": by_signal(signal.SIGKILL),
}


def weights_of(folder: RunFolder, mode: str) -> dict[str, torch.Tensor]:
    (path,) = folder.weights(mode).glob("*model.safetensors")
    return load_file(path)


def is_same(first: RunFolder, second: RunFolder, mode: str) -> bool:
    """Return whether two runs ended with the same bits: weights and logged losses."""
    ours, theirs = (weights_of(run, mode) for run in (first, second))
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return same and run_json(first)["loss"] == run_json(second)["loss"]


def test_bit_exact_is_what_a_resumed_run_is(plan_run):
    assert len(CONFIGS) == 30

    def start(settings, prepare=None):
        run = plan_run(settings)
        output = run.path / "output.txt"
        rank = start_rank(work, (run.path, prepare), 0, free_port(), output, world_size=1)
        return run, [rank]

    def finish(settings):
        run, ranks = start(settings)
        assert [wait_for(rank) for rank in ranks] == [0], settings
        return run

    differ = []
    for number in up_to(30):
        settings = {**SOME, **CONFIGS[number]}
        at = 2 + number % 3  # in the middle of an epoch, at its end, after it
        whole = finish(settings)
        for name, stop in STOPS.items():
            stopped = stop(start, settings, at)
            resumed = finish({**settings, "train.resume_from": stopped.path})
            if not is_same(resumed, whole, settings["tuning.mode"]):
                differ.append((name, CONFIGS[number]))
    total = len(up_to(30)) * len(STOPS)
    words = f"30 configurations, each stopped by {', '.join(STOPS)}: bit for bit as uninterrupted"
    noted("bit-exact", words, "90 of 90", f"{total - len(differ)} of {total}")
    assert not differ


def change(name: str, key: str, by: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes a value of a file that torch saved."""

    def spoil(checkpoint):
        values = torch.load(checkpoint / name, weights_only=False)
        inner = values["state"][0] if name == "optimizer.pt" else values
        inner[key] = by(inner[key])
        torch.save(values, checkpoint / name)

    return spoil


def another_state() -> torch.Tensor:
    """Return a random state of torch that another seed begins with."""
    return torch.Generator().manual_seed(1).get_state()


def nudge(checkpoint: Path) -> None:
    path = checkpoint / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


CONTROLS: dict[str, Callable[[Path], None]] = {
    "a weight": nudge,
    "the first moment": change("optimizer.pt", "exp_avg", lambda old: old * 1.5),
    "the second moment": change("optimizer.pt", "exp_avg_sq", lambda old: old * 1.5),
    "the optimizer's step": change("optimizer.pt", "step", lambda old: old + 1),
    "the schedule": change("scheduler.pt", "last_epoch", lambda old: old + 1),
    "the random state of torch": change("rng_state.pth", "cpu", lambda old: another_state()),
}
OTHER: dict[str, dict[str, Any]] = {
    "the seed": {"train.seed": 8},
    "the learning rate": {"train.learning_rate": 0.02},
    "the order of the rows": {"train.data_seed": 9},
}


def test_controls_differ(train_run, plan_run, run_worker):
    """What is compared would notice: a change of each part of the state ends otherwise."""
    settings = {**SOME, "tuning.lora.dropout": 0.2, "train.lr_scheduler_type": "cosine"}
    whole = train_run(settings)
    other = []
    for name, spoil in list(CONTROLS.items())[:MOST]:
        first = plan_run({**settings, "train.stop_after": 3})
        assert run_worker(first) == 75
        checkpoint = first.checkpoints / "checkpoint-3"
        spoil(checkpoint)
        seal.seal(checkpoint)
        second = plan_run({**settings, "train.resume_from": first.path})
        assert run_worker(second) == 0, name
        other.append(not is_same(second, whole, "lora"))
    for changed in list(OTHER.values())[:MOST]:
        run = train_run({**settings, **changed})
        other.append(not is_same(run, whole, "lora"))
    words = "negative controls that end otherwise: one part of the state or one setting is changed"
    noted("controls", words, "9 of 9", f"{sum(other)} of {len(other)}")
    assert all(other)
