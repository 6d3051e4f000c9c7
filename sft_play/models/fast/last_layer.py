"""Find what the last layer may compute for labelled tokens alone, and prove it.

What these modules compute for some tokens is replaced by NaN. The logits of the other tokens must
stay as they are: then nothing that the loss reads there depends on it. In training zeros stand for
it, and with those all logits must be numbers: a norm without an epsilon would divide by zero, and
its gradient be NaN.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.models.architecture import decoder_layers
from sft_play.models.experts import computes_balance
from sft_play.models.fast.attention.forward import attention_forward
from sft_play.models.fast.capture import as_it_was
from sft_play.models.fast.labelled import NAME, LabelledTokens
from sft_play.models.fast.linears.install import mlp_forward
from sft_play.models.fast.setup import TrainingSetup, is_fused
from sft_play.models.sharding import device_of

# Two rows of tokens, 1 where results are replaced: in no regular order, so that a kept token reads
# a spoiled one at each small distance that a layer mixes, or where tokens lie in another order.
SPOILED = ((1, 0, 0, 1, 1, 0, 1, 0), (0, 1, 1, 0, 0, 1, 0, 1))
# Relative to the largest logit: experts in 16 bits that compute other tokens with these may round
# otherwise.
MAX_DIFFERENCE = 2**-6


def install_last_layer(setup: TrainingSetup) -> bool:
    """Let the last layer compute labelled tokens alone; return whether it may.

    Call it behind the fused loss, which reads no others. A trace computes all tokens. So does a
    model with a loss that balances experts: it reads what routers say of all tokens.
    """
    if computes_balance(setup.base):
        return False
    layers = decoder_layers(setup.decoder)
    if not layers or not setup.has_values or setup.has_packed_parts:
        return False
    candidates: list[nn.Module] = []
    for module in layers[-1].modules():
        if is_fused(module, mlp_forward) or is_fused(module, attention_forward):
            candidates.append(module)
    if not candidates:
        return False
    modules = _that_nobody_else_reads(setup, candidates)
    labelled = LabelledTokens(layers[-1])
    for module in modules:
        setattr(module, NAME, labelled)
    if modules:
        setattr(setup.base, NAME, labelled)
    return bool(modules)


@torch.no_grad()
def _that_nobody_else_reads(
    setup: TrainingSetup, candidates: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return modules that run once on all tokens, and whose results other tokens do not read."""
    base = setup.base
    device = device_of(next(base.parameters()))
    vocabulary = base.get_input_embeddings().weight.shape[0]
    is_spoiled = torch.tensor(SPOILED, dtype=torch.bool, device=device)  # (B, T)
    ids = torch.arange(is_spoiled.numel(), device=device).view_as(is_spoiled) % vocabulary
    with as_it_was(base, device):
        base.eval()
        with _counting_calls(candidates) as calls:
            expected = base(input_ids=ids, use_cache=False).logits
        modules = [module for module in candidates if calls[module] == [is_spoiled.numel()]]
        with _replaced(modules, is_spoiled.flatten(), torch.nan):
            unread = base(input_ids=ids, use_cache=False).logits
        with _replaced(modules, is_spoiled.flatten(), 0.0):
            as_trained = base(input_ids=ids, use_cache=False).logits
    if not as_trained.isfinite().all():
        return []
    is_kept = ~is_spoiled.to(expected.device)
    kept = expected[is_kept].float()
    difference = (kept - unread[is_kept].float()).abs().max()
    return modules if difference <= MAX_DIFFERENCE * kept.abs().max() else []


@contextlib.contextmanager
def _counting_calls(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[int]]]:
    """Note the tokens of each call of modules."""
    calls: dict[nn.Module, list[int]] = {module: [] for module in modules}

    def note(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        calls[module].append(_first(output).shape[:-1].numel())

    with _hooked(modules, note):
        yield calls


@contextlib.contextmanager
def _replaced(modules: Sequence[nn.Module], is_spoiled: Tensor, value: float) -> Iterator[None]:
    """Replace by a value what modules compute for spoiled tokens (B * T,)."""

    def spoil(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        hidden = _first(output)
        rows = is_spoiled.to(hidden.device).view(*hidden.shape[:-1], 1)
        spoiled = hidden.masked_fill(rows, value)
        return (spoiled, *output[1:]) if isinstance(output, tuple) else spoiled

    with _hooked(modules, spoil):
        yield


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Any) -> Iterator[None]:
    hooks = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
