"""Find the stateful token mixers of a decoder, and make them reset their state at each document.

Stateful modules are found by measurement, not by name: a few documents go through the decoder as
one packed row. A module leaks if its output for the later documents depends on its input for the
first. The innermost modules that leak are the mixers to reset. Linears and norms cannot leak, and
attention leaks only if its mask ignores documents.

Each kind of mixer is verified before it is used. One call over packed documents must return the
same outputs and gradients as one call per document. No document may depend on the tokens of
another. The mixer's kernels are tuned first, on as many tokens as a step contains: Triton times the
variants of a kernel at its first call. It uses the fastest for all later sizes and stores the
choice on disk. A proof with only a few tokens would choose the variant for those.

Legend: T tokens of the row.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sft_kernels.attention.install import scales_by_place
from sft_kernels.boundaries import Documents
from sft_kernels.capture import LENGTHS, PACKED, ForwardCall, capture, preserving_state
from sft_kernels.linear_attention import torch_code, uses_fla, why_no_fla
from sft_kernels.mixers.forward import LEFT_OUT, forward_packed, install_mixer, rebound
from sft_kernels.norms.install import install_gated_norms
from sft_kernels.packed import PackedDocuments, hide_arguments, watch_documents
from sft_kernels.training_setup import TrainingSetup, Unsupported
from sft_kernels.trial import TOLERANCES, Forward, Result, Trial

logger = logging.getLogger(__name__)

# A change of later documents counts as a leak from this share of the first document's change on.
# Rounding that depends on other tokens of a batch, as in experts, is far below; a state is above.
MIN_LEAK = 0.01


@contextlib.contextmanager
def hiding_documents(decoder: nn.Module) -> Iterator[None]:
    """Call likely mixers without the arguments that name documents.

    With them, the original implementation may reset only one of its states, or fail if it has no
    kernels.
    """
    with contextlib.ExitStack() as hooks:
        for module in likely_mixers(decoder):
            hooks.enter_context(hide_arguments(module, LEFT_OUT))
        yield


def find_mixers(setup: TrainingSetup) -> list[tuple[Trial, list[nn.Module]]]:
    """Return one call per kind of module with a state across documents, and that kind's modules.

    The decoder is in evaluation mode: dropout would look like a leak.
    """
    inputs = capture(setup.base, setup.process, names_documents=True)
    leaking: dict[int, Trial] = {}
    for kind, sample in inputs.samples.items():
        trial = Trial(sample.module, sample.calls[PACKED], setup.process, mixes_tokens=False)
        with setup.gathered(sample.module):
            if leaks(trial):
                leaking[kind] = trial
    innermost: list[tuple[Trial, list[nn.Module]]] = []
    for kind, trial in leaking.items():
        inner = {inputs.kinds[child] for child in trial.module.modules()} - {kind}
        if not inner & leaking.keys():
            alike = [module for module, other in inputs.kinds.items() if other == kind]
            innermost.append((trial, alike))
    return innermost


def likely_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules that appear to be stateful; used if nothing can be measured.

    They call kernels that are known to be stateful, or have a convolution over tokens.
    """
    found: list[nn.Module] = []
    for module in decoder.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        if has_convolution or rebound(type(module).forward) is not None:
            found.append(module)
    return found


@torch.no_grad()
def leaks(trial: Trial) -> bool:
    """Return whether the later documents of a call depend on the first."""
    call = trial.call
    if hidden_states(call) is None:
        return False
    before = tokens_of(trial.module(*call.args, **call.kwargs))
    if before is None:
        return False
    other = with_other_first_document(call)
    change = (tokens_of(trial.module(*other.args, **other.kwargs)) - before).abs().float()
    first = change[:, : LENGTHS[0]].max()
    later = change[:, LENGTHS[0] :].max()
    return bool(later > MIN_LEAK * first)


def with_other_first_document(call: ForwardCall) -> ForwardCall:
    """Return a call with other hidden states for the first document."""
    hidden = hidden_states(call)
    changed = hidden.clone()
    changed[:, : LENGTHS[0]] = -hidden[:, : LENGTHS[0]].flip(1)
    return tree_map_only(Tensor, lambda value: changed if value is hidden else value, call)


def hidden_states(call: ForwardCall, tokens: int = sum(LENGTHS)) -> Tensor | None:
    """Return the first argument that has features for each token of the row."""
    values = (*call.args, *call.kwargs.values())
    return next((value for value in values if is_hidden(value, tokens)), None)


def is_hidden(value: Any, tokens: int = sum(LENGTHS)) -> bool:
    """Return whether a value has features for each token of the row: (1, T, features...)."""
    is_features = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3
    return is_features and value.shape[:2] == (1, tokens)


def tokens_of(output: Any) -> Tensor | None:
    """Return the first tensor of an output that has features for each token."""
    values: Iterable[Any] = output if isinstance(output, tuple) else (output,)
    return next((value for value in values if is_hidden(value)), None)


TUNED_TOKENS = 8192
TUNED_DOCUMENT = 512  # tokens per document


def tune_kernels(trial: Trial, fast: Forward, packed: PackedDocuments) -> None:
    """Run a mixer's fast code forward and backward on TUNED_TOKENS, if its kernels need tuning."""
    with torch_code(False):
        if not uses_fla(next(trial.module.parameters())):
            return
        logger.info(
            "tuning the kernels of linear attention for this GPU, which a later run finds on disk"
        )
        call = tiled(trial.call)
        hidden = hidden_states(call, TUNED_TOKENS)
        with torch.enable_grad(), packed.showing(_documents(hidden.device)):
            hidden.requires_grad_()
            output = forward_packed(packed, fast, trial.module, *call.args, **call.kwargs)
            mixed = output[0] if isinstance(output, tuple) else output
            torch.autograd.grad(mixed.float().sum(), hidden)


def tiled(call: ForwardCall) -> ForwardCall:
    """Return a call with the tokens of its arguments repeated to TUNED_TOKENS."""

    def repeat(tensor: Tensor) -> Tensor:
        tokens = sum(LENGTHS)
        if tensor.dim() < 2 or tensor.shape[1] != tokens:
            return tensor
        indices = torch.arange(TUNED_TOKENS, device=tensor.device) % tokens
        return tensor.detach().index_select(1, indices)

    return tree_map_only(Tensor, repeat, call)


def _documents(device: torch.device) -> Documents:
    return Documents.of_lengths([TUNED_DOCUMENT] * (TUNED_TOKENS // TUNED_DOCUMENT)).on(device)


WITHOUT_FLA = (
    "%s: transformers computes linear attention and state spaces in plain torch, many times slower"
)
STATELESS = "no module keeps a state across documents"  # in the record of proofs
MAX_PASSES = 3  # a module around a mixer may have a state, too
MIN_GRADIENT = 1e-2  # of a mixer's largest gradient: smaller ones are compared with that


def install_mixers(setup: TrainingSetup) -> int:
    """Make a decoder's mixers reset their state at each packed document; return how many.

    If nothing is to be fused, the original implementation runs on one document after another.
    Raises: Unsupported with the name of a module whose state could not be reset.
    """
    packed = watch_documents(setup.base, setup.decoder)
    for module in setup.decoder.modules():
        if scales_by_place(module, setup.longest_row):
            install_mixer(module, packed, is_fast=False)
    reason = why_no_fla()
    if setup.on_gpu and reason and likely_mixers(setup.decoder):
        logger.warning(WITHOUT_FLA, reason)
    use_kernels = setup.why_off is None
    if use_kernels and setup.zero_stage != 3:
        install_gated_norms(setup)
    decoder = setup.decoder
    if setup.has_values and setup.zero_stage != 3:
        with (
            preserving_state(decoder, setup.process.device),
            setup.process.autocast(),
            torch_code(),
        ):
            decoder.eval()
            _install_what_leaks(setup, packed, use_kernels)
    else:
        for module in likely_mixers(decoder):
            install_mixer(module, packed, use_kernels)
    return sum("mixer_state" in vars(module) for module in decoder.modules())


def _install_what_leaks(setup: TrainingSetup, packed: PackedDocuments, use_kernels: bool) -> None:
    """Install mixers from the innermost outwards, until no module leaks."""
    if STATELESS in setup.proved:
        return
    for number in range(MAX_PASSES):
        with hiding_documents(setup.decoder):
            found = find_mixers(setup)
        if not found:
            if not number:
                setup.newly_proved[STATELESS] = 0.0
            return
        for trial, alike in found:
            with setup.gathered(trial.module):
                _install_kind(alike, trial, packed, use_kernels)
    name = type(found[0][0].module).__name__
    raise Unsupported(f"{name} keeps a state across documents")


def _install_kind(
    alike: list[nn.Module], trial: Trial, packed: PackedDocuments, use_kernels: bool
) -> None:
    """Install mixers of one kind, based on a trial of one of them."""
    name = type(trial.module).__name__
    fast = rebound(type(trial.module).forward) if use_kernels else None
    is_fast = fast is not None
    if fast is not None:
        tune_kernels(trial, fast, packed)
        with torch_code():
            own = trial.run(partial(forward_packed, packed, None))
        with torch_code(False):
            found = trial.run(partial(forward_packed, packed, fast))
        difference = _largest_difference(own, found)
        # on a GPU kernels multiply float32 in TensorFloat-32
        is_rounded = own.dtype == torch.float32 and own.tensors["output"].is_cuda
        is_fast = difference <= TOLERANCES[torch.float16 if is_rounded else own.dtype]
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
    except torch.OutOfMemoryError:  # a RuntimeError that has nothing to do with documents
        raise
    except RuntimeError as error:
        logger.debug("%s on one document: %s", name, error)
        raise Unsupported(f"{name} reads other documents and does not run on one alone") from None
    if does_leak:
        raise Unsupported(f"{name} keeps a state across documents")


def _largest_difference(own: Result, found: Result) -> float:
    """Return the largest relative difference of output or gradients, in the Euclidean norm."""
    sizes: dict[str, Tensor] = {}
    distances: dict[str, Tensor] = {}
    for name, tensor in own.tensors.items():
        if tensor is not None:
            sizes[name] = tensor.float().norm()
            distances[name] = (found.tensors[name].float() - tensor.float()).norm()
    output = distances.pop("output") / sizes.pop("output")
    # a gradient that is nearly zero, e.g. of a decay, is only rounding
    least = MIN_GRADIENT * max(sizes.values())
    gradients = [distances[name] / size.clamp(min=least) for name, size in sizes.items()]
    return max(output, *gradients).item()
