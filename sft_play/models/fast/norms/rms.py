"""RMSNorm: Liger's kernel on a GPU, installed on the modules of one model.

    y = x / rms(x) * (offset + weight),  rms(x) = sqrt(mean(x^2) + epsilon)

The classes of transformers are not patched, so that two models in one process do not affect each
other.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from sft_play.models.fast.setup import is_training


@dataclass(frozen=True)
class NormKind:
    """How an architecture's RMSNorm computes."""

    casting: str  # what is computed in float32: "llama" x / rms(x), "gemma" everything
    offset: float  # of the weight
    # Whether the gradient of its input may overwrite the gradient of its output. False if its
    # output is added to the residual stream: both summands get the same gradient tensor.
    in_place: bool


LLAMA = NormKind("llama", 0.0, in_place=True)
GEMMA = NormKind("gemma", 1.0, in_place=True)


def norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of an RMSNorm: Liger's in training, its class's own otherwise.

    No gradient is computed for a frozen weight.
    """
    if not is_training(self):
        return type(self).forward(self, hidden_states)
    return normalize(hidden_states, self.weight, epsilon(self), self.norm_kind)


def normalize(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """Return y like x, by Liger's kernel."""
    from liger_kernel.ops import LigerRMSNormFunction  # imports Triton, which needs a GPU

    options = (kind.offset, kind.casting, kind.in_place, None)
    return LigerRMSNormFunction.apply(x, weight, eps, *options)


def epsilon(norm: nn.Module) -> float:
    """Return the epsilon that a norm adds to the mean square."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
