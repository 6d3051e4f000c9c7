"""RMSNorm: Liger's kernel on a GPU, set on one model's own modules.

    y = x / rms(x) * (offset + weight),  rms(x) = sqrt(mean(x^2) + epsilon)

The classes of transformers stay as they are, so that two models in one process do not disturb each
other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NormKind:
    """How an architecture's RMSNorm computes."""

    casting: str  # what is computed in float32: "llama" x / rms(x), "gemma" everything
    offset: float  # of the weight
    # Whether the gradient of its input may be written over the gradient of its output. Not where
    # its output is added to the residual stream: that sum gives both sides the same tensor.
    in_place: bool


LLAMA = NormKind("llama", 0.0, in_place=True)
GEMMA = NormKind("gemma", 1.0, in_place=True)
# Gemma 2 and 3 have norms after attention and MLP, too
GEMMA_SANDWICH = NormKind("gemma", 1.0, in_place=False)


def is_training(module: nn.Module) -> bool:
    """Return whether a forward pass belongs to a training step: fused code runs there alone."""
    return module.training and torch.is_grad_enabled()


def norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of an RMSNorm: Liger's in training, its class's own otherwise.

    A frozen weight gets no gradient computed.
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    from liger_kernel.ops import LigerRMSNormFunction  # loads triton, of use on GPUs alone

    kind: NormKind = self.norm_kind
    return LigerRMSNormFunction.apply(
        hidden_states, self.weight, epsilon(self), kind.offset, kind.casting, kind.in_place, None
    )


def epsilon(norm: nn.Module) -> float:
    """Return what a norm adds to the mean square."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
