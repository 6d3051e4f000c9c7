"""Confidence intervals of a mean over rows, by the bootstrap. Loads no torch.

Rows are drawn again with replacement, many times; the interval holds the middle 95 % of the means
(Efron, 1979; for scores of text generation Koehn, 2004). Pairs of a row are drawn together, which
takes out what makes a row easy or hard for both models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sft_play.runs.report import BOUNDS, score_names

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.95
RESAMPLES = 5000
# numbers drawn in all: beyond 4,000 rows there are fewer resamples, which no longer matters
MAX_DRAWS = 20_000_000
MIN_RESAMPLES = 200
DRAWS_AT_A_TIME = 1_000_000
MIN_ROWS = 10  # of fewer rows an interval says too little
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean over rows with its 95 % interval, which is None for a few rows."""

    mean: float
    rows: int
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """Return `0.812 [0.790, 0.834]`, without the interval if there is none."""
        if self.low is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def values(self, name: str) -> dict[str, float]:
        """Return the mean and the ends of its interval, as metrics of this name are written."""
        if self.low is None:
            return {name: self.mean}
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}

    @property
    def interval(self) -> str:
        """The interval of a difference in words, "" if there is none."""
        if self.low is None:
            return ""
        return f"95 % interval {self.low:+.3f} to {self.high:+.3f} over {self.rows} rows"

    @property
    def includes_zero(self) -> bool:
        """Whether 0 is in the interval, so that a mean of differences may be chance."""
        return self.low is not None and self.low <= 0 <= self.high


def recorded_scores(metrics: Mapping[str, float], rows: int = 0) -> dict[str, Estimate]:
    """Return the scores of answers to so many rows in metrics of run.json, ROUGE-L first."""
    found = {}
    for name in score_names(metrics):
        low, high = (metrics.get(f"{name}{end}") for end in BOUNDS)
        if low is None or high is None:
            low = high = None
        found[name] = Estimate(metrics[name], rows, low, high)
    return found


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Return the weighted mean of values (N,), N of at least 1, and its interval.

    A weight is what the row counts for, such as its tokens in a loss per token. The same values
    give the same interval.
    """
    import numpy as np

    numbers = np.asarray(values, dtype=np.float64)
    weighted = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = float((numbers * weighted).sum() / weighted.sum())
    if len(numbers) < MIN_ROWS:
        return Estimate(mean, len(numbers))
    return _with_interval(mean, len(numbers), _resampled_means(numbers * weighted, weighted))


def resampled(
    score: float, rows: int, score_of: Callable[[Sequence[int]], float], resamples: int
) -> Estimate:
    """Return a score of all rows with its interval, if it is no mean of theirs.

    `score_of` scores the rows of some numbers, which may be there several times.
    """
    import numpy as np

    generator = np.random.default_rng(SEED)
    found = [score_of(generator.integers(0, rows, size=rows).tolist()) for _ in range(resamples)]
    return _with_interval(score, rows, found)


def _with_interval(mean: float, rows: int, means: "Sequence[float] | np.ndarray") -> Estimate:
    """Return a mean with the interval that holds the middle of resampled ones."""
    import numpy as np

    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean, rows, float(low), float(high))


def paired_difference(
    before: Sequence[float], after: Sequence[float], weights: Sequence[float] | None = None
) -> Estimate:
    """Return the mean of after - before over rows (N,), with its interval."""
    differences = [late - early for early, late in zip(before, after, strict=True)]
    return estimate(differences, weights)


def _resampled_means(sums: "np.ndarray", weights: "np.ndarray") -> "np.ndarray":
    """Return the mean of each resample, (R,): sums (N,) over weights (N,) of the drawn rows."""
    import numpy as np

    rows = len(sums)
    resamples = max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // rows))
    at_a_time = max(1, DRAWS_AT_A_TIME // rows)
    generator = np.random.default_rng(SEED)
    means: list[np.ndarray] = []
    for start in range(0, resamples, at_a_time):
        count = min(at_a_time, resamples - start)
        drawn = generator.integers(0, rows, size=(count, rows))
        means.append(sums[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    return np.concatenate(means)
