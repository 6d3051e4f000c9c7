"""Faults of numbers: NaN and infinity in losses, weights and moments, divergence, deaf adapters."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from faults.bench import Bench, Fault, Guard, Outcome
from faults.files import flip, nothing
from sft_play.errors import ExitClass
from sft_play.training import saved_weights
from sft_play.training.batches import spread_nan
from sft_play.training.guards import StepGuard
from sft_play.training.loop import TrainingLoop

FIVE = {"train.max_steps": 5}
SKIP = {**FIVE, "train.on_nonfinite": "skip"}


def poison(steps: set[int], value: float = math.nan, rank: int = 0) -> None:
    """Make the loss of the first micro-batch of some steps not finite, on one rank."""
    compute = TrainingLoop.compute_loss
    seen: set[int] = set()

    def poisoned(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        step = self.state.global_step + 1
        if step in steps - seen and self.process.rank == rank:
            seen.add(step)
            loss = spread_nan(loss + torch.tensor(value))
        return loss

    TrainingLoop.compute_loss = poisoned


def poisoned(
    steps: set[int], value: float, changes: dict[str, object]
) -> Callable[[Bench], Outcome]:
    """Return an injection: the losses of some steps are not finite."""

    def inject(bench):
        with patch.object(TrainingLoop, "compute_loss", TrainingLoop.compute_loss):
            poison(steps, value)
            return bench.run(changes)

    return inject


def recorded_by_none(self: StepGuard, *_: object) -> torch.Tensor:
    """Let every step pass."""
    return torch.tensor(True)


UNGUARDED = Guard("sft_play.training.guards:StepGuard.record", recorded_by_none)


def skipped(bench: Bench) -> Outcome:
    """Return the outcome, with the warning of the log as what was said."""
    outcome = poisoned({3}, math.nan, SKIP)(bench)
    folder = bench.last.path
    log = (folder / "logs" / "rank-0.log").read_text()
    (line,) = (line for line in log.splitlines() if "it is left out" in line)
    states = [
        load_file(folder / "checkpoints" / f"checkpoint-{step}" / "adapter_model.safetensors")
        for step in (2, 3)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return dataclasses.replace(outcome, said=line)


def spoil_parameter(bench: Bench) -> Outcome:
    """A weight becomes NaN between the step and its save, as memory that fails does."""
    save = TrainingLoop.save_checkpoint

    def spoiled(self, *args):
        if self.state.global_step == 3:
            trained = next(p for p in self.engine.model.parameters() if p.requires_grad)
            trained.data.view(-1)[7] = math.nan
        save(self, *args)

    with patch.object(TrainingLoop, "save_checkpoint", spoiled):
        return bench.run(FIVE)


def spoil_moment(bench: Bench) -> Outcome:
    """A moment of the optimizer becomes infinite between the step and its save."""
    save = TrainingLoop.save_checkpoint

    def spoiled(self, *args):
        if self.state.global_step == 3:
            state = next(iter(self.engine.torch_optimizer.state.values()))
            state["exp_avg_sq"].view(-1)[7] = math.inf
        save(self, *args)

    with patch.object(TrainingLoop, "save_checkpoint", spoiled):
        return bench.run(FIVE)


def changed_base(bench: Bench, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the base model with other weights."""
    folder = shutil.copytree(bench.settings["model.name"], bench.folder / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def nan_in_the_base(bench: Bench) -> Outcome:
    base = changed_base(bench, lambda tensors: tensors["model.norm.weight"][:1].fill_(math.nan))
    return bench.run({"model.name": base})


def deaf_adapter(bench: Bench) -> Outcome:
    """The second layer ignores its attention, so no gradient reaches the adapter there."""
    name = "model.layers.1.self_attn.o_proj.weight"
    base = changed_base(bench, lambda tensors: tensors[name].zero_())
    targets = {"tuning.lora.target_modules": "[q_proj,down_proj]"}
    changes = {"model.name": base, "train.max_steps": 12, "train.learning_rate": 1e-4}
    return bench.run(targets | changes)


def lost_updates(bench: Bench) -> Outcome:
    """Every weight is trained, at a rate whose updates are lost in rounding."""
    changes = {"tuning.mode": "full", "train.learning_rate": 1e-60, "train.max_steps": 2}
    return bench.run(changes)


def wrongly_written(bench: Bench) -> Outcome:
    """A bit of the weights flips on its way to the disk at the end of the run."""
    save = saved_weights.write_weights

    def spoiled(engine, folder):
        save(engine, folder)
        path = folder / "adapter_model.safetensors"
        flip(path, path.stat().st_size - 100, 1 << 6)

    with patch.object(saved_weights, "write_weights", spoiled):
        return bench.run({"train.max_steps": 3})


def diverged(bench: Bench) -> Outcome:
    """A rate with which the model forgets all, and guesses evenly, without any NaN."""
    return bench.run(
        {"model.name": bench.taught(), "train.learning_rate": 30, "train.max_steps": 30}
    )


REMEDY = ("try TRAIN_LEARNING_RATE=", "or TRAIN_RESUME_FROM an earlier checkpoint")
ROWS = (
    Fault(
        "nan-loss",
        "the loss of one row is NaN",
        poisoned({3}, math.nan, FIVE),
        ExitClass.DIVERGED,
        ("loss=nan at step 3", "train.jsonl:", *REMEDY),
        UNGUARDED,
        loses=1,
        is_quick=True,
    ),
    Fault(
        "inf-loss",
        "the loss of one row is infinite",
        poisoned({3}, math.inf, FIVE | {"train.logging_steps": 5}),
        ExitClass.DIVERGED,
        ("at step 3: the run has diverged", *REMEDY),
        UNGUARDED,
        loses=1,
    ),
    Fault(
        "nan-skipped",
        "the loss of one row is NaN, under on_nonfinite: skip",
        skipped,
        ExitClass.DONE,
        ("loss=nan at step 3: it is left out, and no weight has changed",),
        UNGUARDED,
        loses=0,
    ),
    Fault(
        "nan-too-often",
        "more steps are NaN than may be skipped",
        poisoned({2, 3, 4}, math.nan, SKIP | {"train.max_skipped_steps": 2}),
        ExitClass.DIVERGED,
        ("loss=nan at step 4: 3 steps were not finite", *REMEDY),
        Guard("sft_play.training.guards:StepGuard._handle", nothing),
        loses=1,
    ),
    Fault(
        "overflow",
        "a learning rate with which weights overflow for real",
        lambda bench: bench.run({"train.learning_rate": 1e18, "train.max_steps": 5}),
        ExitClass.DIVERGED,
        ("at step 2: the run has diverged", *REMEDY),
        UNGUARDED,
        loses=1,
    ),
    Fault(
        "guess",
        "the loss rises to that of a uniform guess and stays there, all numbers finite",
        diverged,
        ExitClass.DIVERGED,
        ("as bad as a uniform guess over the vocabulary", "try TRAIN_LEARNING_RATE=3"),
        Guard("sft_play.training.best:LossWatch._is_guess", lambda self, loss: False),
    ),
    Fault(
        "deaf-adapter",
        "no gradient reaches an adapter",
        deaf_adapter,
        ExitClass.DIVERGED,
        ("model.layers.1.self_attn.q_proj: to be trained", "TRAIN_ON_UNTRAINED=warn"),
        Guard("sft_play.training.guards:GradientWatch.record", nothing),
        loses=1,
    ),
    Fault(
        "lost-updates",
        "no weight changes in a whole run: its updates are lost in rounding",
        lost_updates,
        ExitClass.DIVERGED,
        ("no weight has changed in 2 steps", "raise TRAIN_LEARNING_RATE"),
        Guard("sft_play.training.guards:Movement.raise_if_unmoved", nothing),
    ),
    Fault(
        "nan-base",
        "a weight of the base model is NaN",
        nan_in_the_base,
        ExitClass.DIVERGED,
        ("eval_loss=nan", "train again with a lower TRAIN_LEARNING_RATE"),
        Guard("sft_play.evaluation.evaluator:math.isfinite", lambda number: True),
    ),
    Fault(
        "nan-weight",
        "a trained weight becomes NaN right before a save",
        spoil_parameter,
        ExitClass.DIVERGED,
        ("has NaN or infinity at step 3", "try a lower TRAIN_LEARNING_RATE"),
        Guard("sft_play.training.checkpoints:check_finite", nothing),
        loses=1,
    ),
    Fault(
        "inf-moment",
        "a moment of the optimizer becomes infinite right before a save",
        spoil_moment,
        ExitClass.DIVERGED,
        ("the optimizer's exp_avg_sq has NaN or infinity", "try a lower TRAIN_LEARNING_RATE"),
        Guard("sft_play.training.checkpoints:check_finite_optimizer", nothing),
        loses=1,
    ),
    Fault(
        "wrongly-written",
        "a bit of the trained weights flips on its way to the disk",
        wrongly_written,
        ExitClass.CHECKPOINT,
        ("tensors on disk are not those that were trained", "check the disk"),
        Guard("sft_play.training.saved_weights:check_saved_adapter", nothing),
        loses=0,
    ),
)
