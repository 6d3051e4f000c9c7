"""Whether an arm trained what it was given: its speed counts only then. Pure: no torch, no I/O."""

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

from benchmarks.speed.workloads import WARM_UP, Arm, Work

MOST_OFF = 0.01  # of the reference's loss
MOST_OF_FALL = 0.25  # of what the reference learned: an arm that learns nothing must not pass where little is to be learned
COMPARED_STEPS = 25  # of the reference, WARM_UP included


def judge(
    work: Work,
    arm: Arm,
    facts: dict[str, Any],
    reference: Sequence[float],
    tokens: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Return {"counts": bool, "why_not": [...], "off": largest deviation from the reference as a fraction, None without one}.

    `reference` has a loss for each step; `tokens` are (real, labelled) of each step's rows.
    """
    if facts["status"] != "done":
        return {
            "counts": False,
            "why_not": [f"{facts['status']}: {facts.get('error', '')}"],
            "off": None,
        }
    losses = [entry["loss"] for entry in facts["losses"]]
    why_not = [] if losses and all(map(isfinite, losses)) else ["its loss is not finite"]
    off, allowed = deviation(facts["losses"], reference), tolerance(reference)
    if off is None:
        why_not.append("no reference to compare it with")
    elif not off <= allowed:
        why_not.append(f"its loss is {off:.2%} off the reference, of {allowed:.2%}")
    if facts["untrained"]:
        why_not.append(f"{len(facts['untrained'])} adapters got no gradient")
    if not facts["least_grad_norm"]:
        why_not.append("a step without a gradient")
    timed = tokens[WARM_UP:]
    expected = sum(real for real, _ in timed), sum(labelled for _, labelled in timed)
    if not arm.packs and (facts["real_tokens"], facts["trained_tokens"]) != expected:
        why_not.append(
            f"it trained {facts['real_tokens']} tokens, {facts['trained_tokens']} of them with loss, of {expected[0]} and {expected[1]}"
        )
    if facts.get("rows_used") not in (None, len(tokens) * work.rows_per_step):
        why_not.append(f"it used {facts['rows_used']} rows of {len(tokens) * work.rows_per_step}")
    return {"counts": not why_not, "why_not": why_not, "off": off}


def tolerance(reference: Sequence[float]) -> float:
    """Return the fraction of the loss by which an arm may be off."""
    curve = windows(reference)
    fall = (curve[0] - curve[-1]) / curve[-1] if len(curve) > 1 else 0.0
    return min(MOST_OFF, MOST_OF_FALL * fall) if fall > 0 else MOST_OFF


def deviation(losses: Sequence[dict[str, Any]], reference: Sequence[float]) -> float | None:
    """Return the largest |loss / reference - 1| over the windows of WARM_UP steps that both have, None where there is none.

    Steps are compared, not tokens, also for arms whose steps hold other rows: what is learned goes with the optimizer's steps.
    """
    curve = windows(reference)
    both = [
        (entry["loss"], curve[entry["step"] // WARM_UP - 1])
        for entry in losses
        if entry["step"] % WARM_UP == 0 and entry["step"] <= len(reference)
    ]
    return max(
        (abs(loss / expected - 1) if isfinite(loss) else inf for loss, expected in both),
        default=None,
    )


def windows(reference: Sequence[float]) -> list[float]:
    """Return the mean loss of every WARM_UP steps."""
    return [
        sum(reference[start : start + WARM_UP]) / WARM_UP
        for start in range(0, len(reference) - WARM_UP + 1, WARM_UP)
    ]
