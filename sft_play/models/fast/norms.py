"""RMS norms and rotary embeddings: Liger's kernels on a GPU, bound to one model's own modules.

transformers' modules and classes stay as they are, so that two models in one process do not disturb each other.
Legend: B rows, T tokens, H query heads, K key heads, D features of a head, R of them rotated.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class NormKind:
    """How an architecture's RMS norm computes: y = x / rms(x) * (offset + weight)."""

    casting: str  # in float32 are: "llama" x / rms(x), "gemma" everything
    offset: float  # of the weight
    # Whether its input's gradient may be written over its output's. Not where its output is added to the residual stream:
    # that sum hands both sides the same tensor.
    in_place: bool


LLAMA = NormKind("llama", 0.0, in_place=True)
GEMMA = NormKind("gemma", 1.0, in_place=True)
GEMMA_SANDWICH = NormKind(
    "gemma", 1.0, in_place=False
)  # Gemma 2 and 3 have norms behind attention and MLP, too


def is_training(module: nn.Module) -> bool:
    """Return whether a forward pass is one of a training step: what is fused takes its place there and nowhere else."""
    return module.training and torch.is_grad_enabled()


def norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Forward method of an RMS norm while it trains, of its class else; a frozen weight gets no gradient computed."""
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    from liger_kernel.ops import (
        LigerRMSNormFunction,
    )  # loads triton, which only GPUs have a use for

    kind: NormKind = self.norm_kind
    return LigerRMSNormFunction.apply(
        hidden_states, self.weight, epsilon(self), kind.offset, kind.casting, kind.in_place, None
    )


def epsilon(norm: nn.Module) -> float:
    """Return what a norm adds to the mean square."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query (B, T, H, D) and key (B, T, K, D) with the first R features rotated by their positions; cos and sin (B or 1, T, R).

    On a GPU the two are overwritten: give it what no one else reads.
    """
    if query.is_cuda:
        from liger_kernel.ops import LigerRopeFunction

        rotated = LigerRopeFunction.apply(
            query.transpose(1, 2), key.transpose(1, 2), cos, sin
        )  # it computes on (B, T, H, D) by undoing this
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-x2, x1) sin over the halves (x1, x2) of the first R features."""
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(2)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
