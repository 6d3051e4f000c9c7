"""The arithmetic of a sweep: which step is best, how large the largest is. Pure: no torch, no I/O."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

GRANULE = 128  # tokens: as fine as a largest micro-batch is looked for
PRECISION = 0.015  # of the largest: finer than this nobody looks
STRIDE = 1.25  # by so much a size that fits is raised until one does not


def cut(tokens: int, max_seq_len: int) -> tuple[int, int]:
    """Return (rows, width) of a micro-batch of about `tokens` tokens in the fewest rows of equal length.

    >>> cut(5000, 2048), cut(100, 2048)
    ((3, 1666), (1, 100))
    """
    rows = -(-tokens // max_seq_len)
    return rows, tokens // rows


def largest(
    fits: Callable[[int], bool],
    start: int,
    most: int,
    granule: int = GRANULE,
    precision: float = 0.0,
) -> int:
    """Return the largest number of tokens up to `most` that fits, to a granule or that fraction; 0 where not even a granule does.

    `fits` falls once from True to False. It is asked near `start` first, and seldom, since it may cost seconds.

    >>> largest(lambda tokens: tokens <= 1000, start=500, most=10000, granule=8)
    1000
    """
    low, high = 0, start
    while high <= most and fits(high):
        if high == most:
            return most
        low, high = high, min(most, max(high + granule, int(high * STRIDE)))
    while high - low > max(granule, precision * high):
        middle = (low + high) // 2 // granule * granule or granule
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_speed(
    combination: Mapping[str, Any], rows_per_step: int, max_seq_len: int, optimizer_seconds: float
) -> float | None:
    """Return tokens per second of whole optimizer steps: `rows_per_step` rows in equal micro-batches, then the optimizer. None: out of memory."""
    if combination["micro_seconds"] is None:
        return None
    seconds = (
        rows_per_step / combination["batch_size"] * combination["micro_seconds"] + optimizer_seconds
    )
    return rows_per_step * max_seq_len / seconds


def fastest_that_fits(
    combinations: Iterable[Mapping[str, Any]], fits: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any] | None:
    """Return the combination with the highest `tokens_per_second` that fits; faster ones were asked and do not."""
    timed = [combination for combination in combinations if combination["tokens_per_second"]]
    return next(
        filter(fits, sorted(timed, key=lambda combination: -combination["tokens_per_second"])), None
    )
