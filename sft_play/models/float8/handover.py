"""Rows that the kernel which computed them has quantised, on their way to linears that read them.

They travel as an attribute of the tensor, which modules pass on unchanged. Whoever takes them
removes them: autograd keeps the tensor, and would keep them with it.
"""

from torch import Tensor, nn

from sft_play.models.float8.format import Quantised
from sft_play.models.float8.linear import is_float8

NAME = "rows_in_float8"


def hand_over(x: Tensor, quantised: Quantised) -> None:
    """Leave x (..., F) in float8 (N, F) for the linears that read it."""
    setattr(x, NAME, quantised)


def take(x: Tensor) -> Quantised | None:
    """Return what was left with x, which is gone from it then; None where nothing was."""
    return vars(x).pop(NAME, None) if hasattr(x, NAME) else None


def reads_float8(module: nn.Module) -> bool:
    """Return whether a linear of a module is in float8; looked up once."""
    if "reads_float8" not in vars(module):
        vars(module)["reads_float8"] = any(is_float8(part) for part in module.modules())
    return vars(module)["reads_float8"]
