"""Which token ids the samples of a run hold: what a model must have rows for. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft_play.data.files import origin_of
from sft_play.data.store import Store

CHUNK_TOKENS = 1 << 22  # scanned at once: 16 MiB of ids


@dataclass(frozen=True)
class VocabularyUse:
    """The token ids of all samples. Samples hold no padding, so a padding token that is here stands in a row."""

    ids: np.ndarray  # (U,) int64, sorted: each id that occurs
    trained_ids: np.ndarray  # those of them that are to be predicted somewhere, sorted
    stores: tuple[Store, ...] = ()
    files: tuple[tuple[str, ...], ...] = ()  # of each store; without them a row has no name

    @property
    def largest_id(self) -> int:
        """The largest id that occurs, -1 when nothing does."""
        return int(self.ids[-1]) if len(self.ids) else -1

    def origin(self, token_id: int) -> str | None:
        """Return file:line of the first row that holds a token, None where it is not known. Reads ids up to there."""
        for store, files in zip(self.stores, self.files, strict=False):
            for start in range(0, len(store.ids), CHUNK_TOKENS):
                found = np.flatnonzero(store.ids[start : start + CHUNK_TOKENS] == token_id)
                if len(found):
                    record = store.records[
                        np.searchsorted(store.records["end"], start + found[0], side="right")
                    ]
                    return origin_of(Path(files[record["file"]]), int(record["number"]))
        return None


def used_in(stores: Sequence[Store], files: Sequence[Sequence[str]] = ()) -> VocabularyUse:
    """Return the ids that stores hold; `files` names the files of each store."""
    counts, trained_counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for store in stores:
        begins = store.records["end"] - store.lengths
        for start in range(0, len(store.ids), CHUNK_TOKENS):
            ids, trained = (
                store.ids[start : start + CHUNK_TOKENS],
                np.array(store.trained[start : start + CHUNK_TOKENS]),
            )
            first, last = np.searchsorted(begins, (start, start + CHUNK_TOKENS))
            trained[begins[first:last] - start] = (
                False  # nothing stands before a sample's first token to predict it from
            )
            counts = _sum(counts, np.bincount(ids))
            trained_counts = _sum(trained_counts, np.bincount(ids[trained]))
    return VocabularyUse(
        np.flatnonzero(counts),
        np.flatnonzero(trained_counts),
        tuple(stores),
        tuple(map(tuple, files)),
    )


def _sum(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Add counts of which one array may be the shorter."""
    short, long = sorted((left, right), key=len)
    return long + np.pad(short, (0, len(long) - len(short)))
