"""sft_play.data.splits: held-out rows, rows on both sides, and mixes of sources."""

import numpy as np
import pytest

from sft_play.data import splits
from sft_play.data.ledger import EqualRows
from sft_play.data.rows import MAX_HELD_OUT_ROWS
from sft_play.data.store import RECORD


def records(
    words: list[int],
    numbers: list[int] | None = None,
    exact: list[int] | None = None,
    file: int = 0,
    questions: list[int] | None = None,
    groups: list[int] | None = None,
) -> np.ndarray:
    """Records of samples whose rows say `words`, from lines `numbers` of a file."""
    made = np.zeros(len(words), dtype=RECORD)
    made["normalized"], made["file"] = words, file
    made["number"] = range(1, len(words) + 1) if numbers is None else numbers
    made["exact"] = words if exact is None else exact
    made["question"] = words if questions is None else questions
    made["group"] = 0 if groups is None else groups
    return made


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_the_same_words_are_never_on_both_sides(seed):
    draw = np.random.default_rng(seed)
    rows = records(draw.integers(0, 40, size=200).tolist())
    held = splits.choose_held_out(rows, 0.2, seed, "row")
    assert held.any() and not held.all()
    assert not set(rows["normalized"][held].tolist()) & set(rows["normalized"][~held].tolist())


def test_a_group_is_all_rows_that_others_link():
    """Rows 0 and 1 say the same, 1 and 2 are of one value; 4 repeats 3 in another group."""
    rows = records([10, 10, 12, 13, 13, *range(20, 60)], groups=[1, 2, 2, 3, 4, *range(20, 60)])
    kept_together = set()
    for seed in range(200):
        held = splits.choose_held_out(rows, 0.1, seed, "conversation_id")
        assert held.sum() == 4
        assert held[0] == held[1] == held[2] and held[3] == held[4]
        kept_together.add((bool(held[0]), bool(held[3])))
    assert kept_together >= {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("sizes", "fraction", "held"),
    [
        ([1] * 3, 0.05, 1),
        ([1] * 100, 0.1, 10),
        ([1] * 1300, 0.4, MAX_HELD_OUT_ROWS),
        ([2] * 12, 0.05, 2),  # 24 rows of two answers: of one question
        ([8] * 20, 0.05, 8),  # 8 are wanted
        ([8] * 10, 0.05, 8),  # 4 are wanted, and no group is smaller
        ([8] * 100, 0.025, 16),  # 20 are wanted: 16 and 24 are as near
        ([7, 11, 13, 69], 0.2, 20),  # 20 are wanted: 7 and 13
        ([7, 11, 13, 69], 0.24, 24),  # 11 and 13
        ([60, 40], 0.1, 40),
        ([8] * 500, 0.4, 496),  # at most 500
        ([300] * 40, 0.2, 600),
        ([1001] * 4, 0.2, 0),  # twice as many as 500 would slow every evaluation
    ],
)
def test_as_many_rows_are_held_out_as_whole_groups_come_to(sizes, fraction, held, seed):
    questions = [group for group, size in enumerate(sizes) for _ in range(size)]
    rows = records(list(range(len(questions))), questions=questions)
    assert splits.choose_held_out(rows, fraction, seed, "prompt").sum() == held


def test_a_long_chain_of_links_is_one_group_and_takes_no_time():
    numbers = np.arange(100_000)
    rows = records(((numbers + 1) // 2).tolist(), groups=(numbers // 2).tolist())
    assert not splits.choose_held_out(rows, 0.1, 0, "id").any()
    rows["group"][50_000:] += 1  # one link fewer: the word that both halves have
    assert not splits.choose_held_out(rows, 0.1, 0, "id").any()
    rows["normalized"][50_000:] += 1
    assert len(np.unique(splits._connect(rows, ("normalized", "group")))) == 2


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_rows_are_counted_not_their_samples(samples):
    numbers = [row for row in range(12) for _ in range(samples)]
    rows = records(numbers, numbers=numbers)
    assert splits.choose_held_out(rows, 0.05, 0, "prompt").sum() == samples


def test_duplicates_are_the_rows_behind_the_first_of_their_kind():
    rows = records([7, 8, 7, 7], exact=[1, 2, 1, 3], questions=[4, 4, 4, 4])
    assert splits.count_duplicates(rows) == EqualRows(1, 2, 3)
    assert splits.count_duplicates(records([7, 7], numbers=[4, 4])) == EqualRows(0, 0, 0), (
        "two samples of one row"
    )
    assert splits.count_duplicates(records([])) == EqualRows(0, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_a_mix_has_the_ratio_of_its_weights_and_every_sample_of_every_source(seed):
    draw = np.random.default_rng(seed)
    indices = [draw.permutation(1000)[: draw.integers(1, 300)] for _ in range(draw.integers(1, 5))]
    weights = draw.uniform(0.1, 5, size=len(indices)).tolist()
    taken = splits.mix_sources(indices, weights, seed)
    total = sum(map(len, taken))
    for found, weight, one in zip(indices, weights, taken, strict=True):
        assert set(one.tolist()) == set(found.tolist()), "nothing stops early, nothing is cut"
        assert abs(len(one) / total - weight / sum(weights)) < 2 / total * len(indices)
        counts = np.unique(one, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1, "no sample is favoured"
    assert all(map(np.array_equal, taken, splits.mix_sources(indices, weights, seed)))
