"""Errors of a prediction, and whether a measurement counts. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from statistics import median
from typing import NamedTuple

from benchmarks.planner.results import RunResult
from benchmarks.planner.workloads import Workload


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1, above 0 where too much was predicted.

    None where one of them is missing.

    >>> relative_error(11.0, 10.0), relative_error(9.0, 10.0), relative_error(None, 10.0)
    (0.10000000000000009, -0.09999999999999998, None)
    """
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


class Spread(NamedTuple):
    """Errors of several predictions."""

    lowest: float
    median: float
    highest: float
    count: int


def spread(errors: Iterable[float | None]) -> Spread | None:
    """Return the spread of the errors that are known, None without one."""
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return Spread(min(known), median(known), max(known), len(known))


def find_faults(workload: Workload, result: RunResult) -> list[str]:
    """Return why a run does not count, [] where it does.

    It counts where it trained every step to a finite loss, or the plan refused what cannot fit.
    """
    if result.status == "refused":
        return [f"the plan refused it: {result.cause}"] if workload.fits else []
    if result.status != "done":
        return [f"{result.status}: {result.cause or 'no cause'}"]
    faults = []
    if not workload.fits:
        faults.append("the plan let it run")
    if result.steps != workload.steps:
        faults.append(f"{result.steps} steps of {workload.steps}")
    if not result.losses or not all(map(isfinite, result.losses)):
        faults.append("its loss is not finite")
    if not result.measured.peak:
        faults.append("its peak was not measured")
    return faults
