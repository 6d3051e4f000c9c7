"""The checks of a run as a report shows them: what it recorded, and what its numbers say. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ExitClass
from sft_play.reporting.answers import Answer
from sft_play.runs.report import RunReport

State = Literal["passed", "failed", "look"]  # look: no error, and worth a look
GIB = 2**30
MOST_CUT = 0.05  # of the answers, before the cut ones are worth a look
MOST_ABOVE = 1.1  # measured / predicted peak


@dataclass(frozen=True)
class ShownCheck:
    """A check with its result in words."""

    name: str
    state: State
    found: str | None


def shown_checks(report: RunReport, after: Sequence[Answer]) -> list[ShownCheck]:
    """Return the checks that the run made, in order, and those that its numbers allow."""
    found = [
        ShownCheck(check.name, "passed" if check.passed else "failed", check.found)
        for check in report.checks or []
    ]
    derived = [
        _overlap(report),
        _lost_tokens(report),
        _finite(report),
        _memory(report),
        _cut_answers(after),
    ]
    return found + [check for check in derived if check is not None]


def _overlap(report: RunReport) -> ShownCheck | None:
    """Return whether training rows are among the rows that are evaluated on."""
    overlap = ((report.data or {}).get("train") or {}).get("overlap")
    if overlap is None:
        return None
    shared = {split: equal["normalised"] for split, equal in overlap.items()}
    total = sum(shared.values())
    name = "no training row is an evaluation row"
    if total == 0:
        return ShownCheck(name, "passed", f"compared with {', '.join(shared)} rows")
    counts = ", ".join(f"{count:,} {split} rows" for split, count in shared.items() if count)
    return ShownCheck(name, "look", f"equal to {counts}; data.on_overlap says what became of them")


def _lost_tokens(report: RunReport) -> ShownCheck | None:
    train = (report.data or {}).get("train")
    if train is None:
        return None
    fraction = train["lost_fraction"]
    name = "no token with loss is over model.max_seq_len"
    if fraction == 0:
        return ShownCheck(name, "passed", f"{train['trained_tokens']:,} tokens with loss")
    return ShownCheck(name, "look", f"{fraction:.2%} of the tokens with loss were lost")


def _finite(report: RunReport) -> ShownCheck | None:
    name = "loss, gradient norm and weights stayed finite"
    if report.exit_class == ExitClass.DIVERGED:
        return ShownCheck(name, "failed", (report.cause or "").partition("\n")[0])
    if not report.history:
        return None
    return ShownCheck(name, "passed", f"{len(report.history)} logs")


def _memory(report: RunReport) -> ShownCheck | None:
    peak = report.peak_bytes
    if peak is None or peak.measured is None:
        return None
    state: State = "passed" if peak.measured <= MOST_ABOVE * peak.predicted else "look"
    found = f"measured {peak.measured / GIB:.2f} GiB, predicted {peak.predicted / GIB:.2f} GiB"
    return ShownCheck("peak memory is no larger than planned", state, found)


def _cut_answers(after: Sequence[Answer]) -> ShownCheck | None:
    """Return whether the trained model's answers end before the limit on new tokens."""
    known = [answer for answer in after if answer.was_cut is not None]
    if not known:
        return None
    cut = sum(answer.was_cut for answer in known)
    state: State = "passed" if cut <= MOST_CUT * len(known) else "look"
    found = f"{cut} of {len(known)} answers reached train.generation_max_new_tokens"
    return ShownCheck("answers end by themselves", state, found)
