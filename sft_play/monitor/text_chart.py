"""Bars and curves as lines of text. Pure."""

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def bar(fraction: float, width: int) -> str:
    """Return a bar that is filled to `fraction`.

    >>> bar(0.25, 8)
    '██░░░░░░'
    """
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return "█" * filled + "░" * (width - filled)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return lines that draw the values from left to right, the top one first.

    More values than columns are averaged. The top line is labelled with the largest value that is
    drawn, the bottom line with the least.

    >>> for line in curve([4.0, 3.0, 2.0, 0.0], width=4, height=2): print(line)
    4.000 ┤█▅▁▁
    0.000 ┤████
    """
    columns = _columns(values, width)
    low = min(columns)
    high = max(columns)
    # a value at the bottom still shows: its column has an eighth
    span = (high - low) or 1.0
    levels = [1 + round((value - low) / span * (8 * height - 1)) for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = ""
        if row == height - 1:
            label = f"{high:.4g}"
        elif row == 0:
            label = f"{low:.4g}"
        cells = [EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels]
        lines.append(f"{label:>8} ┤{''.join(cells)}")
    return lines


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: each the mean of about equally many neighbours."""
    count = min(width, len(values))
    columns = []
    for column in range(count):
        start = math.floor(column * len(values) / count)
        end = math.floor((column + 1) * len(values) / count)
        group = values[start:end]
        columns.append(sum(group) / len(group))
    return columns
