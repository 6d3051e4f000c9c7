"""How many processes a run has, where they run, and how they find each other. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sft_play.config.invocation import Invocation
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.devices import Hardware

Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True)
class Ranks:
    """The processes of a run."""

    strategy: Strategy
    device: Literal["cuda", "cpu"]
    per_node: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None  # None: a free port, chosen at launch; not for several nodes
    visible: tuple[str, ...]  # entries of CUDA_VISIBLE_DEVICES for this node's ranks
    cpu_count: int
    gpus_per_process: int = 1  # more: one model is placed on them (model.device_map)

    @property
    def gpus_per_node(self) -> int:
        return self.per_node * self.gpus_per_process

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes

    @property
    def collective_backend(self) -> str:
        return "gloo" if self.device == "cpu" else "nccl"


def plan_ranks(
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    distributed: bool,
    use_deepspeed: bool,
) -> Ranks:
    """Return how many processes run where.

    Raises: EnvironmentFault when NUM_GPUS is more than there are GPUs, or cores where DEVICE=cpu,
    or a cluster counts on more processes than are asked for; ConfigError for several machines
    without an address to meet at.
    """
    if invocation.nnodes > 1 and not environ.get("MASTER_ADDR", "").strip():
        raise ConfigError(
            f"NNODES={invocation.nnodes} without MASTER_ADDR: every machine would wait for the "
            f"others at its own {invocation.master_addr}; set MASTER_ADDR to the address of "
            "machine 0 (127.0.0.1 where all NNODES are this host)"
        )
    is_cuda = hardware.kind == "cuda"
    per_node = invocation.num_gpus or (hardware.count if is_cuda and distributed else 1)
    if is_cuda and per_node > hardware.count:
        raise EnvironmentFault(
            f"NUM_GPUS={per_node}: this host has {hardware.count} usable GPUs; "
            f"set NUM_GPUS={hardware.count}, or see make gpu-info"
        )
    if not is_cuda:
        _refuse_crowd(per_node, invocation.device, hardware.cpu_count)
    strategy: Strategy = "single"
    if use_deepspeed:
        strategy = "deepspeed"
    elif per_node * invocation.nnodes > 1:
        strategy = "ddp"
    if strategy == "single" and environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        # each machine of a cluster would train by itself
        raise EnvironmentFault(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, by a cluster or a launcher, and this run "
            "is one process; set NNODES, NODE_RANK and MASTER_ADDR for several machines, or unset "
            "WORLD_SIZE"
        )
    visible: tuple[str, ...] = ()
    if is_cuda:
        visible = visible_entries(environ.get("CUDA_VISIBLE_DEVICES"), per_node)
    return Ranks(
        strategy=strategy,
        device=hardware.kind,
        per_node=per_node,
        nodes=invocation.nnodes,
        node_rank=invocation.node_rank,
        master_addr=invocation.master_addr,
        master_port=invocation.master_port,
        visible=visible,
        cpu_count=hardware.cpu_count,
    )


def _refuse_crowd(processes: int, device: str, cores: int) -> None:
    """Refuse several processes without a GPU, unless DEVICE=cpu asks for as many as have a core.

    Raises: EnvironmentFault.
    """
    if processes > 1 and device != "cpu":
        raise EnvironmentFault(
            f"NUM_GPUS={processes}: this host has no usable GPU, see make gpu-info; leave NUM_GPUS "
            f"out to train in one process, or add DEVICE=cpu for up to {cores} processes on its "
            "cores"
        )
    if processes > cores:
        raise EnvironmentFault(
            f"NUM_GPUS={processes} with DEVICE=cpu: this host gives {cores} cores, and every "
            f"process needs one; set NUM_GPUS={cores} or less"
        )


def visible_entries(visible: str | None, count: int) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES must say for the first `count` of the GPUs it shows now.

    Where it names fewer, the plan is for another machine's GPUs, which count from 0.
    """
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    if len(entries) >= count:
        return tuple(entries[:count])
    return tuple(map(str, range(count)))
