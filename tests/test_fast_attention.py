"""Attention without masks equals masked softmax(Q K^T) V, and so do its gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from sft_play.models.fast import attention, rope
from sft_play.models.fast.attention import UNMASKED, Documents, attend, is_unmasked, remove_mask

ROWS, TOKENS, HEADS, FEATURES = 2, 24, 4, 8
SAME = 1e-6  # tolerance of float32 sums in another order


def inputs(key_heads: int = 2) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(ROWS, TOKENS, heads, FEATURES, generator=draw, requires_grad=True)
        for heads in (HEADS, key_heads, key_heads)
    )


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    document: torch.Tensor,
) -> torch.Tensor:
    """Attention by its definition; `document` (B, T) is the number of each token's document."""
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    position = torch.arange(TOKENS)
    distance = position[:, None] - position
    sees = (
        (distance >= 0)
        & (distance < (window or TOKENS))
        & (document[:, :, None] == document[:, None, :])
    )  # (B, T, T)
    return torch.einsum(
        "bhqk,bkhd->bqhd", scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1), value
    )


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


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 6, TOKENS + 3])
@pytest.mark.parametrize("lengths", [PACKED, WHOLE], ids=["packed", "whole rows"])
def test_attention_is_its_definition(
    lengths: tuple[int, ...], window: int | None, key_heads: int
) -> None:
    of = inputs(key_heads)
    documents, numbers = documents_of(*lengths)
    expected = written_out(*of, 0.3, window, numbers)
    assert gap(attend(*of, 0.3, window, documents), expected, of) <= SAME
    if lengths == WHOLE:
        assert gap(attend(*of, 0.3, window), expected, of) <= SAME


@pytest.mark.parametrize("mutant", ["boundaries", "window", "scale", "no boundaries"])
def test_the_comparison_sees_what_is_wrong(mutant: str) -> None:
    of = inputs()
    documents, numbers = documents_of(*PACKED)
    moved = documents.boundaries + 1
    moved[0] -= 1
    moved[-1] -= 1
    given: dict[str, Any] = {"scale": 0.3, "window": 6, "documents": documents}
    mutants = {
        "boundaries": {"documents": documents._replace(boundaries=moved)},
        "window": {"window": 7},
        "scale": {"scale": 0.31},
        "no boundaries": {"documents": None},
    }
    wrong = attend(*of, **{**given, **mutants[mutant]})
    assert gap(wrong, written_out(*of, 0.3, 6, numbers), of) > 1e-3


def test_rows_of_one_document_need_no_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        attention,
        "_attend_by_document",
        lambda *arguments: called.append(arguments) or arguments[0],
    )
    whole, _ = documents_of(*WHOLE)
    attend(*inputs(), 0.3, None, whole)
    attend(*inputs(), 0.3, TOKENS, whole)
    assert not called
    attend(*inputs(), 0.3, TOKENS - 1, whole)
    packed, _ = documents_of(*PACKED)
    attend(*inputs(), 0.3, None, packed)
    assert len(called) == 2


@pytest.mark.parametrize("rotated", [FEATURES, 4])
def test_positions_are_rotated_as_transformers_does(rotated: int) -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    query, key, _ = inputs()
    angles = torch.randn(ROWS, TOKENS, rotated // 2).repeat(1, 1, 2)
    expected = apply_rotary_pos_emb(
        query.transpose(1, 2), key.transpose(1, 2), angles.cos(), angles.sin()
    )
    for one, two in zip(
        rope.apply_rotary(query, key, angles.cos(), angles.sin()), expected, strict=True
    ):
        assert torch.equal(one, two.transpose(1, 2))


MASK = torch.ones(1, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("trains", "gradients", "given", "expected"),
    [
        (True, True, {"attention_mask": MASK}, True),
        (True, True, {"attention_mask": None}, True),
        (False, True, {"attention_mask": MASK}, False),  # an evaluation: padding may be on the left
        (True, False, {"attention_mask": MASK}, False),
        (True, True, {"attention_mask": MASK, "past_key_values": object()}, False),
        (
            True,
            True,
            {"position_ids": MASK},
            False,
        ),  # documents without boundaries: transformers finds them
        (True, True, {"position_ids": MASK, "cu_seq_lens_q": MASK}, True),
        (False, False, {"position_ids": MASK, "cu_seq_lens_q": MASK}, True),
    ],
)
def test_steps_and_named_documents_go_without_a_mask(
    trains: bool, gradients: bool, given: dict[str, Any], expected: bool
) -> None:
    with torch.set_grad_enabled(gradients):
        routed = remove_mask(nn.Linear(1, 1).train(trains), (), given)
    assert (routed is not None) == expected
    if routed:
        assert routed[1] == {**given, "attention_mask": UNMASKED, "use_cache": False}


def test_no_mask_of_a_model_is_taken_for_none() -> None:
    assert is_unmasked(UNMASKED) and is_unmasked(UNMASKED.detach())
    assert not any(map(is_unmasked, (None, MASK, torch.zeros(2, 1, 3, 3), {})))
