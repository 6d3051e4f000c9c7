"""The fused residual add and norm equals the two computed one after the other, with gradients."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sft_kernels.norms.residual import NormKind, add_norm

EPSILON = 1e-5
LLAMA = NormKind("llama", 0.0, EPSILON, in_place=True)
GEMMA = NormKind("gemma", 1.0, EPSILON, in_place=True)
KINDS = {"llama": (LlamaRMSNorm, LLAMA), "gemma": (GemmaRMSNorm, GEMMA)}
FEATURES = 40  # not a power of two
SAME = 1e-6  # tolerance of float32 sums in another order


def norm_of(name: str) -> nn.Module:
    norm_class, kind = KINDS[name]
    norm = norm_class(FEATURES, eps=EPSILON)
    norm.norm_kind = kind
    nn.init.normal_(norm.weight)
    return norm.requires_grad_(False)


def gap(name: str, adds: bool) -> float:
    """Return the largest difference of outputs and gradients, relative to the largest of each."""
    torch.manual_seed(0)
    norm = norm_of(name)
    of = [torch.randn(2, 7, FEATURES, requires_grad=True) for _ in range(1 + adds)]
    into_y, into_s = torch.randn(2, 2, 7, FEATURES)
    stream = sum(of)
    apart = norm(stream), stream
    joined = add_norm(of[0], of[1] if adds else None, norm)
    gradients = [
        torch.autograd.grad((y * into_y).sum() + (s * into_s).sum(), of) for y, s in (apart, joined)
    ]
    pairs = zip((*apart, *gradients[0]), (*joined, *gradients[1]), strict=True)
    return max(((one - two).abs().max() / one.abs().max()).item() for one, two in pairs)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_joined_is_apart(name, adds):
    assert gap(name, adds) <= SAME


def test_a_norm_that_is_trained_is_refused():
    with pytest.raises(AssertionError, match="trained"):
        add_norm(torch.randn(1, 1, FEATURES), None, norm_of("llama").requires_grad_())


def test_a_stream_without_a_gradient_needs_none():
    """The first layer reads embeddings, which adapters do not change."""
    y, s = add_norm(torch.randn(1, 3, FEATURES), None, norm_of("llama"))
    assert not y.requires_grad and not s.requires_grad
