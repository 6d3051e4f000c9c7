"""Proof that a fused module computes what its own code computes, before it is installed.

`prove` runs the fused code of a module and its own on the inputs that `capture` has kept, on this
device and in this dtype, and compares outputs and gradients. One module of each kind is run. It
leaves weights, gradients, training mode and random generators as they were.

Legend: B rows, T tokens of a row.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sft_play.models.fast.capture import PACKED, PLAIN, SEED, Call, Kind, as_it_was
from sft_play.models.fast.mixers.forward import forward_by_document
from sft_play.models.fast.setup import TrainingSetup, Unsupported
from sft_play.models.fast.shape_proof import why_not_alike

Forward = Callable[..., Any]

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
ADAPTER_STD = 0.05  # of LoRA's B during a proof: its part is visible beside the base weight's
VECTOR_STD = 0.1  # added to weights of norms and to biases, which are all ones or zeros at first


def prove(
    modules: Sequence[nn.Module],
    fused: Callable[[nn.Module], Forward],
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None = None,
) -> list[nn.Module]:
    """Return the modules whose fused forward agrees with their own; one of each kind is run.

    `fused` returns the fused forward method of a module without installing it. `fused_call` returns
    the arguments of the fused forward for those of the module's own, where the two differ; it is
    also given the batch, PACKED or PLAIN. Why modules were left out is added to `setup.left_out`.
    A trace has no values: there see `why_not_alike`. Under ZeRO-3 no forward pass is possible yet,
    and all modules are returned.

    Raises: Unsupported if no module agrees.
    """
    if not setup.has_values and not setup.is_traced:
        return list(modules)
    why_not = _why_not_proved if setup.has_values else why_not_alike
    verdicts: dict[Kind, str | None] = {}
    counts: dict[str, int] = {}
    agreed: list[nn.Module] = []
    for module in modules:
        kind = setup.proof_inputs.kinds[module]
        if kind not in verdicts:
            verdicts[kind] = why_not(kind, fused, setup, fused_call)
        reason = verdicts[kind]
        if reason is None:
            agreed.append(module)
        else:
            counts[reason] = counts.get(reason, 0) + 1
    if modules and not agreed:
        raise Unsupported(next(iter(counts)))
    for reason, count in counts.items():
        setup.left_out.append(f"{count} of {len(modules)}: {reason}")
    return agreed


def _why_not_proved(
    kind: Kind,
    fused: Callable[[nn.Module], Forward],
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None,
) -> str | None:
    """Return where the fused code of a kind of modules differs from its own, None if nowhere."""
    sample = setup.proof_inputs.samples.get(kind)
    if sample is None:
        return "no token of the proof reached it"
    module = sample.module
    name = type(module).__name__
    for batch, call in sample.calls.items():
        # where both are called in one way, a token's result does not depend on its document,
        # but it may depend on its row, of which the packed batch has one
        mixes_tokens = fused_call is not None
        if batch == PACKED and not mixes_tokens and PLAIN in sample.calls:
            continue
        given = fused_call(call, batch) if mixes_tokens else call
        with as_it_was(module, setup.process.device), comparable(module):
            module.train()
            own = run(module.forward, call, module, setup, mixes_tokens)
            try:
                computed = run(fused(module), given, module, setup, mixes_tokens)
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
                # recognised by its structure, but called in another way
                return f"{name} is called in another way ({type(error).__name__}: {error})"
            where = difference(own, computed)
            if where is not None and mixes_tokens and batch == PACKED:
                # its own code sees across documents where the model gives it no mask of them
                alone = _by_document(module, setup)
                where = difference(run(alone, call, module, setup, mixes_tokens), computed)
        if where is not None:
            return f"{name} computes something else ({where})"
    return None


def _by_document(module: nn.Module, setup: TrainingSetup) -> Forward:
    """Return the own code of a module, run on each document of the packed batch alone."""
    lengths = setup.proof_inputs.documents.boundaries.diff().tolist()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return forward_by_document(module, lengths, args, kwargs)

    return forward


class Result(NamedTuple):
    """What one run of a module computed, by name: its output and gradients."""

    tensors: dict[str, Tensor | None]
    dtype: torch.dtype  # the coarsest of output and input: what the differences are judged by


def run(
    forward: Forward, call: Call, module: nn.Module, setup: TrainingSetup, mixes_tokens: bool
) -> Result:
    """Return output and gradients of a forward call, for one random gradient of its output.

    The gradients are those of the input and of the trained parameters. Where a module mixes tokens,
    those of the input for the last token of each row alone tell which tokens reach it: where they
    are zero, to the bit, in any dtype.
    """
    call, inputs = _with_gradients(call)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad(), setup.process.autocast():
        output = _first_tensor(forward(*call.args, **call.kwargs))
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(output.shape, generator=generator).to(output)
    tensors: dict[str, Tensor | None] = {"output": output.detach()}
    if mixes_tokens:
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
    dtypes = (output.dtype, inputs[0].dtype, setup.process.compute_dtype)
    return Result(tensors, max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))


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


def relative_error(expected: Tensor, computed: Tensor) -> float:
    """Return the largest difference of two rows of features, over the root mean square of rows."""
    wide = expected.double().reshape(-1, expected.shape[-1])
    differences = (computed.double().reshape(wide.shape) - wide).norm(dim=-1)
    size = wide.norm(dim=-1).square().mean().sqrt()
    if size == 0:
        return float(differences.max())
    return float(differences.max() / size)


@contextlib.contextmanager
def comparable(module: nn.Module) -> Iterator[None]:
    """Give weights that start as zeros or ones random values, without dropout; restore both.

    Those are LoRA's B, which would hide its A, and vectors: weights of norms, biases, sinks.
    """
    changed: list[tuple[nn.Parameter, Tensor]] = []
    dropouts = [(child, child.p) for child in module.modules() if isinstance(child, nn.Dropout)]
    for child, _ in dropouts:
        child.p = 0.0
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_adapter = "lora_B" in name
            if not parameter.is_floating_point() or not (is_adapter or parameter.dim() == 1):
                continue
            changed.append((parameter, parameter.clone()))
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if is_adapter:
                parameter.copy_(ADAPTER_STD * noise)
            else:
                parameter.add_(VECTOR_STD * noise)
    try:
        yield
    finally:
        for child, probability in dropouts:
            child.p = probability
        with torch.no_grad():
            for parameter, value in changed:
                parameter.copy_(value)
