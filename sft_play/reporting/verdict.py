"""How a run ended, whether it scored better, and what to type next. Pure."""

from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ExitClass
from sft_play.plan.next_command import TARGETS, make_command
from sft_play.reporting.bootstrap import Estimate
from sft_play.runs.checkpoints import has_checkpoint
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

Outcome = Literal["better", "worse", "no clear difference"]
Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Score:
    """A score of the test rows before and after training."""

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

        Without scores of single rows, the sign of the change decides.
        """
        change = self.change
        if change is None:
            return None
        if change == 0 or (self.difference is not None and self.difference.includes_zero):
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
        reasons = [score_sentence(score) for score in scores if score.outcome]
        if not reasons:
            reasons = ["The test rows were not scored both before and after training."]
        if report.warning is not None:
            reasons.append(f"Warning: {report.warning}")
        tone, headline = _tone_and_headline(scores)
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
    """Return what the scores say of a run that is done."""
    outcomes = {score.outcome for score in scores} - {None}
    if not outcomes:
        return "open", "Done"
    if outcomes == {"better"}:
        return "good", "Done: better on the test rows"
    if outcomes == {"no clear difference"}:
        return "open", "Done: no clear difference on the test rows"
    if "better" not in outcomes:
        return "bad", "Done, but worse on the test rows"
    if "worse" in outcomes:
        return "open", "Done: the scores of the test rows do not agree"
    *others, last = [score.name for score in scores if score.outcome == "better"]
    better = f"{', '.join(others)} and {last}" if others else last
    return "open", f"Done: better on the test rows by {better}, by no other score clearly"


def score_sentence(score: Score) -> str:
    """Return `ROUGE-L rose from 0.238 to 0.926, by 0.61 to 0.76 (95 % of ...): better.`"""
    before, after = score.before.mean, score.after.mean
    moved = f"{'rose' if after > before else 'fell'} from {before:.3f} to {after:.3f}"
    if after == before:
        moved = f"stayed at {after:.3f}"
    change = score.difference
    if change is not None and change.interval:
        moved += f", by {change.mean:+.3f} ({change.interval})"
    return f"{score.name} {moved}: {score.outcome}."
