"""Find the token mixers of a decoder that keep a state, and make them start at each document.

Each kind of mixer proves itself before it is used: in one call over packed documents it must give
the outputs and gradients that it gives document by document, and no document may change with the
tokens of another.
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sft_play.models.fast.capture import as_it_was
from sft_play.models.fast.documents import PackedDocuments, watch_documents
from sft_play.models.fast.mixers.find import find_mixers, leaks, likely_mixers
from sft_play.models.fast.mixers.forward import forward_packed, install_mixer
from sft_play.models.fast.mixers.gated_norms import install_gated_norms
from sft_play.models.fast.mixers.kernels import rebound
from sft_play.models.fast.mixers.tuning import tune_kernels
from sft_play.models.fast.proof import TOLERANCES, Forward, Result, Trial
from sft_play.models.fast.setup import TrainingSetup, Unsupported
from sft_play.models.linear_attention import torch_code, why_no_fla

logger = logging.getLogger(__name__)

WITHOUT_FLA = (
    "%s: transformers computes linear attention and state spaces in plain torch, many times slower"
)
MAX_PASSES = 3  # a module around a mixer may keep a state of its own
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
    for _ in range(MAX_PASSES):
        found = find_mixers(setup)
        if not found:
            return
        for trial, alike in found:
            with setup.gathered(trial.module):
                _install_kind(alike, trial, packed, use_kernels)
    name = type(found[0][0].module).__name__
    raise Unsupported(f"{name} keeps a state across documents")


def _install_kind(
    alike: list[nn.Module], trial: Trial, packed: PackedDocuments, use_kernels: bool
) -> None:
    """Install mixers of one kind, by what the one of a trial does."""
    name = type(trial.module).__name__
    fast = rebound(type(trial.module).forward) if use_kernels else None
    is_fast = fast is not None
    if fast is not None:
        tune_kernels(trial, fast, packed)
        own, found = _results(trial, packed, fast)
        difference = _largest_difference(own, found)
        is_fast = difference <= _tolerance(own)
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
            does_leak = leaks(trial)
    except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of documents
        raise
    except RuntimeError as error:
        logger.debug("%s on one document: %s", name, error)
        raise Unsupported(f"{name} reads other documents and does not run on one alone") from None
    if does_leak:
        raise Unsupported(f"{name} keeps a state across documents")


def _results(trial: Trial, packed: PackedDocuments, fast: Forward) -> tuple[Result, Result]:
    """Return what a mixer computes one document after another, and for all of them in one call."""
    with torch_code():
        own = trial.run(partial(forward_packed, packed, None))
    with torch_code(False):
        return own, trial.run(partial(forward_packed, packed, fast))


def _largest_difference(own: Result, found: Result) -> float:
    """Return the largest relative difference of output and gradients, in the Euclidean norm."""
    sizes = {
        name: tensor.float().norm() for name, tensor in own.tensors.items() if tensor is not None
    }
    output = sizes.pop("output")
    differences = [_distance(own, found, "output") / output]
    # a gradient that is nearly zero, such as that of a decay, is rounding
    least = MIN_GRADIENT * max(sizes.values())
    for name, size in sizes.items():
        differences.append(_distance(own, found, name) / size.clamp(min=least))
    return max(differences).item()


def _distance(own: Result, found: Result, name: str) -> Tensor:
    return (found.tensors[name].float() - own.tensors[name].float()).norm()


def _tolerance(own: Result) -> float:
    """Return how far results may be apart: on a GPU kernels multiply float32 in TensorFloat-32."""
    is_rounded = own.dtype == torch.float32 and own.tensors["output"].is_cuda
    return TOLERANCES[torch.float16 if is_rounded else own.dtype]


def _counted(decoder: nn.Module) -> Mixers:
    states = [vars(module).get("mixer_state") for module in decoder.modules()]
    installed = [state for state in states if state is not None]
    in_one_call = sum(state.fast is not None for state in installed)
    return Mixers(in_one_call, len(installed) - in_one_call)
