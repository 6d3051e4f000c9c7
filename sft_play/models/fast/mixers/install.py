"""Find the token mixers of a decoder that keep a state, and make them start at each document.

Each kind of mixer proves itself before it is used: in one call over packed documents it must give
the outputs and gradients that it gives document by document, and no document may change with the
tokens of another.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.fast.capture import as_it_was, kinds_of
from sft_play.models.fast.documents import PackedDocuments, watch_documents
from sft_play.models.fast.mixers.find import (
    ModuleCall,
    find_mixers,
    is_hidden,
    leaks,
    likely_mixers,
    tokens_of,
)
from sft_play.models.fast.mixers.forward import Forward, forward_packed, install_mixer
from sft_play.models.fast.mixers.gated_norms import install_gated_norms
from sft_play.models.fast.mixers.kernels import rebound
from sft_play.models.fast.mixers.tuning import tune_kernels
from sft_play.models.fast.setup import TrainingSetup, Unsupported
from sft_play.models.linear_attention import torch_code, why_no_fla

logger = logging.getLogger(__name__)

WITHOUT_FLA = (
    "%s: transformers computes linear attention and state spaces in plain torch, many times slower"
)
MAX_PASSES = 3  # a module around a mixer may keep a state of its own
# Largest relative difference, in the Euclidean norm, of outputs and of gradients
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
TOLERANCE_ON_GPU = 5e-3  # float32: the kernels multiply in TensorFloat-32
TOLERANCE_IN_16_BITS = 5e-2
MIN_GRADIENT = 1e-2  # of a mixer's largest gradient: smaller ones are compared with that


@dataclass(frozen=True)
class Mixers:
    """How many mixers of a decoder start anew at each document."""

    in_one_call: int
    by_document: int

    @property
    def count(self) -> int:
        return self.in_one_call + self.by_document


def install_mixers(setup: TrainingSetup) -> Mixers:
    """Reset every mixer of a model's decoder at the documents of its packed batches.

    With train.fast_path=false each runs its own code on one document after another.
    Raises: Unsupported with the module that keeps a state whatever is tried.
    """
    packed = watch_documents(setup.base, setup.decoder)
    reason = why_no_fla()
    if setup.on_gpu and reason and likely_mixers(setup.decoder):
        logger.warning(WITHOUT_FLA, reason)
    use_kernels = setup.config.train.fast_path is not False
    is_measurable = setup.has_values and setup.zero_stage != 3
    if use_kernels and setup.zero_stage != 3:
        install_gated_norms(setup)
    if not is_measurable:
        for module in likely_mixers(setup.decoder):
            install_mixer(module, packed, use_kernels)
        return _counted(setup.decoder)
    decoder = setup.decoder
    with as_it_was(decoder, setup.process.device), setup.process.autocast(), torch_code():
        decoder.eval()
        _install_what_leaks(setup, packed, use_kernels)
    return _counted(setup.decoder)


def _install_what_leaks(setup: TrainingSetup, packed: PackedDocuments, use_kernels: bool) -> None:
    """Reset mixers from the innermost outwards, until no module leaks."""
    kinds = kinds_of(setup.decoder, setup.base.config.get_text_config())
    for _ in range(MAX_PASSES):
        found = find_mixers(setup.decoder, kinds, setup.gathered)
        if not found:
            return
        for call in found:
            alike = [module for module in kinds if kinds[module] == kinds[call.module]]
            with setup.gathered(call.module):
                _install_kind(alike, call, packed, use_kernels, setup.process.is_main)
    name = type(found[0].module).__name__
    raise Unsupported(f"{name} keeps a state across documents")


def _install_kind(
    alike: list[nn.Module],
    call: ModuleCall,
    packed: PackedDocuments,
    use_kernels: bool,
    says: bool,
) -> None:
    """Install mixers of one kind, by what the one of a call does.

    `says` is whether this rank shows progress.
    """
    name = type(call.module).__name__
    fast = rebound(type(call.module).forward) if use_kernels else None
    is_fast = fast is not None
    if fast is not None:
        tune_kernels(call, fast, packed, says)
        difference = _difference_in_one_call(call, packed)
        is_fast = difference <= _tolerance(call)
        if not is_fast:
            logger.warning(
                "%s: packed documents in one call differ by %.2g; it runs them one by one",
                name,
                difference,
            )
    for module in alike:
        install_mixer(module, packed, is_fast)
    try:
        with torch_code(not is_fast):
            does_leak = leaks(call)
    except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of documents
        raise
    except RuntimeError as error:
        logger.debug("%s on one document: %s", name, error)
        raise Unsupported(f"{name} reads other documents and does not run on one alone") from None
    if does_leak:
        raise Unsupported(f"{name} keeps a state across documents")


def _difference_in_one_call(call: ModuleCall, packed: PackedDocuments) -> float:
    """Return how far all documents in one call are from one after another, relative."""
    fast = rebound(type(call.module).forward)
    expected, *expected_gradients = _output_and_gradients(call, packed, None)
    found, *found_gradients = _output_and_gradients(call, packed, fast)
    differences = [(found - expected).norm() / expected.norm()]
    # a gradient that is nearly zero, such as that of a decay, is rounding
    least = MIN_GRADIENT * max(gradient.norm() for gradient in expected_gradients)
    for one, two in zip(found_gradients, expected_gradients, strict=True):
        differences.append((one - two).norm() / two.norm().clamp(min=least))
    return max(differences).item()


def _output_and_gradients(
    call: ModuleCall, packed: PackedDocuments, fast: Forward | None
) -> list[Tensor]:
    """Return a mixer's output and the gradients of its input and trained weights, in float32."""
    trained = [p for p in call.module.parameters() if p.requires_grad]
    with torch.enable_grad(), torch_code(fast is None):
        args = tuple(_leaf(value) for value in call.args)
        kwargs = {name: _leaf(value) for name, value in call.kwargs.items()}
        hidden = next(value for value in (*args, *kwargs.values()) if is_hidden(value))
        output = tokens_of(forward_packed(call.module, packed, fast, args, kwargs))
        direction = torch.linspace(-1, 1, output.numel(), device=output.device)
        loss = (output.float().flatten() * direction).sum()
        gradients = torch.autograd.grad(loss, [hidden, *trained], allow_unused=True)
    found = [output.detach(), *(gradient for gradient in gradients if gradient is not None)]
    return [tensor.float() for tensor in found]


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if is_hidden(value) else value


def _tolerance(call: ModuleCall) -> float:
    hidden = next(value for value in (*call.args, *call.kwargs.values()) if is_hidden(value))
    if hidden.dtype.itemsize == 2:
        return TOLERANCE_IN_16_BITS
    return TOLERANCE_ON_GPU if hidden.is_cuda else TOLERANCE[hidden.dtype]


def _counted(decoder: nn.Module) -> Mixers:
    states = [vars(module).get("mixer_state") for module in decoder.modules()]
    installed = [state for state in states if state is not None]
    in_one_call = sum(state.fast is not None for state in installed)
    return Mixers(in_one_call, len(installed) - in_one_call)
