"""Proof that a fused module computes what its own code computes, before it is installed.

`prove` runs the fused code of a module and its own on the inputs that `capture` has stored, on this
device and in this dtype, and compares outputs and gradients. One module of each kind is run. If
the two differ in 16 bits, the own code in float32 decides whether that is rounding. Weights,
gradients, training mode and random generators are left as they were. Of what an earlier start has
proved (`record`) outputs alone are compared.

A trace has no values: there it is shown that the fused code runs, and returns tensors of the shapes
of the module's own, so that the trace counts the bytes of the code that the run will use.

Legend: B rows, T tokens of a row.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from sft_play.models.fast.capture import (
    PACKED,
    PLAIN,
    SEED,
    Call,
    Kind,
    as_it_was,
    shape_of,
)
from sft_play.models.fast.differences import Choices, Result, difference
from sft_play.models.fast.documents import forward_by_document
from sft_play.models.fast.recognize import MISFITS
from sft_play.models.fast.record import of_any_rank, prove_once
from sft_play.models.fast.reference_copies import Part, in_float32
from sft_play.models.fast.setup import TrainingSetup, Unsupported
from sft_play.models.float8.linear import has_float8
from sft_play.models.sharding import shallow_copy
from sft_play.process import Process

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]  # a forward method: its first argument is the module

ADAPTER_STD = 0.05  # of LoRA's B during a proof: its part is visible next to the base weight's
VECTOR_STD = 0.1  # added to weights of norms and to biases, which are all ones or zeros at first


def prove(
    modules: Sequence[nn.Module],
    fused: Forward,
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None = None,
    kernel: str = "",
    part_of: Callable[[nn.Module, Call], Part | None] | None = None,
) -> list[nn.Module]:
    """Return the modules whose fused forward agrees with their own; one of each kind is run.

    `fused` is the fused forward method. `fused_call` returns its arguments for those of the
    module's own, if the two differ; it is also given the batch, PACKED or PLAIN. `kernel` names
    one of several that it may run. `part_of` returns what own code is run on in place of a module
    and its call. Why modules were left out is added to `setup.left_out`. Weights in 4 bits that
    ZeRO-3 divides have no values, and all modules are returned.

    Raises: Unsupported if no module agrees.
    """
    if not setup.has_values and not setup.is_traced:
        return list(modules)
    verdicts: dict[Kind, str | None] = {}
    counts: dict[str, int] = {}
    agreed: list[nn.Module] = []
    for module in modules:
        kind = setup.proof_inputs.kinds[module]
        if kind not in verdicts:
            name = f"{type(module).__name__} {kind}: {kernel or getattr(fused, '__name__', '')}"
            compare = functools.partial(_why_not_proved, kind, fused, setup, fused_call, part_of)
            verdicts[kind] = prove_once(name, setup, compare)
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


def own_code(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward method that a module has."""
    return module.forward(*args, **kwargs)


def _why_not_proved(
    kind: Kind,
    fused: Forward,
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None,
    part_of: Callable[[nn.Module, Call], Part | None] | None,
    errors: list[float] | None,
) -> str | None:
    """Return where the fused code of a kind of modules differs from its own, None if nowhere."""
    inputs = setup.proof_inputs
    sample = inputs.samples.get(kind)
    if sample is None:
        return "no token of the proof reached it"
    module = sample.module
    if setup.divides_weights:
        part_of = None
    # if both are called in one way, a token's result does not depend on its document, but it may
    # depend on its row, of which the packed batch has one
    mixes_tokens = fused_call is not None
    for batch, call in sample.calls.items():
        if batch == PACKED and not mixes_tokens and PLAIN in sample.calls:
            continue
        given = fused_call(call, batch) if mixes_tokens else call
        if setup.is_traced:
            where = _where_misshapen(module, call, given, fused, setup)
        else:
            with (
                setup.gathered(module),
                as_it_was(module, setup.process.device),
                comparable(module),
            ):
                module.train()
                part = None if part_of is None else part_of(module, call)
                trial = Trial(module, call, setup.process, mixes_tokens, errors)
                # its own code may see across documents, if the model gives it no mask of them
                lengths = None
                if mixes_tokens and batch == PACKED:
                    lengths = inputs.documents.boundaries.diff().tolist()
                where = _where_different(trial, given, fused, part, lengths)
        if where is not None:
            return f"{type(module).__name__} {where}"
    return None


def _where_different(
    whole: "Trial", given: Call, fused: Forward, part: Part | None, documents: list[int] | None
) -> str | None:
    """Return where a module's fused code, called as `given`, differs from its own, as text.

    Its own code runs on the part if there is one. It may also be run on each of `documents` alone,
    which are lengths.
    """
    agreed = functools.partial(of_any_rank, whole.module, whole.process)
    trial = whole
    if part is not None:
        trial = replace(whole, module=part.module, call=part.call)
        given = part.whole_call
    own = trial.run(own_code)
    try:
        computed = whole.run(fused, given, own.choices)
        if part is not None:
            computed = part.of_whole(computed)
    except torch.OutOfMemoryError:  # its own code would need as much or more
        raise
    except MISFITS as error:
        # recognized by its structure, but called in another way
        return f"is called in another way ({type(error).__name__}: {error})"
    code: Forward = own_code
    where = agreed(difference(own, computed, None, trial.errors))
    if where is not None and documents is not None:
        code = functools.partial(forward_by_document, documents)
        own = trial.run(code)
        where = agreed(difference(own, computed, None, trial.errors))
    if where is None:
        return None
    # in float8 the last bit of a float32 number may decide between two that are 12 % apart
    if own.dtype.itemsize == 2 or has_float8(trial.module):
        exact = trial.run_in_float32(code, own.choices)
        if exact and agreed(difference(own, computed, exact, trial.errors)) is None:
            return None
    return f"computes something else ({where})"


def _where_misshapen(
    module: nn.Module, call: Call, given: Call, fused: Forward, setup: TrainingSetup
) -> str | None:
    """Return how the fused code of a traced module does not stand for its own, None if it does."""
    device = next(setup.base.parameters()).device
    dtype = setup.process.compute_dtype
    is_half = dtype.itemsize == 2 and not setup.zero_stage
    with as_it_was(module, device), torch.autocast(device.type, dtype, enabled=is_half):
        module.train()
        try:
            computed = shape_of(fused(module, *given.args, **given.kwargs))
        except MISFITS as error:
            return f"is called in another way ({type(error).__name__})"
    if computed != call.shape:
        return f"computes something else (shapes {call.shape} and {computed})"
    return None


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


class Choosing(TorchFunctionMode):
    """Stores the indices that each topk in a context chooses, or repeats those of another run."""

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


@dataclass(frozen=True)
class Trial:
    """A module and the arguments to run it with, by its own code and by fused code."""

    module: nn.Module
    call: Call
    process: Process
    mixes_tokens: bool
    errors: list[float] | None = field(default_factory=list)  # None: outputs alone are compared

    def run(
        self, code: Forward, call: Call | None = None, choices: Choices | None = None
    ) -> Result:
        """Return output and gradients of a forward call, for one random gradient of its output.

        `code` is a forward method, and `call` are its arguments if they are not those of the
        module's own. `choices` of another run are made again: rounding sends a token to another
        expert, which is no difference of the code that is compared.

        The gradients are those of the input and of the trained parameters. If a module mixes
        tokens, those of the input for the last token of each row alone tell which tokens reach it:
        where they are zero, to the bit, in any dtype.
        """
        call, inputs = _with_gradients(call or self.call)
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        choosing = Choosing(choices)
        with torch.enable_grad(), self.process.autocast(), choosing:
            output = code(self.module, *call.args, **call.kwargs)
            output = output if isinstance(output, Tensor) else output[0]
        generator = torch.Generator().manual_seed(SEED)
        weights = torch.randn(output.shape, generator=generator).to(output)
        tensors: dict[str, Tensor | None] = {"output": output.detach()}
        dtypes = (output.dtype, inputs[0].dtype, self.process.compute_dtype)
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        if self.errors is None:
            return Result(tensors, coarsest, choosing.made)
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
        return Result(tensors, coarsest, choosing.made)

    def run_in_float32(self, code: Forward, choices: Choices) -> Result | None:
        """Return the same of a float32 copy of the module, with the code of its classes alone.

        None if it does not run in float32 or in the memory there is.
        """
        call = tree_map_only(
            Tensor, lambda value: value.float() if _is_floating(value) else value, self.call
        )
        process = replace(self.process, compute_dtype=torch.float32)
        try:
            module = in_float32(shallow_copy(self.module))
            for child in module.modules():
                vars(child).pop("forward", None)  # of parts that are fused already
            trial = replace(self, module=module, call=call, process=process)
            return trial.run(code, choices=choices)
        except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of the code
            raise
        except MISFITS as error:
            logger.debug("%s in float32: %s", type(self.module).__name__, error)
            return None


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
