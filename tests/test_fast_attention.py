"""Attention without masks equals masked softmax(Q K^T) V, and so do its gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

from sft_kernels.attention import flex as attention_flex
from sft_kernels.attention import kernels as attention_kernels
from sft_kernels.attention.flex import attend_flex
from sft_kernels.attention.forward import remove_mask
from sft_kernels.attention.kernels import attend
from sft_kernels.attention.reference import Scoring
from sft_kernels.boundaries import Documents, TreeRows
from sft_kernels.packed import UNMASKED, PackedDocuments, is_unmasked
from sft_kernels.trees import Branch, lay_out

ROWS, TOKENS, HEADS, FEATURES = 2, 24, 4, 8
SAME = 1e-6  # tolerance of float32 sums in another order


def inputs(key_heads: int = 2, value_features: int = FEATURES) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((HEADS, FEATURES), (key_heads, FEATURES), (key_heads, value_features))
    return tuple(
        torch.randn(ROWS, TOKENS, *shape, generator=draw, requires_grad=True) for shape in shapes
    )


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    document: torch.Tensor,
) -> torch.Tensor:
    """Attention by its definition; `document` (B, T) is the number of each token's document."""
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    position = torch.arange(TOKENS)
    distance = position[:, None] - position
    sees = (
        (distance >= 0)
        & (distance < (scoring.window or TOKENS))
        & (document[:, :, None] == document[:, None, :])
    )  # (B, T, T)
    weights = scores.masked_fill(~sees[:, None], -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + scoring.sinks[:, None, None].exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights / total, value)


def documents_of(*lengths: int) -> tuple[Documents, torch.Tensor]:
    """Return documents of these lengths, and the number of each token's document (B, T)."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(ROWS, TOKENS)
    return Documents(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)), numbers


def gap(found: torch.Tensor, expected: torch.Tensor, of: tuple[torch.Tensor, ...]) -> float:
    """Return the largest difference of two outputs or of their gradients.

    It is relative to the largest element of each, at least 1.
    """
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [
        torch.autograd.grad((output * weights).sum(), of, retain_graph=True)
        for output in (found, expected)
    ]
    return max(
        ((one - two).abs().max() / two.abs().max().clamp(min=1)).item()
        for one, two in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True)
    )


PACKED = (5, 12, 7, 23, 1)  # documents of two rows
WHOLE = (TOKENS, TOKENS)


SINKS = torch.tensor([-1.0, 0.5, 2.0, 7.0], requires_grad=True)
KINDS = {
    "sinks": Scoring(0.3, None, None, SINKS),
    "sinks in a window": Scoring(0.3, 6, None, SINKS),
    "cap": Scoring(0.3, None, 0.7),
    "cap in a window": Scoring(0.3, 6, 0.7),
    "all": Scoring(0.3, 5, 0.7, SINKS),
}


def leaves(of: tuple[torch.Tensor, ...], scoring: Scoring) -> tuple[torch.Tensor, ...]:
    """Return what has gradients."""
    return of if scoring.sinks is None else (*of, scoring.sinks)


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("value_features", [FEATURES, 12])
@pytest.mark.parametrize(
    "scoring", [*KINDS.values(), *(Scoring(0.3, window) for window in (None, 1, 6, TOKENS + 3))]
)
@pytest.mark.parametrize("lengths", [PACKED, WHOLE], ids=["packed", "whole rows"])
def test_attention_is_its_definition(lengths, scoring, value_features, key_heads):
    of = inputs(key_heads, value_features)
    documents, numbers = documents_of(*lengths)
    expected = written_out(*of, scoring, numbers)
    assert gap(attend(*of, scoring, documents), expected, leaves(of, scoring)) <= SAME
    if lengths == WHOLE:
        assert gap(attend(*of, scoring), expected, leaves(of, scoring)) <= SAME


@pytest.mark.parametrize("block", [8, attention_flex.BLOCK])  # the tokens fill a part of the last
def test_flex_attention_is_the_definition(block, monkeypatch):
    monkeypatch.setattr(attention_flex, "BLOCK", block)  # full, partial and unneeded blocks
    # its backward pass in plain torch, which runs on a CPU too
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    assert attention_flex.BLOCK == 8 or ROWS * TOKENS < attention_flex.BLOCK
    scoring = KINDS["all"]
    of = inputs(2, value_features=16)
    documents, numbers = documents_of(*PACKED)
    flat = attend_flex(*(tensor.flatten(0, 1) for tensor in of), scoring, documents)
    expected = written_out(*of, scoring, numbers)
    assert gap(flat.unflatten(0, (ROWS, TOKENS)), expected, leaves(of, scoring)) <= SAME


@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("is_tree", [False, True])
def test_blocks_hold_the_pairs_that_are_seen_and_full_ones_no_other(is_tree, window, monkeypatch):
    tokens, size = 72, 8
    monkeypatch.setattr(attention_flex, "BLOCK", size)
    boundaries = torch.tensor([0, 5, 6, 40, 48, 71], dtype=torch.int32)
    documents = Documents(boundaries, 34)
    document = torch.bucketize(torch.arange(tokens), boundaries, right=True)
    position = torch.arange(tokens)
    sees = (position[:, None] >= position) & (document[:, None] == document)
    if is_tree:  # the last token is padding of the kernel
        tree = lay_out([Branch(0, 20), Branch(9, 17), Branch(24, 9), Branch(24, 15), Branch(0, 10)])
        position, ends = torch.from_numpy(tree.positions), torch.from_numpy(tree.ends)
        documents = replace(documents, tree=TreeRows(position.int(), ends.int()))
        position, ends = (functional.pad(each, (0, 1), value=tokens) for each in (position, ends))
        place = torch.arange(tokens)
        sees = (place[:, None] >= place) & (place[:, None] < ends)
    mask = attention_flex.make_block_mask(documents, tokens, window)
    sees &= position[:, None] - position < (window or tokens)
    found = torch.zeros_like(sees)
    for indices, counts, is_full in (
        (mask.kv_indices, mask.kv_num_blocks, False),
        (mask.full_kv_indices, mask.full_kv_num_blocks, True),
    ):
        assert counts.sum() > 0 or (is_full and window), "some blocks of each kind"
        for block, count in enumerate(counts[0, 0].tolist()):
            for key_block in indices[0, 0, block, :count].tolist():
                queries = slice(block * size, (block + 1) * size)
                keys = slice(key_block * size, (key_block + 1) * size)
                assert not found[queries, keys].any(), "a block is computed twice"
                assert not is_full or sees[queries, keys].all()
                found[queries, keys] = True
    assert found[sees].all()
    batch = head = torch.zeros((), dtype=torch.int64)
    places = torch.arange(tokens)
    assert torch.equal(
        mask.mask_mod(batch, head, places[:, None], places)[:71, :71], sees[:71, :71]
    )


# two trees in a row, and one in the other, which has padding
TREES = (
    (Branch(0, 9), Branch(4, 3), Branch(6, 2)),
    (Branch(0, 5), Branch(2, 1), Branch(2, 4)),
    (Branch(0, 6), Branch(5, 4), Branch(1, 7)),
)
TREE_LENGTHS = (14, 10, 17 + 7)


def tree_documents() -> tuple[Documents, list[list[int]]]:
    """Return documents of TREES, and the places of each sample's tokens in the flattened rows."""
    padding = Branch(0, 7)
    row = lay_out([*TREES[0], *TREES[1]])
    other = lay_out([*TREES[2], padding])
    positions = torch.from_numpy(np.concatenate([row.positions, other.positions])).int()
    ends = torch.from_numpy(np.concatenate([row.ends, other.ends + TOKENS])).int()
    parents = np.concatenate([row.parents, np.where(other.parents < 0, -1, other.parents + TOKENS)])
    documents = Documents.of_lengths(TREE_LENGTHS)
    documents = replace(documents, longest=12, tree=TreeRows(positions, ends))
    samples, end = [], 0
    for branch in (*TREES[0], *TREES[1], *TREES[2], padding):
        end += branch.new
        path, token = [], end - 1
        while token >= 0:
            path.append(token)
            token = int(parents[token])
        samples.append(path[::-1])
    assert [len(path) for path in samples[:3]] == [9, 7, 8]
    return documents, samples


@pytest.mark.parametrize("key_heads", [HEADS, 1])
@pytest.mark.parametrize("kind", [*KINDS, "plain", "in a window"])
@pytest.mark.parametrize("kernel", ["reference", "flex"])
def test_a_token_of_a_tree_attends_as_in_its_sample_alone(kernel, kind, key_heads, monkeypatch):
    monkeypatch.setattr(attention_flex, "BLOCK", 8)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    scoring = {**KINDS, "plain": Scoring(0.3), "in a window": Scoring(0.3, 3)}[kind]
    of = inputs(key_heads, value_features=16)
    documents, samples = tree_documents()
    flat = [tensor.flatten(0, 1) for tensor in of]
    if kernel == "flex":
        found = attend_flex(*flat, scoring, documents)
    else:
        found = attend(*of, scoring, documents).flatten(0, 1)
    expected = [found] * len(found)
    for path in samples:
        alone = attend(*(each[path][None] for each in flat), scoring)[0]
        for place, output in zip(path, alone, strict=True):
            expected[place] = output
    assert gap(found, torch.stack(expected), leaves(of, scoring)) <= SAME


def flash_by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, of: Documents
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (H, N, N) and whether each pair is seen, of flattened rows."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scoring.scale
    position = torch.arange(len(query))
    document = torch.bucketize(position, of.boundaries, right=True)
    distance = position[:, None] - position
    sees = (distance >= 0) & (distance < (scoring.window or len(query)))
    return scores, sees & (document[:, None] == document)


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, of: Documents
) -> tuple[torch.Tensor, ...]:
    """The forward pass of flash attention by its definition."""
    scores, sees = flash_by_definition(query, key, value, scoring, of)
    scores = scores.masked_fill(~sees, -torch.inf)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return out, scores.logsumexp(-1), torch.zeros(2)


def flash_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    results: list[torch.Tensor],
    scoring: Scoring,
    of: Documents,
) -> tuple[torch.Tensor, ...]:
    """The backward pass of flash attention: from the log sums and the output that it is given."""
    query, key, value = inputs
    out, log_sums, _ = results
    groups = query.shape[1] // key.shape[1]
    scores, sees = flash_by_definition(query, key, value, scoring, of)
    weights = torch.where(sees, (scores - log_sums[:, :, None]).exp(), 0.0)
    delta = (grad * out).sum(-1).t()  # (H, N)
    wanted = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(groups, 1))
    slope = weights * (wanted - delta[:, :, None]) * scoring.scale
    grad_query = torch.einsum("hqk,khd->qhd", slope, key.repeat_interleave(groups, 1))
    grad_key = torch.einsum("hqk,qhd->khd", slope, query)
    grad_value = torch.einsum("hqk,qhd->khd", weights, grad)
    grouped = (tensor.unflatten(1, (-1, groups)).sum(2) for tensor in (grad_key, grad_value))
    return grad_query, *grouped


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_sinks_are_added_to_flash_attention_forward_and_backward(key_heads, window, monkeypatch):
    """The kernels are for GPUs: their definitions stand in for them."""
    monkeypatch.setattr(attention_kernels, "flash_forward", flash_forward)
    monkeypatch.setattr(attention_kernels, "flash_backward", flash_backward)
    scoring = Scoring(0.3, window, None, SINKS)
    documents, numbers = documents_of(*PACKED)
    of = inputs(key_heads)
    padded = (tensor.flatten(0, 1) for tensor in of)
    found = attention_kernels.attend_with_sinks(*padded, scoring, documents)
    expected = written_out(*of, scoring, numbers)
    assert gap(found.unflatten(0, (ROWS, TOKENS)), expected, leaves(of, scoring)) <= 2 * SAME


def test_rows_of_one_document_need_no_boundaries(monkeypatch):
    called = []
    monkeypatch.setattr(
        attention_kernels,
        "_attend_by_document",
        lambda *arguments: called.append(arguments) or arguments[0],
    )
    whole, _ = documents_of(*WHOLE)
    attend(*inputs(), Scoring(0.3), whole)
    attend(*inputs(), Scoring(0.3, TOKENS), whole)
    assert not called
    attend(*inputs(), Scoring(0.3, TOKENS - 1), whole)
    packed, _ = documents_of(*PACKED)
    attend(*inputs(), Scoring(0.3), packed)
    assert len(called) == 2


MASK = torch.ones(1, 3, dtype=torch.long)
PACKED_BATCH = {"cu_seq_lens_q": MASK, "max_length_q": 3}


@pytest.mark.parametrize(
    "trains, gradients, given, expected",
    [
        (True, True, {"attention_mask": MASK}, True),
        (True, True, {"attention_mask": None}, True),
        (False, True, {"attention_mask": MASK}, False),  # an evaluation: padding may be on the left
        (True, False, {"attention_mask": MASK}, False),
        (True, True, {"attention_mask": MASK, "past_key_values": object()}, False),
        (True, True, {"attention_mask": MASK, "cache": object()}, False),
        (
            True,
            True,
            {"position_ids": MASK},
            False,
        ),  # documents without boundaries: transformers finds them
        (True, True, {"position_ids": MASK, **PACKED_BATCH}, True),
        (False, False, {"position_ids": MASK, **PACKED_BATCH}, True),
    ],
)
def test_steps_and_named_documents_go_without_a_mask(trains, gradients, given, expected):
    with torch.set_grad_enabled(gradients):
        routed = remove_mask(nn.Linear(1, 1).train(trains), (), given)
    assert (routed is not None) == expected
    if routed:
        assert is_unmasked(routed[1].pop("attention_mask"))
        given.pop("attention_mask", None)
        assert routed[1] == {**given, "use_cache": False}


def test_attention_sees_the_documents_of_the_batch_on_its_device():
    documents, _ = documents_of(*PACKED)
    packed = PackedDocuments()
    assert packed.on(torch.device("meta")) is None
    with packed.showing(documents):
        assert packed.on(documents.boundaries.device) is documents
        there = packed.on(torch.device("meta"))
        assert there.boundaries.device.type == "meta" and there.longest == documents.longest
        assert packed.on(torch.device("meta")) is there, "copied once"
    assert packed.batch is None


def test_no_mask_of_a_model_is_taken_for_none():
    assert is_unmasked(UNMASKED) and is_unmasked(UNMASKED.detach())
    assert not any(map(is_unmasked, (None, MASK, torch.zeros(2, 1, 3, 3), {})))
