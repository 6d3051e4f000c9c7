"""The fused loss is the plain one: in numbers, gradients and whole models, and what would break it shows."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sft_play.models.fast import loss as fast_loss
from sft_play.models.fast.loss import can_fuse_loss, chunk_rows, fuse_loss, fused_nll, is_loss_fused, linear_nll, nll_to_gradient_
from sft_play.models.losses import summed_nll

ROOT = Path(__file__).resolve().parents[1]
TOKENS, HIDDEN, VOCABULARY = 300, 24, 97
# float32 sums in another order: 2^-24 of a number for each of some dozens of additions
CLOSE = 1e-6


def inputs(tokens: int = TOKENS, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden (N, H), weight (V, H), targets (N,)."""
    torch.manual_seed(0)
    hidden = (spread * torch.randn(tokens, HIDDEN)).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,))


def plain_nll(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """The loss from whole logits, as `losses.summed_nll` has it: a row of tokens, each labelled by the one behind it."""
    logits = hidden @ weight.t()
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    padded = torch.cat([logits, logits[:1]])[None]
    return summed_nll(padded, torch.cat([targets[:1], targets])[None])


def value_and_gradients(nll: Callable, *arguments: torch.Tensor, factor: float = 1.0, **options: float | None) -> list[torch.Tensor]:
    leaves = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments]
    value = nll(*leaves, **options)
    (value * factor).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def gap(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Largest difference of each pair, relative to the largest number of the pair."""
    assert len(ones) == len(others)
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in zip(ones, others, strict=True))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 tokens: three of them, one shorter."""
    monkeypatch.setattr(fast_loss, "CHUNK_BYTES", 1)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("factor", [1.0, 1 / 8192])
def test_loss_and_gradients_are_those_of_whole_logits(small_chunks, softcap: float | None, factor: float) -> None:
    arguments = inputs()
    ours, theirs = (value_and_gradients(nll, *arguments, factor=factor, softcap=softcap) for nll in (linear_nll, plain_nll))
    assert len(ours) == 3 and gap(ours, theirs) <= CLOSE


def test_gradients_agree_with_differences_of_the_loss() -> None:
    hidden, weight, targets = inputs(tokens=3)
    hidden, weight = hidden.detach().double(), weight.detach().double()
    gradient = value_and_gradients(linear_nll, hidden.float().requires_grad_(), weight.float(), targets, softcap=3.0)[1]
    for token, feature in ((0, 0), (1, 7), (2, 23)):
        nudge = torch.zeros_like(hidden)
        nudge[token, feature] = 1e-3
        above, below = (float(_nll64(hidden + sign * nudge, weight, targets, 3.0)) for sign in (1, -1))
        assert gradient[token, feature].item() == pytest.approx((above - below) / 2e-3, abs=1e-5)


def _nll64(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, softcap: float) -> torch.Tensor:
    scores = torch.tanh(hidden @ weight.t() / softcap) * softcap
    return (torch.logsumexp(scores, 1) - scores.gather(1, targets[:, None])[:, 0]).sum()


def test_a_frozen_head_gets_no_gradient_and_changes_none(small_chunks) -> None:
    hidden, weight, targets = inputs()
    trained = value_and_gradients(linear_nll, hidden, weight, targets)
    frozen = value_and_gradients(linear_nll, hidden, weight.detach(), targets)
    assert len(frozen) == 2 and torch.equal(frozen[0], trained[0]) and torch.equal(frozen[1], trained[1])


def test_without_labels_the_loss_is_0_and_so_is_every_gradient() -> None:
    value, *gradients = value_and_gradients(linear_nll, *inputs(tokens=0))
    assert value == 0 and gradients[0].shape == (0, HIDDEN) and not gradients[1].any()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1 / 8192), (torch.float16, 65536 / 8192)], ids=["bfloat16", "float16"])
def test_half_precision_loses_no_more_than_the_plain_loss_does(small_chunks, dtype: torch.dtype, factor: float) -> None:
    """Against float64. The factor is a mean's over 8,192 tokens, in float16 with the 65,536 of a loss scaler on top."""
    hidden, weight, targets = inputs(spread=0.05, dtype=dtype)  # probabilities alike: most gradients are small
    exact = value_and_gradients(_nll64_uncapped, hidden.double(), weight.double(), targets, factor=factor)
    ours, plain = (value_and_gradients(nll, hidden, weight, targets, factor=factor) for nll in (linear_nll, plain_nll))
    assert gap(ours, exact) <= 1.5 * gap(plain, exact) < 0.02


def _nll64_uncapped(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
