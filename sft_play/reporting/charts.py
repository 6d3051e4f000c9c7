"""Line charts and histograms as places on a drawing, which a template writes as SVG. Pure.

A chart is small enough that its text is readable on a phone, where it is not scaled down.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sft_play.reporting.answers import title_of
from sft_play.runs.report import LengthHistogram, LoggedStep

# The area of the curves in a drawing of WIDTH x HEIGHT, in SVG units
WIDTH = 360
HEIGHT = 210
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


@dataclass(frozen=True)
class Tick:
    """A label at a place on an axis, in SVG units."""

    place: float
    label: str


@dataclass(frozen=True)
class Line:
    """A line in SVG units. `number` picks its colour and its dashes."""

    name: str
    number: int
    places: Sequence[Point]


@dataclass(frozen=True)
class Bar:
    """A bar in SVG units."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True)
class Drawing:
    """A chart that is ready to be written."""

    title: str
    description: str  # what the chart shows, for those who do not see it
    x_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class _Axis:
    """Maps values from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        fraction = (value - self.low) / (self.high - self.low)
        return round(self.start + fraction * (self.end - self.start), 1)

    def ticks(self, whole_numbers: bool = False) -> tuple[Tick, ...]:
        """Return about TICKS marks at round values, of whole numbers alone where asked for."""
        least = (self.high - self.low) / TICKS  # above 0
        power = 10 ** math.floor(math.log10(least))
        steps = (factor * power for factor in ROUND_STEPS)
        step = next(step for step in steps if step >= least * (1 - 1e-9))
        if whole_numbers:
            step = max(1, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return tuple(Tick(self.place(value), tick_label(value, step)) for value in values)


def line_chart(title: str, series: Sequence[Series]) -> Drawing | None:
    """Return lines over the steps, or None where there is no point.

    A series keeps its colour where another one has no points.
    """
    shown = {
        number: Series(one.name, thinned(one.points))
        for number, one in enumerate(series)
        if one.points
    }
    if not shown:
        return None
    points = [point for one in shown.values() for point in one.points]
    x_axis = _axis([0.0, *(x for x, _ in points)], LEFT, RIGHT)
    y_axis = _axis([y for _, y in points], BOTTOM, TOP, padding=0.05)
    lines = []
    described = []
    for number, one in shown.items():
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in one.points]
        lines.append(Line(one.name, number, places))
        name = f"{one.name}: " if len(shown) > 1 else ""
        described.append(name + _described(one))
    ticks = x_axis.ticks(True), y_axis.ticks()
    return Drawing(title, "; ".join(described), "step", *ticks, tuple(lines))


def history_charts(runs: Sequence[tuple[str, Sequence[LoggedStep]]]) -> list[Drawing]:
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
        both = curves[TRAINING] + curves.pop(VALIDATION, [Series("", [])])
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


def histogram(title: str, lengths: LengthHistogram) -> Drawing | None:
    """Return a histogram of lengths in tokens, or None where there is no sample."""
    if not lengths.counts:
        return None
    x_axis = _Axis(lengths.edges[0], lengths.edges[-1], LEFT, RIGHT)
    y_axis = _Axis(0, max(lengths.counts), BOTTOM, TOP)
    bars = []
    for count, (low, high) in zip(lengths.counts, pairwise(lengths.edges), strict=True):
        left = x_axis.place(low)
        top = y_axis.place(count)
        width = round(x_axis.place(high) - left - 1, 1)
        label = f"{low:,} to {high - 1:,} tokens: {count:,} samples"
        bars.append(Bar(left, top, width, round(BOTTOM - top, 1), label))
    most = max(range(len(bars)), key=lambda index: lengths.counts[index])
    description = (
        f"{sum(lengths.counts):,} samples of less than {lengths.edges[-1]:,} tokens; "
        f"the fullest bin is {bars[most].label}"
    )
    x_ticks = x_axis.ticks(True)
    return Drawing(title, description, "tokens", x_ticks, y_axis.ticks(True), bars=tuple(bars))


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MAX_POINTS points: each the mean of equally many neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), max(1, size))]
    means = []
    for group in groups:
        x = sum(x for x, _ in group) / len(group)
        y = sum(y for _, y in group) / len(group)
        means.append((x, y))
    return means


def tick_label(value: float, step: float) -> str:
    """Return a tick's value with the decimals that tell it from its neighbours."""
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


def _axis(values: Sequence[float], start: float, end: float, padding: float = 0.0) -> _Axis:
    """Return an axis over all values; one that is alone gets room on both sides."""
    low = min(values)
    high = max(values)
    if low == high:
        room = abs(low) / 2 or 1.0
        return _Axis(low - room, high + room, start, end)
    room = padding * (high - low)
    # a quantity that is never negative is not drawn below zero
    bottom = max(0.0, low - room) if low >= 0 else low - room
    return _Axis(bottom, high + room, start, end)


def _described(series: Series) -> str:
    first_x, first_y = series.points[0]
    last_x, last_y = series.points[-1]
    lowest_x, lowest_y = min(series.points, key=lambda point: point[1])
    highest_x, highest_y = max(series.points, key=lambda point: point[1])
    return (
        f"{first_y:.4g} at step {first_x:.0f}, "
        f"{last_y:.4g} at step {last_x:.0f}; "
        f"lowest {lowest_y:.4g} at {lowest_x:.0f}, highest {highest_y:.4g} at {highest_x:.0f}"
    )
