"""Which samples are trained, evaluated and generated from, and which tokens they contain.

Works on the samples' records (`store.RECORD`); indices refer to one array of records. Loads no
torch.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sft_play.data.ledger import EqualRows, LengthPercentiles
from sft_play.data.rows import MAX_HELD_OUT_ROWS
from sft_play.data.store import Split
from sft_play.runs.report import LengthHistogram

MIN_ANSWER_TOKENS = 64
MAX_ANSWER_TOKENS = 1024  # an untrained base model may generate up to the limit in every answer
TOKENS_STEP = 16
TOKENS_PER_SCAN = 1 << 22  # 16 MiB of ids
BINS = 24  # of a histogram, at most
ROUND_WIDTHS = (1, 2, 2.5, 5, 10)  # of bins, times a power of ten


@dataclass(frozen=True)
class Overlap:
    """Training samples whose rows are also evaluated on: (K,) indices each."""

    exact: np.ndarray
    normalized: np.ndarray  # the same words; the exact ones are among them
    questions: np.ndarray  # the same words are asked; the normalized ones are among them
    equal_to: np.ndarray  # for each of `normalized`, the first evaluated sample that it equals


def count_rows(records: np.ndarray) -> int:
    """Return the number of rows of the samples; samples of one row are adjacent."""
    return int(np.count_nonzero(begins_row(records)))


def begins_row(records: np.ndarray, *besides: str) -> np.ndarray:
    """Return a mask (N,) of the samples that start a row, or at which another column changes.

    Each piece of a plain text has its own `exact`.
    """
    mask = np.zeros(len(records), dtype=bool)
    mask[:1] = True
    for name in ("file", "number", *besides):
        mask[1:] |= records[name][1:] != records[name][:-1]
    return mask


def continues_row(split: Split, *besides: str) -> np.ndarray:
    """Return a mask (N,) of the samples that belong to the row of the sample before them.

    Another value in a column of `besides` starts a row, too.
    """
    mask = ~begins_row(split.records, *besides)
    mask[1:] &= (np.diff(split.index_in) > 0) & (np.diff(split.store_of) == 0)
    return mask


def find_row_ends(split: Split) -> np.ndarray:
    """Return the ends of the rows among their samples, (R,) int64; pieces of a text are rows."""
    begins = np.flatnonzero(~continues_row(split, "exact"))
    return np.append(begins[1:], len(split))


def choose_held_out(records: np.ndarray, fraction: float, seed: int, split_by: str) -> np.ndarray:
    """Return a mask (N,) of the samples to set aside.

    They belong to about `fraction` of the rows, or to MAX_HELD_OUT_ROWS: as near to it as complete
    groups allow, and never more than twice as many. Rows with the same words are in one group, and
    so are rows with one question, or with one value of a column, according to data.split_by.
    The choice does not depend on the order of the rows. A piece of a plain text counts as a row.
    The mask may be all false.
    """
    keys = {"row": (), "prompt": ("question",)}.get(split_by, ("group",))
    _, group_of = np.unique(_connect(records, ("normalized", *keys)), return_inverse=True)
    sizes = np.bincount(group_of[begins_row(records, "exact")]).tolist()
    rows = sum(sizes)
    target = min(max(1, round(rows * fraction)), MAX_HELD_OUT_ROWS)
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    reached = {0: (0, -1)}  # set-aside rows: those without the last group, and that group
    tried: Counter[int] = Counter()  # groups by size
    for group in order:
        size = sizes[group]
        if target in reached:
            break
        if size * tried[size] <= target:  # another group of this size would not improve the sum
            tried[size] += 1
            for held_out in [held_out for held_out in reached if held_out < target]:
                reached.setdefault(held_out + size, (held_out, group))
    most = min(rows - 1, 2 * MAX_HELD_OUT_ROWS)
    possible = [held_out for held_out in reached if 0 < held_out <= most]
    held_out = min(possible, key=lambda count: (abs(count - target), count), default=0)
    groups = []
    while held_out:
        held_out, group = reached[held_out]
        groups.append(group)
    return np.isin(group_of, groups)


def _connect(records: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    """Return labels (N,): samples that share any key, directly or via others, have one label.

    The label is the least hash of the group's words.
    """
    members = [np.unique(records[key], return_inverse=True)[1] for key in keys]
    first = np.arange(len(records))  # an earlier sample of the same group
    before = None
    while not np.array_equal(first, before):
        before = first
        for values in members:
            first = _least(first, values)
        first = first[first]  # otherwise a chain of groups would need one iteration per link
    return _least(records["normalized"], first)


def _least(values: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Return the least value of each sample's group; groups are numbered below N."""
    least = np.full(len(values), np.iinfo(values.dtype).max, values.dtype)
    np.minimum.at(least, group_of, values)
    return least[group_of]


def find_overlap(trained: np.ndarray, evaluated: np.ndarray) -> Overlap:
    """Return the training samples whose row is a row of the evaluated samples, by their records."""
    exact = np.flatnonzero(np.isin(trained["exact"], evaluated["exact"]))
    normalized = np.flatnonzero(np.isin(trained["normalized"], evaluated["normalized"]))
    values, first_samples = np.unique(evaluated["normalized"], return_index=True)
    positions = np.searchsorted(values, trained["normalized"][normalized])
    asked = np.flatnonzero(np.isin(trained["question"], evaluated["question"]))
    questions = np.union1d(normalized, asked)
    return Overlap(exact, normalized, questions, first_samples[positions])


def count_duplicates(records: np.ndarray) -> EqualRows:
    """Return how many rows repeat an earlier one: exactly, by words, or by question."""
    rows = records[begins_row(records)]
    repeated = []
    for key in ("exact", "normalized", "question"):
        values = np.sort(rows[key])  # np.unique takes 20 times as long for millions of rows
        repeated.append(int(np.count_nonzero(values[1:] == values[:-1])))
    return EqualRows(*repeated)


def samples_of_rows(row_ends: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the indices of the samples of some rows, in the order of `rows`.

    `row_ends` (R,) are the ends of all rows among the samples.

    >>> samples_of_rows(np.array([1, 4, 6]), np.array([2, 1])).tolist()
    [4, 5, 1, 2, 3]
    """
    counts = np.diff(row_ends, prepend=0)[rows]
    shifts = row_ends[rows] - np.cumsum(counts)  # of a row: from its place in the result
    return np.arange(counts.sum()) + np.repeat(shifts, counts)


def mix_sources(
    rows: Sequence[np.ndarray], weights: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Return each source's rows of one epoch, repeated so that the ratio is that of `weights`.

    The source with the most rows for its weight is used once. The others repeat, and the seed
    draws the rows of the last, incomplete repeat. No source ends early and none is cut.

    >>> [len(taken) for taken in mix_sources([np.arange(100), np.arange(10)], [3, 1], seed=0)]
    [100, 33]
    """
    rows_per_weight = max(
        len(source) / weight for source, weight in zip(rows, weights, strict=True)
    )
    generator = np.random.default_rng(seed)
    mixed = []
    for source, weight in zip(rows, weights, strict=True):
        repeats, rest = divmod(round(rows_per_weight * weight), max(1, len(source)))
        last = generator.choice(source, rest, replace=False) if rest else source[:0]
        mixed.append(np.concatenate([np.tile(source, repeats), np.sort(last)]))
    return mixed


def question_indices(split: Split, max_rows: int | None) -> np.ndarray:
    """Return the first samples that end with an answer to a prompt; `max_rows` None: all."""
    has_answer = np.flatnonzero(split.records["answer_start"])
    return has_answer[:max_rows]


def drawn(rows: np.ndarray, count: int) -> np.ndarray:
    """Return `count` of the rows, in order: the same at each call; fewer rows are a subset."""
    order = np.random.default_rng(0).permutation(len(rows))
    return rows[np.sort(order[:count])]


def answer_token_limit(splits: Iterable[Split], max_rows: int | None, max_seq_len: int) -> int:
    """Return the token limit of generated answers to the rows of `splits`.

    It is the longest answer of those rows plus a quarter, so that a right answer ends before
    it. Prompt and answer stay within `max_seq_len` tokens, unless that would cut the longest one.
    """
    longest_answer = 0
    longest_prompt = 0
    for split in splits:
        indices = question_indices(split, max_rows)
        if len(indices):
            prompts = split.records["answer_start"][indices]
            answers = split.lengths[indices] - prompts
            longest_prompt = max(longest_prompt, int(prompts.max()))
            longest_answer = max(longest_answer, int(answers.max()))
    with_room = longest_answer + longest_answer // 4
    rounded = -(-with_room // TOKENS_STEP) * TOKENS_STEP
    wanted = min(max(rounded, MIN_ANSWER_TOKENS), MAX_ANSWER_TOKENS)
    room = max(longest_answer, max_seq_len - longest_prompt)
    return max(1, min(wanted, room))


@dataclass(frozen=True)
class UsedTokens:
    """The token ids of all samples. These have no padding: a padding token here is from a row."""

    ids: np.ndarray  # (U,) int64, sorted: each id that occurs
    trained_ids: np.ndarray  # ids that are predicted somewhere, sorted
    samples: Split

    def origin(self, token_id: int) -> str | None:
        """Return `file:line` of the first row that has a token, None if it is not known."""
        first_sample = 0  # of a store, in the order of all samples
        for store in self.samples.stores:
            if not store.files:
                return None
            for start in range(0, len(store.ids), TOKENS_PER_SCAN):
                found = np.flatnonzero(store.ids[start : start + TOKENS_PER_SCAN] == token_id)
                if len(found):
                    token = start + int(found[0])
                    sample = np.searchsorted(store.records["end"], token, side="right")
                    return self.samples.origin(first_sample + int(sample))
            first_sample += len(store)
        return None


def find_used_tokens(samples: Split) -> UsedTokens:
    """Return the ids of complete stores."""
    counts = np.zeros(0, np.int64)
    trained_counts = np.zeros(0, np.int64)
    for store in samples.stores:
        sample_starts = (store.records["end"] - store.lengths)[store.shared == 0]
        for start in range(0, len(store.ids), TOKENS_PER_SCAN):
            end = start + TOKENS_PER_SCAN
            ids = store.ids[start:end]
            trained = np.array(store.trained[start:end])
            first, last = np.searchsorted(sample_starts, (start, end))
            trained[sample_starts[first:last] - start] = False  # nothing predicts a first token
            counts = _add_counts(counts, ids)
            trained_counts = _add_counts(trained_counts, ids[trained])
    return UsedTokens(np.flatnonzero(counts), np.flatnonzero(trained_counts), samples)


def _add_counts(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return counts of ids, with those of more ids."""
    total = np.bincount(ids, minlength=len(counts))
    total[: len(counts)] += counts
    return total


def length_percentiles(lengths: np.ndarray) -> LengthPercentiles:
    """Return the percentiles of lengths (N,), all 0 if there are none."""
    if not len(lengths):
        return LengthPercentiles(0, 0, 0, 0)
    percentiles = np.percentile(lengths, (50, 90, 99), method="higher")
    return LengthPercentiles(*map(int, percentiles), int(lengths.max()))


def length_histogram(lengths: np.ndarray) -> LengthHistogram:
    """Return how many of the lengths (N,) in tokens lie in each of at most BINS equal bins.

    The first bin starts at 0, the last one ends after the longest, and all have the smallest round
    width with which BINS are enough. Without lengths there is no bin.
    """
    if not len(lengths):
        return LengthHistogram([], [])
    longest = int(lengths.max())
    least = (longest + 1) / BINS
    power = 10 ** math.floor(math.log10(max(least, 1)))
    widths = (math.ceil(factor * power) for factor in ROUND_WIDTHS)
    width = next(width for width in widths if width >= least)
    edges = list(range(0, longest + width + 1, width))
    counts, _ = np.histogram(lengths, edges)
    return LengthHistogram(edges, counts.tolist())
