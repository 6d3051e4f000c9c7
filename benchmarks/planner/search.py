"""The arithmetic of a sweep: the fastest step, the largest micro-batch. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.planner.figures import Combination

GRANULE = 128  # tokens: the resolution of the search for a largest micro-batch
PRECISION = 0.015  # of the largest, at which the search ends
STRIDE = 1.25  # factor by which a size that fits is raised until one does not


class MicroBatch(NamedTuple):
    """Rows of equal length."""

    rows: int
    width: int


def cut(tokens: int, max_seq_len: int) -> MicroBatch:
    """Return a micro-batch of about `tokens` tokens in the fewest rows of equal length.

    >>> cut(5000, 2048), cut(100, 2048)
    (MicroBatch(rows=3, width=1666), MicroBatch(rows=1, width=100))
    """
    rows = -(-tokens // max_seq_len)
    return MicroBatch(rows, tokens // rows)


def find_largest(
    fits: Callable[[int], bool],
    start: int,
    most: int,
    granule: int = GRANULE,
    precision: float = 0.0,
) -> int:
    """Return the largest number of tokens up to `most` that fits, 0 if not even a granule fits.

    It is exact to a granule or to `precision`. `fits` changes once from True to False. It is called
    rarely and near `start` first, because a call may take seconds.

    >>> find_largest(lambda tokens: tokens <= 1000, start=500, most=10000, granule=8)
    1000
    """
    low = 0
    high = start
    while high <= most and fits(high):
        if high == most:
            return most
        low = high
        high = min(most, max(high + granule, int(high * STRIDE)))
    while high - low > max(granule, precision * high):
        middle = (low + high) // 2 // granule * granule or granule
        if middle <= low:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def step_speed(
    micro_seconds: float | None,
    batch_size: int,
    rows_per_step: int,
    max_seq_len: int,
    optimizer_seconds: float,
) -> float | None:
    """Return tokens per second of complete optimizer steps, None if memory ran out.

    A step is `rows_per_step` rows in equal micro-batches, then the optimizer.
    """
    if micro_seconds is None:
        return None
    seconds = rows_per_step / batch_size * micro_seconds + optimizer_seconds
    return rows_per_step * max_seq_len / seconds


def fastest_that_fits(
    combinations: Iterable[Combination], fits: Callable[[Combination], bool]
) -> Combination | None:
    """Return the fastest combination that fits. `fits` is called from the fastest on."""
    timed = [each for each in combinations if each.tokens_per_second]
    timed.sort(key=lambda each: -each.tokens_per_second)
    return next(filter(fits, timed), None)
