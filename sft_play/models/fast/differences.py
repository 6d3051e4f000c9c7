"""What two runs of a module computed, and whether they differ by more than rounding."""

from typing import NamedTuple

import torch
from torch import Tensor

Choices = list[Tensor]  # the indices that each topk chose, such as the experts of each token

# Largest difference of two rows of features (of a token, of a matrix), over the root mean square
# of all rows of the own result. Float32: sums in another order. 16 bits: fused code rounds less
# often than the code that it replaces, and each rounding moves a row by up to half of 2^-7
# (bfloat16) or 2^-10 (float16); gradients pass through some ten of them.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
# How far fused code may be from float32 if its own code in 16 bits is farther than the above, in
# errors of the own code: those of two ways to round are of one size, and not equal.
MAX_ROUNDING = 1.5


class Result(NamedTuple):
    """What one run of a module computed, by name: its output and gradients."""

    tensors: dict[str, Tensor | None]
    dtype: torch.dtype  # the coarsest of output and input: what the differences are judged by
    choices: Choices


def difference(
    own: Result, fused: Result, exact: Result | None = None, errors: list[float] | None = None
) -> str | None:
    """Return the first tensor of two results that differs by more than the tolerance, as text.

    With `exact`, the result of the own code in float32, both may be as far from it as rounding
    explains. What differs by less is added to `errors`.
    """
    for name, expected in own.tensors.items():
        computed = fused.tensors[name]
        right = expected if exact is None else exact.tensors[name]
        present = [tensor for tensor in (expected, computed, right) if tensor is not None]
        if not present:
            continue
        if len(present) < 3 or computed.shape != right.shape:
            return f"{name} is there in one and not in the other"
        if expected.dtype == torch.bool:
            if not torch.equal(expected, computed):
                return name
            continue
        allowed = TOLERANCES[own.dtype]
        if exact is not None:
            allowed = max(allowed, MAX_ROUNDING * relative_error(right, expected))
        error = relative_error(right, computed)
        if not error <= allowed:
            return f"{name} by {error:.1e} of its size, {allowed:.0e} is allowed"
        if errors is not None:
            errors.append(error)
    return None


def relative_error(expected: Tensor, computed: Tensor) -> float:
    """Return the largest difference of two rows of features, over the root mean square of rows."""
    wide = expected.double().reshape(-1, expected.shape[-1])
    differences = (computed.double().reshape(wide.shape) - wide).norm(dim=-1)
    size = wide.norm(dim=-1).square().mean().sqrt()
    if size == 0:
        return float(differences.max())
    return float(differences.max() / size)
