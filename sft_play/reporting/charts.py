"""Line charts and histograms as places on a drawing, which a template writes as SVG. Pure.

A chart is small enough that its text is readable on a phone, where it is not scaled down.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

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

CURVES = {
    "Learning rate": "learning_rate",
    "Gradient norm": "grad_norm",
    "Tokens per second": "tokens_per_second",
}

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of a line in the chart's own units, by rising x."""

    name: str
    points: Sequence[Point]


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
    points: str  # of a polyline
    end: Point  # the last point, for a line of one point too


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
    numbered = {number: one for number, one in enumerate(series) if one.points}
    if not numbered:
        return None
    shown = {number: Series(one.name, thinned(one.points)) for number, one in numbered.items()}
    points = [point for one in shown.values() for point in one.points]
    x_axis = _axis([0.0, *(x for x, _ in points)], LEFT, RIGHT)
    y_axis = _axis([y for _, y in points], BOTTOM, TOP, padding=0.05)
    lines = tuple(_line(number, one, x_axis, y_axis) for number, one in shown.items())
    described = [_described(one) for one in shown.values()]
    if len(shown) > 1:
        named = zip(shown.values(), described, strict=True)
        described = [f"{one.name}: {text}" for one, text in named]
    description = "; ".join(described)
    return Drawing(title, description, "step", x_axis.ticks(True), y_axis.ticks(), lines)


def history_charts(runs: Sequence[tuple[str, Sequence[LoggedStep]]]) -> list[Drawing]:
    """Return the curves of runs, given as (name, history), one chart for each kind of number.

    The curves of one run are named by what they are, those of several by the run.
    """

    def series(value: Callable[[LoggedStep], float | None]) -> list[Series]:
        """Return a number of every run's history; a run that did not log it has no points."""
        found = []
        for run, history in runs:
            points = [(step.step, value(step)) for step in history]
            found.append(Series(run, [point for point in points if point[1] is not None]))
        return found

    losses = series(attrgetter("loss"))
    charts = []
    if len(runs) > 1:
        charts.append(line_chart("Validation loss", series(attrgetter("eval_loss"))))
    else:
        (training,), (validation,) = losses, series(attrgetter("eval_loss"))
        losses = [Series("training", training.points), Series("validation", validation.points)]
    charts.insert(0, line_chart("Loss, nats per token with loss", losses))
    every = [step for _, steps in runs for step in steps]
    for name in dict.fromkeys(name for step in every for name in step.eval_losses or {}):
        of_name = series(lambda step, name=name: (step.eval_losses or {}).get(name))
        charts.append(line_chart(f"Validation loss of {name}", of_name))
    scores = dict.fromkeys(name for step in every for name in step.scores)
    for name in scores:
        title = f"{title_of(name)} of the validation rows"
        charts.append(line_chart(title, series(lambda step, name=name: step.scores.get(name))))
    for title, name in CURVES.items():
        charts.append(line_chart(title, series(attrgetter(name))))
    return [chart for chart in charts if chart is not None]


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


def _line(number: int, series: Series, x_axis: _Axis, y_axis: _Axis) -> Line:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    words = " ".join(f"{x:g},{y:g}" for x, y in places)
    return Line(series.name, number, words, places[-1])


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
