"""Whether an arm trained what it was given: its speed counts only then. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from benchmarks.speed.results import ArmRun, Measurement, TokenCount, Verdict
from benchmarks.speed.workloads import WARM_UP, Arm, Workload
from sft_play.runs.report import LoggedLoss

MAX_DEVIATION = 0.01  # of the reference's loss, which may be of another precision
MAX_ROUNDING = 0.002  # of one program's loss in bfloat16, whose sums are in another order
# Of a loss: where it hardly falls, wrong gradients give the same. On random words it falls by 0.31.
MIN_FALL = 0.25
COMPARED_STEPS = 25  # of the reference, WARM_UP included


def check_run(
    workload: Workload,
    arm: Arm,
    run: ArmRun,
    reference: Sequence[float],
    tokens: Sequence[TokenCount],
    allowed: float = MAX_DEVIATION,
) -> Verdict:
    """Return whether a run counts; `reference` has a loss and `tokens` a count for each step.

    `allowed` is the share of the reference's loss by which it may be off.
    """
    if run.measured is None:
        return Verdict(counts=False, why_not=[f"{run.status}: {run.error or ''}"], off=None)
    off = deviation(run.measured.losses, reference)
    why_not = [
        *loss_faults(run.measured.losses, off, allowed),
        *reference_faults(run.measured.losses, reference),
        *gradient_faults(run.measured),
        *row_faults(workload, arm, run.measured, tokens),
    ]
    return Verdict(counts=not why_not, why_not=why_not, off=off)


def loss_faults(losses: Sequence[LoggedLoss], off: float | None, allowed: float) -> list[str]:
    """Return what is wrong with a loss curve that is `off` its reference."""
    faults = []
    if not losses or not all(isfinite(logged.loss) for logged in losses):
        faults.append("its loss is not finite")
    if off is not None and not off <= allowed:
        faults.append(f"its loss is {off:.2%} off the reference, of {allowed:.2%}")
    return faults


def reference_faults(losses: Sequence[LoggedLoss], reference: Sequence[float]) -> list[str]:
    """Return why a loss curve says nothing when it follows its reference."""
    compared = reference[: losses[-1].step] if losses else []
    if len(compared) < WARM_UP:
        return ["no reference to compare it with"]
    fallen = fall(compared)
    if fallen < MIN_FALL:
        return [f"the reference's loss falls by {fallen:.0%}, of {MIN_FALL:.0%}"]
    return []


def fall(losses: Sequence[float]) -> float:
    """Return by which share of the first loss the last one is lower."""
    return 1 - losses[-1] / losses[0]


def gradient_faults(measured: Measurement) -> list[str]:
    """Return which gradients are missing."""
    faults = []
    if measured.untrained:
        faults.append(f"{len(measured.untrained)} adapters got no gradient")
    if not measured.least_grad_norm:
        faults.append("a step without a gradient")
    return faults


def row_faults(
    workload: Workload, arm: Arm, measured: Measurement, tokens: Sequence[TokenCount]
) -> list[str]:
    """Return where other rows were trained than those that the workload has."""
    faults = []
    timed = tokens[WARM_UP:]
    real = sum(step.real for step in timed)
    trained = sum(step.trained for step in timed)
    found = (measured.real_tokens, measured.trained_tokens)
    if not arm.packs and found != (real, trained):
        faults.append(
            f"it trained {measured.real_tokens} tokens, {measured.trained_tokens} of them "
            f"with loss, of {real} and {trained}"
        )
    rows = len(tokens) * workload.rows_per_step
    if measured.rows_used not in (None, rows):
        faults.append(f"it used {measured.rows_used} rows of {rows}")
    return faults


def deviation(losses: Sequence[LoggedLoss], reference: Sequence[float]) -> float | None:
    """Return the largest |loss / reference - 1| over the windows of WARM_UP steps that both have.

    None where they share no window. Steps are compared, not tokens, also for arms whose steps hold
    other rows: what is learned depends on the number of optimizer steps.
    """
    curve = window_means(reference)
    deviations = []
    for logged in losses:
        if logged.step % WARM_UP or logged.step > len(reference):
            continue
        expected = curve[logged.step // WARM_UP - 1]
        deviations.append(abs(logged.loss / expected - 1) if isfinite(logged.loss) else inf)
    return max(deviations, default=None)


def window_means(reference: Sequence[float]) -> list[float]:
    """Return the mean loss of every WARM_UP steps."""
    starts = range(0, len(reference) - WARM_UP + 1, WARM_UP)
    return [sum(reference[start : start + WARM_UP]) / WARM_UP for start in starts]
