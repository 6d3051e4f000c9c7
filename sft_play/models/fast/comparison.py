"""What a module computes on given inputs, and whether two ways of computing it agree.

Legend: B rows, T tokens of a row.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sft_play.models.expert_quantization import in_float32
from sft_play.models.fast.capture import SEED, Call
from sft_play.models.sharding import shallow_copy
from sft_play.process import Process

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
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
# How far fused code may be from float32 where its own code in 16 bits is farther than the above, in
# errors of the own code: those of two ways to round are of one size, and not equal.
MAX_ROUNDING = 1.5


class Choosing(TorchFunctionMode):
    """Keeps the indices that each topk in a context chooses, or repeats those of another run."""

    def __init__(self, again: Choices | None):
        super().__init__()
        self.made: Choices = []
        self._again = iter(again or ())

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and `topk` with the choice of the other run."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return output
        chosen = next(self._again, None)
        if chosen is not None and chosen.shape == output.indices.shape:
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            source = args[0] if args else kwargs["input"]
            output = torch.return_types.topk((source.gather(dim, chosen), chosen))
        self.made.append(output.indices)
        return output


class Result(NamedTuple):
    """What one run of a module computed, by name: its output and gradients."""

    tensors: dict[str, Tensor | None]
    dtype: torch.dtype  # the coarsest of output and input: what the differences are judged by
    choices: Choices


@dataclass(frozen=True)
class Trial:
    """A module and the arguments to run it with, by its own code and by fused code."""

    module: nn.Module
    call: Call
    process: Process
    mixes_tokens: bool

    def run(
        self,
        code: Callable[[nn.Module], Forward],
        call: Call | None = None,
        choices: Choices | None = None,
    ) -> Result:
        """Return output and gradients of a forward call, for one random gradient of its output.

        `code` returns the forward method of the module, and `call` are its arguments where they are
        not those of its own code. `choices` of another run are made again: rounding sends a token
        to another expert, which is no difference of the code that is compared.

        The gradients are those of the input and of the trained parameters. Where a module mixes
        tokens, those of the input for the last token of each row alone tell which tokens reach it:
        where they are zero, to the bit, in any dtype.
        """
        call, inputs = _with_gradients(call or self.call)
        forward = code(self.module)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        choosing = Choosing(choices)
        with torch.enable_grad(), self.process.autocast(), choosing:
            output = _first_tensor(forward(*call.args, **call.kwargs))
        generator = torch.Generator().manual_seed(SEED)
        weights = torch.randn(output.shape, generator=generator).to(output)
        tensors: dict[str, Tensor | None] = {"output": output.detach()}
        if self.mixes_tokens:
            last = torch.zeros_like(weights)
            last[:, -1] = weights[:, -1]
            (of_last,) = torch.autograd.grad(output, inputs[:1], last, retain_graph=True)
            tensors["reach of the last token"] = of_last.ne(0).any(-1)
        sources = (*inputs, *trained.values())
        # kernels may overwrite the gradient of the output, so nothing reads it after this pass
        gradients = torch.autograd.grad(output, sources, weights, allow_unused=True)
        names = [f"input {number}" for number in range(len(inputs))]
        for name, gradient in zip([*names, *trained], gradients, strict=True):
            tensors[f"gradient of {name}"] = gradient
        dtypes = (output.dtype, inputs[0].dtype, self.process.compute_dtype)
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        return Result(tensors, coarsest, choosing.made)

    def run_in_float32(
        self, code: Callable[[nn.Module], Forward], choices: Choices
    ) -> Result | None:
        """Return the same of a float32 copy of the module, with the code of its classes alone.

        None where it does not run in float32 or in the memory there is.
        """
        call = Call(_in_float32(self.call.args), _in_float32(self.call.kwargs))
        process = replace(self.process, compute_dtype=torch.float32)
        try:
            module = in_float32(shallow_copy(self.module))
            for child in module.modules():
                vars(child).pop("forward", None)  # of parts that are fused already
            return Trial(module, call, process, self.mixes_tokens).run(code, choices=choices)
        except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of the code
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            logger.debug("%s in float32: %s", type(self.module).__name__, error)
            return None


def _in_float32(value: Any) -> Any:
    """Return a tensor in float32 where it is of floating point, also inside containers."""
    if _is_floating(value):
        return value.float()
    if type(value) in (list, tuple):
        return type(value)(_in_float32(item) for item in value)
    if type(value) is dict:
        return {name: _in_float32(item) for name, item in value.items()}
    return value


def _with_gradients(call: Call) -> tuple[Call, list[Tensor]]:
    """Return a call whose inputs are copies that require a gradient, and those inputs.

    They are the floating-point tensors among its positional arguments, or else the first one that
    is passed by keyword.
    """
    args = [_leaf(value) for value in call.args]
    leaves = [value for value in args if _is_floating(value)]
    kwargs = dict(call.kwargs)
    for name, value in kwargs.items():
        if not leaves and _is_floating(value):
            kwargs[name] = _leaf(value)
            leaves.append(kwargs[name])
    return Call(tuple(args), kwargs), leaves


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_() if _is_floating(value) else value


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def difference(own: Result, fused: Result) -> str | None:
    """Return the first tensor of two results that differs by more than the tolerance, in words."""
    tolerance = TOLERANCES[own.dtype]
    for name, expected in own.tensors.items():
        computed = fused.tensors[name]
        if expected is None and computed is None:
            continue
        if expected is None or computed is None or expected.shape != computed.shape:
            return f"{name} is there in one and not in the other"
        if expected.dtype == torch.bool:
            if not torch.equal(expected, computed):
                return name
            continue
        error = relative_error(expected, computed)
        if not error <= tolerance:
            return f"{name} by {error:.1e} of its size, {tolerance:.0e} is allowed"
    return None


def is_rounding(own: Result, fused: Result, exact: Result) -> bool:
    """Return whether fused code differs from its own no more than rounding explains.

    `exact` is the result of the own code in float32.
    """
    for name, right in exact.tensors.items():
        expected = own.tensors[name]
        computed = fused.tensors[name]
        if right is None or expected is None or computed is None:
            if not (right is None and expected is None and computed is None):
                return False
            continue
        if computed.shape != right.shape:
            return False
        if right.dtype == torch.bool:
            if not torch.equal(expected, computed):
                return False
            continue
        own_error = relative_error(right, expected)
        allowed = max(TOLERANCES[own.dtype], MAX_ROUNDING * own_error)
        if not relative_error(right, computed) <= allowed:
            return False
    return True


def relative_error(expected: Tensor, computed: Tensor) -> float:
    """Return the largest difference of two rows of features, over the root mean square of rows."""
    wide = expected.double().reshape(-1, expected.shape[-1])
    differences = (computed.double().reshape(wide.shape) - wide).norm(dim=-1)
    size = wide.norm(dim=-1).square().mean().sqrt()
    if size == 0:
        return float(differences.max())
    return float(differences.max() / size)
