"""Two ranks that replay their layers: the gradients that DDP averages, without its hooks."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import long
from rank_processes import train_on_two
from safetensors.torch import load_file
from test_fast_graphs import again

pytestmark = pytest.mark.slow

STEPS = 12
SETTINGS = {
    "train.strategy": "ddp",
    "train.max_steps": STEPS,
    "train.batch_size": 1,
    "train.grad_accum": 2,
    "train.learning_rate": 1e-3,
    "train.gradient_checkpointing": False,
    "train.packing": False,
    "train.save_strategy": "no",
    "train.predict_with_generate": False,
}


def replay_on_cpu() -> None:
    """Let a rank on a CPU record its layers: a replay launches them again."""
    from sft_play.models.fast.graphs import decoder

    setup = decoder.graph_setup

    def setup_on_gpu(model, config, ranks, offloading):
        return setup(model, config, dataclasses.replace(ranks, device="cuda"), offloading)

    decoder.graph_setup = setup_on_gpu
    decoder.record_on_gpu = lambda: again


@pytest.mark.parametrize(
    ("strategy", "model_type", "packing"),
    [
        long("ddp", None, False),
        long("ep", "qwen3_moe", False),
        ("ep", "qwen3_moe", True),
    ],
)
def test_two_ranks_that_replay_train_as_those_that_do_not(
    plan_run: Callable,
    taught_base: Path,
    base_of: Callable[..., Path],
    strategy: str,
    model_type: str | None,
    packing: bool,
    losses_of,
) -> None:
    base = base_of(model_type) if model_type else taught_base
    settings = {**SETTINGS, "model.name": base, "train.strategy": strategy}
    found = {}
    for graphs in (False, True):
        changes = {**settings, "train.packing": packing, "train.cuda_graphs": graphs}
        folder = plan_run(changes, num_gpus=2, may_trace=False)
        train_on_two(folder, replay_on_cpu)
        found[graphs] = folder
    for rank in (0, 1):
        log = (found[True].logs / f"rank-{rank}.log").read_text()
        assert "differs by" not in log and "cannot be recorded" not in log
    log = (found[True].logs / "rank-0.log").read_text()
    (replayed,) = re.findall(r"cuda graphs: (\d+) of \d+ micro-batches replayed, which", log)
    assert int(replayed) >= 6
    losses = [losses_of(found[graphs]) for graphs in found]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    name = "adapter/adapter_model.safetensors"
    one, two = (load_file(found[graphs].path / name) for graphs in found)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
