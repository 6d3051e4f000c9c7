"""Which token ids the samples of a run hold; each needs an embedding. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sft_play.data.files import format_origin
from sft_play.data.store import Store

TOKENS_PER_SCAN = 1 << 22  # 16 MiB of ids


@dataclass(frozen=True)
class UsedTokens:
    """The token ids of all samples. These have no padding: a padding token here is from a row."""

    ids: np.ndarray  # (U,) int64, sorted: each id that occurs
    trained_ids: np.ndarray  # those that are predicted somewhere, sorted
    stores: tuple[Store, ...] = ()
    files: tuple[tuple[str, ...], ...] = ()  # of each store; without them rows have no name

    @property
    def largest_id(self) -> int:
        """The largest id that occurs, -1 when there is none."""
        return int(self.ids[-1]) if len(self.ids) else -1

    def origin(self, token_id: int) -> str | None:
        """Return `file:line` of the first row that holds a token, None where it is not known."""
        for store, files in zip(self.stores, self.files, strict=False):
            position = _find_token(store, token_id)
            if position is not None:
                sample = np.searchsorted(store.records["end"], position, side="right")
                record = store.records[sample]
                return format_origin(Path(files[record["file"]]), int(record["number"]))
        return None


def find_used_tokens(stores: Sequence[Store], files: Sequence[Sequence[str]] = ()) -> UsedTokens:
    """Return the ids that stores hold; `files` are the names of the files of each store."""
    counts = np.zeros(0, np.int64)
    trained_counts = np.zeros(0, np.int64)
    for store in stores:
        sample_starts = store.records["end"] - store.lengths
        for start in range(0, len(store.ids), TOKENS_PER_SCAN):
            end = start + TOKENS_PER_SCAN
            ids = store.ids[start:end]
            trained = np.array(store.trained[start:end])
            first, last = np.searchsorted(sample_starts, (start, end))
            trained[sample_starts[first:last] - start] = False  # nothing predicts a first token
            counts = _add(counts, np.bincount(ids))
            trained_counts = _add(trained_counts, np.bincount(ids[trained]))
    return UsedTokens(
        np.flatnonzero(counts),
        np.flatnonzero(trained_counts),
        tuple(stores),
        tuple(tuple(names) for names in files),
    )


def _find_token(store: Store, token_id: int) -> int | None:
    """Return the first place of a token in a store's ids. Reads them up to there."""
    for start in range(0, len(store.ids), TOKENS_PER_SCAN):
        places = np.flatnonzero(store.ids[start : start + TOKENS_PER_SCAN] == token_id)
        if len(places):
            return start + int(places[0])
    return None


def _add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Add counts, of which one array may be shorter."""
    short, long = sorted((left, right), key=len)
    return long + np.pad(short, (0, len(long) - len(short)))
