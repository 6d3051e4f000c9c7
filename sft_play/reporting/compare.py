"""Runs beside each other: scores with their intervals, what differs, and whether it matters.

Every run is compared with the first one, as lines, JSON or a page. Loads no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft_play.reporting import charts
from sft_play.reporting.answers import LOSS, ROUGE_L, changed, title_of
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate
from sft_play.reporting.page import count, gib, render, seconds
from sft_play.reporting.run_facts import RunFacts
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
    """A setting that has not the same value in all runs."""

    name: str
    values: list[str]  # by run, in their order


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
        score, difference = self.score, self.score.difference
        start = f"{self.run} against {self.first}: {score.name} {score.change:+.3f}"
        if difference is None or difference.low is None:
            return f"{start}: {score.outcome}, by the means alone"
        interval = f"95 % interval {difference.low:+.3f} to {difference.high:+.3f}"
        return f"{start} ({interval} over {difference.rows} rows): {score.outcome}"


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
    runs = [RunFacts.read(folder) for folder in folders]
    differences = []
    notes = []
    for other in runs[1:]:
        for found in _differences(runs[0], other):
            if isinstance(found, ScoreDifference):
                differences.append(found)
            else:
                notes.append(f"{other.run} against {runs[0].run}: {found}")
    return Comparison(
        runs=[_compared(run) for run in runs],
        settings=differing_settings(runs),
        differences=differences,
        notes=notes,
        histories=[(run.run, run.report.history or []) for run in runs],
    )


def differing_settings(runs: Sequence[RunFacts]) -> list[SettingDifference]:
    """Return the settings that the runs did not all use with the same value, by name."""
    found = []
    for name in sorted(set(runs[0].values).difference(NOT_COMPARED)):
        values = [run.values[name] for run in runs]
        if len(set(values)) > 1:
            found.append(SettingDifference(name, values))
    return found


def _compared(run: RunFacts) -> ComparedRun:
    report = run.report
    scores = {score.name: score.after for score in run.scores}
    return ComparedRun(
        run=run.run,
        model=run.model,
        tone=run.verdict.tone,
        headline=run.verdict.headline,
        steps=report.global_step,
        loss=scores.pop(LOSS, None),
        scores=scores,
        tokens_per_second=report.tokens_per_second,
        peak_bytes=report.peak_bytes.measured if report.peak_bytes else None,
        seconds=report.total_seconds,
    )


def _differences(first: RunFacts, other: RunFacts) -> Iterator[ScoreDifference | str]:
    """Yield how each score differs after training, or why it is not compared.

    The loss comes first, then the scores that answers have, ROUGE-L before others.
    """
    yield _loss_difference(first, other)
    scored = []
    for run in (first, other):
        titles = [title_of(name) for answer in run.after.answers for name in answer.scores]
        scored.append(sorted(dict.fromkeys(titles), key=lambda title: title != ROUGE_L))
    both = [title for title in scored[0] if title in scored[1]]
    for title in both:
        yield from _answer_difference(first, other, title, notes_rows=title == both[0])
    for title in dict.fromkeys(scored[0] + scored[1]) if both else [ROUGE_L]:
        if title not in both:
            yield _unscored(first, other, title)


def _loss_difference(first: RunFacts, other: RunFacts) -> ScoreDifference | str:
    early, late = (run.after.scores.get(LOSS) for run in (first, other))
    first_tokens, other_tokens = (_test_tokens(run) for run in (first, other))
    if early is None or late is None:
        return _unscored(first, other, LOSS)
    if first_tokens != other_tokens:
        return (
            "loss is not compared, because their test rows or their tokenizers differ: "
            f"{other_tokens} and {first_tokens}"
        )
    score = changed(LOSS, early, late)
    return ScoreDifference(other.run, first.run, score, score.after.rows)


def _answer_difference(
    first: RunFacts, other: RunFacts, title: str, notes_rows: bool
) -> Iterator[ScoreDifference | str]:
    """Yield how a score of answers differs on the rows that both runs answered."""
    early, late = (run.after.scores[title] for run in (first, other))
    common = [row for row in late.rows if row in early.rows]
    answered = len(other.after.answers), len(first.after.answers)
    has_all = len(common) == max(answered)
    if len(common) < MIN_ROWS:
        yield (
            f"{title} is not compared, because {len(common)} scored test rows are the same; "
            f"{MIN_ROWS} are needed"
        )
    elif not has_all and not (early.is_mean and late.is_mean):
        yield f"{title} is of all rows, and the test rows differ"
    else:
        score = changed(title, early.on(common), late.on(common))
        yield ScoreDifference(other.run, first.run, score, len(common))
        if notes_rows and not has_all:
            yield (
                f"the test rows differ; {title} is compared on the {len(common)} rows of both "
                f"({answered[0]} and {answered[1]} were answered)"
            )


def _unscored(first: RunFacts, other: RunFacts, title: str) -> str:
    lacks = first if title not in first.after.recorded else other
    return f"{title} is not compared, {lacks.run} has none"


def _test_tokens(run: RunFacts) -> str:
    """Return how many samples and tokens with loss the test rows have."""
    test = run.report.rows("test")
    samples, tokens = test.get("samples") or 0, test.get("trained_tokens") or 0
    return f"{samples:,} samples with {tokens:,} tokens with loss"


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
            lines.append(f"    {name}: {value}")
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
