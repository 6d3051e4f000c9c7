"""Run a module with its original implementation or fused code, and compare two runs.

`Trial.run` returns output and gradients. Two results agree if they differ only by rounding.
Weights, gradients, training mode and random generators are not changed.

The original implementation of experts unpacks and adapts the matrices of every expert, several
times: 12 GiB for a layer of gpt-oss-120b. A proof therefore sends its tokens only to the first and
last experts. The fused code runs them in the full module. The original runs in a copy with only
these experts.

Legend: B rows, T tokens per row, E experts, r rank of an adapter.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from sft_kernels.capture import SEED, ForwardCall
from sft_kernels.e4m3.linear import Float8Linear
from sft_kernels.expert_modules import (
    SharedParamWrapper,
    ranks_of_experts,
    true_shape,
    unwrap,
    weight_of,
)
from sft_kernels.linears import four_bit
from sft_kernels.needs import PROVEN_EXPERTS
from sft_kernels.process import Process
from sft_kernels.recognize import MISMATCH_ERRORS
from sft_kernels.sharded import shallow_copy

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]  # a forward method: its first argument is the module
Choices = list[Tensor]  # the indices that each topk chose, e.g. the experts of each token

# Largest difference of two rows of features (of a token, of a matrix), over the root mean square
# of all rows of the original result. Float32: sums in another order. 16 bits: fused code rounds
# less often than the code that it replaces. Each rounding moves a row by up to half of 2^-7
# (bfloat16) or 2^-10 (float16). Gradients pass through about ten roundings.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# How far fused code may be from float32 if the original in 16 bits exceeds the tolerances above, as
# a multiple of the original's error: two ways to round have errors of similar, not equal, size.
MAX_ROUNDING = 1.5


class Result(NamedTuple):
    """What one run of a module computed, by name: its output and gradients."""

    tensors: dict[str, Tensor | None]
    dtype: torch.dtype  # the coarsest of output, input and compute dtype: selects the tolerance
    choices: Choices


def difference(
    own: Result, fused: Result, exact: Result | None = None, errors: list[float] | None = None
) -> str | None:
    """Return as text the first tensor that differs by more than the tolerance; None if none does.

    `exact` is the original's result in float32. With it, both results may differ from it by as much
    as rounding explains. Differences within the tolerance are added to `errors`.
    """
    errors = [] if errors is None else errors
    for name, expected in own.tensors.items():
        computed = fused.tensors[name]
        right = (exact or own).tensors[name]
        present = [tensor for tensor in (expected, computed, right) if tensor is not None]
        if not present:
            continue
        if len(present) < 3 or computed.shape != right.shape:
            return f"{name} is there in one and not in the other"
        if expected.dtype == torch.bool:
            if not torch.equal(expected, computed):
                return name
            continue
        allowed = max(TOLERANCES[own.dtype], MAX_ROUNDING * relative_error(right, expected))
        error = relative_error(right, computed)
        if not error <= allowed:
            return f"{name} by {error:.1e} of its size, {allowed:.0e} is allowed"
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


ADAPTER_STD = 0.05  # of LoRA's B in a proof: large enough to matter next to the base weight
VECTOR_STD = 0.1  # added to weights of norms and to biases, which are all ones or zeros at first


def own_code(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a module's current forward method."""
    return module.forward(*args, **kwargs)


@contextlib.contextmanager
def comparable(module: nn.Module) -> Iterator[None]:
    """Set weights that start as zeros or ones to random values, without dropout; restore both.

    These weights are LoRA's B, which would hide its A, and vectors: weights of norms, biases,
    sinks.
    """
    before: dict[nn.Parameter, Tensor] = {}
    dropouts = {child: child.p for child in module.modules() if isinstance(child, nn.Dropout)}
    for child in dropouts:
        child.p = 0.0
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_adapter = "lora_B" in name
            if not parameter.is_floating_point() or not (is_adapter or parameter.dim() == 1):
                continue
            before[parameter] = parameter.clone()
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if is_adapter:
                parameter.copy_(ADAPTER_STD * noise)
            else:
                parameter.add_(VECTOR_STD * noise)
    try:
        yield
    finally:
        for child, probability in dropouts.items():
            child.p = probability
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)


class Choosing(TorchFunctionMode):
    """Stores the indices that each topk in a context chooses, or reuses those of another run."""

    def __init__(self, again: Choices | None):
        super().__init__()
        self.made: Choices = []
        self._again = iter(again or ())

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the output of a torch function; `topk` reuses the choice of the other run."""
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


@dataclass(frozen=True)
class Trial:
    """One call of a module, to run it with the original implementation or with fused code."""

    module: nn.Module
    call: ForwardCall
    process: Process
    mixes_tokens: bool
    has_gradients: bool = True  # False: only outputs are compared

    def run(self, code: Forward, choices: Choices | None = None) -> Result:
        """Return output and gradients of a forward call, for one random gradient of its output.

        `code` is a forward method. `choices` of another run are reused: rounding can send a token
        to another expert, which is not a difference in the compared code.

        The gradients are those of the input and of the trained parameters. If a module mixes
        tokens, a second gradient of the input is computed, only from the last token of each row. It
        is zero, to the bit and in any dtype, for tokens that do not reach the last one.
        """
        call, inputs = _with_gradients(self.call)
        with torch.enable_grad(), self.process.autocast(), Choosing(choices) as choosing:
            output = code(self.module, *call.args, **call.kwargs)
            output = output if isinstance(output, Tensor) else output[0]
        generator = torch.Generator().manual_seed(SEED)
        weights = torch.randn(output.shape, generator=generator).to(output)
        tensors: dict[str, Tensor | None] = {"output": output.detach()}
        dtypes = (output.dtype, inputs["input 0"].dtype, self.process.compute_dtype)
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        result = Result(tensors, coarsest, choosing.made)
        if not self.has_gradients:
            return result
        if self.mixes_tokens:
            last = torch.zeros_like(weights)
            last[:, -1] = weights[:, -1]
            (of_last,) = torch.autograd.grad(output, inputs["input 0"], last, retain_graph=True)
            tensors["reach of the last token"] = of_last.ne(0).any(-1)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        sources = inputs | trained
        # kernels may overwrite the gradient of the output, so nothing reads it after this pass
        gradients = torch.autograd.grad(output, [*sources.values()], weights, allow_unused=True)
        for name, gradient in zip(sources, gradients, strict=True):
            tensors[f"gradient of {name}"] = gradient
        return result

    def run_in_float32(self, code: Forward, choices: Choices) -> Result | None:
        """Return the result of a float32 copy of the module, with nothing in it fused.

        Return None if it does not run in float32.
        """
        widened = tree_map_only(Tensor, lambda x: x.float() if _is_floating(x) else x, self.call)
        process = replace(self.process, compute_dtype=torch.float32)
        try:
            module = float32_copy(shallow_copy(self.module))
            for child in module.modules():
                vars(child).pop("forward", None)  # set on parts that are already fused
            return replace(self, module=module, call=widened, process=process).run(code, choices)
        except torch.OutOfMemoryError:  # a RuntimeError that has nothing to do with the code
            raise
        except MISMATCH_ERRORS as error:
            logger.debug("%s in float32: %s", type(self.module).__name__, error)
            return None


def _with_gradients(call: ForwardCall) -> tuple[ForwardCall, dict[str, Tensor]]:
    """Return a call whose inputs are copies that require a gradient, and those inputs.

    They are the floating-point tensors among its positional arguments, or else the first one that
    is passed by keyword.
    """
    inputs: dict[str, Tensor] = {}

    def leaf(value: Any) -> Any:
        if not _is_floating(value):
            return value
        copied = value.detach().clone().requires_grad_()
        inputs[f"input {len(inputs)}"] = copied
        return copied

    args = tuple(map(leaf, call.args))
    kwargs = {name: value if inputs else leaf(value) for name, value in call.kwargs.items()}
    return ForwardCall(args, kwargs), inputs


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class TrialPart(NamedTuple):
    """A smaller module and its call for the original, if the full one needs too much memory."""

    module: nn.Module
    call: ForwardCall
    whole_call: ForwardCall  # of the full module, which the fused code runs
    take: Callable[[str, Tensor], Tensor]  # the part of a lora_A (E r, in) or lora_B (out, r E)

    def of_whole(self, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the tensors of the full module, reduced to the experts of the part."""
        return {
            name: self.take(name, tensor) if "lora_" in name and tensor is not None else tensor
            for name, tensor in tensors.items()
        }


def few_experts(module: nn.Module, call: ForwardCall) -> TrialPart | None:
    """Return a copy with PROVEN_EXPERTS experts, and its call; None if all experts run.

    All experts run if a module does not have more, or if ranks share its experts.
    """
    wrappers, experts = unwrap(module)
    count = true_shape(weight_of(experts, "down_proj"))[0]
    if count <= PROVEN_EXPERTS or ranks_of_experts(module) > 1 or len(call.args) != 3:
        return None
    x, choices, weights = call.args
    side = PROVEN_EXPERTS // 2
    chosen = torch.tensor([*range(side), *range(count - side, count)], device=choices.device)
    places = choices % PROVEN_EXPERTS

    def take(name: str, factor: Tensor) -> Tensor:
        if isinstance(wrappers[name.count("base_layer.")], SharedParamWrapper):
            return factor.clone()
        if "lora_A" in name:
            return factor.unflatten(0, (count, -1))[chosen].flatten(0, 1)
        return factor.unflatten(1, (-1, count))[..., chosen].flatten(1)

    memo: dict[int, Any] = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            few = take(name, parameter) if "lora_" in name else _few_of(parameter, chosen, count)
            memo[id(parameter)] = nn.Parameter(few, parameter.requires_grad)
    copied = copy_with(module, memo)
    wrappers_of_copy, experts_of_copy = unwrap(copied)
    for child in (*wrappers_of_copy, experts_of_copy):
        if not isinstance(child, SharedParamWrapper):
            child.num_experts = PROVEN_EXPERTS
    return TrialPart(
        copied,
        call._replace(args=(x, places, weights)),
        call._replace(args=(x, chosen[places], weights)),
        take,
    )


def _few_of(parameter: nn.Parameter, chosen: Tensor, count: int) -> Tensor:
    """Return the chosen experts of a weight or bias, unpacked if it is packed."""
    if true_shape(parameter)[0] != count:
        return parameter.clone()
    if not hasattr(parameter, "quant_state"):
        return parameter[chosen]
    lines = four_bit.block_lines(parameter) if parameter.is_cuda else None
    if lines is None:
        return four_bit.unpack_with_kernel(parameter)[chosen]
    stored = [lines.unpack(parameter, slice(each, each + 1)) for each in chosen.tolist()]
    few = torch.cat(stored)
    return few.transpose(1, 2) if lines.is_turned else few


@torch.no_grad()
def float32_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module, which may have adapters, with every weight in float32.

    4-bit weights of experts and linear layers are unpacked, and so are float8 weights.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        if isinstance(child, ParametrizationList):  # of packed experts
            memo[id(child.original)] = nn.Parameter(child().float(), requires_grad=False)
        if isinstance(child, Linear4bit):
            weight = dequantize_4bit(child.weight.data, child.weight.quant_state).float()
        elif isinstance(child, Float8Linear):
            weight = child.dequantized_weight(torch.float32)
        else:
            continue
        plain = nn.Linear(child.in_features, child.out_features, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.bias = copy.deepcopy(child.bias)
        memo[id(child)] = plain
    return copy_with(module, memo).float()


def copy_with(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module in which `memo` replaces parameters and modules, by identity.

    Packed parameters become plain ones. torch's function would remove their names from the class,
    which the original shares with the copy.
    """
    copied = copy.deepcopy(module, memo)
    for child in [*copied.modules()]:
        vars(child).pop("_activate_lora", None)  # set by `unpack_with_adapter`
        packed = getattr(child, "parametrizations", {})
        if packed:
            child.__class__ = type_before_parametrizations(child)
            del child.parametrizations
        for name, parametrizations in packed.items():
            child.register_parameter(name, parametrizations.original)
    return copied
