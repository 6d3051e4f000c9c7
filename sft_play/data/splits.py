"""Which samples are trained on and which are evaluated on: held-out rows, overlap, source mix.

Works on the samples' records (`store.RECORD`); indices are into one array of records. Pure; loads
no torch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sft_play.data.ledger import EqualRows
from sft_play.data.rows import MAX_HELD_OUT_ROWS


@dataclass(frozen=True)
class Overlap:
    """Training samples whose rows are also evaluated on: (K,) indices each."""

    exact: np.ndarray
    normalized: np.ndarray  # the same words; the exact ones are among them
    equal_to: np.ndarray  # for each of `normalized`, the first evaluated sample that it equals


def count_rows(records: np.ndarray) -> int:
    """Return how many rows samples come from; the samples of one row are adjacent."""
    return int(np.count_nonzero(begins_row(records)))


def begins_row(records: np.ndarray) -> np.ndarray:
    """Return a mask (N,) of the samples that are the first of their row."""
    mask = np.ones(len(records), dtype=bool)
    same_file = records["file"][1:] == records["file"][:-1]
    same_number = records["number"][1:] == records["number"][:-1]
    mask[1:] = ~(same_file & same_number)
    return mask


def choose_held_out(records: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return a mask (N,) of the samples to hold out.

    They are about `fraction` of the rows, and at most MAX_HELD_OUT_ROWS. Rows of the same words are
    held out together, so that nothing evaluated is trained on. The mask may be all true or all
    false.
    """
    _, group_of = np.unique(records["normalized"], return_inverse=True)
    # the samples of a split row count one by one here, so fewer rows are held out
    group_sizes = np.bincount(group_of).tolist()
    target = min(max(1, round(len(records) * fraction)), MAX_HELD_OUT_ROWS)
    order = list(range(len(group_sizes)))
    random.Random(seed).shuffle(order)
    groups: list[int] = []
    held_out = 0
    for group in order:
        if held_out + group_sizes[group] <= target:
            groups.append(group)
            held_out += group_sizes[group]
        if held_out == target:
            break
    return np.isin(group_of, groups)


def find_overlap(trained: np.ndarray, evaluated: np.ndarray) -> Overlap:
    """Return the training samples whose row is a row of the evaluated samples, by their records."""
    exact = np.flatnonzero(np.isin(trained["exact"], evaluated["exact"]))
    normalized = np.flatnonzero(np.isin(trained["normalized"], evaluated["normalized"]))
    values, first_samples = np.unique(evaluated["normalized"], return_index=True)
    positions = np.searchsorted(values, trained["normalized"][normalized])
    return Overlap(exact, normalized, first_samples[positions])


def count_duplicates(records: np.ndarray) -> EqualRows:
    """Return how many rows repeat an earlier one, exactly and by their words."""
    rows = records[begins_row(records)]
    return EqualRows(
        exact=len(rows) - len(np.unique(rows["exact"])),
        normalized=len(rows) - len(np.unique(rows["normalized"])),
    )


def mix_sources(
    indices: Sequence[np.ndarray], weights: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Return each source's samples of one epoch, repeated so that the ratio is that of `weights`.

    The source with the most samples for its weight is taken once. The others repeat, and the seed
    draws the samples of the last, incomplete repeat. So no source ends early and none is cut.

    >>> [len(taken) for taken in mix_sources([np.arange(100), np.arange(10)], [3, 1], seed=0)]
    [100, 33]
    """
    samples_per_weight = max(
        len(source) / weight for source, weight in zip(indices, weights, strict=True)
    )
    generator = np.random.default_rng(seed)
    mixed = []
    for source, weight in zip(indices, weights, strict=True):
        repeats, rest = divmod(round(samples_per_weight * weight), max(1, len(source)))
        last = generator.choice(source, rest, replace=False) if rest else source[:0]
        mixed.append(np.concatenate([np.tile(source, repeats), np.sort(last)]))
    return mixed
