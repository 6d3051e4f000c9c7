"""Times of kernels on a GPU, without those of their launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPEATS, ROUNDS = 20, 7
WAIT_CYCLES = 40_000_000  # in which the host runs ahead: launches are not what is measured


def kernel_microseconds(launches: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Return the median time of what one call launches, and the host's time for the call.

    The calls take turns: what they read may be more than a GPU caches.
    """
    for launch in launches:
        launch()
    times, host_times = [], []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        began = time.perf_counter()
        for index in range(REPEATS):
            launches[index % len(launches)]()
        host_times.append((time.perf_counter() - began) * 1e6 / REPEATS)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPEATS)
    return statistics.median(times), statistics.median(host_times)
