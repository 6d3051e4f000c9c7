"""Token mixers that keep a state: convolutions, linear attention, state spaces, packed exactly.

Such a mixer reads the tokens before its own through a state, which must be empty where a document
of a packed batch begins. `forward_by_document` runs the mixer's own code on each document, which is
exact for any mixer. Mixers that call known kernels run once over all documents, with those of
`kernels`, after a proof that both are the same.

Legend: B rows, T tokens of a row.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from sft_play.models.fast.documents import (
    BOUNDARIES,
    PackedDocuments,
    first_tensor,
    forward_by_document,
    is_unmasked,
    unflatten,
)
from sft_play.models.fast.mixers.kernels import documents_of_call, rebound
from sft_play.models.fast.proof import Forward
from sft_play.models.fast.setup import fuse, is_training

# What a layer tells attention about documents. A mixer's own code that reads them would reset
# where it should not, or reset one of its two states.
LEFT_OUT = (*BOUNDARIES, "seq_idx")


@dataclass
class MixerState:
    """How one mixer runs: set on its module as `mixer_state`."""

    packed: PackedDocuments
    fast: Forward | None  # its own forward method with the functions of `kernels`


def install_mixer(module: nn.Module, packed: PackedDocuments, is_fast: bool = True) -> None:
    """Make a mixer start again at each document of the batches in `packed`."""
    fast = rebound(type(module).forward) if is_fast else None
    module.mixer_state = MixerState(packed, fast)
    fuse([module], mixer_forward)


def mixer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward method of a mixer that keeps a state.

    Evaluation and generation run the code of its class, with its masks and its cache.
    """
    state: MixerState = self.mixer_state
    batch = state.packed.batch
    own = type(self).forward
    # the mask of a batch that needs none
    kwargs = {name: None if is_unmasked(value) else value for name, value in kwargs.items()}
    is_plain = batch is None and not is_training(self)
    has_cache = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
    if is_plain or has_cache:
        return own(self, *args, **kwargs)
    if batch is None:
        with documents_of_call(None):
            return (state.fast or own)(self, *args, **kwargs)
    return forward_packed(state.packed, state.fast, self, *args, **kwargs)


def forward_packed(
    packed: PackedDocuments, fast: Forward | None, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run a mixer over the documents of a packed batch, and return what its own forward would.

    All documents in one call of `fast`, or one after another if it is None.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in LEFT_OUT}
    if fast is None:
        lengths = packed.batch.lengths
        with packed.showing(None):  # from mixers within this one
            return forward_by_document(lengths, module, *args, **kwargs)
    hidden = first_tensor(args, kwargs)
    rows, tokens = hidden.shape[:2]
    flat_args = tuple(_flatten(value, rows, tokens) for value in args)
    flat_kwargs = {name: _flatten(value, rows, tokens) for name, value in kwargs.items()}
    with documents_of_call(packed.batch.on(hidden.device)):
        output = fast(module, *flat_args, **flat_kwargs)
    return unflatten(output, rows, tokens)


def _flatten(value: Any, rows: int, tokens: int) -> Any:
    """Return tensors (B or 1, T, ...) as (1, B * T, ...), and anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_flatten(element, rows, tokens) for element in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens:
        return value
    return value.expand(rows, *value.shape[1:]).reshape(1, rows * tokens, *value.shape[2:])
