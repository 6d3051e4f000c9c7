"""Samples that begin alike as trees: how they are stored, cut and laid out."""

import numpy as np
import pytest

from sft_kernels.trees import Branch, lay_out
from sft_play.data.render import IGNORE_INDEX, RenderedSample
from sft_play.data.row_hashes import RowHashes
from sft_play.data.store import Split, Store, StoredSample, StoreWriter, to_arrays
from sft_play.data.trees import find_units

SEEDS = range(8)
HASHES = RowHashes(1, 2, 3)


def conversation(random: np.random.Generator, answers: int) -> list[RenderedSample]:
    """Samples of one row: thoughts are in the last answer only, as with Qwen3."""

    def draw(most: int) -> list[int]:
        return random.integers(1, 50, random.integers(1, most)).tolist()

    history, samples = draw(9), []
    for _ in range(answers):
        history += draw(7)
        for _ in range(1 + (random.random() < 0.3)):  # some prompts have two answers
            answer = draw(6)
            trained = [*draw(5), *answer]
            labels = [IGNORE_INDEX] * len(history) + trained
            weights = None
            if random.random() < 0.5:
                weights = (random.integers(1, 9, len(labels)) / 8).tolist()
            samples.append(RenderedSample(history + trained, labels, len(history), weights=weights))
        if random.random() < 0.8:
            history = [*history, 51, *answer]
        else:  # the context is shortened, so the next sample branches off near the root
            history = history[: len(history) // 3 + 1] + draw(4)
    return samples


def stored(rows: list[list[RenderedSample]]) -> list[StoredSample]:
    return [
        StoredSample(sample, 0, number, HASHES._replace(exact=number), 0)
        for number, row in enumerate(rows, start=1)
        for sample in row
    ]


def store_of(folder, rows: list[list[RenderedSample]]) -> Store:
    with StoreWriter(folder) as writer:
        half = len(rows) // 2  # as of two chunks
        writer.append(to_arrays(stored(rows[:half])))
        writer.append(to_arrays(stored(rows[half:])))
    return Store(folder, ["rows.jsonl"])


def draw_rows(seed: int) -> list[list[RenderedSample]]:
    random = np.random.default_rng(seed)
    return [conversation(random, answers) for answers in (1, 4, 7, 1, 3)]


def as_sets(samples) -> list[tuple]:
    found = []
    for sample in samples:
        weights = np.ones(len(sample.ids)) if sample.weights is None else np.array(sample.weights)
        labels = np.array(sample.labels)
        own = weights[labels != IGNORE_INDEX].tolist()
        facts = tuple(sample.ids), tuple(labels), sample.answer_start, tuple(own)
        found.append(tuple(tuple(map(float, np.atleast_1d(fact))) for fact in facts))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_are_read_as_they_were_written(tmp_path, seed):
    rows = draw_rows(seed)
    store = store_of(tmp_path, rows)
    first = 0
    for row in rows:
        of_row = [store[index] for index in range(first, first + len(row))]
        assert sorted(as_sets(of_row)) == sorted(as_sets(row))
        first += len(row)
    assert store.lengths.tolist() == [len(store[index].ids) for index in range(len(store))]
    every = [sample.ids for row in rows for sample in row]
    distinct = {(at, *ids[: end + 1]) for at, row in enumerate(rows) for ids in
                (sample.ids for sample in row) for end in range(len(ids))}  # fmt: skip
    # two answers to one prompt may begin with a token that both train
    assert len(distinct) <= len(store.ids) <= len(distinct) + 3
    assert len(distinct) < sum(map(len, every))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_the_samples_shares_what_both_have(tmp_path, seed):
    split = Split.whole([store_of(tmp_path, draw_rows(seed))])
    chosen = np.sort(np.random.default_rng(seed).permutation(len(split))[: len(split) // 2])
    part = split.take(np.concatenate([chosen, chosen]))  # rows may be repeated
    for index, shared in enumerate(part.shared.tolist()):
        if shared:
            one, other = part[index - 1].ids, part[index].ids
            assert one[:shared].tolist() == other[:shared].tolist()
    assert part.shared[: len(chosen)].sum() > 0
    assert part.shared[0] == part.shared[len(chosen)] == 0


@pytest.mark.parametrize("capacity", [1, 40, 60, 90, 10_000])
@pytest.mark.parametrize("seed", SEEDS)
def test_units_have_each_sample_once_and_fit(tmp_path, seed, capacity):
    rows = draw_rows(seed)
    split = Split.whole([store_of(tmp_path, rows)])
    row_ends = np.cumsum(list(map(len, rows)))
    units = find_units(split.lengths, split.shared, row_ends, capacity)
    found = [units.samples(unit) for unit in range(len(units.ends))]
    assert [index for samples in found for index in samples] == list(range(len(split)))
    for samples, length in zip(found, units.lengths.tolist(), strict=True):
        first, *others = samples
        own = sum(int(split.lengths[index] - split.shared[index]) for index in others)
        assert length == split.lengths[first] + own
        assert length <= capacity or len(samples) == 1
    assert units.ends[units.row_ends - 1].tolist() == row_ends.tolist()
    if capacity == 10_000:
        assert units.lengths.sum() == (split.lengths - split.shared).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_token_attends_to_those_before_it_in_its_samples(tmp_path, seed):
    split = Split.whole([store_of(tmp_path, draw_rows(seed)[2:3])])
    branches = [
        Branch(shared, length - shared)
        for shared, length in zip(split.shared.tolist(), split.lengths.tolist(), strict=True)
    ]
    tokens = lay_out(branches)
    place = np.arange(len(tokens.ends))
    sees = (place <= place[:, None]) & (place[:, None] < tokens.ends)
    ids = np.concatenate([split[index].ids[each.shared :] for index, each in enumerate(branches)])
    end = 0
    for index, branch in enumerate(branches):
        end += branch.new
        sample = split[index].ids
        for back in range(branch.new):
            token = end - 1 - back
            path = np.flatnonzero(sees[token])
            assert ids[path].tolist() == sample[: len(sample) - back].tolist()
            assert tokens.positions[path].tolist() == list(range(len(path)))
            assert tokens.parents[token] == (path[-2] if len(path) > 1 else -1)
