"""A histogram of the lengths of samples, for the report of a run. Loads no torch."""

import math

import numpy as np

from sft_play.runs.report import LengthHistogram

BINS = 24  # at most
ROUND_WIDTHS = (1, 2, 2.5, 5, 10)  # times a power of ten


def length_histogram(lengths: np.ndarray) -> LengthHistogram:
    """Return how many of the lengths (N,) in tokens lie in each of at most BINS equal bins.

    The first bin starts at 0 and the last one ends behind the longest. Without lengths there is no
    bin.
    """
    if not len(lengths):
        return LengthHistogram([], [])
    longest = int(lengths.max())
    width = _round_width(longest + 1)
    edges = list(range(0, longest + width + 1, width))
    counts, _ = np.histogram(lengths, edges)
    return LengthHistogram(edges, counts.tolist())


def _round_width(span: int) -> int:
    """Return the smallest round width with which BINS bins cover `span` tokens."""
    least = span / BINS
    power = 10 ** math.floor(math.log10(max(least, 1)))
    widths = [math.ceil(factor * power) for factor in ROUND_WIDTHS]
    return next(width for width in widths if width >= least)
