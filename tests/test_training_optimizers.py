"""Muon, Adafactor and Lion in real runs: resume, ranks, the best checkpoint, and planned bytes."""

import pytest
import torch
from marks import long
from rank_processes import train_on_two
from run_files import run_json
from safetensors.torch import load_file
from traced_steps import storage_bytes

from sft_play.models.optimizers import OPTIMIZERS, hidden_matrices
from sft_play.plan.memory import step_bytes
from sft_play.plan.run_plan import PlannedRun

FULL = {
    "tuning.mode": "full",
    "train.learning_rate": 1e-3,
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 0.5,
    "train.lr_scheduler_type": "cosine",
    "train.predict_with_generate": False,
}
SAVED = {"train.max_steps": 4, "train.save_strategy": "steps", "train.save_steps": 2}


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder.weights("full") / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max((one[name].float() - two[name].float()).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("optim", "dtype"),
    [
        ("muon", "float32"),
        ("lion_8bit", "float32"),
        ("adafactor", "bfloat16"),
        long("lion", "float32"),
        long("adafactor", "float32"),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(train_run, optim, dtype):
    settings = {**FULL, **SAVED, "train.optim": optim, "model.dtype": dtype}
    whole = train_run(settings)
    resumed = train_run({**settings, "train.resume_from": whole.checkpoints / "checkpoint-2"})
    assert largest_difference(weights(whole), weights(resumed)) == 0
    losses = run_json(whole)["loss"]
    assert losses[-1]["loss"] < losses[0]["loss"]


LIMITED = {"train.max_grad_norm": 1.0}
DIVIDED = {"tuning.mode": "lora", "train.strategy": "fsdp"}


@pytest.mark.parametrize(
    ("strategy", "optim", "changes", "stage"),
    [
        ("ddp", "muon", {}, None),
        long("ddp", "adafactor", {}, None),
        ("deepspeed", "lion", LIMITED, 2),
        long("deepspeed", "lion", LIMITED, 3),
        long("deepspeed", "lion_8bit", LIMITED, 2),
        long("fsdp", "adafactor", DIVIDED, None),
        long("fsdp", "lion", DIVIDED, None),
    ],
)
def test_two_ranks_train_what_one_does(
    strategy, optim, changes, stage, plan_run, train_run, losses_of
):
    settings = {**FULL, "train.optim": optim, "train.batch_size": 1, "train.grad_accum": "auto"}
    settings |= {"train.effective_batch_size": 4, "train.max_steps": 3, **changes}
    zero = stage and f"configs/deepspeed_zero{stage}.json"
    together = plan_run(settings, 2, zero)
    train_on_two(together)
    assert run_json(together)["strategy"] == strategy
    alone = train_run({**settings, "train.strategy": "auto"})
    assert losses_of(together) == pytest.approx(losses_of(alone), rel=1e-3)
    if strategy == "ddp":
        assert largest_difference(weights(alone), weights(together)) < 2e-4


def test_the_best_checkpoint_of_muon_is_scored_and_saved(train_run):
    best = {"train.load_best_model_at_end": True, "train.save_strategy": "steps"}
    steps = {"train.eval_strategy": "steps", "train.eval_steps": 1, "train.save_steps": 1}
    rising = {"train.learning_rate": 0.5, "train.lr_scheduler_type": "constant"}
    folder = train_run({**FULL, **best, **steps, **rising, "train.optim": "muon"})
    report = run_json(folder)
    step = report["best"]["step"]
    assert step < 3
    kept = load_file(folder.checkpoints / f"checkpoint-{step}" / "model.safetensors")
    assert largest_difference(weights(folder), kept) == 0


def test_muon_steps_the_matrices_of_layers_and_adamw_all_else(plan_run, build_loop):
    trainer, _ = build_loop(plan_run({**FULL, "train.optim": "muon"}))
    groups = trainer.engine.create_optimizer().param_groups
    by_muon = {id(each) for group in groups if "momentum" in group for each in group["params"]}
    assert by_muon == set(map(id, hidden_matrices(trainer.engine.model)))
    for name, parameter in trainer.engine.model.named_parameters():
        is_matrix = "_proj." in name and parameter.ndim == 2
        assert (id(parameter) in by_muon) == is_matrix, name
    decays = [(group["weight_decay"], len(group["params"])) for group in groups]
    # matrices, no matrix without decay, embedding, norms
    assert decays == [(0.1, len(by_muon)), (0.0, 0), (0.1, 1), (0.0, 5)]


@pytest.mark.parametrize(
    "optim, mode",
    [
        ("adamw_torch", "lora"),
        ("adamw_8bit", "lora"),
        *((each, "full") for each in sorted(OPTIMIZERS)),
    ],
)
def test_the_planned_state_is_that_of_trainers_optimizer(optim, mode, plan_run, build_loop):
    settings = {"train.optim": optim, "tuning.mode": mode, "tuning.lora.r": 32}
    folder = plan_run({**settings, "train.fast_path": False})
    trainer, _ = build_loop(folder)
    optimizer = trainer.engine.create_optimizer()
    trained = [each for each in trainer.engine.model.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    measured = storage_bytes(value for value in values if isinstance(value, torch.Tensor))
    planned = PlannedRun.read(folder).plan
    expected = step_bytes(planned.step, planned.layout).phases["forward"].optimizer
    if "8bit" not in optim:  # a counter of steps, or an RMS, for each parameter
        assert 0 <= measured - expected <= 4 * len(trained)
        return
    # bitsandbytes keeps moments of fewer than 4,096 numbers in 32 bits, of others a scale for 256
    moments = 1 if optim == "lion_8bit" else 2
    small = sum(each.numel() for each in trained if each.numel() < 4096)
    assert measured == pytest.approx(expected + 3 * moments * small, rel=0.05)
