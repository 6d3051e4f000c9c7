"""Who trains and who evaluates, from tokenised samples alone; and the ledger of it. Pure but for the mapped files; loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from sft_play.config.schema import Config
from sft_play.data import splits
from sft_play.data.files import origin_of
from sft_play.data.ledger import Tally, of_lengths
from sft_play.data.rows import SHOWN
from sft_play.data.store import Split, Store
from sft_play.data.tokenize import META
from sft_play.data.vocabulary_use import VocabularyUse, used_in
from sft_play.errors import ConfigError, DataError


@dataclass(frozen=True)
class TokenisedSource:
    """A source and where its samples are; plain enough for data.json."""

    name: str
    files: tuple[str, ...]
    weight: float | None
    digest: str  # of the files' content
    folder: str

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Return the source that `asdict` gave."""
        return cls(**{**facts, "files": tuple(facts["files"])})

    def meta(self) -> dict[str, Any]:
        """Return what was noted when the source was tokenised."""
        return json.loads((Path(self.folder) / META).read_text(encoding="utf-8"))

    def place(self, file: int, number: int) -> str:
        """Return the file and line, or index, of a row."""
        return origin_of(Path(self.files[file]), number)


Tokenised = dict[
    str, tuple[TokenisedSource, ...]
]  # by split: train, and validation and test where they have rows of their own


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on and is judged by; `test` is `validation` where there are no test rows."""

    train: Split
    validation: Split
    test: Split
    ledger: dict[str, dict[str, Any]]  # by split
    sources: Tokenised

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the content of every source's files."""
        return tuple(source.digest for parts in self.sources.values() for source in parts)

    def vocabulary(self) -> VocabularyUse:
        """Return the token ids that occur."""
        parts = [source for parts in self.sources.values() for source in parts]
        return used_in(
            [Store(Path(source.folder)) for source in parts], [source.files for source in parts]
        )


@dataclass(frozen=True)
class Side:
    """The samples of one split on their way: `chosen` holds indices (n,) into each source's store."""

    sources: tuple[TokenisedSource, ...]
    stores: tuple[Store, ...]
    chosen: tuple[np.ndarray, ...]
    tallies: tuple[
        Tally, ...
    ]  # of the sources; none where the split takes rows that another accounts for
    dropped: Mapping[str, int] = field(
        default_factory=dict
    )  # rows that were usable and went elsewhere, by reason
    overlap: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # by the split that holds the same rows

    @classmethod
    def whole(cls, sources: tuple[TokenisedSource, ...]) -> Self:
        """Return all samples of the sources."""
        stores = tuple(Store(Path(source.folder)) for source in sources)
        tallies = tuple(Tally.from_json(source.meta()["tally"]) for source in sources)
        return cls(sources, stores, tuple(np.arange(len(store)) for store in stores), tallies)

    @property
    def names(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @property
    def tally(self) -> Tally:
        """The account of all sources."""
        total = Tally()
        for tally in self.tallies:
            total.add(tally)
        return total

    def records(self) -> np.ndarray:
        """Return the records of the chosen samples, one source behind the other; `file` counts on through the sources."""
        parts, files = [], 0
        for source, store, chosen in zip(self.sources, self.stores, self.chosen, strict=True):
            part = store.records[chosen]
            part["file"] += files
            files += len(source.files)
            parts.append(part)
        return np.concatenate(parts)

    def place(self, record: np.void) -> str:
        """Return the file and line of a record that `records` gave."""
        files = [(source, number) for source in self.sources for number in range(len(source.files))]
        source, number = files[record["file"]]
        return source.place(number, int(record["number"]))

    def where(self, mask: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the chosen indices at which `mask` (over all samples) is true."""
        parts = np.split(mask, np.cumsum([len(chosen) for chosen in self.chosen])[:-1])
        return tuple(chosen[part] for chosen, part in zip(self.chosen, parts, strict=True))

    def without(self, mask: np.ndarray, reason: str) -> Self:
        """Return the side without the samples at which `mask` is true, their rows accounted for."""
        rows = splits.row_count(self.records()[mask])
        return replace(
            self,
            chosen=self.where(~mask),
            dropped={**self.dropped, reason: self.dropped.get(reason, 0) + rows},
        )


def assemble(config: Config, sources: Tokenised) -> PreparedData:
    """Return who trains and who evaluates. Raises DataError: too much lost, rows on both sides, or nothing left to train on."""
    sides = {split: Side.whole(parts) for split, parts in sources.items()}
    for side in sides.values():
        _refuse_lost(side, config)
    seed = config.train.order_seed
    if "validation" not in sides:
        sides["train"], sides["validation"] = _hold_out(sides["train"], config.data.val_size, seed)
    for split in ("validation", "test"):
        if split in sides:
            sides["train"] = _without_overlap(sides["train"], sides[split], split, config)
    _refuse_nothing(sides)
    epoch = replace(sides["train"], chosen=_mixed(sides["train"], seed))
    made = {
        split: Split(
            side.stores, list(enumerate(side.chosen)), [source.files for source in side.sources]
        )
        for split, side in {**sides, "train": epoch}.items()
    }
    ledger = {split: _ledger(side) for split, side in sides.items()}
    ledger["train"] |= {"overlap": dict(sides["train"].overlap), "epoch": _epoch(epoch)}
    return PreparedData(
        made["train"], made["validation"], made.get("test", made["validation"]), ledger, sources
    )


def _refuse_lost(side: Side, config: Config) -> None:
    tally = side.tally
    if tally.lost_fraction <= config.data.max_lost:
        return
    long = sorted(
        (
            (tokens, source.place(file, number))
            for source in side.sources
            for file, number, tokens in source.meta()["long"]
        ),
        reverse=True,
    )
    named = [
        f"{place}: {tokens} tokens, model.max_seq_len is {config.model.max_seq_len}"
        for tokens, place in long[:SHOWN]
    ]
    counts = {**tally.dropped, **tally.shortened}
    rows = sum(counts.get(reason, 0) for reason in ("too_long", "truncated", "split"))
    held = f"{rows} of {tally.rows_in} rows are too long, and {tally.lost_fraction:.1%} of the trained tokens are lost (data.too_long={config.data.too_long})"
    split = "DATA_TOO_LONG=split, " if config.data.too_long != "split" else ""
    advice = f"set MODEL_MAX_SEQ_LEN={long[0][0]}, {split}or raise DATA_MAX_LOST, which is {config.data.max_lost}, to go on without them"
    raise DataError("\n".join([*named, f"{held}; {advice}"]))


def _hold_out(train: Side, fraction: float, seed: int) -> tuple[Side, Side]:
    held = splits.hold_out(train.records(), fraction, seed)
    if not held.any() or held.all():
        rows = splits.row_count(train.records())
        raise DataError(
            f"{train.names}: {rows} usable rows, or all of the same words, cannot be split into training and validation; set DATA_VAL_PATH"
        )
    return train.without(held, "held_out"), replace(train, chosen=train.where(held), tallies=())


def _without_overlap(train: Side, evaluated: Side, split: str, config: Config) -> Side:
    """Return the training side without the rows that are evaluated on, as data.on_overlap says, which is to refuse them."""
    ours, theirs = train.records(), evaluated.records()
    found = splits.overlap(ours, theirs)
    counts = {
        "exact": splits.row_count(ours[found.exact]),
        "normalised": splits.row_count(ours[found.normalised]),
    }
    train = replace(train, overlap={**train.overlap, split: counts})
    if not counts["normalised"] or config.data.on_overlap == "allow":
        return train
    mask = np.zeros(len(ours), dtype=bool)
    mask[found.normalised] = True
    if config.data.on_overlap == "drop":
        return train.without(mask, "evaluated_on")
    pairs = zip(found.normalised[:SHOWN], found.equal_to[:SHOWN], strict=True)
    named = [
        f"{train.place(ours[i])} is {evaluated.place(theirs[j])} of the {split} rows"
        for i, j in pairs
    ]
    more = [f"... and {counts['normalised'] - SHOWN} more"] if counts["normalised"] > SHOWN else []
    told = f"{counts['normalised']} training rows are {split} rows, too ({counts['exact']} to the letter), so the scores would be too good"
    raise DataError(
        "\n".join(
            [*named, *more, f"{told}; set DATA_ON_OVERLAP=drop to train without them, or allow"]
        )
    )


def _refuse_nothing(sides: Mapping[str, Side]) -> None:
    for split, side in sides.items():
        if not any(len(chosen) for chosen in side.chosen):
            where = {**side.tally.dropped, **side.dropped}
            told = (
                ", ".join(f"{reason} {rows}" for reason, rows in where.items()) or "there was none"
            )
            raise DataError(
                f"{side.names}: no {split} row is left ({told}); make data-check shows where they went"
            )


def _mixed(train: Side, seed: int) -> tuple[np.ndarray, ...]:
    weights = [source.weight for source in train.sources]
    if None not in weights:
        return tuple(splits.mixed(train.chosen, weights, seed))
    if any(weights):
        raise ConfigError(
            f"data.train_path: {train.sources[weights.index(None)].name} has no weight and others have one; give one to each, or to none"
        )
    return train.chosen


def _ledger(side: Side) -> dict[str, Any]:
    """Return the account of a split: rows_in = rows_used + the sum of dropped."""
    records = side.records()
    rows, tally = splits.row_count(records), side.tally
    facts = {
        **tally.as_json(),
        "rows_in": tally.rows_in if side.tallies else rows,
        "rows_used": rows,
        "samples": len(records),
        "tokens": int(
            sum(
                store.lengths[chosen].sum()
                for store, chosen in zip(side.stores, side.chosen, strict=True)
            )
        ),
        "trained_tokens": int(records["trained"].sum()),
        "lost_fraction": round(tally.lost_fraction, 6),
        "dropped": {**tally.dropped, **side.dropped},
        "lengths": of_lengths(
            np.concatenate(
                [
                    store.lengths[chosen]
                    for store, chosen in zip(side.stores, side.chosen, strict=True)
                ]
            )
        ),
        "duplicates": splits.duplicates(records),
        "sources": [
            {"name": source.name, "weight": source.weight, **tally.as_json()}
            for source, tally in zip(side.sources, side.tallies, strict=False)
        ],
    }
    assert facts["rows_in"] == facts["rows_used"] + sum(facts["dropped"].values()), (
        f"rows are unaccounted for: {facts}"
    )
    return facts


def _epoch(train: Side) -> list[dict[str, Any]]:
    """Return how often each source's samples are trained on in one pass."""
    total = sum(len(chosen) for chosen in train.chosen)
    pairs = zip(train.sources, train.chosen, strict=True)
    return [
        {"name": source.name, "samples": len(chosen), "share": round(len(chosen) / total, 6)}
        for source, chosen in pairs
    ]
