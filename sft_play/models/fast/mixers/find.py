"""Which modules of a decoder keep a state across tokens: measured, by no name.

A few documents go through the decoder as one packed row. A module leaks if its output for the later
documents changes with what it gets for the first. The innermost modules that leak are the mixers to
reset. Linears and norms cannot leak, and attention leaks only where its mask ignores documents.

Legend: T tokens of the row.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.fast.capture import LENGTHS, PACKED, Call, capture
from sft_play.models.fast.mixers.kernels import rebound
from sft_play.models.fast.proof import Trial
from sft_play.models.fast.setup import TrainingSetup

# Share of the change of the first document's output that counts as a leak. Rounding that depends on
# the other tokens of a batch, as in experts, is far below, and a state is above.
MIN_LEAK = 0.01


def find_mixers(setup: TrainingSetup) -> list[tuple[Trial, list[nn.Module]]]:
    """Return one call of each kind of module that keeps a state across documents, and that kind.

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
    """Return the modules that look as if they kept a state, where nothing can be measured.

    They call kernels that are known to keep one, or have a convolution over tokens.
    """
    found: list[nn.Module] = []
    for module in decoder.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        if has_convolution or rebound(type(module).forward) is not None:
            found.append(module)
    return found


@torch.no_grad()
def leaks(trial: Trial) -> bool:
    """Return whether the later documents of a call read the first."""
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


def with_other_first_document(call: Call) -> Call:
    """Return a call with other hidden states for the first document."""
    hidden = hidden_states(call)
    changed = hidden.clone()
    changed[:, : LENGTHS[0]] = -hidden[:, : LENGTHS[0]].flip(1)
    args = tuple(changed if value is hidden else value for value in call.args)
    kwargs = {name: changed if value is hidden else value for name, value in call.kwargs.items()}
    return Call(args, kwargs)


def hidden_states(call: Call, tokens: int = sum(LENGTHS)) -> Tensor | None:
    """Return the first argument that has features of each token of the row."""
    values = (*call.args, *call.kwargs.values())
    return next((value for value in values if is_hidden(value, tokens)), None)


def is_hidden(value: Any, tokens: int = sum(LENGTHS)) -> bool:
    """Return whether a value has features of each token of the row: (1, T, features...)."""
    is_features = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3
    return is_features and value.shape[:2] == (1, tokens)


def tokens_of(output: Any) -> Tensor | None:
    """Return the first tensor of an output that has features of each token."""
    values: Iterable[Any] = output if isinstance(output, tuple) else (output,)
    return next((value for value in values if is_hidden(value)), None)
