"""Runs beside each other: scores with their intervals, what differs, and whether it matters.

Every run is compared with the first one, as lines, JSON or a page. Loads no torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from sft_play.config.layers import defaults
from sft_play.config.messages import word
from sft_play.reporting import bootstrap, charts
from sft_play.reporting.answers import (
    Answer,
    RowLoss,
    is_mean_of_rows,
    loss_difference,
    read_answers,
    read_losses,
    title_of,
)
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate
from sft_play.reporting.page import count, gib, render, seconds
from sft_play.reporting.summary import LOSS, RunSummary, read_summary
from sft_play.reporting.verdict import Score
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import LoggedStep

# They differ between any two runs, or say where files are
NOT_COMPARED = ("train.run_name", "train.output_dir", "data.cache_dir", "data.image_folder")

AFTER_SCORES = ("tokens/s", "peak memory", "time", "verdict")


@dataclass(frozen=True)
class ComparedRun:
    """One run as a comparison shows it; None is what the run did not record."""

    run: str
    model: str | None
    tone: str
    headline: str
    steps: int | None
    loss: Estimate | None
    scores: dict[str, Estimate | None]  # of the answers, by title
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
    sides = [_Side.read(folder) for folder in folders]
    summaries = [side.summary for side in sides]
    comparison = Comparison(
        runs=[_compared(summary) for summary in summaries],
        settings=differing_settings(summaries),
        differences=[],
        notes=[],
        histories=[(summary.run, summary.history) for summary in summaries],
    )
    for other in sides[1:]:
        pair = _Pair(sides[0], other, comparison)
        pair.compare_loss()
        pair.compare_answers()
    return comparison


def differing_settings(summaries: Sequence[RunSummary]) -> list[SettingDifference]:
    """Return the settings that the runs did not all use with the same value, by name."""
    used = [{line.name: line.value for line in summary.settings} for summary in summaries]
    built_in = defaults()
    found = []
    for name in sorted(set().union(*used).difference(NOT_COMPARED)):
        # a run of a version without the setting did what the default does now
        default = word(built_in[name].value)
        compared = {settings.get(name, default) for settings in used}
        if len(compared) > 1:
            values = [settings.get(name) for settings in used]
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
        loss=scores.get(LOSS),
        scores={name: score for name, score in scores.items() if name != LOSS},
        tokens_per_second=report.tokens_per_second,
        peak_bytes=report.peak_bytes.measured if report.peak_bytes else None,
        seconds=report.total_seconds,
    )


@dataclass(frozen=True)
class _Side:
    """A run, the answers to its test rows, and the losses of these, after training."""

    summary: RunSummary
    answers: list[Answer]
    losses: list[RowLoss]

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        losses = read_losses(folder, "after")
        return cls(read_summary(folder), read_answers(folder, "after"), losses)

    @property
    def metrics(self) -> list[str]:
        """The metrics of which some answers have a score, ROUGE-L first."""
        names = dict.fromkeys(name for answer in self.answers for name in answer.scores)
        return sorted(names, key=lambda name: name != "rougeL")

    @property
    def tokens_in_words(self) -> str:
        """How many samples and tokens with loss the test rows have."""
        test = self.summary.report.rows("test")
        samples, tokens = test.get("samples") or 0, test.get("trained_tokens") or 0
        return f"{samples:,} samples with {tokens:,} tokens with loss"

    def after(self, name: str) -> Estimate | None:
        """Return a score after training."""
        return next((score.after for score in self.summary.scores if score.name == name), None)

    def is_mean_of_rows(self, name: str) -> bool:
        """Return whether a score is the mean over the answers, as BLEU of a corpus is not."""
        return is_mean_of_rows(self.summary.report, name, self.answers)


@dataclass(frozen=True)
class _Pair:
    """The first run and another one, compared into a comparison of all."""

    first: _Side
    other: _Side
    comparison: Comparison

    def compare_loss(self) -> None:
        """Add how the losses differ, or why they cannot be compared."""
        early, late = self.first.after(LOSS), self.other.after(LOSS)
        if early is None or late is None:
            self._note_unscored(LOSS)
        elif self.first.tokens_in_words != self.other.tokens_in_words:
            self._note(
                "loss is not compared, because their test rows or their tokenizers differ: "
                f"{self.other.tokens_in_words} and {self.first.tokens_in_words}"
            )
        else:
            difference = loss_difference(self.first.losses, self.other.losses)
            self._add(Score(LOSS, early, late, difference, higher_is_better=False), late.rows)

    def compare_answers(self) -> None:
        """Add how the scores of answers differ, or why that is unknown; ROUGE-L first."""
        first, other = self.first.metrics, self.other.metrics
        both = [name for name in first if name in other]
        for name in both:
            self._compare_metric(name, is_first=name == both[0])
        for name in dict.fromkeys([*first, *other]) if both else ["rougeL"]:
            if name not in both:
                self._note_unscored(title_of(name))

    def _compare_metric(self, name: str, is_first: bool) -> None:
        """Add how a score differs on the rows that both answered; the first one notes rows."""
        title = title_of(name)
        first, other = self.first.answers, self.other.answers
        by_row = {answer.row: answer.scores[name] for answer in first if name in answer.scores}
        common = [answer for answer in other if answer.row in by_row and name in answer.scores]
        early = [by_row[answer.row] for answer in common]
        late = [answer.scores[name] for answer in common]
        has_all = len(common) == max(len(first), len(other))
        if len(common) < MIN_ROWS:
            self._note(
                f"{title} is not compared, because {len(common)} scored test rows are the same; "
                f"{MIN_ROWS} are needed"
            )
        elif self.first.is_mean_of_rows(name) and self.other.is_mean_of_rows(name):
            estimates = (bootstrap.estimate(early), bootstrap.estimate(late))
            difference = bootstrap.paired_difference(early, late)
            self._add(Score(title, *estimates, difference, higher_is_better=True), len(common))
            if is_first and not has_all:
                self._note(
                    f"the test rows differ; {title} is compared on the {len(common)} rows of both "
                    f"({len(other)} and {len(first)} were answered)"
                )
        elif has_all:
            recorded = (self.first.after(title), self.other.after(title))
            self._add(Score(title, *recorded, None, higher_is_better=True), len(common))
        else:
            self._note(f"{title} is of all rows, and the test rows differ")

    def _add(self, score: Score, rows: int) -> None:
        names = (self.other.summary.run, self.first.summary.run)
        self.comparison.differences.append(ScoreDifference(*names, score, rows))

    def _note(self, text: str) -> None:
        names = f"{self.other.summary.run} against {self.first.summary.run}"
        self.comparison.notes.append(f"{names}: {text}")

    def _note_unscored(self, title: str) -> None:
        without = self.first if self.first.after(title) is None else self.other
        self._note(f"{title} is not compared, {without.summary.run} has none")


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a table of the runs, the settings that differ, and how the scores differ."""
    titles = score_titles(comparison)
    with_interval = [f"{title}, 95 % interval" for title in titles[:1]] + titles[1:]
    headings = ("run", "loss", *with_interval, *AFTER_SCORES)
    rows = [headings, *(_cells(run, titles) for run in comparison.runs)]
    *columns, _ = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [_aligned(row, widths) for row in rows]
    lines += ["", "settings that differ"]
    names = [run.run for run in comparison.runs]
    for setting in comparison.settings:
        lines.append(f"  {setting.name}")
        for name, value in zip(names, setting.values, strict=True):
            lines.append(f"    {name}: {'(not there)' if value is None else value}")
    if not comparison.settings:
        lines.append("  none")
    lines.append("")
    lines += [difference.sentence for difference in comparison.differences]
    lines += comparison.notes
    return lines


def score_titles(comparison: Comparison) -> list[str]:
    """Return the scores of answers that any of the runs has."""
    return list(dict.fromkeys(title for run in comparison.runs for title in run.scores))


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return what `compare --json` prints."""
    values = asdict(comparison)
    del values["histories"]  # run.json has them
    for written, difference in zip(values["differences"], comparison.differences, strict=True):
        written["outcome"] = difference.score.outcome
    return values


def _cells(run: ComparedRun, titles: list[str]) -> tuple[str, ...]:
    return (
        run.run,
        _number(run.loss),
        *(_number(run.scores.get(title), with_interval=True) for title in titles),
        count(run.tokens_per_second),
        gib(run.peak_bytes),
        seconds(run.seconds),
        run.headline,
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    return render(
        "compare.html.j2",
        comparison=comparison,
        titles=score_titles(comparison),
        curves=charts.history_charts(comparison.histories),
    )


def _number(estimate: Estimate | None, with_interval: bool = False) -> str:
    if estimate is None:
        return "–"
    if with_interval and estimate.low is not None:
        return f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
    return f"{estimate.mean:.4f}"


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """Return a line: the first and the last cell to the left, the others to the right."""
    name, *numbers, last = row
    cells = [f"{name:<{widths[0]}}"]
    cells += [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([*cells, last])
