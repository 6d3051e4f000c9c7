"""Assemble a run's training and evaluation data from tokenized sources, and its ledger.

Reads only the mapped stores; loads no torch. The run's data.json has their paths: the front end
writes it, and every rank reads it.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from sft_play.config.schema import Config
from sft_play.data import splits
from sft_play.data.cache import TokenizedSource, TokenizedSplits, open_samples
from sft_play.data.file_kinds import format_origin
from sft_play.data.ledger import (
    EpochShare,
    EqualRows,
    Ledger,
    PaddedTokens,
    SourceLedger,
    SplitLedger,
    Tally,
)
from sft_play.data.rows import MAX_LISTED_ROWS, Json
from sft_play.data.store import Split
from sft_play.data.trees import Units, find_units
from sft_play.errors import ConfigError, DataError


@dataclass(frozen=True)
class DataFacts:
    """The paths of a run's tokenized samples, and the computation of an epoch of them."""

    sources: TokenizedSplits
    padding: PaddedTokens

    def to_json(self) -> Json:
        """Return the facts as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the facts from `to_json`. Raises DataError if their samples are missing."""
        tokenized: TokenizedSplits = {}
        for split, sources in facts["sources"].items():
            tokenized[split] = tuple(map(TokenizedSource.from_json, sources))
        return cls(tokenized, PaddedTokens(**facts["padding"]))


@dataclass(frozen=True)
class RunData:
    """A run's training and evaluation data; `test` is `validation` if there are no test rows."""

    train: Split
    validation: Split
    test: Split
    ledger: Ledger
    sources: TokenizedSplits

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the content of every source's files."""
        return tuple(source.digest for source in chain(*self.sources.values()))

    @cached_property
    def row_ends(self) -> np.ndarray:
        """Ends of the training rows among their samples, (R,) int64; pieces of a text are rows."""
        return splits.find_row_ends(self.train)

    def units(self, tree_tokens: int | None) -> Units:
        """Return what training packs: trees of at most so many tokens, None for single samples."""
        return find_units(self.train.lengths, self.train.shared, self.row_ends, tree_tokens)

    def used_tokens(self) -> splits.UsedTokens:
        """Return the token ids that occur."""
        return splits.find_used_tokens(open_samples(list(chain(*self.sources.values()))))


@dataclass(frozen=True)
class Selection:
    """The samples chosen for one split, and the dropped ones."""

    sources: tuple[TokenizedSource, ...]
    samples: Split
    tallies: tuple[Tally, ...]  # per source; () for held-out rows
    dropped: Counter[str] = field(default_factory=Counter)  # usable rows, by reason
    overlap: dict[str, EqualRows] = field(default_factory=dict)  # by the split with equal rows

    @classmethod
    def read(cls, sources: tuple[TokenizedSource, ...]) -> Self:
        """Return all samples of the sources."""
        tallies = tuple(source.read_summary().tally for source in sources)
        return cls(sources, open_samples(sources), tallies)

    @property
    def names(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def tally(self) -> Tally:
        """The sum over all sources, with the rows that were dropped here."""
        total = Tally()
        for tally in self.tallies:
            total.add(tally)
        total.dropped.update(self.dropped)
        return total

    def without(self, mask: np.ndarray, reason: str) -> Self:
        """Return the selection without the samples where `mask` is true, counted as dropped."""
        dropped = Counter(self.dropped)
        records = self.samples.records  # some pieces of a plain text may remain
        dropped[reason] += splits.count_rows(records) - splits.count_rows(records[~mask])
        return replace(self, samples=self.samples.take(~mask), dropped=dropped)


def assemble(config: Config, sources: TokenizedSplits) -> RunData:
    """Return a run's training and evaluation data.

    Raises: DataError if too many tokens are lost, if training rows are also evaluated on, or if a
    split has no row left.
    """
    selections = {split: Selection.read(parts) for split, parts in sources.items()}
    for selection in selections.values():
        _refuse_lost_tokens(selection, config)
    train = selections["train"]
    if "validation" not in selections:
        held_out = _choose_held_out(train, config)
        held_out_samples = train.samples.take(held_out)
        selections["validation"] = replace(train, samples=held_out_samples, tallies=())
        train = train.without(held_out, "held_out")
    for split in ("validation", "test"):
        if split in selections:
            train = _without_overlap(train, selections[split], split, config)
    selections["train"] = train
    _refuse_empty_splits(selections)
    epoch = _mix(train, config.train.order_seed)
    ledgers = {split: _build_ledger(selection) for split, selection in selections.items()}
    ledgers["train"] = replace(
        ledgers["train"], overlap=train.overlap, epoch=_epoch_shares(train.sources, epoch)
    )
    validation = selections["validation"].samples
    return RunData(
        train=epoch,
        validation=validation,
        test=selections["test"].samples if "test" in selections else validation,
        ledger=Ledger(ledgers, config.model.max_seq_len),
        sources=sources,
    )


@dataclass(frozen=True)
class OtherRows:
    """Rows that are scored after a run, and how many of them were trained on."""

    split: Split
    ledger: SplitLedger
    trained_on: int


def assemble_other_rows(
    config: Config, sources: tuple[TokenizedSource, ...], trained: tuple[TokenizedSource, ...]
) -> OtherRows:
    """Return test rows for a finished run; `trained` are its training rows, () if missing.

    Raises: DataError if too many tokens are lost, or if no row is left.
    """
    selection = Selection.read(sources)
    _refuse_lost_tokens(selection, config)
    _refuse_empty_splits({"test": selection})
    records = selection.samples.records
    found = splits.find_overlap(records, Selection.read(trained).samples.records)
    trained_on = splits.count_rows(records[found.normalized])
    return OtherRows(selection.samples, _build_ledger(selection), trained_on)


def _refuse_lost_tokens(selection: Selection, config: Config) -> None:
    tally = selection.tally
    if tally.lost_fraction <= config.data.max_lost:
        return
    long_rows: list[tuple[int, str]] = []  # tokens and origin
    for source in selection.sources:
        for row in source.read_summary().long_rows:
            origin = format_origin(Path(source.files[row.file]), row.number)
            long_rows.append((row.tokens, origin))
    long_rows.sort(reverse=True)
    limit = config.model.max_seq_len
    lines = [
        f"{origin}: {tokens} tokens, model.max_seq_len is {limit}"
        for tokens, origin in long_rows[:MAX_LISTED_ROWS]
    ]
    rows = tally.dropped["too_long"] + tally.shortened["truncated"] + tally.shortened["split"]
    longest, _ = long_rows[0]
    split = "" if config.data.too_long == "split" else "DATA_TOO_LONG=split, "
    lines.append(
        f"{rows} of {tally.rows_in} rows are too long, and {tally.lost_fraction:.1%} "
        f"of the trained tokens are lost (data.too_long={config.data.too_long}); "
        f"set MODEL_MAX_SEQ_LEN={longest}, {split}or raise DATA_MAX_LOST, "
        f"which is {config.data.max_lost}, to continue without them"
    )
    raise DataError("\n".join(lines))


def _choose_held_out(train: Selection, config: Config) -> np.ndarray:
    records = train.samples.records
    data = config.data
    choose = partial(splits.choose_held_out, records, data.val_size, config.train.order_seed)
    mask = choose(data.split_by)
    if mask.any():
        return mask
    by_row = " or DATA_SPLIT_BY=row" if choose("row").any() else ""
    message = (
        f"{train.names}: {splits.count_rows(records)} usable rows, or too many that data.split_by="
        f"{data.split_by} keeps together, cannot be split into training and validation; "
        f"set DATA_VAL_PATH{by_row}"
    )
    for file in chain(*(source.files for source in train.sources)):
        if file.lower().endswith(".txt"):
            message += (
                "\na .txt file is one document; cut it into several: mkdir parts && "
                f"split -n l/20 --additional-suffix=.txt {shlex.quote(file)} parts/part- "
                "and set DATA_TRAIN_PATH=parts"
            )
            break
    raise DataError(message)


def _without_overlap(
    train: Selection, evaluated: Selection, split: str, config: Config
) -> Selection:
    """Return the training samples without those that are also evaluated on.

    data.on_overlap defines what happens to them. Raises DataError if it is `fail`.
    """
    records = train.samples.records
    found = splits.find_overlap(records, evaluated.samples.records)
    samples = (found.exact, found.normalized, found.questions)
    equal = EqualRows(*(splits.count_rows(records[indices]) for indices in samples))
    train = replace(train, overlap={**train.overlap, split: equal})
    policy = config.data.on_overlap
    reason, unwanted = "evaluated_on", found.normalized
    if policy == "drop_questions":
        reason, unwanted = "question_evaluated_on", found.questions
    if not len(unwanted) or policy == "allow":
        return train
    if policy != "fail":
        mask = np.zeros(len(records), dtype=bool)
        mask[unwanted] = True
        return train.without(mask, reason)
    pairs = list(zip(found.normalized, found.equal_to, strict=True))
    lines = [
        f"{train.samples.origin(one)} is {evaluated.samples.origin(other)} of the {split} rows"
        for one, other in pairs[:MAX_LISTED_ROWS]
    ]
    if equal.normalized > MAX_LISTED_ROWS:
        lines.append(f"... and {equal.normalized - MAX_LISTED_ROWS} more")
    lines.append(
        f"{equal.normalized} training rows are {split} rows, too ({equal.exact} to the letter), "
        "so the scores would be too good; "
        "set DATA_ON_OVERLAP=drop to train without them, or allow"
    )
    raise DataError("\n".join(lines))


def _refuse_empty_splits(selections: Mapping[str, Selection]) -> None:
    for split, selection in selections.items():
        if not len(selection.samples):
            reasons = [f"{reason} {rows}" for reason, rows in selection.tally.dropped.items()]
            raise DataError(
                f"{selection.names}: no {split} row is left "
                f"({', '.join(reasons) or 'there was none'}); "
                "make data-check shows where they went"
            )


def _mix(train: Selection, seed: int) -> Split:
    """Return the samples of an epoch: all of them, or according to the sources' weights."""
    samples = train.samples
    weights = [source.weight for source in train.sources]
    if None not in weights:
        row_ends = splits.find_row_ends(samples)
        store_of = samples.store_of[row_ends - 1]
        rows = [np.flatnonzero(store_of == store) for store in range(len(samples.stores))]
        mixed = np.concatenate(splits.mix_sources(rows, weights, seed))
        return samples.take(splits.samples_of_rows(row_ends, mixed))
    if any(weights):
        unweighted = train.sources[weights.index(None)].name
        raise ConfigError(
            f"data.train_path: {unweighted} has no weight and others have one; "
            "give one to each, or to none"
        )
    return samples


def _build_ledger(selection: Selection) -> SplitLedger:
    samples = selection.samples
    tally = selection.tally
    rows = splits.count_rows(samples.records)
    images = samples.image_counts
    tokens = int(samples.lengths.sum())
    counts = replace(
        tally,
        rows_in=tally.rows_in if selection.tallies else rows,
        rows_used=rows,
        samples=len(samples),
        tokens=tokens,
        distinct_tokens=tokens - int(samples.shared.sum()),
        trained_tokens=int(samples.records["trained"].sum()),
        images=int(images.sum()),
        image_tokens=int(samples.records["image_tokens"].sum()),
        image_rows=splits.count_rows(samples.records[images > 0]),
    )
    pairs = zip(selection.sources, selection.tallies, strict=False)  # held-out rows have no tallies
    return SplitLedger(
        tally=counts,
        lost_fraction=round(tally.lost_fraction, 6),
        lengths=splits.length_percentiles(samples.lengths),
        duplicates=splits.count_duplicates(samples.records),
        sources=tuple(
            SourceLedger(source.label, source.weight, found, source.unread)
            for source, found in pairs
        ),
        image_samples=int((samples.image_counts > 0).sum()),
    )


def _epoch_shares(sources: Sequence[TokenizedSource], epoch: Split) -> tuple[EpochShare, ...]:
    shares = []
    store_of_rows = epoch.store_of[splits.find_row_ends(epoch) - 1]
    for store, source in enumerate(sources):
        rows, samples = (
            np.count_nonzero(each == store) for each in (store_of_rows, epoch.store_of)
        )
        share = round(rows / len(store_of_rows), 6)
        shares.append(EpochShare(source.name, int(rows), int(samples), share))
    return tuple(shares)
