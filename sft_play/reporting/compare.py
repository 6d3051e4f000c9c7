"""Runs beside each other: scores with their intervals, what differs, and whether it matters.

Loads no torch. Every run is compared with the first one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from sft_play.config.layers import defaults
from sft_play.config.messages import word
from sft_play.reporting import bootstrap, charts
from sft_play.reporting.answers import (
    ROUGE_L,
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
    summaries = [read_summary(folder) for folder in folders]
    rows = [_TestRows.read(folder) for folder in folders]
    differences: list[ScoreDifference] = []
    notes: list[str] = []
    for summary, test in zip(summaries[1:], rows[1:], strict=True):
        pair = _Pair(summaries[0], summary, rows[0], test)
        for found in (pair.loss(), *pair.of_answers()):
            if found.difference is not None:
                differences.append(found.difference)
            if found.note is not None:
                notes.append(found.note)
    return Comparison(
        runs=[_compared(summary) for summary in summaries],
        settings=differing_settings(summaries),
        differences=differences,
        notes=notes,
        histories=[(summary.run, summary.history) for summary in summaries],
    )


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
        seconds=(report.seconds or {}).get("total"),
    )


@dataclass(frozen=True)
class _TestRows:
    """The answers to the test rows, and their losses, after training."""

    answers: list[Answer]
    losses: list[RowLoss]

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        return cls(read_answers(folder, "after"), read_losses(folder, "after"))


@dataclass(frozen=True)
class _Found:
    """How a score differs, and what has to be said of that."""

    difference: ScoreDifference | None = None
    note: str | None = None


@dataclass(frozen=True)
class _Pair:
    """The first run and another one."""

    first: RunSummary
    other: RunSummary
    first_rows: _TestRows
    other_rows: _TestRows

    def loss(self) -> _Found:
        """Return how the losses differ, or why they cannot be compared."""
        early = _after(self.first, LOSS)
        late = _after(self.other, LOSS)
        if early is None or late is None:
            return self._unscored(LOSS, early)
        if _test_tokens(self.first) != _test_tokens(self.other):
            note = (
                "loss is not compared, because their test rows or their tokenizers differ: "
                f"{_token_words(self.other)} and {_token_words(self.first)}"
            )
            return self._only_note(note)
        difference = loss_difference(self.first_rows.losses, self.other_rows.losses)
        return self._found(Score(LOSS, early, late, difference, higher_is_better=False), late.rows)

    def of_answers(self) -> list[_Found]:
        """Return how the scores of answers differ, or why that is unknown; ROUGE-L first."""
        names = [_names(test.answers) for test in (self.first_rows, self.other_rows)]
        both = [name for name in names[0] if name in names[1]]
        if not both:
            return [self._unscored(ROUGE_L, _after(self.first, ROUGE_L))]
        found = [self._of_metric(name, is_first=name == both[0]) for name in both]
        for name in dict.fromkeys([*names[0], *names[1]]):
            if name not in both:
                found.append(self._unscored(title_of(name), _after(self.first, title_of(name))))
        return found

    def _of_metric(self, name: str, is_first: bool) -> _Found:
        """Return how a score differs on the rows that both answered; the first one notes rows."""
        answered = (self.first_rows.answers, self.other_rows.answers)
        early, late = _common_scores(name, *answered)
        if len(early) < MIN_ROWS:
            note = (
                f"{title_of(name)} is not compared, because {len(early)} scored test rows are the "
                f"same; {MIN_ROWS} are needed"
            )
            return self._only_note(note)
        every = len(early) == max(map(len, answered))
        score = self._score(name, early, late, every)
        if score is None:
            return self._only_note(f"{title_of(name)} is of all rows, and the test rows differ")
        note = None
        if is_first and not every:
            note = (
                f"{self._start}the test rows differ; {title_of(name)} is compared on the "
                f"{len(early)} rows of both ({len(answered[1])} and {len(answered[0])} were "
                "answered)"
            )
        return self._found(score, len(early), note)

    def _score(
        self, name: str, early: Sequence[float], late: Sequence[float], every: bool
    ) -> Score | None:
        """Return a score of both runs; None of a score of all rows where these differ."""
        title = title_of(name)
        if all(is_mean_of_rows(side.report, name, rows) for side, rows in self._sides):
            estimates = (bootstrap.estimate(early), bootstrap.estimate(late))
            difference = bootstrap.paired_difference(early, late)
            return Score(title, *estimates, difference, higher_is_better=True)
        if not every:
            return None
        recorded = (_after(self.first, title), _after(self.other, title))
        return Score(title, *recorded, None, higher_is_better=True)

    @property
    def _sides(self) -> list[tuple[RunSummary, list[Answer]]]:
        return [(self.first, self.first_rows.answers), (self.other, self.other_rows.answers)]

    @property
    def _start(self) -> str:
        return f"{self.other.run} against {self.first.run}: "

    def _found(self, score: Score, rows: int, note: str | None = None) -> _Found:
        return _Found(ScoreDifference(self.other.run, self.first.run, score, rows), note)

    def _only_note(self, note: str) -> _Found:
        return _Found(note=f"{self._start}{note}")

    def _unscored(self, name: str, first_score: Estimate | None) -> _Found:
        without = self.first.run if first_score is None else self.other.run
        return self._only_note(f"{name} is not compared, {without} has none")


def _names(answers: Sequence[Answer]) -> list[str]:
    """Return the metrics of which some answers have a score, ROUGE-L first."""
    names = dict.fromkeys(name for answer in answers for name in answer.scores)
    return sorted(names, key=lambda name: name != "rougeL")


def _common_scores(
    name: str, first: Sequence[Answer], other: Sequence[Answer]
) -> tuple[list[float], list[float]]:
    """Return a score of the rows that both lists score, in the order of the second."""
    by_row = {answer.row: answer.scores[name] for answer in first if name in answer.scores}
    common = [answer for answer in other if answer.row in by_row and name in answer.scores]
    return [by_row[answer.row] for answer in common], [answer.scores[name] for answer in common]


def _after(summary: RunSummary, name: str) -> Estimate | None:
    return next((score.after for score in summary.scores if score.name == name), None)


def _test_tokens(summary: RunSummary) -> tuple[int | None, int | None]:
    """Return samples and tokens with loss of the test rows."""
    test = (summary.report.data or {}).get("test") or {}
    return test.get("samples"), test.get("trained_tokens")


def _token_words(summary: RunSummary) -> str:
    samples, tokens = _test_tokens(summary)
    return f"{samples or 0:,} samples with {tokens or 0:,} tokens with loss"


AFTER_SCORES = ("tokens/s", "peak memory", "time", "verdict")


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


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    return render(
        "compare.html.j2",
        comparison=comparison,
        titles=score_titles(comparison),
        curves=charts.history_charts(comparison.histories),
    )


def _cells(run: ComparedRun, titles: list[str]) -> tuple[str, ...]:
    return (
        run.run,
        _number(run.loss),
        *(_with_interval(run.scores.get(title)) for title in titles),
        count(run.tokens_per_second),
        gib(run.peak_bytes),
        seconds(run.seconds),
        run.headline,
    )


def _number(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.mean:.4f}"


def _with_interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None:
        return _number(estimate)
    return f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    """Return a line: the first and the last cell to the left, the others to the right."""
    name, *numbers, last = row
    cells = [f"{name:<{widths[0]}}"]
    cells += [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([*cells, last])
