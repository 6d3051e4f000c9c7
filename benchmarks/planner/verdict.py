"""Errors of a prediction, and whether a measurement counts. Pure: no torch, no I/O."""

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median
from typing import Any

from benchmarks.planner.workloads import Work


def error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1, above 0 where too much was predicted; None where one of them is not there.

    >>> error(11.0, 10.0), error(9.0, 10.0), error(None, 10.0)
    (0.10000000000000009, -0.09999999999999998, None)
    """
    return predicted / measured - 1 if predicted is not None and measured else None


def spread(errors: Iterable[float | None]) -> tuple[float, float, float] | None:
    """Return (lowest, median, highest) of the errors that are there, None without one."""
    found = [one for one in errors if one is not None]
    return (min(found), median(found), max(found)) if found else None


def why_not(work: Work, facts: Mapping[str, Any]) -> list[str]:
    """Return why a run does not count, [] where it does: it trained every step to a finite loss, or the plan refused what cannot fit."""
    if facts["status"] == "refused":
        return [f"the plan refused it: {facts['cause']}"] if work.fits else []
    if facts["status"] != "done":
        return [f"{facts['status']}: {facts.get('cause') or 'no cause'}"]
    reasons = [] if work.fits else ["the plan let it run"]
    if facts["steps"] != work.steps:
        reasons.append(f"{facts['steps']} steps of {work.steps}")
    if not facts["losses"] or not all(map(isfinite, facts["losses"])):
        reasons.append("its loss is not finite")
    if not facts["measured"]["peak"]:
        reasons.append("its peak was not measured")
    return reasons
