"""The ledger: what happened to every row and every trained token, as data and as tables.

For every source and every split, rows_in = rows_used + the sum of dropped, and the trained tokens
in the rows = trained_tokens + lost_trained_tokens. `make data-check --json` prints the
ledger, and run.json contains it. Loads no torch, no numpy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Self

from sft_play.data.row_parsing import unused_notes
from sft_play.data.rows import FORMS, Json
from sft_play.data.special_text import special_notes
from sft_play.plan.workload import describe_conversations
from sft_play.runs.tables import aligned


@dataclass
class Tally:
    """Counts of rows and tokens, which `add` sums over chunks and sources."""

    rows_in: int = 0
    rows_used: int = 0
    samples: int = 0  # sequences made of the rows
    tokens: int = 0
    distinct_tokens: int = 0  # without beginnings that samples of a row share
    trained_tokens: int = 0
    images: int = 0
    image_tokens: int = 0  # tokens that represent the images
    image_rows: int = 0  # rows used that have images
    lost_trained_tokens: int = 0  # of rows over model.max_seq_len, by data.too_long
    dropped: Counter[str] = field(default_factory=Counter)  # rows by reason
    shortened: Counter[str] = field(default_factory=Counter)  # partly used rows, by the change
    untrained: Counter[str] = field(default_factory=Counter)  # answers without loss, by reason
    unused: Counter[str] = field(default_factory=Counter)  # rows with a key that is not used
    as_text: Counter[str] = field(default_factory=Counter)  # rows with a special token in a message
    noted: Counter[str] = field(default_factory=Counter)  # rows that the template changes, by how
    doubtful: Counter[str] = field(default_factory=Counter)  # rows by what their answers look like

    def add(self, other: "Tally") -> None:
        """Add the counts of another chunk or source."""
        for name, count in vars(other).items():
            if isinstance(count, Counter):
                getattr(self, name).update(count)
            else:
                setattr(self, name, getattr(self, name) + count)

    def check(self) -> None:
        """Assert the identity of rows."""
        used_or_dropped = self.rows_used + self.dropped.total()
        assert self.rows_in == used_or_dropped, f"rows are unaccounted for: {self}"

    @property
    def lost_fraction(self) -> float:
        """Lost trained tokens / trained tokens in the rows."""
        return self.lost_trained_tokens / max(1, self.trained_tokens + self.lost_trained_tokens)

    def as_json(self) -> Json:
        """Return the counts as plain data."""
        return {n: dict(v) if isinstance(v, Counter) else v for n, v in vars(self).items()}

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the counts that `as_json` gave."""
        return cls(**{n: Counter(v) if isinstance(v, dict) else v for n, v in facts.items()})


@dataclass
class DataAccount:
    """How many of a run's rows have been read; data-check prints it if an error stops reading."""

    # By split, name and number of files of a source; None: nothing was read of it
    tallies: dict[tuple[str, str, int], Tally | None] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the account in the format that data-check prints after an error."""
        sources = [
            {"split": split, "name": name, "files": files, "tally": tally and tally.as_json()}
            for (split, name, files), tally in self.tallies.items()
        ]
        return {"complete": False, "sources": sources}

    def lines(self) -> list[str]:
        """Return the account as lines of text."""
        lines = []
        for (split, name, files), tally in self.tallies.items():
            facts = ["no row read"]
            if tally:
                dropped = [f"{reason} {rows:,}" for reason, rows in tally.dropped.items() if rows]
                facts = [f"{tally.rows_in:,} rows read", *dropped]
            counted = "1 file" if files == 1 else f"{files} files"
            lines.append(f"  {split} {name} ({counted}): {', '.join(facts)}")
        return ["read before the error:", *lines] if lines else []


@dataclass(frozen=True)
class LengthPercentiles:
    """Lengths of samples in tokens; each is the length of a sample."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True)
class EqualRows:
    """Rows that equal other rows: exactly, by their words, and by their question."""

    exact: int
    normalized: int
    questions: int  # by the words before the last trained answer


@dataclass(frozen=True)
class SourceLedger:
    """What happened to the rows of one source."""

    name: str
    weight: float | None
    tally: Tally
    unread: Mapping[str, int]  # files of its folder that are not read, by ending

    @property
    def notes(self) -> list[str]:
        """Notes on unread files and keys, special tokens in messages, changes by the template."""
        tally, name = self.tally, self.name
        noted = [f"{name}: {rows:,} rows: {note}" for note, rows in sorted(tally.noted.items())]
        noted = [*unused_notes(tally.unused, name), *special_notes(tally.as_text, name), *noted]
        if self.unread:
            counts = ", ".join(f"{count:,} {end}" for end, count in sorted(self.unread.items()))
            noted.insert(0, f"{name}: {sum(self.unread.values()):,} files are not read: {counts}")
        return noted


@dataclass(frozen=True)
class EpochShare:
    """How many rows of an epoch come from a source, with how many samples."""

    name: str
    rows: int
    samples: int
    share: float  # of the rows


@dataclass(frozen=True)
class SplitLedger:
    """What happened to the rows of one split."""

    tally: Tally
    lost_fraction: float  # of the sources' trained tokens; rounded
    lengths: LengthPercentiles
    duplicates: EqualRows  # rows that repeat an earlier one
    sources: tuple[SourceLedger, ...]  # () for held-out rows
    overlap: dict[str, EqualRows] | None = None  # of training rows, by the split with equal rows
    epoch: tuple[EpochShare, ...] | None = None  # of training rows
    image_samples: int = 0  # with an image

    def __post_init__(self) -> None:
        self.tally.check()

    @property
    def notes(self) -> list[str]:
        """Notes on unused keys, by source, and on questions that are also evaluated."""
        notes = list(chain.from_iterable(source.notes for source in self.sources))
        doubtful = self.tally.doubtful + Counter({"repeat another": self.duplicates.exact})
        if self.sources and doubtful:
            counts = ", ".join(f"{rows:,} {words}" for words, rows in doubtful.items())
            notes.append(f"of {self.tally.rows_in:,} rows {counts}")
        tally = self.tally
        counts = tally.rows_used, tally.samples, tally.tokens, tally.distinct_tokens
        if self.epoch and (cost := describe_conversations(*counts)):
            notes.append(f"conversations: {cost}")
        for split, equal in (self.overlap or {}).items():
            asked = equal.questions - equal.normalized
            if asked and not self.tally.dropped["question_evaluated_on"]:
                notes.append(
                    f"{asked:,} training rows ask what {split} rows ask, and answer otherwise; "
                    "to train without them: DATA_ON_OVERLAP=drop_questions"
                )
        return notes

    def as_json(self) -> Json:
        """Return the ledger as plain data."""
        sources = [
            {"name": source.name, "weight": source.weight, **source.tally.as_json()}
            for source in self.sources
        ]
        facts = {
            **self.tally.as_json(),
            "lost_fraction": self.lost_fraction,
            "lengths": asdict(self.lengths),
            "duplicates": asdict(self.duplicates),
            "sources": sources,
            "notes": self.notes,
        }
        for name in ("unused", "as_text", "noted", "doubtful"):  # the notes contain them
            del facts[name]
        if self.image_samples:
            facts["image_samples"] = self.image_samples
        if self.overlap is not None:
            facts["overlap"] = {split: asdict(rows) for split, rows in self.overlap.items()}
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
    """What happened to all rows of a run, by split."""

    splits: dict[str, SplitLedger]
    max_seq_len: int
    padding: PaddedTokens | None = None  # None until the batch size is known
    variables: tuple[str, ...] = ()  # read by the chat template

    @property
    def notes(self) -> list[str]:
        """The notes of all splits, each once."""
        return list(dict.fromkeys(chain.from_iterable(s.notes for s in self.splits.values())))

    def splits_as_json(self) -> Json:
        """Return the ledger of each split in the format of run.json."""
        return {name: split.as_json() for name, split in self.splits.items()}

    def as_json(self) -> Json:
        """Return the ledger as data-check prints it: the training rows, then all splits."""
        splits = self.splits_as_json()
        facts = {**splits["train"], "splits": splits, "max_seq_len": self.max_seq_len}
        if self.padding is not None:
            facts["padding"] = asdict(self.padding)
        facts["template_variables"] = list(self.variables)
        return facts


MAX_COLUMNS = 100  # of the text
REASONS = FORMS["ledger"]  # by counter of a tally: the meaning of each

EQUAL = REASONS["equal"]  # the kinds of equality in EqualRows

Line = tuple[str, ...]  # its first cell is its name


@dataclass(frozen=True)
class Table:
    """Cells under headings."""

    headings: Line
    lines: tuple[Line, ...]


def ledger_lines(ledger: Ledger) -> list[str]:
    """Return a ledger as lines: splits, then sources, then padding, then unused keys.

    The lines of tables have at most MAX_COLUMNS.
    """
    tables = [split_table(ledger), *source_tables(ledger)]
    blocks = [*map(table_lines, tables), padding_lines(ledger), variable_lines(ledger)]
    blocks.append(ledger.notes)
    return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()


def split_table(ledger: Ledger) -> Table:
    """Return the rows and tokens of every split: rows in = used + the lines with a plus."""
    splits = list(ledger.splits.values())
    every = Tally()  # determines the lines
    others: dict[str, EqualRows] = {}  # splits whose rows are compared with another split
    for split in splits:
        every.add(split.tally)
        others |= split.overlap or {}
    columns = []
    for split in splits:
        column = _count_split(split, every, ledger.max_seq_len)
        for other in others:
            equal = (split.overlap or {}).get(other)
            for name, words in EQUAL.items():
                column[f"also {other} rows, {words}"] = getattr(equal, name, None)
        columns.append(column)
    lines = [(label, *(_format(column[label]) for column in columns)) for label in columns[0]]
    return Table(("", *ledger.splits), tuple(lines))


def _count_split(split: SplitLedger, every: Tally, max_seq_len: int) -> dict[str, float | None]:
    """Return the numbers of a split by label, with a line for each reason in any split."""
    tally = split.tally

    def reasons(counter: str, mark: str) -> dict[str, int]:
        counts = {}
        for reason in +getattr(every, counter):
            label = ": ".join(filter(None, (f"{mark} {reason}", REASONS[counter].get(reason))))
            counts[label] = getattr(tally, counter)[reason]
        return counts

    images = {"images": tally.images, "tokens that stand for images": tally.image_tokens}
    duplicates = asdict(split.duplicates)
    lengths = asdict(split.lengths)
    longest = lengths.pop("max")
    return {
        "rows in": tally.rows_in,
        "= used": tally.rows_used,
        **reasons("shortened", "  of them"),
        **reasons("dropped", "+"),
        "samples that they give": tally.samples,
        "tokens": tally.tokens,
        **(images if every.images else {}),
        "trained tokens": tally.trained_tokens,
        "share of tokens that is trained": tally.trained_tokens / max(1, tally.tokens),
        **reasons("untrained", "answers without loss,"),
        "trained tokens lost to data.too_long": split.lost_fraction,
        **{f"tokens of a sample, {name}": tokens for name, tokens in lengths.items()},
        f"longest, of model.max_seq_len={max_seq_len}": longest,
        **{f"repeated rows, {words}": duplicates[name] for name, words in EQUAL.items()},
    }


def source_tables(ledger: Ledger) -> list[Table]:
    """Return a table for each split of several sources, with their shares of a training epoch."""
    tables = []
    for name, split in ledger.splits.items():
        if len(split.sources) < 2:
            continue
        headings = [
            f"sources of {name}",
            "weight",
            *"rows in,= used,+ dropped,tokens,lost".split(","),
        ]
        if split.epoch:
            headings += ["an epoch", "share"]
        lines: list[Line] = []
        for number, source in enumerate(split.sources):
            tally = source.tally
            numbers = [tally.rows_in, tally.rows_used, tally.dropped.total(), tally.tokens]
            numbers.append(tally.lost_fraction)
            if split.epoch:
                share = split.epoch[number]
                numbers += [share.rows, float(share.share)]
            weight = "-" if source.weight is None else f"{source.weight:g}"
            lines.append((source.name, weight, *map(_format, numbers)))
        tables.append(Table(tuple(headings), tuple(lines)))
    return tables


def padding_lines(ledger: Ledger) -> list[str]:
    """Return the share of padding in an epoch, with and without packing, if it is known."""
    padding = ledger.padding
    if padding is None:
        return []
    unpacked, packed = (1 - padding.real / width for width in (padding.unpacked, padding.packed))
    fewer = padding.unpacked / padding.packed
    return [
        f"padding: {unpacked:.1%} of an epoch's tokens unpacked, {packed:.1%} packed, "
        f"which computes {fewer:.2f} times fewer"
    ]


def variable_lines(ledger: Ledger) -> list[str]:
    """Return the variables that the chat template reads, if any."""
    names = ", ".join(ledger.variables)
    rows = "of a row's chat_template_kwargs, or for all rows of MODEL_TEMPLATE_KWARGS"
    return [f"variables that the chat template reads, {rows}: {names}"] if names else []


def table_lines(table: Table) -> list[str]:
    """Return a table as aligned text; the start of too long names is cut."""
    rows = [table.headings, *table.lines]
    _, *columns = zip(*rows, strict=True)
    room = MAX_COLUMNS - sum(max(map(len, column)) + 2 for column in columns)
    room = max(len(table.headings[0]), room)
    shown = []
    for name, *cells in rows:
        shown.append([name if len(name) <= room else f"…{name[1 - room :]}", *cells])
    return aligned(shown)


def _format(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if isinstance(value, float) else f"{value:,}"
