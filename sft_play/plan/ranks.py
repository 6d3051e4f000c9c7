"""How many processes a run has, where they run, how they connect, and their devices.

Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from sft_play.config import deepspeed
from sft_play.config.deepspeed_json import DEFAULT_FETCHING, Fetching
from sft_play.config.invocation import Invocation
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan import cards
from sft_play.plan.devices import Hardware

Strategy = Literal["single", "ddp", "fsdp", "ep", "deepspeed"]


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

    Raises: EnvironmentFault if NUM_GPUS is more than there are GPUs, or cores if DEVICE=cpu,
    or if a cluster started more processes than requested; ConfigError for several machines
    without an address for the main machine.
    """
    if invocation.nnodes > 1 and not environ.get("MASTER_ADDR", "").strip():
        raise ConfigError(
            f"NNODES={invocation.nnodes} without MASTER_ADDR: every machine would wait for the "
            f"others at its own {invocation.master_addr}; set MASTER_ADDR to the address of "
            "machine 0 (127.0.0.1 if all NNODES are this host)"
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
        # otherwise each machine of a cluster would train separately
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
    """Refuse several processes without a GPU, unless DEVICE=cpu requests at most one per core.

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
    """Return the value of CUDA_VISIBLE_DEVICES for the first `count` of the GPUs it shows now.

    If it names fewer, the plan is for another machine's GPUs, which count from 0.
    """
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    if len(entries) >= count:
        return tuple(entries[:count])
    return tuple(map(str, range(count)))


Precision = Literal["bf16", "fp16", "float32"]
# torch's names
DTYPE_NAMES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}


class PrecisionChoice(NamedTuple):
    """A precision, and why it differs from the requested one, if it does."""

    precision: Precision
    warnings: list[str]


def config_precision(config: Config) -> Precision:
    """Return the precision of a resolved config, as accelerate spells it, or float32."""
    if config.train.bf16 is True:
        return "bf16"
    return "fp16" if config.train.fp16 is True else "float32"


def choose_precision(
    loaded: LoadedConfig,
    hardware: Hardware,
    raw: deepspeed.DeepSpeedJson,
    json_path: Path | None = None,
) -> PrecisionChoice:
    """Return bfloat16 if every GPU has it, else float16, and float32 on a CPU unless asked.

    What `raw`, the DeepSpeed JSON at `json_path`, says decides if the config leaves both to
    auto.
    Raises: ConfigError for float16 without a GPU.
    """
    train = loaded.config.train
    wants_bf16, wants_fp16 = train.bf16, train.fp16
    of_json = deepspeed.json_precision(raw) if raw else None
    if of_json and wants_bf16 == wants_fp16 == "auto":
        wants_bf16, wants_fp16 = of_json == "bf16", of_json == "fp16"
    has_old_gpu = hardware.kind == "cuda" and not hardware.supports_bf16
    if wants_bf16 == "auto":
        wants_bf16 = hardware.supports_bf16 and wants_fp16 is not True
    if wants_fp16 == "auto":
        wants_fp16 = has_old_gpu and not wants_bf16
    warnings = []
    if wants_bf16 and has_old_gpu:
        wants_bf16 = False
        wants_fp16 = train.fp16 is not False
        name, setting = "float32", "TRAIN_BF16=false"
        if wants_fp16:
            name, setting = "float16", "TRAIN_FP16=true TRAIN_BF16=false"
        warnings.append(
            "train.bf16=true, but a GPU here has no bfloat16 (capability under 8.0): "
            f"computing in {name}; {setting} says so"
        )
    if wants_bf16 and wants_fp16:
        wants_fp16 = False
        warnings.append(
            "train.bf16 and train.fp16 are both true: computing in bfloat16; "
            "TRAIN_FP16=false says so"
        )
    if wants_fp16 and hardware.kind != "cuda":
        asked, advice = loaded.described("train.fp16"), "set TRAIN_FP16=auto"
        if train.fp16 == "auto":
            asked, advice = f"{json_path}: fp16.enabled=true", 'write "auto" there'
        raise ConfigError(f"{asked}: float16 needs a GPU; {advice}")
    if wants_bf16:
        return PrecisionChoice("bf16", warnings)
    return PrecisionChoice("fp16" if wants_fp16 else "float32", warnings)


RESERVE = 0.08  # of free memory: fragmentation, and what the closed form does not cover


@dataclass(frozen=True)
class Machine:
    """The ranks of a run, their precision, and the memory that each may use."""

    ranks: Ranks
    precision: Precision
    budget_bytes: int  # that one rank may use
    gpu_names: tuple[str, ...]  # of this machine's ranks; () on a CPU
    gpu_count: int = 0  # of a host, also idle ones
    host_budget_bytes: int = 0  # host memory that one rank may use
    zero_stage: int = 0  # 0 without DeepSpeed
    offload: bool = False  # of the optimizer's state
    offload_weights: bool = False  # ZeRO-3's or FSDP's
    fetching: Fetching = DEFAULT_FETCHING  # of ZeRO-3

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device == "cuda"

    @property
    def is_half(self) -> bool:
        """Whether matrix multiplications are in 16 bits."""
        return self.precision != "float32"

    @property
    def card(self) -> cards.Card | None:
        """What is known of the GPUs."""
        return cards.card_of(self.gpu_names)


def machine_of(
    hardware: Hardware,
    ranks: Ranks,
    precision: Precision,
    raw: deepspeed.DeepSpeedJson,
    fsdp_offload: bool,
    hidden: int,
) -> Machine:
    """Return the ranks' hardware. `raw` is the DeepSpeed JSON; `hidden` are its features."""
    free_bytes = hardware.ram_available_bytes // ranks.per_node
    if ranks.device == "cuda":  # the least free of its GPUs
        free_bytes = min(gpu.free_bytes for gpu in hardware.gpus[: ranks.gpus_per_node])
    machine = Machine(
        ranks=ranks,
        precision=precision,
        budget_bytes=int(free_bytes * (1 - RESERVE)),
        gpu_names=tuple(gpu.name for gpu in hardware.gpus[: ranks.gpus_per_node]),
        gpu_count=hardware.count,
        host_budget_bytes=int(hardware.ram_available_bytes // ranks.per_node * (1 - RESERVE)),
        offload_weights=fsdp_offload,
    )
    if not raw:
        return machine
    offload, offload_weights = deepspeed.offloads(raw)
    return replace(
        machine,
        zero_stage=deepspeed.zero_stage(raw),
        offload=offload,
        offload_weights=offload_weights or fsdp_offload,
        fetching=deepspeed.fetching(raw, hidden),
    )


def used_before(hardware: Hardware, ranks: Ranks) -> tuple[int, ...]:
    """Return the bytes that others use now on each GPU of this machine's ranks; 0 on a CPU."""
    if ranks.device == "cpu":
        return (0,) * ranks.per_node
    gpus = hardware.gpus[: ranks.gpus_per_node]
    return tuple(gpu.total_bytes - gpu.free_bytes for gpu in gpus)
