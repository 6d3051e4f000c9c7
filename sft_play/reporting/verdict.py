"""How a run ended, whether it scored better, and what to type next. Pure."""

from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ExitClass
from sft_play.plan.next_command import TARGETS, make_command
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate
from sft_play.runs.checkpoints import has_checkpoint
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

NO_CLAIM = ("too few rows to tell", "no interval known")
Outcome = Literal[
    "better", "worse", "no clear difference", "too few rows to tell", "no interval known"
]
Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Score:
    """A score of the held-out rows before and after training."""

    name: str
    before: Estimate | None
    after: Estimate | None
    difference: Estimate | None  # after - before, of the same rows; None if rows have no score
    higher_is_better: bool

    @property
    def change(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return self.after.mean - self.before.mean

    @property
    def outcome(self) -> Outcome | None:
        """What became of the score; None if it is not known before and after.

        It is a claim only with a 95 % interval: of the difference, or of both scores if single
        rows have none.
        """
        change = self.change
        if change is None:
            return None
        before, after, difference = self.before, self.after, self.difference
        known = (before, after) if difference is None else (difference,)
        if any(each.low is None for each in known):
            return NO_CLAIM[after.rows >= MIN_ROWS]
        is_open = difference is None and before.low <= after.high and after.low <= before.high
        if change == 0 or is_open or (difference is not None and difference.includes_zero):
            return "no clear difference"
        return "better" if (change > 0) == self.higher_is_better else "worse"


@dataclass(frozen=True)
class Verdict:
    """The first lines of a report."""

    tone: Tone
    headline: str
    reasons: list[str]
    next: str | None  # the command to type


def verdict(folder: RunFolder, report: RunReport, scores: list[Score]) -> Verdict:
    """Return what became of a run."""
    if report.status == "done":
        known = [score for score in scores if score.outcome]
        reasons = list(map(score_sentence, known))
        if not reasons:
            reasons = ["The held-out rows were not scored both before and after training."]
        if report.warning is not None:
            reasons.append(f"Warning: {report.warning}")
        tone, headline = _tone_and_headline(known)
        return Verdict(tone, headline, reasons, f"make chat RUN={folder.name}")
    cause = (report.cause or "").splitlines()
    if report.status == "stopped":
        headline = f"Stopped on request at step {report.global_step or 0}"
        return Verdict("open", headline, cause, resume_command(folder, report))
    if report.status == "failed":
        advice = report.out_of_memory.next if report.out_of_memory else None
        return Verdict("bad", f"Failed: {exit_words(report.exit_class)}", cause, advice)
    if report.state == "died":
        headline = "Died: the run was killed before it could say how it ended"
        return Verdict("bad", headline, cause, resume_command(folder, report))
    return Verdict("open", f"Not ended: {report.state}", cause, None)


def resume_command(folder: RunFolder, report: RunReport) -> str | None:
    """Return the command that continues from the last checkpoint, None if there is none."""
    if not has_checkpoint(folder.path):
        return None
    target = TARGETS.get(report.strategy or "", "train")
    return " ".join(make_command(target, {"TRAIN_RESUME_FROM": folder.path}))


def exit_words(exit_class: int | None) -> str:
    """Return an exit class as `out of memory (exit class 15)`."""
    if exit_class is None:
        return "no exit class"
    name = next((known.name for known in ExitClass if known == exit_class), "unknown")
    return f"{name.lower().replace('_', ' ')} (exit class {exit_class})"


def _tone_and_headline(scores: list[Score]) -> tuple[Tone, str]:
    """Return what the scores say of a run that is done; each has an outcome."""
    outcomes = {score.outcome for score in scores}
    if not outcomes:
        return "open", "Done"
    if outcomes.issubset(NO_CLAIM):
        return "open", f"Done: {describe_outcome(scores[0])}; the {_moved(scores[0])}"
    if outcomes == {"better"}:
        return "good", "Done: better on the held-out rows"
    if outcomes.isdisjoint(("better", "worse")):
        return "open", "Done: no clear difference on the held-out rows"
    if "better" not in outcomes:
        return "bad", "Done, but worse on the held-out rows"
    if "worse" in outcomes:
        return "open", "Done: the scores of the held-out rows do not agree"
    *others, last = [score.name for score in scores if score.outcome == "better"]
    better = f"{', '.join(others)} and {last}" if others else last
    return "open", f"Done: better on the held-out rows by {better}, by no other score clearly"


def score_sentence(score: Score) -> str:
    """Return `ROUGE-L rose from 0.238 to 0.926, by 0.61 to 0.76 (95 % of ...): better.`"""
    moved = _moved(score)
    change = score.difference
    if change is not None and change.interval:
        moved += f", by {change.mean:+.3f} ({change.interval})"
    return f"{moved}: {describe_outcome(score)}."


def _moved(score: Score) -> str:
    before, after = score.before.mean, score.after.mean
    if after == before:
        return f"{score.name} stayed at {after:.3f}"
    return f"{score.name} {'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"


def describe_outcome(score: Score) -> str:
    """Return the outcome, with the number of rows if these are too few for a claim."""
    count = f" ({score.after.rows})" if score.outcome == NO_CLAIM[0] else ""
    return f"{score.outcome}{count}"
