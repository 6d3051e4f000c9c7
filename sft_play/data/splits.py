"""Which samples are trained on and which are evaluated on: held-out rows, overlap, and the mix of sources. Pure; loads no torch.

Works on the samples' records (`store.RECORD`); indices are of samples within one store.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_HELD_OUT = 500  # rows; more does not sharpen a loss, and every evaluation pays for it


@dataclass(frozen=True)
class Overlap:
    """Training samples whose rows are evaluated on, too: (K,) indices each, and for each the first sample that it equals."""

    exact: np.ndarray
    normalised: np.ndarray  # the same words; exact ones are among them
    equal_to: np.ndarray  # (K,) beside `normalised`: index of an evaluated sample


def row_count(records: np.ndarray) -> int:
    """Return how many rows samples come from; samples of one row stand together."""
    if not len(records):
        return 0
    differs = (records["file"][1:] != records["file"][:-1]) | (
        records["number"][1:] != records["number"][:-1]
    )
    return 1 + int(np.count_nonzero(differs))


def hold_out(records: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return a mask (N,) of the samples that are held out, about `fraction` of the rows and at most MOST_HELD_OUT.

    Rows of the same words go to the same side: what is evaluated is never trained. Everything may be on one side.
    """
    _, group = np.unique(records["normalised"], return_inverse=True)
    rows_of_group = np.bincount(
        group
    )  # samples of split rows count as rows here, which makes fewer rows held out
    wanted = min(max(1, round(len(records) * fraction)), MOST_HELD_OUT)
    order = list(range(len(rows_of_group)))
    random.Random(seed).shuffle(order)
    chosen, held = [], 0
    for number in order:
        if held + rows_of_group[number] <= wanted:
            chosen.append(number)
            held += int(rows_of_group[number])
        if held == wanted:
            break
    return np.isin(group, chosen)


def overlap(trained: np.ndarray, evaluated: np.ndarray) -> Overlap:
    """Return the training samples whose row is a row of the evaluated samples, by their records."""
    exact = np.flatnonzero(np.isin(trained["exact"], evaluated["exact"]))
    normalised = np.flatnonzero(np.isin(trained["normalised"], evaluated["normalised"]))
    values, first = np.unique(evaluated["normalised"], return_index=True)
    return Overlap(
        exact,
        normalised,
        first[np.searchsorted(values, trained["normalised"][normalised])]
        if len(values)
        else normalised,
    )


def duplicates(records: np.ndarray) -> dict[str, int]:
    """Return how many rows repeat an earlier one, to the letter and in the same words."""
    starts = (
        np.r_[
            True,
            (records["file"][1:] != records["file"][:-1])
            | (records["number"][1:] != records["number"][:-1]),
        ]
        if len(records)
        else []
    )
    rows = records[starts]
    return {name: len(rows) - len(np.unique(rows[name])) for name in ("exact", "normalised")}


def mixed(indices: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> list[np.ndarray]:
    """Return each source's samples in one epoch, repeated so that sources stand in the ratio of `weights`.

    The source that has most for its weight is taken once, whole; the others repeat, and the part of the last repeat that
    is needed is drawn by seed. So nothing stops early and nothing is cut.

    >>> [len(taken) for taken in mixed([np.arange(100), np.arange(10)], [3, 1], seed=0)]
    [100, 33]
    """
    per_weight = max(len(found) / weight for found, weight in zip(indices, weights, strict=True))
    draw = np.random.default_rng(seed)
    taken = []
    for found, weight in zip(indices, weights, strict=True):
        repeats, rest = divmod(round(per_weight * weight), max(1, len(found)))
        part = draw.choice(found, rest, replace=False) if rest else found[:0]
        taken.append(np.concatenate([np.tile(found, repeats), np.sort(part)]))
    return taken
