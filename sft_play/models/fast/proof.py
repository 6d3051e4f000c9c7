"""Proof that a fused module computes what its own code computes, before it is installed.

`prove` runs the fused code of a module and its own on the inputs that `capture` has kept, on this
device and in this dtype, and compares outputs and gradients. One module of each kind is run. Where
the two differ in 16 bits, the own code in float32 decides whether that is rounding. Weights,
gradients, training mode and random generators are left as they were.

A trace has no values: there it is shown that the fused code runs, and returns tensors of the shapes
of the module's own, so that the trace counts the bytes of the code that the run will use.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.fast.by_document import forward_by_document
from sft_play.models.fast.capture import PACKED, PLAIN, SEED, Call, Kind, as_it_was, shape_of
from sft_play.models.fast.comparison import (
    Forward,
    Trial,
    difference,
    is_rounding,
)
from sft_play.models.fast.setup import TrainingSetup, Unsupported, current_gpu_of
from sft_play.models.float8.linear import has_float8

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
    A trace has no values: there see `why_not_alike`. Nor have weights in 4 bits that ZeRO-3
    divides, and all modules are returned.

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
    # where both are called in one way, a token's result does not depend on its document, but it may
    # depend on its row, of which the packed batch has one
    mixes_tokens = fused_call is not None
    for batch, call in sample.calls.items():
        if batch == PACKED and not mixes_tokens and PLAIN in sample.calls:
            continue
        given = fused_call(call, batch) if mixes_tokens else call
        with (
            setup.gathered(module),
            current_gpu_of(module),
            as_it_was(module, setup.process.device),
            comparable(module),
        ):
            module.train()
            trial = Trial(module, call, setup.process, mixes_tokens)
            # its own code may see across documents, where the model gives it no mask of them
            lengths = _document_lengths(setup) if mixes_tokens and batch == PACKED else None
            where = _where_different(trial, fused, given, lengths)
        if where is not None:
            return f"{type(module).__name__} {where}"
    return None


def _where_different(
    trial: Trial,
    fused: Callable[[nn.Module], Forward],
    given: Call,
    documents: Sequence[int] | None,
) -> str | None:
    """Return where a module's fused code differs from its own, in words.

    Its own code may also be run on each of `documents` alone, which are lengths.
    """
    own_code = _own_code
    own = trial.run(own_code)
    try:
        computed = trial.run(fused, given, own.choices)
    except torch.OutOfMemoryError:  # its own code would need as much or more
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        # recognised by its structure, but called in another way
        return f"is called in another way ({type(error).__name__}: {error})"
    where = difference(own, computed)
    if where is not None and documents is not None:
        own_code = functools.partial(_by_document, lengths=documents)
        own = trial.run(own_code)
        where = difference(own, computed)
    if where is None:
        return None
    # in float8 the last bit of a float32 number may decide between two that are 12 % apart
    if own.dtype.itemsize == 2 or has_float8(trial.module):
        exact = trial.run_in_float32(own_code, own.choices)
        if exact is not None and is_rounding(own, computed, exact):
            return None
    return f"computes something else ({where})"


def _own_code(module: nn.Module) -> Forward:
    return module.forward


def _by_document(module: nn.Module, lengths: Sequence[int]) -> Forward:
    """Return the own code of a module, run on each document of one row alone."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return forward_by_document(module, lengths, args, kwargs)

    return forward


def _document_lengths(setup: TrainingSetup) -> list[int]:
    return setup.proof_inputs.documents.boundaries.diff().tolist()


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


def why_not_alike(
    kind: Kind,
    fused: Callable[[nn.Module], Callable[..., Any]],
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None,
) -> str | None:
    """Return why the fused code of a kind of modules is not used, None where it is.

    It is where it runs, with outputs of the shapes of the module's own. The arguments are those of
    `proof.prove`.
    """
    sample = setup.proof_inputs.samples.get(kind)
    if sample is None:
        return "no token of the proof reached it"
    module = sample.module
    name = type(module).__name__
    device = next(setup.base.parameters()).device
    dtype = setup.process.compute_dtype
    is_half = dtype.itemsize == 2 and not setup.zero_stage
    for batch, call in sample.calls.items():
        # where both are called in one way, one batch shows the shapes
        if batch == PACKED and fused_call is None and PLAIN in sample.calls:
            continue
        given = fused_call(call, batch) if fused_call is not None else call
        with as_it_was(module, device), torch.autocast(device.type, dtype, enabled=is_half):
            module.train()
            try:
                computed = shape_of(fused(module)(*given.args, **given.kwargs))
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
                return f"{name} is called in another way ({type(error).__name__})"
        if computed != call.shape:
            return f"{name} computes something else (shapes {call.shape} and {computed})"
    return None
