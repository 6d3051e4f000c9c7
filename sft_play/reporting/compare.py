"""Runs side by side: scores with their intervals, what differs, and whether it matters.

Every run is compared with the first one, as lines, JSON or a page. Loads no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from sft_play.reporting import charts
from sft_play.reporting.answers import LOSS, ROUGE_L, changed, title_of
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate
from sft_play.reporting.page import count, render, seconds, shown_gib
from sft_play.reporting.run_facts import OF_THE_FOLDER, RunFacts
from sft_play.reporting.verdict import Score, describe_outcome
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.tables import aligned


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
        score = self.score
        start = f"{self.run} against {self.first}: {score.name} {score.change:+.3f}"
        if score.difference is not None and score.difference.interval:
            start += f" ({score.difference.interval})"
        return f"{start}: {describe_outcome(score)}"


@dataclass(frozen=True)
class Comparison:
    """Runs in the order in which they were named."""

    runs: list[RunFacts]
    settings: list[SettingDifference]
    differences: list[ScoreDifference]
    notes: list[str]  # what cannot be compared, and why

    @property
    def titles(self) -> list[str]:
        """The scores besides the loss that any of the runs has."""
        names = dict.fromkeys(name for run in self.runs for name in run.last_scores)
        return [name for name in names if name != LOSS]


def compare_runs(folders: Sequence[RunFolder]) -> Comparison:
    """Return two or more runs side by side."""
    runs = [RunFacts.read(folder) for folder in folders]
    settings = []
    for name in sorted(set(runs[0].values).difference(OF_THE_FOLDER)):
        values = [run.values[name] for run in runs]
        if len(set(values)) > 1:
            settings.append(SettingDifference(name, values))
    differences = []
    notes = []
    for other in runs[1:]:
        for found in _differences(runs[0], other):
            if isinstance(found, ScoreDifference):
                differences.append(found)
            else:
                notes.append(f"{other.run} against {runs[0].run}: {found}")
    return Comparison(runs, settings, differences, notes)


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
    if early is None or late is None:
        return _unscored(first, other, LOSS)
    first_tokens, other_tokens = (_scored_tokens(run) for run in (first, other))
    if first_tokens != other_tokens:
        return (
            "loss is not compared, because their held-out rows or their tokenizers differ: "
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
            f"{title} is not compared, because {len(common)} scored held-out rows are the same; "
            f"{MIN_ROWS} are needed"
        )
    elif not has_all and not (early.is_mean and late.is_mean):
        yield f"{title} is of all rows, and the held-out rows differ"
    else:
        score = changed(title, early.on(common), late.on(common))
        yield ScoreDifference(other.run, first.run, score, len(common))
        if notes_rows and not has_all:
            yield (
                f"the held-out rows differ; {title} is compared on the {len(common)} rows of both "
                f"({answered[0]} and {answered[1]} were answered)"
            )


def _unscored(first: RunFacts, other: RunFacts, title: str) -> str:
    lacks = first if title not in first.after.recorded else other
    return f"{title} is not compared, {lacks.run} has none"


def _scored_tokens(run: RunFacts) -> str:
    """Return how many samples were scored, and their tokens with loss."""
    loss, test = run.after.scores[LOSS], run.report.rows("test")
    samples, tokens = len(loss.rows), int(sum(loss.weights))
    if not samples:  # a run of an earlier version, without losses of single rows
        samples, tokens = test.get("samples") or 0, test.get("trained_tokens") or 0
    return f"{samples:,} samples with {tokens:,} tokens with loss"


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a table of the runs, the settings that differ, and how the scores differ."""
    titles = comparison.titles
    with_interval = [f"{title}, 95 % interval" for title in titles[:1]] + titles[1:]
    headings = ("run", "loss", *with_interval, "tokens/s", "peak memory", "time", "verdict")
    rows = [headings, *(_cells(run, titles) for run in comparison.runs)]
    lines = [*aligned(rows, left=(0, len(headings) - 1)), "", "settings that differ"]
    for setting in comparison.settings:
        lines.append(f"  {setting.name}")
        for run, value in zip(comparison.runs, setting.values, strict=True):
            lines.append(f"    {run.run}: {value}")
    if not comparison.settings:
        lines.append("  none")
    lines.append("")
    lines += [difference.sentence for difference in comparison.differences]
    return lines + comparison.notes


def comparison_json(comparison: Comparison) -> Json:
    """Return what `compare --json` prints."""
    return {
        "runs": [_run_json(run) for run in comparison.runs],
        "settings": [asdict(setting) for setting in comparison.settings],
        "differences": [
            {**asdict(difference), "outcome": difference.score.outcome}
            for difference in comparison.differences
        ],
        "notes": comparison.notes,
    }


def _run_json(run: RunFacts) -> Json:
    report = run.report
    scores = {name: score and asdict(score) for name, score in run.last_scores.items()}
    return {
        "run": run.run,
        "model": run.model,
        "tone": run.verdict.tone,
        "headline": run.verdict.headline,
        "steps": report.global_step,
        "loss": scores.pop(LOSS, None),
        "scores": scores,
        "tokens_per_second": report.tokens_per_second,
        "peak_bytes": report.measured_peak,
        "seconds": report.total_seconds,
    }


def _cells(run: RunFacts, titles: list[str]) -> tuple[str, ...]:
    scores, report = run.last_scores, run.report
    return (
        run.run,
        _number(scores.get(LOSS)),
        *(_number(scores.get(title), with_interval=True) for title in titles),
        count(report.tokens_per_second),
        shown_gib(report.measured_peak),
        seconds(report.total_seconds),
        run.verdict.headline,
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    histories = [(run.run, run.report.history or []) for run in comparison.runs]
    curves = charts.history_charts(histories)
    return render("compare.html.j2", comparison=comparison, curves=curves)


def _number(estimate: Estimate | None, with_interval: bool = False) -> str:
    if estimate is None:
        return "–"
    if with_interval and estimate.low is not None:
        return f"{estimate.mean:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
    return f"{estimate.mean:.4f}"
