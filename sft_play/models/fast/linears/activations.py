"""The activations of gated MLPs: formulas shared by the reference and the Triton kernels.

Both have the form act(g) = g * sigmoid(p(g)):
    silu        p(g) = g
    gelu_tanh   p(g) = 2 sqrt(2 / pi) (g + 0.044715 g^3), since (1 + tanh(z)) / 2 = sigmoid(2 z)
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUTanh, SiLUActivation

Activation = Literal["silu", "gelu_tanh"]
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715


def activation_of(module: nn.Module | Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the name of an activation module or function; None if it is not one of the two."""
    if module is functional.silu or isinstance(module, nn.SiLU | SiLUActivation):
        return "silu"
    if isinstance(module, GELUTanh):
        return "gelu_tanh"
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return None


def sigmoid_argument(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """Return p(g) and its derivative p'(g)."""
    if activation == "silu":
        return g, 1.0
    return GELU_SLOPE * (g + GELU_CUBE * g**3), GELU_SLOPE * (1 + 3 * GELU_CUBE * g**2)
