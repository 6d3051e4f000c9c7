"""A comparison of runs as lines for a terminal, as JSON and as a page. Pure."""

from dataclasses import asdict
from typing import Any

from sft_play.reporting import charts
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.compare import ComparedRun, Comparison
from sft_play.reporting.page import count, gib, render, seconds

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
