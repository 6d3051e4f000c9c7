"""sft_play.models.unsloth: what needs no GPU. tests/test_gpu.py trains with the backend itself."""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from sft_kernels.trees import Branch
from sft_play.data.collate import PackCollator, TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.models.unsloth import PackedBatchHooks


def sequence_of(*lengths: int) -> TokenSequence:
    tokens = sum(lengths)
    trees = tuple((Branch(0, each),) for each in lengths)
    return TokenSequence(np.arange(5, 5 + tokens), np.full(tokens, IGNORE_INDEX), trees)


def test_the_rows_of_a_pack_are_joined_for_unsloth_and_parted_again():
    """Unsloth gets the batch as one joined row; a transformers model computes the same from it."""

    class Takes(nn.Module):
        def forward(self, input_ids, position_ids, packed_seq_lengths=None):
            self.seen = input_ids, position_ids, packed_seq_lengths
            return SimpleNamespace(logits=input_ids[..., None] * torch.arange(3))

    model, collate = Takes(), PackCollator(0, max_seq_len=16, varlen=True)
    PackedBatchHooks().attach(model)
    batch = collate([sequence_of(3, 4), sequence_of(5, 3)])
    rows, width = batch.ids.shape
    logits = model(**batch.arguments).logits
    ids, positions, lengths = model.seen
    assert (ids.shape, positions.shape, lengths.dtype) == (
        (1, rows * width),
        (1, rows * width),
        torch.int32,
    )
    assert (
        lengths.cumsum(0).tolist() == batch.documents.boundaries[1:].tolist()
        and lengths.sum() == rows * width
    )
    assert torch.equal(logits, batch.ids[..., None] * torch.arange(3))
    alone = {name: value[:, :3] for name, value in batch.inputs.items()}
    assert model(**alone).logits.shape == (rows, 3, 3) and model.seen[2] is None, (
        "a batch without boundaries is none of its business"
    )
