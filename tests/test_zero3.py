"""Two processes that divide a model by ZeRO-3: the fused kernels train it as the plain code does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import long
from rank_processes import train_on_two
from run_files import run_json
from test_fsdp import saved

from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

# 10 rows, 8 a step: two steps an epoch, and the second holds 2 rows and 6 fillers
SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 1e-3,
    "train.save_strategy": "steps",
    "train.save_steps": 3,
    "train.probe": True,
    "train.batch_size": 2,
    "train.grad_accum": 2,
}
# nothing stays whole but what runs, and the next modules are fetched ahead
ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 50_000,
    "reduce_bucket_size": 100_000,
}
ALL_LINEARS = {"attention": 2, "linears": 8, "mlp": 2, "norms": 4, "loss": 1}
Finished = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def finished(plan_run, taught_base, tmp_path_factory) -> Finished:
    """A function that returns a finished run of two processes, the same one to every test."""
    runs: dict[tuple, RunFolder] = {}
    path = tmp_path_factory.mktemp("zero") / "zero3.json"
    path.write_text(json.dumps({"zero_optimization": ZERO_3, "train_batch_size": "auto"}))

    def run(engine: str, mode: str, base: Path = taught_base, **changes: object) -> RunFolder:
        key = (engine, mode, base, *sorted(changes.items()))
        if key not in runs:
            settings = {f"train.{name}": value for name, value in changes.items()}
            settings = {**SETTINGS, "model.name": base, "tuning.mode": mode, **settings}
            zero = str(path) if engine == "zero3" else None
            folder = plan_run(settings, num_gpus=2, deepspeed_config=zero)
            train_on_two(folder)
            runs[key] = folder
        return runs[key]

    return run


def check_alike(one: RunFolder, two: RunFolder, mode: str, tolerance: float) -> None:
    """Assert that losses, norms of gradients, scores and weights of two runs are equal."""
    reports = [run_json(run) for run in (one, two)]
    for name in ("loss", "grad_norm"):
        found = [[entry[name] for entry in report["history"]] for report in reports]
        assert len(found[0]) == 4
        assert found[1] == pytest.approx(found[0], abs=tolerance), name
    for when in ("before", "after"):
        scores = [report["metrics"][when]["eval_loss"] for report in reports]
        assert scores[1] == pytest.approx(scores[0], abs=tolerance), when
    torch.testing.assert_close(saved(two, mode), saved(one, mode), rtol=0, atol=tolerance)


@pytest.mark.parametrize("checkpointing", [False, long(True)])
def test_fused_adapters_train_as_under_ddp(finished: Finished, checkpointing: bool) -> None:
    changes = {"gradient_checkpointing": checkpointing}
    ddp, zero = (finished(engine, "lora", **changes) for engine in ("ddp", "zero3"))
    assert run_json(zero)["fast_path"] == run_json(ddp)["fast_path"]
    assert run_json(zero)["fast_path"]["on"] == ALL_LINEARS
    check_alike(ddp, zero, "lora", 5e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode, kernel", [("lora", "experts"), ("full", "loss")])
def test_experts_and_the_loss_of_a_trained_head_train_as_under_ddp(
    finished: Finished, taught_base, base_of, mode, kernel
) -> None:
    base = base_of("qwen3_moe") if kernel == "experts" else taught_base
    ddp, zero = (finished(engine, mode, base) for engine in ("ddp", "zero3"))
    assert run_json(zero)["fast_path"] == run_json(ddp)["fast_path"]
    assert run_json(zero)["fast_path"]["on"][kernel] == 1
    check_alike(ddp, zero, mode, 5e-5)


@pytest.mark.long
def test_fused_adapters_train_as_with_the_plain_code(finished: Finished) -> None:
    fused, plain = (
        finished("zero3", "lora", gradient_checkpointing=False, fast_path=on)
        for on in ("auto", False)
    )
    assert not run_json(plain)["fast_path"]["on"]
    check_alike(plain, fused, "lora", 5e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_resumed_run_is_the_one_that_never_stopped(
    finished: Finished, mode: str, losses_of
) -> None:
    changes = {"gradient_checkpointing": False} if mode == "lora" else {}
    whole = finished("zero3", mode, **changes)
    checkpoint = whole.checkpoints / "checkpoint-3"
    again = finished("zero3", mode, resume_from=checkpoint, **changes)
    losses = [losses_of(run) for run in (whole, again)]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-6)
    torch.testing.assert_close(saved(again, mode), saved(whole, mode), rtol=0, atol=1e-6)
