"""Where every row and every trained token went. Plain numbers; loads no torch.

Two identities hold for every source and every split: rows_in = rows_used + the sum of dropped, and trained tokens that were
there = trained_tokens + lost_trained_tokens.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Tally:
    """Counts of a source's rows; those of its parts add up."""

    rows_in: int = 0
    rows_used: int = 0
    samples: int = 0  # sequences that the rows gave
    tokens: int = 0
    trained_tokens: int = 0
    lost_trained_tokens: int = 0  # of rows over model.max_seq_len, as data.too_long says
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    shortened: Counter[str] = field(
        default_factory=Counter
    )  # rows that are used in part, by what was done to them

    def add(self, other: "Tally") -> None:
        """Count the rows of another part of the source, too."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def check(self) -> None:
        """Assert the identity of rows."""
        assert self.rows_in == self.rows_used + self.dropped.total(), (
            f"rows are unaccounted for: {self}"
        )

    @property
    def lost_fraction(self) -> float:
        """Lost trained tokens / trained tokens that the rows held."""
        return self.lost_trained_tokens / max(1, self.lost_trained_tokens + self.trained_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Return the counts that `as_json` gave."""
        return cls(
            **{
                name: Counter(value) if isinstance(value, dict) else value
                for name, value in facts.items()
            }
        )


def of_lengths(lengths: np.ndarray) -> dict[str, int]:
    """Return percentiles of samples' lengths in tokens: a length that a sample has."""
    found = (
        np.percentile(lengths, PERCENTILES, method="higher")
        if len(lengths)
        else np.zeros(len(PERCENTILES))
    )
    named = {f"p{percent}": int(value) for percent, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": int(lengths.max(initial=0))}
