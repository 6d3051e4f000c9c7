"""Measure how fast ranks all-reduce and copy from host memory, before weights load."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from sft_play.errors import EnvironmentFault
from sft_play.plan import cards
from sft_play.plan.speed import LINK_SHARE
from sft_play.process import Process

SUMMED_BYTES = 64 << 20  # large enough that the links limit a ring
REPEATS = 5
SLOW_SHARE = 0.25  # of the links' expected speed; below it something is wrong
COPIED_BYTES = 256 << 20  # like a layer of frozen weights
SLOW_HOST_SHARE = 0.7  # of the speed that the plan assumes for copies from host memory


@dataclass(frozen=True)
class Collectives:
    """Speed of an all-reduce over the ranks' GPUs."""

    world_size: int
    bytes_per_second: float | None  # through each rank's link; None on CPUs
    expected: float | None  # if the card is known

    def __str__(self) -> str:
        if self.bytes_per_second is None:
            return f"links ranks={self.world_size} all_reduce right"
        words = f"links ranks={self.world_size} all_reduce {self.bytes_per_second / 1e9:.0f} GB/s"
        if self.expected and self.bytes_per_second < SLOW_SHARE * self.expected:
            words += (
                f", slow: GPUs of this kind reach {self.expected / 1e9:.0f}; make doctor shows "
                "how they are linked, NCCL_DEBUG=INFO what NCCL uses"
            )
        return words


@dataclass(frozen=True)
class HostLink:
    """Speed of each GPU's copies from pinned host memory while all GPUs copy."""

    bytes_per_second: float
    expected: float | None  # what the plan assumes, if the card is known

    def __str__(self) -> str:
        rate = f"{self.bytes_per_second / 1e9:.1f} GB/s"
        text = f"weights in host memory: copied to the GPU at {rate}"
        if self.expected and self.bytes_per_second < SLOW_HOST_SHARE * self.expected:
            text += (
                f", slow: the plan assumes {self.expected / 1e9:.1f}; see nvidia-smi "
                "--query-gpu=pcie.link.gen.max,pcie.link.width.current --format=csv, and set "
                "TRAIN_BATCH_SIZE higher if steps wait for copies"
            )
        return text


def measure_collectives(process: Process) -> Collectives:
    """All-reduce over all ranks on their devices, and return the speed. Every rank must call it.

    Raises: EnvironmentFault if the sum is wrong.
    """
    check_sum(process)
    if not process.is_gpu:
        return Collectives(process.world_size, None, None)
    rate = int(_bytes_per_second(process))
    slowest = process.min(rate)
    card = _card_of(process)
    expected = LINK_SHARE * card.link_bytes if card else None
    return Collectives(process.world_size, slowest, expected)


def measure_host_link(process: Process) -> HostLink:
    """Copy from pinned host memory on all GPUs at once. Every rank must call it."""
    on_host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(on_host, device=process.device)
    process.gather(None)  # all ranks copy at the same time
    seconds = _seconds_each(process, partial(on_gpu.copy_, on_host, non_blocking=True))
    del on_gpu
    torch.cuda.empty_cache()  # the weights need the room
    slowest = process.min(int(COPIED_BYTES / seconds))
    card = _card_of(process)
    return HostLink(slowest, card.host_link_bytes if card else None)


def _card_of(process: Process) -> cards.Card | None:
    return cards.card_of((torch.cuda.get_device_name(process.device),))


def _seconds_each(process: Process, queue: Callable[[], object]) -> float:
    """Return the seconds that each of REPEATS pieces of GPU work takes, after one warm-up."""
    queue()  # sets up everything it needs
    torch.cuda.synchronize(process.device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        queue()
    torch.cuda.synchronize(process.device)
    return (time.perf_counter() - started) / REPEATS


def check_sum(process: Process) -> None:
    """Raise EnvironmentFault unless a sum over all ranks is right in every element."""
    positions = torch.arange(4096, dtype=torch.float32, device=process.device)
    summed = positions + process.rank
    distributed.all_reduce(summed)
    ranks = process.world_size
    # all are integers below 2^24, so float32 is exact
    right = positions * ranks + ranks * (ranks - 1) // 2
    wrong = process.gather(int((summed != right).sum()))
    for rank, count in enumerate(wrong):
        if count:
            raise EnvironmentFault(
                f"rank {rank}: {count} of {len(right)} elements of a sum over {ranks} ranks are "
                "wrong; try NCCL_P2P_DISABLE=1, and make doctor"
            )


def _bytes_per_second(process: Process) -> float:
    """Return the bytes per second that a ring moves over each link in an all_reduce.

    2 (N - 1) / N of the summed bytes (Patarasuk and Yuan 2009).
    """
    summed = torch.zeros(SUMMED_BYTES // 4, device=process.device)
    seconds = _seconds_each(process, partial(distributed.all_reduce, summed))
    del summed
    torch.cuda.empty_cache()
    ranks = process.world_size
    return 2 * (ranks - 1) / ranks * SUMMED_BYTES / seconds
