"""Counts of rows and tokens, which sum over chunks and sources. Loads no torch, no numpy."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from sft_play.data.rows import Json

COUNTERS = ("dropped", "shortened", "untrained", "unused", "as_text")  # of a tally


@dataclass
class Tally:
    """Counts of rows and tokens, which `add` sums over chunks and sources."""

    rows_in: int = 0
    rows_used: int = 0
    samples: int = 0  # sequences that the rows gave
    tokens: int = 0
    trained_tokens: int = 0
    lost_trained_tokens: int = 0  # of rows over model.max_seq_len, as data.too_long says
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    shortened: Counter[str] = field(default_factory=Counter)  # rows used in part, by what was done
    untrained: Counter[str] = field(default_factory=Counter)  # answers without loss, by reason
    unused: Counter[str] = field(default_factory=Counter)  # rows with a key that is not used
    as_text: Counter[str] = field(default_factory=Counter)  # rows with a special token in a message

    def add(self, other: "Tally") -> None:
        """Add the counts of another chunk or source."""
        self.rows_in += other.rows_in
        self.rows_used += other.rows_used
        self.samples += other.samples
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.lost_trained_tokens += other.lost_trained_tokens
        self.dropped.update(other.dropped)
        self.shortened.update(other.shortened)
        self.untrained.update(other.untrained)
        self.unused.update(other.unused)
        self.as_text.update(other.as_text)

    def check(self) -> None:
        """Assert the identity of rows."""
        used_or_dropped = self.rows_used + self.dropped.total()
        assert self.rows_in == used_or_dropped, f"rows are unaccounted for: {self}"

    @property
    def lost_fraction(self) -> float:
        """Lost trained tokens / trained tokens that the rows held."""
        held = self.trained_tokens + self.lost_trained_tokens
        return self.lost_trained_tokens / max(1, held)

    def as_json(self) -> Json:
        """Return the counts as plain data."""
        counters = {name: dict(getattr(self, name)) for name in COUNTERS}
        return {**vars(self), **counters}

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the counts that `as_json` gave; an older version had fewer counters."""
        counters = {name: Counter(facts.get(name, {})) for name in COUNTERS}
        return cls(**{**facts, **counters})
