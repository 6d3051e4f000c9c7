"""Runs beside each other: scores with their intervals, what differs, and whether it matters.

Loads no torch. Every run is compared with the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.reporting import bootstrap
from sft_play.reporting.answers import Answer, read_answers
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate
from sft_play.reporting.summary import RunSummary, read_summary
from sft_play.reporting.verdict import Score
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import LoggedStep

# They differ between any two runs, or say where files are
NOT_COMPARED = ("train.run_name", "train.output_dir", "data.cache_dir")


@dataclass(frozen=True)
class ComparedRun:
    """One run as a comparison shows it; None is what the run did not record."""

    run: str
    model: str | None
    tone: str
    headline: str
    steps: int | None
    loss: Estimate | None
    rouge_l: Estimate | None
    tokens_per_second: float | None
    peak_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class SettingDifference:
    """A setting that has not the same value in all runs; None where a run does not have it."""

    name: str
    values: list[str | None]  # by run, in their order


@dataclass(frozen=True)
class ScoreDifference:
    """How a score of `run` differs from that of the first run."""

    run: str
    first: str
    score: Score
    rows: int  # that both runs were scored on

    @property
    def sentence(self) -> str:
        """Return the difference in words."""
        better = self.score.outcome
        change = self.score.change
        difference = self.score.difference
        start = f"{self.run} against {self.first}: {self.score.name} {change:+.3f}"
        if difference is None or difference.low is None:
            return f"{start}: {better}, by the means alone"
        interval = f"95 % interval {difference.low:+.3f} to {difference.high:+.3f}"
        return f"{start} ({interval} over {difference.rows} rows): {better}"


@dataclass(frozen=True)
class Comparison:
    """Runs in the order in which they were named."""

    runs: list[ComparedRun]
    settings: list[SettingDifference]
    differences: list[ScoreDifference]
    notes: list[str]  # what cannot be compared, and why
    histories: list[tuple[str, list[LoggedStep]]]


def compare(folders: Sequence[RunFolder]) -> Comparison:
    """Return two or more runs beside each other."""
    summaries = [read_summary(folder) for folder in folders]
    answers = [read_answers(folder, "after") for folder in folders]
    differences: list[ScoreDifference] = []
    notes: list[str] = []
    for summary, found in zip(summaries[1:], answers[1:], strict=True):
        _compare_loss(summaries[0], summary, differences, notes)
        _compare_rouge(summaries[0], summary, answers[0], found, differences, notes)
    return Comparison(
        runs=[_compared(summary) for summary in summaries],
        settings=differing_settings(summaries),
        differences=differences,
        notes=notes,
        histories=[(summary.run, summary.history) for summary in summaries],
    )


def differing_settings(summaries: Sequence[RunSummary]) -> list[SettingDifference]:
    """Return the settings that the runs did not all use with the same value."""
    used = [{line.name: line.value for line in summary.settings} for summary in summaries]
    names = sorted(set().union(*used))
    found = []
    for name in names:
        values = [settings.get(name) for settings in used]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            found.append(SettingDifference(name, values))
    return found


def _compared(summary: RunSummary) -> ComparedRun:
    report = summary.report
    scores = {score.name: score.after for score in summary.scores}
    return ComparedRun(
        run=summary.run,
        model=summary.model,
        tone=summary.verdict.tone,
        headline=summary.verdict.headline,
        steps=report.global_step,
        loss=scores.get("loss"),
        rouge_l=scores.get("ROUGE-L"),
        tokens_per_second=report.tokens_per_second,
        peak_bytes=report.peak_bytes.measured if report.peak_bytes else None,
        seconds=(report.seconds or {}).get("total"),
    )


def _after(summary: RunSummary, name: str) -> Estimate | None:
    return next((score.after for score in summary.scores if score.name == name), None)


def _compare_loss(
    first: RunSummary,
    other: RunSummary,
    differences: list[ScoreDifference],
    notes: list[str],
) -> None:
    """Add how the losses differ, or a note why they cannot be compared."""
    early = _after(first, "loss")
    late = _after(other, "loss")
    if early is None or late is None:
        notes.append(_unscored(first, other, "loss", early))
        return
    if _test_tokens(first) != _test_tokens(other):
        notes.append(
            f"{other.run} against {first.run}: loss is not compared, because their test rows or "
            "their tokenizers differ: "
            f"{_token_words(other)} and {_token_words(first)}"
        )
        return
    score = Score("loss", early, late, None, higher_is_better=False)
    differences.append(ScoreDifference(other.run, first.run, score, late.rows))


def _compare_rouge(
    first: RunSummary,
    other: RunSummary,
    first_answers: Sequence[Answer],
    other_answers: Sequence[Answer],
    differences: list[ScoreDifference],
    notes: list[str],
) -> None:
    """Add how ROUGE-L differs on the rows that both answered, or a note why it cannot be said."""
    by_row = {answer.row: answer.rouge_l for answer in first_answers if answer.rouge_l is not None}
    pairs = [
        (by_row[answer.row], answer.rouge_l)
        for answer in other_answers
        if answer.row in by_row and answer.rouge_l is not None
    ]
    if not first_answers or not other_answers:
        notes.append(_unscored(first, other, "ROUGE-L", _after(first, "ROUGE-L")))
        return
    start = f"{other.run} against {first.run}: "
    if len(pairs) < MIN_ROWS:
        notes.append(
            f"{start}ROUGE-L is not compared, because {len(pairs)} scored test rows are the same; "
            f"{MIN_ROWS} are needed"
        )
        return
    if len(pairs) < max(len(first_answers), len(other_answers)):
        notes.append(
            f"{start}the test rows differ; ROUGE-L is compared on the {len(pairs)} rows of both "
            f"({len(other_answers)} and {len(first_answers)} were answered)"
        )
    early = [before for before, _ in pairs]
    late = [after for _, after in pairs]
    score = Score(
        "ROUGE-L",
        bootstrap.estimate(early),
        bootstrap.estimate(late),
        bootstrap.paired_difference(early, late),
        higher_is_better=True,
    )
    differences.append(ScoreDifference(other.run, first.run, score, len(pairs)))


def _unscored(first: RunSummary, other: RunSummary, name: str, first_score: Estimate | None) -> str:
    without = first.run if first_score is None else other.run
    return f"{other.run} against {first.run}: {name} is not compared, {without} has none"


def _test_tokens(summary: RunSummary) -> tuple[int | None, int | None]:
    """Return samples and tokens with loss of the test rows."""
    test = (summary.report.data or {}).get("test") or {}
    return test.get("samples"), test.get("trained_tokens")


def _token_words(summary: RunSummary) -> str:
    samples, tokens = _test_tokens(summary)
    return f"{samples or 0:,} samples with {tokens or 0:,} tokens with loss"
