"""What a run trains and evaluates on, assembled from tokenized sources, and its ledger.

Reads nothing but the mapped stores; loads no torch. data.json of a run says where they are: the
front end writes it, every rank reads it.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Self

import numpy as np

from sft_play.config.schema import Config
from sft_play.data import splits
from sft_play.data.ledger import (
    EpochShare,
    EqualRows,
    Ledger,
    PaddedTokens,
    SourceLedger,
    SplitLedger,
    Tally,
    merge,
)
from sft_play.data.rows import MAX_LISTED_ROWS, Json
from sft_play.data.splits import UsedTokens, find_used_tokens, length_percentiles
from sft_play.data.store import Split, Store, TokenizedSource, TokenizedSplits
from sft_play.errors import ConfigError, DataError


@dataclass(frozen=True)
class RunData:
    """What a run trains and evaluates on; `test` is `validation` where there are no test rows."""

    train: Split
    validation: Split
    test: Split
    ledger: Ledger
    sources: TokenizedSplits

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the content of every source's files."""
        return tuple(source.digest for source in self._all_sources())

    def used_tokens(self) -> UsedTokens:
        """Return the token ids that occur."""
        sources = self._all_sources()
        stores = [source.open_store() for source in sources]
        return find_used_tokens(stores, [source.files for source in sources])

    def _all_sources(self) -> list[TokenizedSource]:
        return list(chain.from_iterable(self.sources.values()))


@dataclass(frozen=True)
class Selection:
    """The samples chosen for one split; `indices` holds those (n,) of each source's store."""

    sources: tuple[TokenizedSource, ...]
    stores: tuple[Store, ...]
    indices: tuple[np.ndarray, ...]
    tallies: tuple[Tally, ...]  # of each source; () for held-out rows
    dropped: Mapping[str, int] = field(default_factory=dict)  # usable rows, by reason
    overlap: Mapping[str, EqualRows] = field(
        default_factory=dict
    )  # by the split that has equal rows

    @classmethod
    def whole(cls, sources: tuple[TokenizedSource, ...]) -> Self:
        """Return all samples of the sources."""
        stores = tuple(source.open_store() for source in sources)
        indices = tuple(np.arange(len(store)) for store in stores)
        tallies = tuple(source.read_summary().tally for source in sources)
        return cls(sources, stores, indices, tallies)

    @property
    def names(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def tally(self) -> Tally:
        """The sum of all sources."""
        return merge(self.tallies)

    @property
    def all_dropped(self) -> dict[str, int]:
        """Rows by why they were left out, here or when they were tokenized."""
        return {**self.tally.dropped, **self.dropped}

    def records(self) -> np.ndarray:
        """Return the records of the samples; `file` counts through the files of all sources."""
        parts = []
        first_file = 0
        for source, store, indices in zip(self.sources, self.stores, self.indices, strict=True):
            records = store.records[indices]
            records["file"] += first_file
            first_file += len(source.files)
            parts.append(records)
        return np.concatenate(parts)

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sample, source after source."""
        stores = zip(self.stores, self.indices, strict=True)
        return np.concatenate([store.lengths[indices] for store, indices in stores])

    def origin(self, record: np.void) -> str:
        """Return `file:line` or `file[index]` of a record that `records` gave."""
        file = int(record["file"])
        for source in self.sources:
            if file < len(source.files):
                return source.origin(file, int(record["number"]))
            file -= len(source.files)
        raise AssertionError("a record's file is one of the sources' files")

    def indices_where(self, mask: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the indices in each store at which `mask` (over all samples) is true."""
        ends = np.cumsum([len(indices) for indices in self.indices])
        masks = np.split(mask, ends[:-1])
        return tuple(indices[part] for indices, part in zip(self.indices, masks, strict=True))

    def without(self, mask: np.ndarray, reason: str) -> Self:
        """Return the selection without the samples where `mask` is true, counted as dropped."""
        rows = splits.count_rows(self.records()[mask])
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + rows}
        return replace(self, indices=self.indices_where(~mask), dropped=dropped)

    def to_split(self) -> Split:
        """Return the samples as a run reads them."""
        return Split(self.stores, self.indices, [source.files for source in self.sources])


def assemble(config: Config, sources: TokenizedSplits) -> RunData:
    """Return what a run trains and evaluates on.

    Raises: DataError if too many tokens are lost, if training rows are also evaluated on, or if a
    split has no row left.
    """
    selections = {split: Selection.whole(parts) for split, parts in sources.items()}
    for selection in selections.values():
        _refuse_lost_tokens(selection, config)
    if "validation" not in selections:
        train = selections["train"]
        held_out = _held_out_mask(train, config)
        held_out_indices = train.indices_where(held_out)
        selections["validation"] = replace(train, indices=held_out_indices, tallies=())
        selections["train"] = train.without(held_out, "held_out")
    train = selections["train"]
    for split in ("validation", "test"):
        if split in selections:
            train = _without_overlap(train, selections[split], split, config)
    selections["train"] = train
    _refuse_empty_splits(selections)
    epoch = replace(train, indices=_mix(train, config.train.order_seed))
    validation = selections["validation"].to_split()
    return RunData(
        train=epoch.to_split(),
        validation=validation,
        test=selections["test"].to_split() if "test" in selections else validation,
        ledger=_build_ledger(selections, epoch, config.model.max_seq_len),
        sources=sources,
    )


@dataclass(frozen=True)
class OtherRows:
    """Rows that are scored after a run, and how many of them it trained on."""

    split: Split
    ledger: SplitLedger
    trained_on: int


def assemble_other_rows(
    config: Config,
    sources: tuple[TokenizedSource, ...],
    trained: tuple[TokenizedSource, ...],
) -> OtherRows:
    """Return test rows for a finished run; `trained` are its training rows, () if they are gone.

    Raises: DataError if too many tokens are lost, or if no row is left.
    """
    selection = Selection.whole(sources)
    _refuse_lost_tokens(selection, config)
    _refuse_empty_splits({"test": selection})
    records = selection.records()
    trained_on = 0
    if trained:
        found = splits.find_overlap(records, Selection.whole(trained).records())
        trained_on = splits.count_rows(records[found.normalized])
    return OtherRows(selection.to_split(), _split_ledger(selection), trained_on)


def _refuse_lost_tokens(selection: Selection, config: Config) -> None:
    tally = selection.tally
    if tally.lost_fraction <= config.data.max_lost:
        return
    long_rows: list[tuple[int, str]] = []  # tokens and origin
    for source in selection.sources:
        for row in source.read_summary().long_rows:
            long_rows.append((row.tokens, source.origin(row.file, row.number)))
    long_rows.sort(reverse=True)
    limit = config.model.max_seq_len
    lines = []
    for tokens, origin in long_rows[:MAX_LISTED_ROWS]:
        lines.append(f"{origin}: {tokens} tokens, model.max_seq_len is {limit}")
    shortened = tally.shortened["truncated"] + tally.shortened["split"]
    rows = tally.dropped["too_long"] + shortened
    longest, _ = long_rows[0]
    split = "" if config.data.too_long == "split" else "DATA_TOO_LONG=split, "
    lines.append(
        f"{rows} of {tally.rows_in} rows are too long, and {tally.lost_fraction:.1%} "
        f"of the trained tokens are lost (data.too_long={config.data.too_long}); "
        f"set MODEL_MAX_SEQ_LEN={longest}, {split}or raise DATA_MAX_LOST, "
        f"which is {config.data.max_lost}, to go on without them"
    )
    raise DataError("\n".join(lines))


def _held_out_mask(train: Selection, config: Config) -> np.ndarray:
    records = train.records()
    mask = splits.choose_held_out(records, config.data.val_size, config.train.order_seed)
    if not mask.any() or mask.all():
        files = [file for source in train.sources for file in source.files]
        texts = [file for file in files if file.lower().endswith(".txt")]
        raise DataError(
            f"{train.names}: {splits.count_rows(records)} usable rows, or all of the same words, "
            "cannot be split into training and validation; set DATA_VAL_PATH"
            + (f"\n{_split_text(texts[0])}" if texts else "")
        )
    return mask


def _split_text(file: str) -> str:
    """Return how to make several documents of a text file."""
    return (
        "a .txt file is one document; cut it into several: "
        f"mkdir parts && split -n l/20 --additional-suffix=.txt {shlex.quote(file)} parts/part- "
        "and set DATA_TRAIN_PATH=parts"
    )


def _without_overlap(
    train: Selection, evaluated: Selection, split: str, config: Config
) -> Selection:
    """Return the training samples without those that are also evaluated on.

    data.on_overlap says what happens to them. Raises DataError if it is `fail`.
    """
    trained_records = train.records()
    evaluated_records = evaluated.records()
    found = splits.find_overlap(trained_records, evaluated_records)
    equal = EqualRows(
        exact=splits.count_rows(trained_records[found.exact]),
        normalized=splits.count_rows(trained_records[found.normalized]),
    )
    train = replace(train, overlap={**train.overlap, split: equal})
    if not equal.normalized or config.data.on_overlap == "allow":
        return train
    if config.data.on_overlap == "drop":
        mask = np.zeros(len(trained_records), dtype=bool)
        mask[found.normalized] = True
        return train.without(mask, "evaluated_on")
    lines = []
    pairs = zip(found.normalized, found.equal_to, strict=True)
    for trained_index, evaluated_index in list(pairs)[:MAX_LISTED_ROWS]:
        trained_origin = train.origin(trained_records[trained_index])
        evaluated_origin = evaluated.origin(evaluated_records[evaluated_index])
        lines.append(f"{trained_origin} is {evaluated_origin} of the {split} rows")
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
        if not any(len(indices) for indices in selection.indices):
            reasons = [f"{reason} {rows}" for reason, rows in selection.all_dropped.items()]
            raise DataError(
                f"{selection.names}: no {split} row is left "
                f"({', '.join(reasons) or 'there was none'}); "
                "make data-check shows where they went"
            )


def _mix(train: Selection, seed: int) -> tuple[np.ndarray, ...]:
    """Return the indices of an epoch: all of them, or as the weights of the sources say."""
    weights = [source.weight for source in train.sources]
    if None not in weights:
        return tuple(splits.mix_sources(train.indices, weights, seed))
    if any(weights):
        unweighted = train.sources[weights.index(None)].name
        raise ConfigError(
            f"data.train_path: {unweighted} has no weight and others have one; "
            "give one to each, or to none"
        )
    return train.indices


def _build_ledger(
    selections: Mapping[str, Selection], epoch: Selection, max_seq_len: int
) -> Ledger:
    ledgers = {split: _split_ledger(selection) for split, selection in selections.items()}
    ledgers["train"] = replace(
        ledgers["train"],
        overlap=dict(selections["train"].overlap),
        epoch=_epoch_shares(epoch),
    )
    return Ledger(ledgers, max_seq_len)


def _split_ledger(selection: Selection) -> SplitLedger:
    records = selection.records()
    lengths = selection.lengths()
    rows = splits.count_rows(records)
    tally = selection.tally
    sources = []
    for source, source_tally in zip(selection.sources, selection.tallies, strict=False):
        sources.append(SourceLedger(source.name, source.weight, source_tally))
    return SplitLedger(
        rows_in=tally.rows_in if selection.tallies else rows,
        rows_used=rows,
        samples=len(records),
        tokens=int(lengths.sum()),
        trained_tokens=int(records["trained"].sum()),
        lost_trained_tokens=tally.lost_trained_tokens,
        lost_fraction=round(tally.lost_fraction, 6),
        dropped=selection.all_dropped,
        shortened=dict(tally.shortened),
        untrained=dict(tally.untrained),
        lengths=length_percentiles(lengths),
        duplicates=splits.count_duplicates(records),
        sources=tuple(sources),
    )


def _epoch_shares(epoch: Selection) -> tuple[EpochShare, ...]:
    total = sum(len(indices) for indices in epoch.indices)
    shares = []
    for source, indices in zip(epoch.sources, epoch.indices, strict=True):
        share = round(len(indices) / total, 6)
        shares.append(EpochShare(source.name, len(indices), share))
    return tuple(shares)


@dataclass(frozen=True)
class DataFacts:
    """Where the tokenized samples of a run are, and what an epoch of them computes."""

    sources: TokenizedSplits
    padding: PaddedTokens

    def to_json(self) -> Json:
        """Return the facts as plain data."""
        sources = {}
        for split, tokenized in self.sources.items():
            sources[split] = [asdict(source) for source in tokenized]
        return {"sources": sources, "padding": asdict(self.padding)}

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the facts that `to_json` gave. Raises DataError when their samples are gone."""
        splits: TokenizedSplits = {}
        for split, sources in facts["sources"].items():
            splits[split] = tuple(TokenizedSource.from_json(source) for source in sources)
        return cls(splits, PaddedTokens(**facts["padding"]))
