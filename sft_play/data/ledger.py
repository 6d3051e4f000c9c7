"""The ledger: what became of every row and every trained token. Loads no torch.

For every source and every split, rows_in = rows_used + the sum of dropped, and the trained tokens
that the rows held = trained_tokens + lost_trained_tokens. `make data-check --json` prints the
ledger, and run.json holds it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Self

from sft_play.data.row_parsing import unused_notes
from sft_play.data.rows import Json
from sft_play.data.special_text import special_notes

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


@dataclass
class SourceAccount:
    """What was read of a source so far; without a tally, nothing."""

    split: str
    name: str
    files: int
    tally: Tally | None = None

    def as_json(self) -> Json:
        tally = self.tally.as_json() if self.tally else None
        return {"split": self.split, "name": self.name, "files": self.files, "tally": tally}

    def as_line(self) -> str:
        """Return the account as a line of text."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        start = f"{self.split} {self.name} ({files}): "
        if self.tally is None:
            return start + "no row read"
        dropped = [f"{reason} {rows:,}" for reason, rows in self.tally.dropped.items() if rows]
        return start + ", ".join([f"{self.tally.rows_in:,} rows read", *dropped])


@dataclass
class DataAccount:
    """What was read of all sources so far."""

    sources: dict[tuple[str, str], SourceAccount] = field(default_factory=dict)

    def find(self, split: str, name: str, files: int) -> None:
        """Enter a source whose files are known."""
        self.sources[split, name] = SourceAccount(split, name, files)

    def read(self, split: str, name: str, files: int, tally: Tally) -> None:
        """Enter what became of the rows of a source that were read."""
        self.sources[split, name] = SourceAccount(split, name, files, tally)

    def as_json(self) -> Json:
        """Return the account as data-check prints it after an error."""
        sources = [source.as_json() for source in self.sources.values()]
        return {"complete": False, "sources": sources}

    def lines(self) -> list[str]:
        """Return the account as lines of text."""
        lines = [source.as_line() for source in self.sources.values()]
        return ["read before the error:", *(f"  {line}" for line in lines)] if lines else []


@dataclass(frozen=True)
class LengthPercentiles:
    """Lengths of samples in tokens; each is the length of a sample."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True)
class EqualRows:
    """Rows that equal other rows: exactly, and by their words; exact ones are among the latter."""

    exact: int
    normalized: int

    def as_json(self) -> dict[str, int]:
        return {"exact": self.exact, "normalised": self.normalized}


@dataclass(frozen=True)
class SourceLedger:
    """What became of the rows of one source."""

    name: str
    weight: float | None
    tally: Tally

    @property
    def notes(self) -> list[str]:
        """What becomes of unused keys, and of special tokens in the text of messages."""
        tally = self.tally
        return [*unused_notes(tally.unused, self.name), *special_notes(tally.as_text, self.name)]

    def as_json(self) -> Json:
        return {"name": self.name, "weight": self.weight, **self.tally.as_json()}


@dataclass(frozen=True)
class EpochShare:
    """How many samples of an epoch come from a source, and which fraction that is."""

    name: str
    samples: int
    share: float


@dataclass(frozen=True)
class SplitLedger:
    """What became of the rows of one split."""

    rows_in: int
    rows_used: int
    samples: int
    tokens: int
    trained_tokens: int
    lost_trained_tokens: int
    lost_fraction: float  # rounded
    dropped: dict[str, int]  # rows by reason
    shortened: dict[str, int]
    lengths: LengthPercentiles
    duplicates: EqualRows  # rows that repeat an earlier one
    sources: tuple[SourceLedger, ...]  # () for held-out rows
    overlap: dict[str, EqualRows] | None = None  # of training rows, by the split with equal rows
    epoch: tuple[EpochShare, ...] | None = None  # of training rows
    untrained: dict[str, int] = field(default_factory=dict)  # answers without loss, by reason

    def __post_init__(self) -> None:
        used_or_dropped = self.rows_used + sum(self.dropped.values())
        assert self.rows_in == used_or_dropped, f"rows are unaccounted for: {self}"

    @property
    def notes(self) -> list[str]:
        """What becomes of the keys of rows that are not used, of each source once."""
        return list(chain.from_iterable(source.notes for source in self.sources))

    def as_json(self) -> Json:
        """Return the ledger as plain data."""
        facts = {
            **vars(self),
            "lengths": asdict(self.lengths),
            "duplicates": self.duplicates.as_json(),
            "sources": [source.as_json() for source in self.sources],
        }
        facts["notes"] = self.notes
        del facts["overlap"], facts["epoch"]
        if self.overlap is not None:
            facts["overlap"] = {split: rows.as_json() for split, rows in self.overlap.items()}
        if self.epoch is not None:
            facts["epoch"] = [asdict(share) for share in self.epoch]
        return facts


@dataclass(frozen=True)
class PaddedTokens:
    """Tokens of an epoch: the real ones, and those that the model computes, padding included."""

    real: int
    unpacked: int
    packed: int


@dataclass(frozen=True)
class Ledger:
    """What became of all rows of a run, by split."""

    splits: dict[str, SplitLedger]
    max_seq_len: int
    padding: PaddedTokens | None = None  # None until the batch size is known

    @property
    def train(self) -> SplitLedger:
        return self.splits["train"]

    @property
    def notes(self) -> list[str]:
        """The notes of all splits, each once."""
        notes = chain.from_iterable(split.notes for split in self.splits.values())
        return list(dict.fromkeys(notes))

    def splits_as_json(self) -> Json:
        """Return the ledger of each split, as run.json holds them."""
        return {name: split.as_json() for name, split in self.splits.items()}

    def as_json(self) -> Json:
        """Return the ledger as data-check prints it: the training rows, then all splits."""
        facts = {
            **self.train.as_json(),
            "splits": self.splits_as_json(),
            "max_seq_len": self.max_seq_len,
        }
        if self.padding is not None:
            facts["padding"] = asdict(self.padding)
        return facts


def merge(tallies: Sequence[Tally]) -> Tally:
    """Return the sum of tallies."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
