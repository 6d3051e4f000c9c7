"""Whether a run trained what it was given: only then its speed counts. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from benchmarks.results import Result
from benchmarks.samples import TokenCount
from benchmarks.workloads import NO_REFERENCE, Arm, Workload
from sft_play.runs.report import LoggedLoss

MAX_DEVIATION = 0.01  # from the loss of the reference, which may have another precision
MAX_ROUNDING = 0.002  # from the loss of the same program in bfloat16, summed in another order
# Of a loss. If it hardly falls, wrong gradients give the same loss. Random words: it falls by 0.31.
MIN_FALL = 0.25
COMPARED_STEPS = 25  # of the reference, including the warm-up


def check_run(
    workload: Workload,
    arm: Arm,
    result: Result,
    reference: Sequence[float],
    tokens: Sequence[TokenCount] = (),
    allowed: float = MAX_DEVIATION,
) -> list[str]:
    """Return why a run does not count. [] if it counts.

    `reference` has a loss and `tokens` a count for each step. `allowed` is the largest deviation
    from the loss of the reference, as a fraction.
    """
    if result.status != "done":
        return [f"{result.status}: {result.cause or ''}"]
    faults = [] if workload.fits else ["the plan let it run"]
    if not result.losses or not all(isfinite(logged.loss) for logged in result.losses):
        faults.append("its loss is not finite")
    off = deviation(result.losses, reference, workload.warm_up)
    if off is not None and not off <= allowed:
        faults.append(f"its loss is {off:.2%} off the reference, of {allowed:.2%}")
    compared = reference[: result.losses[-1].step] if result.losses else []
    if workload.reference != NO_REFERENCE and len(compared) < workload.warm_up:
        faults.append("no reference to compare it with")
    elif workload.reference != NO_REFERENCE and fall(compared) < MIN_FALL:
        faults.append(f"the reference's loss falls by {fall(compared):.0%}, of {MIN_FALL:.0%}")
    if result.figure("untrained"):
        faults.append(f"{len(result.figures['untrained'])} adapters got no gradient")
    if not result.figure("least_grad_norm"):
        faults.append("a step without a gradient")
    return faults + (row_faults(workload, arm, result, tokens) if tokens else [])


def fall(losses: Sequence[float]) -> float:
    """Return by which fraction of the first loss the last loss is lower."""
    return 1 - losses[-1] / losses[0]


def row_faults(
    workload: Workload, arm: Arm, result: Result, tokens: Sequence[TokenCount]
) -> list[str]:
    """Return what differs between the trained rows and those of the workload."""
    faults = []
    timed = tokens[workload.warm_up :]
    expected = (sum(step.real for step in timed), sum(step.labelled for step in timed))
    found = (result.figure("tokens"), result.figure("labelled_tokens"))
    if not arm.packs and found != expected:
        faults.append(
            f"it trained {found[0]} tokens, {found[1]} of them with a label, "
            f"of {expected[0]} and {expected[1]}"
        )
    rows = len(tokens) * workload.rows_per_step
    if result.figure("rows_used") not in (None, rows):
        faults.append(f"it used {result.figure('rows_used')} rows of {rows}")
    return faults


def deviation(
    losses: Sequence[LoggedLoss], reference: Sequence[float], window: int
) -> float | None:
    """Return the largest |loss / reference - 1| over the windows that both have. None if none.

    A loss is logged every `window` steps. Steps are compared, not tokens, also for arms whose steps
    have other rows: what a model learns depends on the number of optimizer steps.
    """
    curve = window_means(reference, window)
    deviations = []
    for logged in losses:
        if window == 0 or logged.step % window or logged.step > len(reference):
            continue
        expected = curve[logged.step // window - 1]
        deviations.append(abs(logged.loss / expected - 1) if isfinite(logged.loss) else inf)
    return max(deviations, default=None)


def window_means(losses: Sequence[float], window: int) -> list[float]:
    """Return the mean loss of every `window` steps."""
    starts = range(0, len(losses) - window + 1, window) if window else ()
    return [sum(losses[start : start + window]) / window for start in starts]
