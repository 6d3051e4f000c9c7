"""Line charts and histograms, which the macro `chart` of the templates draws as SVG. Pure.

A chart is small enough that its text is readable on a phone, if it is not scaled down.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import fmean

from sft_play.reporting.answers import title_of
from sft_play.runs.report import LengthHistogram, LoggedStep

# The area of the curves in the drawing of the macro, in SVG units
LEFT = 50
RIGHT = 348
TOP = 10
BOTTOM = 172
MAX_POINTS = 300  # of a line; more are averaged
TICKS = 5  # about
ROUND_STEPS = (1, 2, 2.5, 5, 10)  # times a power of ten

TRAINING = "Loss, nats per token with loss"
VALIDATION = "Validation loss"
LAST = ("Learning rate", "Gradient norm", "Tokens per second")  # of the charts

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of a line in the chart's own units, by rising x."""

    name: str
    points: list[Point]
    number: int = 0  # picks the color and the dashes


@dataclass(frozen=True)
class Bar:
    """How many samples have `low` <= tokens < `high`."""

    low: int
    high: int
    count: int

    @property
    def label(self) -> str:
        return f"{self.low:,} to {self.high - 1:,} tokens: {self.count:,} samples"


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to places from `start` to `end`, in SVG units."""

    low: float
    high: float
    start: float
    end: float
    has_whole_numbers: bool = False  # at its marks

    def place(self, value: float) -> float:
        """Return where a value is drawn."""
        fraction = (value - self.low) / (self.high - self.low)
        return round(self.start + fraction * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The places and labels of about TICKS marks at round values."""
        least = (self.high - self.low) / TICKS  # above 0
        power = 10 ** math.floor(math.log10(least))
        steps = (factor * power for factor in ROUND_STEPS)
        step = next(step for step in steps if step >= least * (1 - 1e-9))
        if self.has_whole_numbers:
            step = max(1, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = (number * step for number in range(first, last + 1))
        return [(self.place(value), tick_label(value, step)) for value in values]


@dataclass(frozen=True)
class Chart:
    """Lines or bars, which the macro `chart` draws."""

    title: str
    description: str  # what the chart shows, for those who do not see it
    x_name: str
    x_axis: Axis
    y_axis: Axis
    lines: Sequence[Series] = ()
    bars: Sequence[Bar] = ()


def line_chart(title: str, series: Sequence[Series]) -> Chart | None:
    """Return lines over the steps, or None if there is no point.

    A series keeps its color if another one has no points.
    """
    lines = []
    for number, one in enumerate(series):
        if one.points:
            columns = (averaged(values, MAX_POINTS) for values in zip(*one.points, strict=True))
            lines.append(Series(one.name, [*zip(*columns, strict=True)], number))
    if not lines:
        return None
    points = [point for line in lines for point in line.points]
    x_axis = replace(_axis([0.0, *(x for x, _ in points)], LEFT, RIGHT), has_whole_numbers=True)
    y_axis = _axis([y for _, y in points], BOTTOM, TOP, padding=0.05)
    names = [f"{line.name}: " if len(lines) > 1 else "" for line in lines]
    described = [
        f"{name}{_described(line.points)}" for name, line in zip(names, lines, strict=True)
    ]
    return Chart(title, "; ".join(described), "step", x_axis, y_axis, lines)


def history_charts(runs: Sequence[tuple[str, Sequence[LoggedStep]]]) -> list[Chart]:
    """Return the curves of runs, given as (name, history), one chart for each kind of number.

    The curves of one run are named by what they are, those of several by the run.
    """
    curves: dict[str, list[Series]] = defaultdict(lambda: [Series(name, []) for name, _ in runs])
    for number, (_, history) in enumerate(runs):
        for step in history:
            for title, value in _numbers(step).items():
                points = curves[title][number].points
                points += [] if value is None else [(step.step, value)]
    if len(runs) == 1:
        both = curves[TRAINING] + curves[VALIDATION]
        del curves[VALIDATION]
        names = ("training", "validation")
        curves[TRAINING] = [Series(name, one.points) for name, one in zip(names, both, strict=True)]
    titles = sorted(curves, key=lambda title: title in LAST)
    charts = (line_chart(title, curves[title]) for title in titles)
    return [chart for chart in charts if chart is not None]


def _numbers(step: LoggedStep) -> Mapping[str, float | None]:
    """Return what was logged at a step, by the title of its chart and in the page's order."""
    losses = {f"{VALIDATION} of {name}": loss for name, loss in (step.eval_losses or {}).items()}
    scores = {f"{title_of(name)} of the validation rows": of for name, of in step.scores.items()}
    last = (step.learning_rate, step.grad_norm, step.tokens_per_second)
    logged = {TRAINING: step.loss, VALIDATION: step.eval_loss, **losses, **scores}
    return logged | dict(zip(LAST, last, strict=True))


def histogram(title: str, lengths: LengthHistogram) -> Chart | None:
    """Return a histogram of lengths in tokens, or None if there is no sample."""
    if not lengths.counts:
        return None
    edges = zip(pairwise(lengths.edges), lengths.counts, strict=True)
    bars = [Bar(low, high, count) for (low, high), count in edges]
    fullest = max(bars, key=attrgetter("count"))
    description = (
        f"{sum(lengths.counts):,} samples of less than {lengths.edges[-1]:,} tokens; "
        f"the fullest bin is {fullest.label}"
    )
    x_axis = Axis(lengths.edges[0], lengths.edges[-1], LEFT, RIGHT, has_whole_numbers=True)
    y_axis = Axis(0, fullest.count, BOTTOM, TOP, has_whole_numbers=True)
    return Chart(title, description, "tokens", x_axis, y_axis, bars=bars)


def averaged(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` values: each the mean of about equally many neighbors."""
    count = min(count, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(edges)]


def tick_label(value: float, step: float) -> str:
    """Return a tick's value with the decimals that tell it from its neighbors."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if step >= 1:
        return f"{value:g}"
    if step < 1e-3:
        return f"{value:.3g}"
    decimals = -math.floor(math.log10(step) + 1e-9)
    return f"{value:.{decimals + (round(step * 10**decimals, 6) % 1 > 0)}f}"


def _axis(values: Sequence[float], start: float, end: float, padding: float = 0.0) -> Axis:
    """Return an axis over all values; one that is alone gets room on both sides."""
    low = min(values)
    high = max(values)
    if low == high:
        room = abs(low) / 2 or 1.0
        return Axis(low - room, high + room, start, end)
    room = padding * (high - low)
    # a quantity that is never negative is not drawn below zero
    bottom = max(0.0, low - room) if low >= 0 else low - room
    return Axis(bottom, high + room, start, end)


def _described(points: Sequence[Point]) -> str:
    (first_x, first_y), (last_x, last_y) = points[0], points[-1]
    lowest_x, lowest_y = min(points, key=itemgetter(1))
    highest_x, highest_y = max(points, key=itemgetter(1))
    return (
        f"{first_y:.4g} at step {first_x:.0f}, "
        f"{last_y:.4g} at step {last_x:.0f}; "
        f"lowest {lowest_y:.4g} at {lowest_x:.0f}, highest {highest_y:.4g} at {highest_x:.0f}"
    )
