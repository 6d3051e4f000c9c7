"""Memory of each GPU and time, in the sentences of Unsloth's notebooks. Does not load torch.

A GB in these lines is 2^30 bytes, as in those notebooks. On CPUs a line is about a process.
"""

import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft_play.plan.devices import host_memory
from sft_play.runs.report import RankMemory, RunReport


def rank_memory(
    rank: int, device: "torch.device", before_bytes: int, peak_bytes: int
) -> RankMemory:
    """Return a rank's peaks and the total memory of its GPU, or of this host."""
    if device.type == "cuda":
        import torch

        card = torch.cuda.get_device_properties(device)
        name, total_bytes = card.name, card.total_memory
    else:
        name, total_bytes = "CPU", host_memory().total_bytes
    return RankMemory(
        rank=rank,
        host=socket.gethostname(),
        device=str(device),
        name=name,
        total_bytes=total_bytes,
        before_bytes=before_bytes,
        peak_bytes=peak_bytes,
    )


def resident_peak_bytes() -> int:
    """Return the peak of this process's resident host memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


if TYPE_CHECKING:
    import torch

GB = 2**30


@dataclass(frozen=True)
class MeasuredSpeed:
    """What all processes trained per second, and their shares of it."""

    of_all: float
    unit: str  # tokens/s or samples/s
    strategy: str


def lines_before_training(ranks: Sequence[RankMemory]) -> list[str]:
    """Return each GPU's memory, and what is reserved once the weights are loaded."""
    if len(ranks) == 1:
        only = ranks[0]
        return [
            f"{'GPU' if _is_gpu(only) else 'Process'} = {only.name}. "
            f"Max memory = {_gb(only.total_bytes)} GB.",
            f"{_gb(only.before_bytes)} GB of memory {_held(only)}.",
        ]
    lines = [
        f"{_label(rank)} = {rank.name}. Max memory = {_gb(rank.total_bytes)} GB. "
        f"{_held(rank).capitalize()} = {_gb(rank.before_bytes)} GB."
        for rank in ranks
    ]
    total = sum(rank.total_bytes for rank in ranks)
    reserved = sum(rank.before_bytes for rank in ranks)
    if all(map(_is_gpu, ranks)):
        lines.append(
            f"Total across {len(ranks)} GPUs: {_gb(total)} GB max, {_gb(reserved)} GB reserved"
        )
    return lines


def lines_after_training(report: RunReport) -> list[str]:
    """Return the peaks of each GPU, in total and for training, and the time that training took.

    One process on a CPU has no such lines: the run's line `done` reports its peak and time.
    """
    ranks = report.memory_by_rank or []
    if len(ranks) == 1 and not _is_gpu(ranks[0]):
        return []
    speed = None
    if report.tokens_per_second:
        speed = MeasuredSpeed(report.tokens_per_second, "tokens/s", report.strategy)
    return lines_after(ranks, report.seconds["train"], report.world_size or 1, speed)


def lines_after(
    ranks: Sequence[RankMemory], seconds: float, world_size: int, speed: MeasuredSpeed | None
) -> list[str]:
    """Return the lines after training; `ranks` has an entry for each GPU or CPU process.

    One process may use several GPUs: `world_size` counts processes.
    """
    minutes = seconds / 60
    if len(ranks) == 1:
        return [
            f"{seconds:.1f} seconds used for training.",
            f"{minutes:.2f} minutes used for training.",
            *_lines_of_one(ranks[0]),
        ]
    lines = [
        *map(_line_of_several, ranks),
        *_total_lines(ranks),
        f"{seconds:.1f} seconds ({minutes:.2f} minutes) used for training.",
    ]
    if speed is not None and world_size > 1:
        lines.append(_parallel_line(all(map(_is_gpu, ranks)), world_size, speed))
    return lines


def _lines_of_one(only: RankMemory) -> list[str]:
    what = _held(only)
    of = "max memory" if _is_gpu(only) else "this host's memory"
    peak, training = only.peak_bytes, only.training_bytes
    return [
        f"Peak {what} memory = {_gb(peak)} GB.",
        f"Peak {what} memory for training = {_gb(training)} GB.",
        f"Peak {what} memory % of {of} = {only.percent(peak):.3f} %.",
        f"Peak {what} memory for training % of {of} = {only.percent(training):.3f} %.",
    ]


def _line_of_several(rank: RankMemory) -> str:
    peak, training = rank.peak_bytes, rank.training_bytes
    return (
        f"{_label(rank)}: Peak {_held(rank)} = {_gb(peak)} GB ({rank.percent(peak):.3f}%), "
        f"Training = {_gb(training)} GB ({rank.percent(training):.3f}%)"
    )


def _total_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """Return the sum over GPUs; processes on one CPU share the host's memory, so there is none."""
    if not ranks or not all(map(_is_gpu, ranks)):
        return []
    total = sum(rank.total_bytes for rank in ranks)
    peak = sum(rank.peak_bytes for rank in ranks)
    training = sum(rank.training_bytes for rank in ranks)
    return [
        f"Total across {len(ranks)} GPUs: Peak = {_gb(peak)} GB ({100 * peak / total:.3f}%), "
        f"Training = {_gb(training)} GB ({100 * training / total:.3f}%)"
    ]


def _parallel_line(is_on_gpus: bool, world_size: int, speed: MeasuredSpeed) -> str:
    one, several = ("GPU", "GPUs") if is_on_gpus else ("process", "processes")
    digits = 0 if speed.unit == "tokens/s" else 2
    each = speed.of_all / world_size
    return (
        f"Training on {world_size} {several} in parallel ({speed.strategy}): "
        f"{speed.of_all:.{digits}f} {speed.unit}, {each:.{digits}f} a {one}"
    )


def _label(rank: RankMemory) -> str:
    """Return `GPU 0`: over several machines the ranks are numbered consecutively."""
    return f"GPU {rank.rank}" if _is_gpu(rank) else f"Process {rank.rank}"


def _held(rank: RankMemory) -> str:
    """Return what the bytes count: reserved by a GPU's allocator, or resident in a CPU process."""
    return "reserved" if _is_gpu(rank) else "resident"


def _is_gpu(rank: RankMemory) -> bool:
    return rank.device != "cpu"


def _gb(size_bytes: int) -> str:
    return f"{round(size_bytes / GB, 3)}"
