"""Proof that a fused module computes the same as its original implementation.

`prove` runs before a fused module is installed. It runs the fused code and the original
implementation on the inputs stored by `capture`, on this device and in this dtype. It then compares
outputs and gradients. It runs one module per kind. If the two differ in 16 bits, the original
implementation in float32 decides whether that is rounding. If an earlier start has proved a
kernel, only outputs are compared.

A trace has no values. There, `prove` checks that the fused code runs and returns the same shapes as
the original implementation. The trace then counts the bytes of the code that the run will use.

Legend: B rows, T tokens per row.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from sft_kernels.capture import PACKED, PLAIN, ForwardCall, Kind, output_shape, preserving_state
from sft_kernels.e4m3.linear import has_float8
from sft_kernels.expert_modules import ranks_of_experts
from sft_kernels.packed import forward_by_document
from sft_kernels.process import Process
from sft_kernels.recognize import MISMATCH_ERRORS
from sft_kernels.training_setup import TrainingSetup
from sft_kernels.trial import Forward, Result, Trial, TrialPart, comparable, difference, own_code

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Proof:
    """Fused code, and how its arguments and its reference follow from an original call."""

    fused: Forward
    setup: TrainingSetup
    fused_call: Callable[[ForwardCall, str], ForwardCall] | None
    part_of: Callable[[nn.Module, ForwardCall], TrialPart | None] | None

    def reason_against(self, name: str, kind: Kind) -> str | None:
        """Return where the fused code of a kind differs from the original; None if nowhere.

        If an earlier start found no difference, it is enough to compare outputs. If outputs differ
        on any rank, all earlier proofs are ignored.
        """
        setup = self.setup
        if name in setup.proved:
            where = self.compare(kind)
            if not setup.process.max(int(where is not None)):
                return None
            where = where or "its outputs differ on another rank"
            logger.warning("fast path: %s: %s; this and what follows is proved again", name, where)
            setup.proved.clear()
        errors: list[float] = []
        with setup.timed(f"proof of {name}"):
            where = self.compare(kind, errors)
        if where is None:
            setup.newly_proved[name] = max(errors, default=0.0)
        return where

    def compare(self, kind: Kind, errors: list[float] | None = None) -> str | None:
        """Return where the fused code of a kind differs from the original; None if nowhere.

        Sizes of differences are added to `errors`. Without it, only outputs are compared.
        """
        inputs = self.setup.proof_inputs
        sample = inputs.samples.get(kind)
        if sample is None:
            return "no token of the proof reached it"
        for batch, call in sample.calls.items():
            fused_call = call
            if self.fused_call is not None:
                fused_call = self.fused_call(call, batch)
            elif batch == PACKED and PLAIN in sample.calls:
                # A token's result does not depend on its document. It may depend on its row, and
                # the packed batch has only one row.
                continue
            if self.setup.is_traced:
                where = self._compare_shapes(sample.module, call.shape, fused_call)
            else:
                where = self._compare_values(sample.module, call, fused_call, batch, errors)
            if where is not None:
                return f"{type(sample.module).__name__} {where}"
        return None

    def _compare_values(
        self,
        module: nn.Module,
        call: ForwardCall,
        fused_call: ForwardCall,
        batch: str,
        errors: list[float] | None,
    ) -> str | None:
        """Return where outputs and gradients differ; None if nowhere.

        The original runs on the part, if there is one. It may also run on each packed document
        separately: it attends across documents, if the model passes no mask for them.
        """
        process = self.setup.process
        trial = Trial(module, fused_call, process, self.fused_call is not None, errors is not None)
        with (
            self.setup.gathered(module),
            preserving_state(module, process.device),
            comparable(module),
        ):
            module.train()
            part = None if self.part_of is None else self.part_of(module, call)
            reference = replace(trial, call=call)
            if part is not None:
                reference = replace(trial, module=part.module, call=part.call)
                trial = replace(trial, call=part.whole_call)
            own = reference.run(own_code)
            try:
                computed = trial.run(self.fused, own.choices)
            except torch.OutOfMemoryError:  # the original would need as much or more
                raise
            except MISMATCH_ERRORS as error:
                # recognized by its structure, but called in another way
                return f"is called in another way ({type(error).__name__}: {error})"
            if part is not None:
                computed = computed._replace(tensors=part.of_whole(computed.tensors))

            def find_difference(own: Result, exact: Result | None = None) -> str | None:
                return of_any_rank(module, process, difference(own, computed, exact, errors))

            code: Forward = own_code
            where = find_difference(own)
            if where is not None and batch == PACKED and self.fused_call is not None:
                code = partial(forward_by_document, self.setup.proof_inputs.documents.lengths)
                own = reference.run(code)
                where = find_difference(own)
            # in float8, a float32 number's last bit may decide between two numbers that differ by
            # 12 %
            if where is not None and (own.dtype.itemsize == 2 or has_float8(reference.module)):
                exact = reference.run_in_float32(code, own.choices)
                if exact is not None and find_difference(own, exact) is None:
                    return None
        return where and f"computes something else ({where})"

    def _compare_shapes(
        self, module: nn.Module, shape: tuple[int, ...], fused_call: ForwardCall
    ) -> str | None:
        """Return how fused code of a traced module differs from the original; None if nowhere."""
        setup = self.setup
        device = next(setup.base.parameters()).device
        dtype = setup.process.compute_dtype
        is_half = dtype.itemsize == 2 and not setup.zero_stage
        with preserving_state(module, device), torch.autocast(device.type, dtype, enabled=is_half):
            module.train()
            try:
                computed = output_shape(self.fused(module, *fused_call.args, **fused_call.kwargs))
            except MISMATCH_ERRORS as error:
                return f"is called in another way ({type(error).__name__})"
        if computed != shape:
            return f"computes something else (shapes {shape} and {computed})"
        return None


def prove(
    modules: Sequence[nn.Module],
    fused: Forward,
    setup: TrainingSetup,
    fused_call: Callable[[ForwardCall, str], ForwardCall] | None = None,
    part_of: Callable[[nn.Module, ForwardCall], TrialPart | None] | None = None,
) -> list[nn.Module]:
    """Return the modules whose fused forward agrees with their original; run one of each kind.

    `fused` is the fused forward method. `fused_call` converts the original arguments to those of
    `fused`, if the two differ; it also gets the batch, PACKED or PLAIN. `part_of` returns a smaller
    module and call for the original implementation. Reasons why modules were left out are added to
    `setup.left_out`. 4-bit weights sharded by ZeRO-3 have no values, so all modules are returned.

    Raises: Unsupported if no module agrees.
    """
    if not setup.has_values and not setup.is_traced:
        return list(modules)
    proof = _Proof(fused, setup, fused_call, None if setup.divides_weights else part_of)
    kinds = setup.proof_inputs.kinds
    reasons: dict[Kind, str | None] = {}
    for module in modules:
        kind = kinds[module]
        if kind not in reasons:
            name = f"{type(module).__name__} {kind}: {fused.__name__}"
            reasons[kind] = proof.reason_against(name, kind)
    return setup.without_reason({module: reasons[kinds[module]] for module in modules})


def of_any_rank(module: nn.Module, process: Process, where: str | None) -> str | None:
    """Return where a proof finds a difference, on any rank if ranks share the module's experts.

    Such ranks run the module together, so all of them must handle a difference the same way.
    """
    if ranks_of_experts(module) == 1:
        return where
    return next(filter(None, process.gather(where)), None)
