"""sft_play.data.chunk_tokenizer: what is left of samples over the limit, and what is lost."""

import random

import pytest
from families import FAMILIES, family
from record_files import run_data, write_rows
from renderings import assert_consistent, row, samples_of, trained

from sft_play.data.chunk_tokenizer import fit_sample
from sft_play.data.render import IGNORE_INDEX, RenderedSample

LONG = RenderedSample([1, 11, 12, 13, 14, 15, 16, 17], [IGNORE_INDEX] * 4 + [14, 15, 16, 17], 4)
MANY = RenderedSample(
    list(range(20, 28)), [IGNORE_INDEX, 21, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 25, 26, 27], 5
)
X = IGNORE_INDEX


@pytest.mark.parametrize(
    ("sample", "limit", "policy", "parts"),
    [
        (LONG, 7, "drop", []),
        (LONG, 7, "truncate_left", [("1 12 13 14 15 16 17", 3, 3)]),
        (LONG, 5, "truncate_left", [("1 14 15 16 17", 2, 0)]),
        (LONG, 2, "truncate_left", []),
        (MANY, 7, "truncate_left", [("21 22 23 24 25 26 27", 4, 4)]),
        (LONG, 4, "split", [("14 15 16 17", 1, 0)]),
        (LONG, 7, "split", [("1 11 12 13 14 15 16", 4, 4)]),
    ],
)
def test_what_a_limit_leaves(sample, limit, policy, parts):
    samples = []
    for text, first, answer_start in parts:
        ids = list(map(int, text.split()))
        samples.append(RenderedSample(ids, [X] * first + ids[first:], answer_start))
    assert fit_sample(sample, limit, policy, 1) == samples


def test_a_split_sample_keeps_the_labels_of_each_part():
    assert fit_sample(MANY, 3, "split", 1) == [
        RenderedSample([20, 21, 22], [X, 21, X], 0),
        RenderedSample([23, 24, 25], [X, X, 25], 2),
        RenderedSample([26, 27], [X, 27], 0),
    ]


def random_sample(rng: random.Random) -> RenderedSample:
    ids = [rng.choice([1, 5])] + [rng.randrange(100, 200) for _ in range(rng.randint(1, 40))]
    if rng.random() < 0.3:
        return RenderedSample(ids, [X, *ids[1:]])
    start = rng.randint(1, len(ids) - 1)
    return RenderedSample(
        ids,
        [X, *(token if rng.random() < 0.2 else X for token in ids[1:start]), *ids[start:]],
        start,
    )


@pytest.mark.parametrize("policy", ["drop", "truncate_left", "split"])
def test_tokens_are_kept_or_counted_as_lost(policy, tmp_path):
    rng = random.Random(policy)
    answers = ["word " * rng.randint(1, 60) for _ in range(40)]
    rows = [{"question": f"What is {n}?", "answer": text} for n, text in enumerate(answers)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    settings = {"val_path": str(path), "on_overlap": "allow", "max_lost": 0.999}
    whole, cut = (
        run_data(path, family("chatml"), limit, too_long=policy, **settings).ledger.splits["train"]
        for limit in (4096, 64)
    )
    assert whole.tally.lost_trained_tokens == 0 < cut.tally.lost_trained_tokens
    assert cut.tally.trained_tokens + cut.tally.lost_trained_tokens == whole.tally.trained_tokens
    assert cut.tally.rows_used + cut.tally.dropped["too_long"] == len(rows)


@pytest.mark.parametrize("policy", ["drop", "truncate_left", "split"])
def test_what_is_left_is_trained_as_it_was_and_fits(policy):
    rng = random.Random(policy)
    for _ in range(2000):
        sample, limit = random_sample(rng), rng.randint(2, 45)
        parts = fit_sample(sample, limit, policy, rng.choice([1, None]))
        assert len(sample.ids) > limit or parts == [sample]
        assert sum(part.trained_tokens for part in parts) <= sample.trained_tokens
        for part in parts:
            assert_consistent(part)
            assert part.trained_tokens > 0
            assert len(part.ids) <= limit
            if part.answer_start:
                assert part.labels[part.answer_start] == sample.labels[sample.answer_start] != X
                assert part.ids[part.answer_start - 1] == sample.ids[sample.answer_start - 1]


def test_splits_in_order_are_the_sample():
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(100) for _ in range(rng.randint(2, 60))]
        limit = rng.randint(2, 30)
        parts = fit_sample(RenderedSample(ids, [X, *ids[1:]]), limit, "split")
        is_cut = len(ids) % limit == 1  # a last token alone is predicted by nothing
        assert [token for part in parts for token in part.ids] == (ids[:-1] if is_cut else ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_truncated_conversation_still_ends_with_its_answer(name):
    tok = family(name)
    sample = samples_of(row("What is red? " * 20, "A rose."), tok)[0]
    (part,) = fit_sample(sample, 60, "truncate_left", tok.bos_token_id)
    assert trained(part, tok) == trained(sample, tok)
    assert part.ids[part.answer_start :] == sample.ids[sample.answer_start :]
    assert (part.ids[0] == tok.bos_token_id) == (sample.ids[0] == tok.bos_token_id)
