"""sft_play.plan.ranks: how many processes a run has, and on which GPUs."""

import pytest
from plan_examples import CPU, plan_for

from sft_play.plan.ranks import visible_entries


@pytest.mark.parametrize(
    "gpus, environ, distributed, expected",
    [
        ("4xH200", {}, True, (4, "ddp")),
        ("4xH200", {}, False, (1, "single")),
        ("4xH200", {"NUM_GPUS": "2"}, True, (2, "ddp")),
        ("4xH200", {"NUM_GPUS": "2"}, False, (2, "ddp")),
        ("1xH200", {}, True, (1, "single")),
        (CPU, {}, True, (1, "single")),
        (CPU, {"NUM_GPUS": "2", "DEVICE": "cpu"}, True, (2, "ddp")),
        (CPU, {"NUM_GPUS": "8", "DEVICE": "cpu"}, True, (8, "ddp")),
        ("2xH200", {"NNODES": "3", "MASTER_ADDR": "10.0.0.1"}, True, (6, "ddp")),
        (CPU, {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, True, (2, "ddp")),
        (CPU, {"WORLD_SIZE": "1"}, True, (1, "single")),  # of a launcher or a cluster
        (CPU, {"WORLD_SIZE": "8", "NUM_GPUS": "2", "DEVICE": "cpu"}, True, (2, "ddp")),
    ],
)
def test_num_gpus_defaults_to_every_gpu_of_a_distributed_run(gpus, environ, distributed, expected):
    ranks = plan_for(gpus, environ=environ, distributed=distributed).plan.ranks
    assert (ranks.world_size, ranks.strategy) == expected


def test_deepspeed_is_deepspeed_on_one_gpu_too():
    assert plan_for("1xH200", use_deepspeed=True).plan.ranks.strategy == "deepspeed"


def test_ranks_sum_gradients_by_nccl_on_gpus_and_by_gloo_on_a_cpu():
    assert plan_for("2xH200").plan.ranks.collective_backend == "nccl"
    assert plan_for(CPU).plan.ranks.collective_backend == "gloo"


@pytest.mark.parametrize(
    "visible, count, entries",
    [
        (None, 2, ("0", "1")),
        ("", 2, ("0", "1")),
        ("3", 1, ("3",)),
        (" 3 , 1,0", 2, ("3", "1")),
        ("GPU-a,GPU-b", 1, ("GPU-a",)),
        ("3", 2, ("0", "1")),  # a plan for another machine
    ],
)
def test_the_first_of_the_visible_gpus_are_used(visible, count, entries):
    assert visible_entries(visible, count) == entries
