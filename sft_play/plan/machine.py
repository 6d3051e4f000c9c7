"""What a rank computes on: its device, numbers and memory, and what ZeRO divides. Pure."""

from dataclasses import dataclass

from sft_play.config import deepspeed
from sft_play.config.deepspeed_json import DEFAULT_FETCHING, Fetching
from sft_play.plan import cards
from sft_play.plan.devices import Hardware
from sft_play.plan.ranks import Precision, Ranks

RESERVE = 0.08  # of free memory: fragmentation, and what the closed form does not see


@dataclass(frozen=True)
class Machine:
    """The ranks of a run, what they compute in, and the memory that each may use."""

    ranks: Ranks
    precision: Precision
    budget_bytes: int  # that one rank may take
    gpu_names: tuple[str, ...]  # of this machine's ranks; () on a CPU
    host_budget_bytes: int = 0  # that one rank may take of host memory
    zero_stage: int = 0  # 0 without DeepSpeed
    offload: bool = False  # of the optimizer's state
    offload_weights: bool = False  # ZeRO-3's or FSDP's
    fetching: Fetching = DEFAULT_FETCHING  # of ZeRO-3

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device == "cuda"

    @property
    def is_half(self) -> bool:
        """Whether matrix products are in 16 bits."""
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
    """Return what the ranks compute on. `raw` is the DeepSpeed JSON; `hidden` are its features."""
    offload, offload_weights = deepspeed.offloads(raw)
    free_bytes = hardware.ram_available_bytes // ranks.per_node
    if ranks.device == "cuda":  # the least free of its GPUs
        free_bytes = min(gpu.free_bytes for gpu in hardware.gpus[: ranks.gpus_per_node])
    return Machine(
        ranks=ranks,
        precision=precision,
        budget_bytes=int(free_bytes * (1 - RESERVE)),
        gpu_names=tuple(gpu.name for gpu in hardware.gpus[: ranks.gpus_per_node]),
        host_budget_bytes=int(hardware.ram_available_bytes // ranks.per_node * (1 - RESERVE)),
        zero_stage=deepspeed.zero_stage(raw),
        offload=offload,
        offload_weights=offload_weights or fsdp_offload,
        fetching=deepspeed.fetching(raw, hidden),
    )


def used_before(hardware: Hardware, ranks: Ranks) -> tuple[int, ...]:
    """Return what others use now of each GPU of this machine's ranks; 0 on a CPU."""
    if ranks.device == "cpu":
        return (0,) * ranks.per_node
    gpus = hardware.gpus[: ranks.gpus_per_node]
    return tuple(gpu.total_bytes - gpu.free_bytes for gpu in gpus)
