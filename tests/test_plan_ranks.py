"""sft_play.plan.ranks: how many processes a run has, and on which GPUs."""

from typing import Any

import pytest
from plan_examples import CPU, plan_for

from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.ranks import visible_entries


@pytest.mark.parametrize(
    ("gpus", "environ", "distributed", "expected"),
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
    ],
)
def test_num_gpus_defaults_to_every_gpu_of_a_distributed_run(
    gpus: Any, environ: dict[str, str], distributed: bool, expected: tuple[int, str]
) -> None:
    ranks = plan_for(gpus, environ=environ, distributed=distributed).plan.ranks
    assert (ranks.world_size, ranks.strategy) == expected


def test_deepspeed_is_deepspeed_on_one_gpu_too() -> None:
    assert plan_for("1xH200", use_deepspeed=True).plan.ranks.strategy == "deepspeed"


def test_ranks_sum_gradients_by_nccl_on_gpus_and_by_gloo_on_a_cpu() -> None:
    assert plan_for("2xH200").plan.ranks.collective_backend == "nccl"
    assert plan_for(CPU).plan.ranks.collective_backend == "gloo"


def test_more_processes_than_gpus_are_refused() -> None:
    message = "NUM_GPUS=3: this host has 2 usable GPUs; set NUM_GPUS=2, or see make gpu-info"
    with pytest.raises(EnvironmentFault, match=message):
        plan_for("2xH200", environ={"NUM_GPUS": "3"})


def test_several_processes_without_a_gpu_are_refused_unless_the_cpu_is_asked_for() -> None:
    message = "NUM_GPUS=64: this host has no usable GPU, .*DEVICE=cpu for up to 8 processes"
    with pytest.raises(EnvironmentFault, match=message):
        plan_for(CPU, environ={"NUM_GPUS": "64"})
    message = "NUM_GPUS=9 with DEVICE=cpu: this host gives 8 cores, .* set NUM_GPUS=8 or less"
    with pytest.raises(EnvironmentFault, match=message):
        plan_for(CPU, environ={"NUM_GPUS": "9", "DEVICE": "cpu"})


@pytest.mark.parametrize("address", [{}, {"MASTER_ADDR": ""}, {"MASTER_ADDR": " "}])
def test_several_machines_need_an_address_to_meet_at(address: dict[str, str]) -> None:
    message = (
        r"NNODES=2 without MASTER_ADDR: .*127.0.0.1; "
        r"set MASTER_ADDR to the address of machine 0"
    )
    with pytest.raises(ConfigError, match=message):
        plan_for("2xH200", environ={"NNODES": "2", **address})


def test_a_cluster_that_counts_on_several_machines_is_not_given_single_ones() -> None:
    message = (
        r"WORLD_SIZE=8 is set, by a cluster or a launcher, .*; "
        r"set NNODES, NODE_RANK and MASTER_ADDR .* or unset WORLD_SIZE"
    )
    with pytest.raises(EnvironmentFault, match=message):
        plan_for(CPU, environ={"WORLD_SIZE": "8"})
    alone = plan_for(CPU, environ={"WORLD_SIZE": "1"})
    assert alone.plan.ranks.world_size == 1
    two = plan_for(CPU, environ={"WORLD_SIZE": "8", "NUM_GPUS": "2", "DEVICE": "cpu"})
    assert two.plan.ranks.world_size == 2


@pytest.mark.parametrize(
    ("visible", "count", "entries"),
    [
        (None, 2, ("0", "1")),
        ("", 2, ("0", "1")),
        ("3", 1, ("3",)),
        (" 3 , 1,0", 2, ("3", "1")),
        ("GPU-a,GPU-b", 1, ("GPU-a",)),
        ("3", 2, ("0", "1")),  # a plan for another machine
    ],
)
def test_the_first_of_the_visible_gpus_are_used(
    visible: str | None, count: int, entries: tuple[str, ...]
) -> None:
    assert visible_entries(visible, count) == entries
