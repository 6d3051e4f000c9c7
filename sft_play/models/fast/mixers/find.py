"""Which modules of a decoder keep a state across tokens: measured, by no name.

A few documents go through the decoder as one packed row. A module leaks if its output for the later
documents changes with what it gets for the first. The innermost modules that leak are the mixers to
reset. Linears and norms cannot leak, and attention leaks only where its mask ignores documents.

Legend: T tokens of the row.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sft_play.models.fast.capture import Kind
from sft_play.models.fast.mixers.kernels import rebound
from sft_play.models.sharding import device_of

LENGTHS = (19, 1, 3, 23)  # of the documents, some shorter than a convolution is wide
# Share of the change of the first document's output that counts as a leak. Rounding that depends on
# the other tokens of a batch, as in experts, is far below, and a state is above.
MIN_LEAK = 0.01


@dataclass(frozen=True)
class ModuleCall:
    """A module, and what the decoder called it with."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]


def packed_batch(device: torch.device, vocabulary: int) -> dict[str, Any]:
    """Return a packed batch of one row of documents, as `PackCollator` makes it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ends = torch.tensor(LENGTHS).cumsum(0)
    boundaries = functional.pad(ends, (1, 0)).to(device, torch.int32)
    return {
        "input_ids": ids.to(device),
        "position_ids": positions.to(device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": False,
    }


def find_mixers(
    decoder: nn.Module,
    kinds: dict[nn.Module, Kind],
    gathered: Callable[[nn.Module], AbstractContextManager] = nullcontext,
) -> list[ModuleCall]:
    """Return one call of each kind of module that keeps a state across documents.

    `kinds` are those of `capture.kinds_of`. The decoder is in evaluation mode: dropout would look
    like a leak. In the context `gathered` a module has its weights, where ranks divide them.
    """
    leaking: list[ModuleCall] = []
    for call in _calls_of_each_kind(decoder, kinds):
        with gathered(call.module):
            if leaks(call):
                leaking.append(call)
    leaking_kinds = {kinds[call.module] for call in leaking}
    innermost: list[ModuleCall] = []
    for call in leaking:
        inner = {kinds[child] for child in call.module.modules() if child is not call.module}
        if not inner & leaking_kinds:
            innermost.append(call)
    return innermost


def likely_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules that look as if they kept a state, where nothing can be measured.

    They call kernels that are known to keep one, or own a convolution over tokens.
    """
    found: list[nn.Module] = []
    for module in decoder.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        if has_convolution or rebound(type(module).forward) is not None:
            found.append(module)
    return found


@torch.no_grad()
def leaks(call: ModuleCall) -> bool:
    """Return whether the later documents of a call read the first."""
    before = tokens_of(call.module(*call.args, **call.kwargs))
    if before is None:
        return False
    args, kwargs = with_other_first_document(call)
    change = (tokens_of(call.module(*args, **kwargs)) - before).abs().float()
    first = change[:, : LENGTHS[0]].max()
    later = change[:, LENGTHS[0] :].max()
    return bool(later > MIN_LEAK * first)


def with_other_first_document(call: ModuleCall) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call with other hidden states for the first document."""
    is_changed = False

    def change(value: Any) -> Any:
        nonlocal is_changed
        if is_changed or not is_hidden(value):
            return value
        is_changed = True
        changed = value.clone()
        changed[:, : LENGTHS[0]] = -value[:, : LENGTHS[0]].flip(1)
        return changed

    args = tuple(change(value) for value in call.args)
    kwargs = {name: change(value) for name, value in call.kwargs.items()}
    return args, kwargs


def is_hidden(value: Any) -> bool:
    """Return whether a value has features of each token of the row: (1, T, features...)."""
    is_features = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3
    return is_features and value.shape[:2] == (1, sum(LENGTHS))


def tokens_of(output: Any) -> Tensor | None:
    """Return the first tensor of an output that has features of each token."""
    values: Iterable[Any] = output if isinstance(output, tuple) else (output,)
    return next((value for value in values if is_hidden(value)), None)


@torch.no_grad()
def _calls_of_each_kind(decoder: nn.Module, kinds: dict[nn.Module, Kind]) -> list[ModuleCall]:
    """Run a decoder in evaluation mode on packed documents; return a call of each kind."""
    calls: dict[Kind, ModuleCall] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if any(is_hidden(value) for value in (*args, *kwargs.values())):
            calls.setdefault(kinds[module], ModuleCall(module, args, kwargs))

    modules = [module for module in decoder.modules() if module is not decoder]
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    device = device_of(next(decoder.parameters()))
    try:
        decoder(**packed_batch(device, decoder.get_input_embeddings().weight.shape[0]))
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())
