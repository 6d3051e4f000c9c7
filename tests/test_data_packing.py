"""Which documents share a sequence, and what a batch of them holds."""

import doctest
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sft_play.data import collate, packing, splits
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.packing import batch_shape, pack_documents, padded_width
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ConfigError


@dataclass
class Document:
    """A sample as a store gives it."""

    ids: list[int]
    labels: list[int]
    weights: list[float] | None = None
    images: tuple = ()


ROWS = TrainRows(
    [
        Document([1, 2, 3], [IGNORE_INDEX, 2, 3]),
        Document([4, 5], [IGNORE_INDEX, 5]),
        Document([6, 7, 8, 9], [IGNORE_INDEX] * 3 + [9]),
    ]
)


@pytest.mark.parametrize(
    ("lengths", "capacity", "sequences"),
    [
        ([], 8, []),
        ([8], 8, [[0]]),
        ([5, 3, 8, 2, 4], 8, [[2], [0, 1], [4, 3]]),
        ([6, 5, 2, 3], 8, [[0, 2], [1, 3]]),  # the fullest sequence that has room
        ([4, 4, 4], 8, [[0, 1], [2]]),  # equal lengths in their order
        ([1, 1, 1], 1, [[0], [1], [2]]),
    ],
)
def test_each_document_goes_to_the_fullest_sequence_with_room(lengths, capacity, sequences):
    assert pack_documents(lengths, capacity) == sequences


@pytest.mark.parametrize("seed", range(40))
def test_every_document_is_packed_once_within_capacity_and_within_the_guarantee(seed):
    draw = random.Random(seed)
    capacity = draw.choice([1, 2, 7, 64, 1000])
    lengths = [
        draw.randint(1, draw.choice([capacity, max(1, capacity // 3)]))
        for _ in range(draw.randint(1, 300))
    ]
    sequences = pack_documents(lengths, capacity)
    assert sorted(index for sequence in sequences for index in sequence) == list(
        range(len(lengths))
    )
    assert max(sum(lengths[index] for index in sequence) for sequence in sequences) <= capacity
    assert sequences == pack_documents(lengths, capacity)
    fewest = max(
        -(-sum(lengths) // capacity), sum(2 * length > capacity for length in lengths)
    )  # no packing has fewer
    assert len(sequences) <= 11 / 9 * fewest + 1


def test_a_document_that_is_too_long_is_refused_with_the_setting_for_it():
    with pytest.raises(
        ConfigError,
        match=r"a sample of 9 tokens does not fit into a sequence of 8; set MODEL_MAX_SEQ_LEN=9",
    ):
        pack_documents([1, 9], 8)


def test_widths_are_few_and_at_most_an_eighth_wider():
    for longest in range(1, 3000):
        width = padded_width(longest, 3000)
        assert longest <= width <= max(8, longest * 9 // 8, longest + 7)
    assert len({padded_width(longest, 2048) for longest in range(1, 2049)}) <= 48
    assert [padded_width(longest, 1000) for longest in (993, 1000)] == [1000, 1000]
    assert padded_width(20, 8) == 20  # what is there is never cut


@pytest.mark.parametrize("module", [packing, collate, splits])
def test_the_examples_in_the_docstrings_run(module):
    found = doctest.testmod(module, extraglobs={"np": np})
    assert found.attempted and found.failed == 0


def tensors(batch: Batch) -> dict:
    return {
        name: value.tolist() for name, value in {**batch.inputs, "labels": batch.labels}.items()
    }


def test_padding_stands_on_the_right_and_carries_nothing():
    batch = PadCollator(9)([ROWS[0], ROWS[1]])
    assert tensors(batch) == {
        "input_ids": [[1, 2, 3], [4, 5, 9]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[-100, 2, 3], [-100, 5, -100]],
    }
    assert {tensor.dtype for tensor in (batch.labels, *batch.inputs.values())} == {torch.int64}
    assert PadCollator(9, max_seq_len=16)([ROWS[0], ROWS[1]]).inputs["attention_mask"].tolist() == [
        [1] * 3 + [0] * 5,
        [1] * 2 + [0] * 6,
    ]


def test_a_padded_row_holds_one_document():
    with pytest.raises(AssertionError, match="keeps no documents apart"):
        PadCollator(9)([ROWS[0, 1]])


def test_packed_documents_begin_at_position_0_and_padding_is_one_of_them():
    batch = PackCollator(9, max_seq_len=8)([ROWS[0, 1], ROWS[2, 0]])
    assert tensors(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 8, 9, 1, 2, 3, 9]],
        "labels": [
            [-100, 2, 3, -100, 5, -100, -100, -100],
            [-100, -100, -100, 9, -100, 2, 3, -100],
        ],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 0]],
    }
    assert {tensor.dtype for tensor in (batch.labels, *batch.inputs.values())} == {torch.int64}


def test_boundaries_are_those_of_the_flattened_batch_with_padding_at_the_end_of_documents():
    batch = PackCollator(9, max_seq_len=8, varlen=True)([ROWS[0, 1], ROWS[2, 0]])
    starts = torch.nonzero(batch.inputs["position_ids"].flatten() == 0).flatten().tolist()
    padding = {5, 15}
    assert (
        batch.documents.boundaries.tolist()
        == [*(start for start in starts if start not in padding), 16]
        == [0, 3, 8, 12, 16]
    )
    assert batch.documents.boundaries.dtype == torch.int32 and batch.documents.longest == 5
    alone = PackCollator(9, max_seq_len=8, varlen=True)([ROWS[0], ROWS[2]])
    assert alone.documents.boundaries.tolist() == [0, 8, 16] and alone.documents.longest == 8, (
        "a row of one document is one as a whole"
    )
    full = PackCollator(9, max_seq_len=7, varlen=True)([ROWS[0, 2]])
    assert full.documents.boundaries.tolist() == [
        0,
        3,
        7,
    ]  # nothing is padded, and no document is empty


def test_documents_in_one_row_are_those_of_all_sequences():
    collate = PackCollator(9, max_seq_len=8, varlen=True, in_one_row=True)
    batch = collate([ROWS[0, 1], ROWS[2, 0]])
    padding = 16 - 12
    assert tensors(batch) == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3] + [9] * padding],
        "labels": [[-100, 2, 3, -100, 5, -100, -100, -100, 9, -100, 2, 3] + [-100] * padding],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, *range(padding)]],
    }
    assert batch.documents.boundaries.tolist() == [0, 3, 5, 9, 16] and batch.documents.longest == 7


def test_rows_of_one_document_stay_rows_where_little_of_them_is_padding():
    def shape_of(*lengths: int) -> tuple[int, ...]:
        documents = [Document([1] * length, [IGNORE_INDEX] * length) for length in lengths]
        rows = TrainRows(documents)
        collate = PackCollator(0, max_seq_len=512, varlen=True, in_one_row=True)
        return tuple(collate([rows[i] for i in range(len(lengths))]).ids.shape)

    assert shape_of(512, 512, 512) == (3, 512)
    assert shape_of(512, 500, 505) == (3, 512), "their attention has faster kernels"
    assert shape_of(512, 300, 505) == (1, 1344)


def test_one_row_needs_little_padding_where_tokens_are_few():
    for tokens in range(2, 4096):
        rows, width = batch_shape([[1, tokens - 1]], 4096, in_one_row=True)
        assert rows == 1 and 0 <= width - tokens < max(8, min(64, tokens / 8))


def test_documents_alone_in_a_micro_batch_have_few_widths():
    """cuDNN plans its kernels for each width of a row of one document, which takes a second."""
    lengths = range(1, 32769, 7)
    shapes = {batch_shape([[length]], 32768, in_one_row=True) for length in lengths}
    assert shapes == {batch_shape([[length]], 32768) for length in lengths}
    assert len(shapes) < 100


def test_a_filler_is_its_sample_without_loss_and_is_not_counted():
    assert [ROWS[1].labels.tolist(), ROWS[~1].labels.tolist()] == [[-100, 5], [-100, -100]]
    assert ROWS[~1].ids.tolist() == ROWS[1].ids.tolist()
    real = [[new for _, new in ROWS[at].real_branches] for at in ((0, 1), (0, ~1), ~0)]
    assert real == [[3, 2], [3], []]
    assert ROWS[0, ~1].lengths == (3, 2)


def test_a_first_token_that_is_trained_is_refused():
    with pytest.raises(AssertionError, match="would be predicted from the document before it"):
        TrainRows([Document([1, 2], [1, 2])])[0]
