"""Rates and updates of each step are those of the optimizers' libraries, one tensor at a time.

`make test` takes each schedule and each optimizer once. All of them with one another, on one rank
and on two: -m long.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import bitsandbytes.optim as bnb
import pytest
import torch
from rank_processes import train_on_two
from test_training_schedules import RATE, expected_rates
from tiny_models import MODEL_TYPES, tiny_config
from torch import Tensor
from transformers import Adafactor, AutoModelForCausalLM, Trainer

from sft_kernels.loss.head import summed_nll
from sft_play.config.schema import TrainSection
from sft_play.data.assemble import DataFacts, assemble
from sft_play.data.order import steps
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training.engine import Engine, decays
from sft_play.training.loop import TrainingLoop

STEPS = 6  # of 4 rows; 10 rows: the third and the sixth have 2 rows and fillers
SCHEDULES = get_args(TrainSection.model_fields["lr_scheduler_type"].annotation)
OPTIMIZERS = get_args(TrainSection.model_fields["optim"].annotation)
# warm-up, limit of the gradients' norm, weight decay
VARIANTS = ((0, 1.0, 0.1), (3, 0.0, 0.1), (0.34, 0.05, 0.0), (2, 0.05, 0.1))
# options of schedules of STEPS steps
DEFAULTS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 1},
}
ALL = [(schedule, optim) for schedule in SCHEDULES for optim in OPTIMIZERS]
SAMPLE = [(SCHEDULES[n % len(SCHEDULES)], optim) for n, optim in enumerate(OPTIMIZERS)]


@dataclass
class Oracle:
    """The optimizer of its library with clipped gradients, one tensor at a time."""

    optim: str
    max_norm: float
    weight_decay: float
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def updates(
        self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float
    ) -> dict[str, Tensor]:
        """Return what a step adds to each weight."""
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        scale = ((self.max_norm or math.inf) / (norm + 1e-6)).clamp(max=1.0)
        found = {}
        for name, gradient in gradients.items():
            if name not in self.optimizers:
                self.optimizers[name] = self.optimizer_of(
                    name, torch.nn.Parameter(gradient.clone())
                )
            (group,) = self.optimizers[name].param_groups
            (own,) = group["params"]
            own.data.copy_(weights[name])
            own.grad, group["lr"] = gradient * scale, rate
            self.optimizers[name].step()
            found[name] = own.detach() - weights[name]
        return found

    def optimizer_of(self, name: str, own: torch.nn.Parameter) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"weight_decay": 0.0 if is_undecayed(name) else self.weight_decay}
        is_in_8_bits = "8bit" in self.optim and "embed" not in name
        if self.optim == "sgd":
            return torch.optim.SGD([own], **options)
        if self.optim == "muon" and own.ndim == 2 and not is_vocabulary(name):
            return torch.optim.Muon([own], adjust_lr_fn="match_rms_adamw", **options)
        if self.optim == "adafactor":
            options |= {"scale_parameter": False, "relative_step": False}
            return Adafactor([own], lr=RATE, **options)
        if self.optim.startswith("lion"):
            kind = bnb.Lion8bit if is_in_8_bits else bnb.Lion
            return kind([own], betas=(0.9, 0.999), **options)
        return (bnb.AdamW8bit if is_in_8_bits else torch.optim.AdamW)([own], **options)


def is_vocabulary(name: str) -> bool:
    return "embed" in name or "lm_head" in name


def is_undecayed(name: str) -> bool:
    """Return whether a parameter of Qwen2 is a bias or a norm's weight."""
    return name.endswith(".bias") or name.split(".")[-2].endswith("norm")


@dataclass
class TakenStep:
    """What a step of our trainer began with, and what it did."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # as summed over micro-batches and ranks, before clipping
    after: dict[str, Tensor] = field(default_factory=dict)
    rate: float = math.nan  # as it is logged
    rates: list[float] = field(default_factory=list)  # of the optimizer's groups


def record_steps(patch: pytest.MonkeyPatch) -> list[TakenStep]:
    """Make TrainingLoop write down each step; return the list."""
    taken: list[TakenStep] = []
    clip, rate_of = Engine.clip_gradients, Engine.learning_rate

    def state(engine, of_gradient):
        named = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
        return {name: (p.grad if of_gradient else p).detach().clone() for name, p in named}

    def clip_gradients(engine):
        taken.append(TakenStep(state(engine, False), state(engine, True)))
        return clip(engine)

    def learning_rate(engine):
        rate = rate_of.fget(engine)
        if taken and not taken[-1].after:
            taken[-1].after, taken[-1].rate = state(engine, False), rate
            taken[-1].rates = [group["lr"] for group in engine.optimizer.param_groups]
        return rate

    patch.setattr(Engine, "clip_gradients", clip_gradients)
    patch.setattr(Engine, "learning_rate", property(learning_rate))
    return taken


def save_steps(folder: Path) -> None:
    """Make a rank write its steps into the run's folder, and end."""
    taken = record_steps(pytest.MonkeyPatch())
    train = TrainingLoop.train

    def train_and_end(trainer, *arguments):
        train(trainer, *arguments)
        torch.save(taken, folder / f"steps-{trainer.process.rank}.pt")
        os._exit(0)

    TrainingLoop.train = train_and_end


@dataclass
class Workshop:
    """Plans and runs the steps of a schedule and an optimizer, and compares them."""

    plan_run: Callable[..., RunFolder]
    build_loop: Callable[..., Any]
    base: Path

    def compare(self, pair: tuple[str, str], ranks: int) -> tuple[float, float, float]:
        """Return the largest differences: of a rate, of a gradient and of an update.

        The first is in parts of the peak, the others of the largest number of their step.
        """
        schedule, optim = pair
        warmup, max_norm, weight_decay = VARIANTS[ALL.index(pair) % len(VARIANTS)]
        settings = {
            "model.name": self.base,
            "tuning.mode": "full",
            "train.max_steps": STEPS,
            "train.learning_rate": RATE,
            "train.lr_scheduler_type": schedule,
            "train.optim": optim,
            "train.warmup_steps": warmup,
            "train.max_grad_norm": max_norm,
            "train.weight_decay": weight_decay,
            "train.predict_with_generate": False,
        }
        folder = self.plan_run(settings, num_gpus=ranks)
        taken = self.taken_by_two(folder) if ranks == 2 else self.taken_by_one(folder)
        assert len(taken) == STEPS
        gradient_of = gradients_by_row(folder, self.base)
        steps_of_warmup = math.ceil(STEPS * warmup) if warmup < 1 else warmup
        rates = expected_rates(schedule, DEFAULTS.get(schedule), steps_of_warmup, STEPS)
        bnb.GlobalOptimManager.get_instance().initialize()  # it knows tensors by their position
        oracle, worst = Oracle(optim, max_norm, weight_decay), [0.0, 0.0, 0.0]
        for number, step in enumerate(taken):
            rate = rates[number]
            assert set(step.rates) == {step.rate}
            updates = oracle.updates(step.weights, step.gradients, rate)
            found = (
                abs(step.rate - rate) / RATE,
                difference(step.gradients, gradient_of(number, step.weights)),
                difference(step.after, updates, step.weights),
            )
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
        return tuple(worst)

    def taken_by_one(self, folder: RunFolder) -> list[TakenStep]:
        with pytest.MonkeyPatch.context() as patch:
            taken = record_steps(patch)
            trainer, _ = self.build_loop(folder)
            trainer.start()
            trainer.train()
        return taken

    def taken_by_two(self, folder: RunFolder) -> list[TakenStep]:
        train_on_two(folder, save_steps, folder.path)
        one, two = (
            torch.load(folder.path / f"steps-{rank}.pt", weights_only=False) for rank in (0, 1)
        )
        for ours, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(vars(ours), vars(theirs), rtol=0, atol=0)
        return one


def gradients_by_row(
    folder: RunFolder, base: Path
) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function of a step and its weights: the gradient of its rows' mean loss a token."""
    planned = PlannedRun.read(folder)
    config, layout = planned.config, planned.plan.layout
    rows = assemble(config, DataFacts.from_json(folder.read_data()).sources).train
    by_step: list[list[int]] = []
    for epoch in range(STEPS):
        by_step += steps(len(rows), layout.rows_per_step, config.train.order_seed, epoch)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def gradient(step, weights):
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        samples = [rows[index] for index in by_step[step]]
        tokens = sum(sample.trained_tokens for sample in samples)
        for sample in samples:
            logits = model(input_ids=torch.tensor(sample.ids[None])).logits
            (summed_nll(logits, torch.tensor(sample.labels[None])) / tokens).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    return gradient


def difference(
    found: dict[str, Tensor], changes: dict[str, Tensor], since: dict[str, Tensor] | None = None
) -> float:
    """Return the largest difference of any number, in parts of the largest change.

    `found` are changes `since` some weights; what float32 rounds of the weights does not count.
    """
    assert found.keys() == changes.keys()
    largest = max(tensor.abs().max().item() for tensor in changes.values())
    assert largest > 0
    worst = 0.0
    for name, change in changes.items():
        before = torch.zeros_like(change) if since is None else since[name]
        apart = (found[name].double() - before.double() - change.double()).abs()
        worst = max(worst, (apart - before.abs() * 2**-23).max().item())
    return worst / largest


@pytest.fixture
def workshop(plan_run, build_loop, base_of):
    """Qwen2 has biases and norms; with these sizes its matrices have 4,096 numbers."""
    return Workshop(plan_run, build_loop, base_of("qwen2", "qlora"))


def check(workshop: Workshop, pairs: list[tuple[str, str]], ranks: int) -> None:
    """Assert that the differences of these schedules and optimizers are small."""
    for pair in pairs:
        rate, gradient, update = workshop.compare(pair, ranks)
        assert rate < 1e-12 and gradient < 1e-5 and update < 1e-5, pair


def test_each_schedule_and_optimizer_steps_as_the_oracle(workshop):
    check(workshop, SAMPLE, ranks=1)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_weight_decay_is_that_of_transformers_but_for_norms_that_it_misses(model_type):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    theirs = Trainer.get_decay_parameter_names(None, model)
    for name, _ in model.named_parameters():
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        is_missed = name in theirs and kind.endswith("Norm")  # Mamba's norm_f
        assert decays(model, name) == (name in theirs and not is_missed), name


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_schedules_and_optimizers_step_as_the_oracle(workshop, ranks):
    check(workshop, ALL, ranks)
