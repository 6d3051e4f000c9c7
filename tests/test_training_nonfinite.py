"""Steps that are not finite: found in the step, on all ranks, and nothing of them is kept."""

import math

import pytest
import torch
from faults.numbers import poison
from marks import long
from rank_processes import train_on_two
from run_files import run_json
from safetensors.torch import load_file

from sft_play.errors import ExitClass
from sft_play.training.batches import spread_nan
from sft_play.training.loop import TrainingLoop

SKIP = {"train.on_nonfinite": "skip", "train.max_steps": 5}
EVERY_STEP = {"train.save_strategy": "steps", "train.save_steps": 1, "train.save_total_limit": None}


@pytest.fixture
def poisoned(monkeypatch):
    """A function that poisons the losses of some steps until the test ends."""
    monkeypatch.setattr(TrainingLoop, "compute_loss", TrainingLoop.compute_loss)
    return poison


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_gradients_of_a_loss_that_is_not_finite_are_nan_and_others_keep_their_bits(value):
    weight = torch.tensor([0.1, 0.7], requires_grad=True)
    (spread_nan((weight**2).sum() + value)).backward()
    assert weight.grad.isnan().all()
    gradients = []
    for change in (spread_nan, lambda loss: loss):
        weight.grad = None
        change((weight**2).sum() / 3).backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "optim", ["adamw_torch_fused", long("adamw_torch"), "adamw_8bit", long("sgd")]
)
def test_a_skipped_step_changes_neither_weights_nor_optimizer(train_run, poisoned, optim, caplog):
    poisoned({3})
    folder = train_run(SKIP | EVERY_STEP | {"train.optim": optim})
    report = run_json(folder)
    assert report["skipped_steps"] == [3] and len(report["loss"]) == 4
    assert [entry["step"] for entry in report["loss"]] == [1, 2, 4, 5]
    warned = "loss=nan at step 3: it is left out, and no weight has changed; its rows: "
    assert warned in (folder.logs / "rank-0.log").read_text()
    before, after = (folder.checkpoints / f"checkpoint-{step}" for step in (2, 3))
    assert same_tensors(
        *(load_file(path / "adapter_model.safetensors") for path in (before, after))
    )
    states = [torch.load(path / "optimizer.pt", weights_only=True) for path in (before, after)]
    assert same_tensors(*(flat(state["state"]) for state in states))


def flat(state: dict) -> dict[str, torch.Tensor]:
    found = {}
    for number, values in state.items():
        tensors = {name: value for name, value in values.items() if torch.is_tensor(value)}
        found |= {f"{number}.{name}": value for name, value in tensors.items()}
    return found


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.long
def test_the_loss_of_a_log_is_the_mean_of_the_steps_that_were_trained(
    plan_run, run_worker, poisoned, losses_of
):
    poisoned({2})
    folders = [plan_run(SKIP | {"train.logging_steps": steps}) for steps in (1, 5)]
    for folder in folders:
        assert run_worker(folder) == 0
        poisoned({2})
    single, mean = map(losses_of, folders)
    assert len(single) == 4 and mean == pytest.approx([sum(single) / 4])


def test_a_run_stops_at_the_step_with_the_rows_and_keeps_the_checkpoint_before(
    plan_run, run_worker, poisoned
):
    poisoned({3})
    folder = plan_run(EVERY_STEP | {"train.max_steps": 5, "train.logging_steps": 100})
    assert run_worker(folder) == ExitClass.DIVERGED
    report = run_json(folder)
    assert report["cause"].startswith("loss=nan at step 3: the run has diverged; try TRAIN_LEARN")
    assert "TRAIN_ON_NONFINITE=skip" in report["cause"] and "train.jsonl:" in report["cause"]
    assert report["checkpoint"] == str(folder.checkpoints / "checkpoint-2")


def test_too_many_skipped_steps_stop_the_run(plan_run, run_worker, poisoned):
    poisoned({1, 2, 3})
    folder = plan_run(SKIP | {"train.max_skipped_steps": 2})
    assert run_worker(folder) == ExitClass.DIVERGED
    cause = run_json(folder)["cause"]
    assert "loss=nan at step 3: 3 steps were not finite, and train.max_skipped_steps=2" in cause


def test_skipped_steps_count_across_a_resumed_run(plan_run, run_worker, poisoned):
    poisoned({1, 2, 3})
    settings = SKIP | EVERY_STEP | {"train.max_skipped_steps": 2}
    first = plan_run(settings | {"train.stop_after": 2})
    assert run_worker(first) == ExitClass.STOPPED
    resumed = plan_run(settings | {"train.resume_from": first.checkpoints / "checkpoint-2"})
    assert run_worker(resumed) == ExitClass.DIVERGED
    assert "at step 3: 3 steps were not finite" in run_json(resumed)["cause"]


def test_the_rows_that_are_named_are_those_of_the_micro_batch(plan_run, build_loop):
    folder = plan_run({"train.max_steps": None, "train.epochs": 2})
    trainer, data = build_loop(folder)
    for epoch in (0, 1):
        trainer.order.set_epoch(epoch)
        for number, batch in enumerate(trainer.order):
            step, micro_batch = divmod(number, trainer.order.layout.micro_batches)
            named = trainer.order.find_samples(3 * epoch + step + 1, micro_batch, rank=0)
            assert named == [index for rows in batch for index in rows if index >= 0]
    assert trainer.guard.rows_of(1, 0)[0].startswith(data.train.origin(0).partition(":")[0])


@pytest.mark.parametrize(
    "strategy, mode",
    [
        ("ddp", "lora"),
        long("zero2", "lora"),
        long("zero3", "lora"),
        long("fsdp", "lora"),
        long("fsdp", "full"),
        long("ep", "lora"),
    ],
)
@pytest.mark.slow
def test_a_bad_row_of_one_rank_is_skipped_by_both(plan_run, tiny_base, base_of, strategy, mode):
    folder = plan_run(
        SKIP
        | EVERY_STEP
        | {
            "model.name": base_of("qwen3_moe") if strategy == "ep" else tiny_base,
            "train.strategy": strategy,
            "tuning.mode": mode,
            "train.effective_batch_size": 4,
            "train.grad_accum": "auto",
            "train.batch_size": 1,
        },
        num_gpus=2,
    )
    train_on_two(folder, poison, {3}, math.nan, 1)
    assert run_json(folder)["skipped_steps"] == [3]
    paths = [folder.checkpoints / f"checkpoint-{step}" for step in (2, 3, 4)]
    name = "model.safetensors" if mode == "full" else "adapter_model.safetensors"
    states = [load_file(path / name) for path in paths]
    assert same_tensors(*states[:2]) and not same_tensors(*states[1:])
