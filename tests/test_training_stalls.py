"""No stalls between steps: the fused loss in the trainer, and one collective a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from rank_processes import run_two
from test_packed_training import ALONE, CPU, llama, losses_of, trainer_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from sft_kernels.loss.head import fuse_loss, is_loss_fused
from sft_kernels.loss.tokens import labelled
from sft_kernels.process import Process
from sft_play.data.render import IGNORE_INDEX
from sft_play.training import runtime
from sft_play.training.loop import TrainingLoop

STEPS = 6


def fused_trainer(
    folder: Path,
    batch: int,
    packed: bool,
    process: Process = ALONE,
    is_full: bool = False,
    **arguments: Any,
) -> TrainingLoop:
    trainer = trainer_of(
        folder, batch, packed, process, model=llama(is_lora=not is_full), **arguments
    )
    fuse_loss(trainer.engine.model)
    assert is_loss_fused(trainer.engine.model)
    return trainer


def test_a_first_token_is_never_predicted():
    positions, targets, *_ = labelled(torch.tensor([[3, IGNORE_INDEX], [4, 5]]))
    assert (positions.tolist(), targets.tolist()) == ([2], [5])


def be_one_rank(folder: Path, options: dict[str, Any]) -> None:
    """Run one of two ranks; save losses, the steps of all-reduced buckets, and other facts."""
    rank = runtime.rank()
    trainer = fused_trainer(
        folder / f"rank-{rank}", 1, True, Process(rank, rank, 2, CPU), **options
    )
    sent: list[int] = []

    def count(state, bucket):
        sent.append(trainer.state.global_step)
        return allreduce_hook(None, bucket)

    losses = losses_of(
        trainer, prepare=lambda: trainer.engine.wrapped.register_comm_hook(None, count)
    )
    wrapped = trainer.engine.wrapped
    total = trainer.process.sum(10**12 + rank)
    facts = {
        "losses": losses,
        "sent": sent,
        "view": wrapped.gradient_as_bucket_view,
        "total": total,
        "micro": trainer.order.layout.micro_batches,
    }
    torch.save(facts, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("looks_for_unused", [False, long(True)])
def test_two_ranks_send_gradients_once_a_step_and_learn_what_one_does(
    tmp_path, is_full, looks_for_unused
):
    one = losses_of(trainer_of(tmp_path, 2, packed=False, model=llama(is_lora=not is_full)))
    options = {"is_full": is_full, "ddp_find_unused_parameters": looks_for_unused}
    assert run_two(be_one_rank, tmp_path, options) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["micro"] == 2, "gradients are accumulated"
    assert first["sent"] == second["sent"] == list(range(STEPS)), "one bucket, once a step"
    assert first["losses"] == pytest.approx(one, abs=1e-5) and first["view"]
    assert first["total"] == second["total"] == 2 * 10**12 + 1, "whole numbers beyond float32"


def test_one_rank_asks_nobody():
    assert not torch.distributed.is_initialized()
    assert ALONE.sum(7) == 7
