"""Proof that a fused module computes the same as its original implementation.

`prove` runs before a fused module is installed. It runs the fused code and the original
implementation on the inputs stored by `capture`, on this device and in this dtype. It then compares
outputs and gradients. It runs one module per kind. If the two differ in 16 bits, the original
implementation in float32 decides whether that is rounding. If an earlier start has proved a kernel
(`record`), only outputs are compared.

A trace has no values. There, `prove` checks that the fused code runs and returns the same shapes as
the original implementation. The trace then counts the bytes of the code that the run will use.

Legend: B rows, T tokens per row.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from sft_play import timeline
from sft_play.models.experts import ranks_of_experts
from sft_play.models.fast.capture import PACKED, PLAIN, Call, Kind, preserving_state, shape_of
from sft_play.models.fast.documents import forward_by_document
from sft_play.models.fast.recognize import MISMATCH_ERRORS
from sft_play.models.fast.reference_copies import Part
from sft_play.models.fast.setup import TrainingSetup
from sft_play.models.fast.trial import Forward, Trial, comparable, difference, own_code
from sft_play.models.float8.linear import has_float8
from sft_play.process import Process

logger = logging.getLogger(__name__)


def prove(
    modules: Sequence[nn.Module],
    fused: Forward,
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None = None,
    kernel: str = "",
    part_of: Callable[[nn.Module, Call], Part | None] | None = None,
) -> list[nn.Module]:
    """Return the modules whose fused forward agrees with their original; run one of each kind.

    `fused` is the fused forward method. `fused_call` converts the original arguments to those of
    `fused`, if the two differ; it also gets the batch, PACKED or PLAIN. `kernel` names the kernel,
    if `fused` may run several. `part_of` returns a smaller module and call for the original
    implementation. Reasons why modules were left out are added to `setup.left_out`. 4-bit weights
    sharded by ZeRO-3 have no values, so all modules are returned.

    Raises: Unsupported if no module agrees.
    """
    if not setup.has_values and not setup.is_traced:
        return list(modules)
    if part_of is not None and setup.divides_weights:
        part_of = None
    kernel = kernel or getattr(fused, "__name__", "")
    kinds = setup.proof_inputs.kinds
    verdicts: dict[Kind, str | None] = {}
    for module in modules:
        kind = kinds[module]
        if kind not in verdicts:
            compare = functools.partial(_why_not_proved, kind, fused, setup, fused_call, part_of)
            name = f"{type(module).__name__} {kind}: {kernel}"
            verdicts[kind] = prove_once(name, setup, compare)
    return setup.without_reason({module: verdicts[kinds[module]] for module in modules})


def prove_once(
    name: str, setup: TrainingSetup, compare: Callable[[list[float] | None], str | None]
) -> str | None:
    """Return where `compare` finds a difference; None if it finds none.

    `compare` adds the sizes of differences to a list. Without a list it compares only outputs,
    which is enough if an earlier start found no difference. If outputs differ on any rank, all
    earlier proofs are ignored.
    """
    if name in setup.proved:
        where = compare(None)
        if not setup.process.max(int(where is not None)):
            return None
        reason = where or "its outputs differ on another rank"
        logger.warning("fast path: %s: %s; this and what follows is proved again", name, reason)
        setup.proved.clear()
    errors: list[float] = []
    with timeline.span(f"proof of {name}"):
        where = compare(errors)
    if where is None:
        setup.newly_proved[name] = max(errors, default=0.0)
    return where


def of_any_rank(module: nn.Module, process: Process, where: str | None) -> str | None:
    """Return where a proof finds a difference, on any rank if ranks share the module's experts.

    Such ranks run the module together, so all of them must handle a difference the same way.
    """
    if ranks_of_experts(module) == 1:
        return where
    return next(filter(None, process.gather(where)), None)


def _why_not_proved(
    kind: Kind,
    fused: Forward,
    setup: TrainingSetup,
    fused_call: Callable[[Call, str], Call] | None,
    part_of: Callable[[nn.Module, Call], Part | None] | None,
    errors: list[float] | None,
) -> str | None:
    """Return where the fused code of a kind differs from the original; None if nowhere."""
    inputs = setup.proof_inputs
    sample = inputs.samples.get(kind)
    if sample is None:
        return "no token of the proof reached it"
    module = sample.module
    # Without `fused_call`, a token's result does not depend on its document. It may depend on its
    # row, and the packed batch has only one row.
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
                preserving_state(module, setup.process.device),
                comparable(module),
            ):
                module.train()
                part = None if part_of is None else part_of(module, call)
                trial = Trial(module, call, setup.process, mixes_tokens, errors)
                # the original may attend across documents, if the model passes no mask for them
                lengths = inputs.documents.lengths if mixes_tokens and batch == PACKED else None
                where = _where_different(trial, given, fused, part, lengths)
        if where is not None:
            return f"{type(module).__name__} {where}"
    return None


def _where_different(
    whole: Trial, given: Call, fused: Forward, part: Part | None, documents: list[int] | None
) -> str | None:
    """Return as text where a module's fused code differs from the original; None if nowhere.

    The fused code is called with `given`. The original implementation runs on the part, if there is
    one. It may also run on each document separately; `documents` are their lengths.
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
            computed = computed._replace(tensors=part.of_whole(computed.tensors))
    except torch.OutOfMemoryError:  # the original would need as much or more
        raise
    except MISMATCH_ERRORS as error:
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
    # in float8, a float32 number's last bit may decide between two numbers that differ by 12 %
    if own.dtype.itemsize == 2 or has_float8(trial.module):
        exact = trial.run_in_float32(code, own.choices)
        if exact and agreed(difference(own, computed, exact, trial.errors)) is None:
            return None
    return f"computes something else ({where})"


def _where_misshapen(
    module: nn.Module, call: Call, given: Call, fused: Forward, setup: TrainingSetup
) -> str | None:
    """Return how fused code of a traced module differs from the original; None if nowhere."""
    device = next(setup.base.parameters()).device
    dtype = setup.process.compute_dtype
    is_half = dtype.itemsize == 2 and not setup.zero_stage
    with preserving_state(module, device), torch.autocast(device.type, dtype, enabled=is_half):
        module.train()
        try:
            computed = shape_of(fused(module, *given.args, **given.kwargs))
        except MISMATCH_ERRORS as error:
            return f"is called in another way ({type(error).__name__})"
    if computed != call.shape:
        return f"computes something else (shapes {call.shape} and {computed})"
    return None
