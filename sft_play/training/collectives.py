"""The first sums over all ranks: right, in time, and how fast."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer

import torch
from torch import distributed

from sft_play.errors import EnvironmentFault
from sft_play.plan import cards
from sft_play.plan.speed import LINK_SHARE
from sft_play.process import Process

FIRST_SECONDS = 180.0  # for ranks that have met; some are slow to read the base model's files
JOIN_SECONDS = 15.0  # beyond the timeout of the group, whose own error says more
SUMMED_BYTES = 64 << 20  # enough that a ring is limited by its links
REPEATS = 5
SLOW_SHARE = 0.25  # of what such links reach, below which something is wrong with them


@dataclass(frozen=True)
class Collectives:
    """How fast the ranks sum, on GPUs."""

    world_size: int
    bytes_per_second: float | None  # through the link of each rank; None on CPUs
    expected: float | None  # where the card is known

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


@contextmanager
def limited(process: Process, give_up: Callable[[str], None], is_joining: bool) -> Iterator[None]:
    """Call `give_up(cause)` in a thread where what the ranks do inside does not end in time.

    While they join, the group's own timeout counts, which gloo does not keep where addresses are
    wrong; machines may start minutes apart. Then they are all there.
    """
    seconds = process.timeout.total_seconds()
    missing = "the other ranks did not come, or cannot be reached,"
    if is_joining:
        seconds += JOIN_SECONDS
    else:
        seconds = min(FIRST_SECONDS, seconds)
        missing = "the ranks have met, and their first collectives did not end"
    cause = (
        f"rank {process.rank} on {socket.gethostname()}: {missing} within {seconds:.0f} s; between "
        "machines, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that joins them "
        "(make doctor lists them), and look at logs/rank-*.log of the run on each"
    )
    timer = Timer(seconds, give_up, (cause,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def measure_collectives(process: Process) -> Collectives:
    """Sum over all ranks, on their devices, and return how fast. Every rank must call it.

    Raises: EnvironmentFault where the sum is wrong.
    """
    check_sum(process)
    if process.device.type == "cpu":
        return Collectives(process.world_size, None, None)
    rate = int(_bytes_per_second(process))
    slowest = process.min(rate)
    card = cards.card_of((torch.cuda.get_device_name(process.device),))
    expected = LINK_SHARE * card.link_bytes if card else None
    return Collectives(process.world_size, slowest, expected)


def check_sum(process: Process) -> None:
    """Raise EnvironmentFault unless a sum over all ranks is right in every element."""
    positions = torch.arange(4096, dtype=torch.float32, device=process.device)
    summed = positions + process.rank
    distributed.all_reduce(summed)
    ranks = process.world_size
    # all are whole numbers below 2^24, so float32 is exact
    right = positions * ranks + ranks * (ranks - 1) // 2
    wrong = process.gather(int((summed != right).sum()))
    for rank, count in enumerate(wrong):
        if count:
            raise EnvironmentFault(
                f"rank {rank}: {count} of {len(right)} elements of a sum over {ranks} ranks are "
                "wrong; try NCCL_P2P_DISABLE=1, and make doctor"
            )


def _bytes_per_second(process: Process) -> float:
    """Return the bytes a second that a ring moves over each link in an all_reduce.

    2 (N - 1) / N of the summed bytes (Patarasuk and Yuan 2009).
    """
    summed = torch.zeros(SUMMED_BYTES // 4, device=process.device)
    distributed.all_reduce(summed)  # the first one sets up the links
    torch.cuda.synchronize(process.device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        distributed.all_reduce(summed)
    torch.cuda.synchronize(process.device)
    seconds = (time.perf_counter() - started) / REPEATS
    del summed
    torch.cuda.empty_cache()
    ranks = process.world_size
    return 2 * (ranks - 1) / ranks * SUMMED_BYTES / seconds
