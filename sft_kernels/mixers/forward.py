"""Stateful token mixers on packed batches: convolutions, linear attention and state spaces.

A stateful mixer reads earlier tokens through a state. The state must be empty at the start of each
document of a packed batch. `forward_by_document` runs the mixer's original implementation on each
document, which is exact for any mixer. Mixers that call known kernels run once over all documents,
after a proof that the results are the same.

A mixer of transformers calls a few functions by name: a causal convolution and a scan. `rebound`
returns a copy of its forward method in which these names refer to the functions below. They start
each document of a packed batch with an empty state. On a GPU they call the kernels of
flash-linear-attention, which accept the boundaries; elsewhere they call the original functions.

Legend: B rows, T tokens per row or in the flattened rows, N documents, C channels, W width of a
convolution, H heads, G groups of heads, P features per head, S per state.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from sft_kernels.boundaries import BOUNDARIES, Documents
from sft_kernels.linear_attention import (
    fla_convolution,
    fla_delta_rule,
    fla_linear_attention,
    uses_fla,
)
from sft_kernels.mixers import indices
from sft_kernels.packed import (
    PackedDocuments,
    first_tensor,
    forward_by_document,
    is_unmasked,
    unflatten,
)
from sft_kernels.training_setup import fuse, is_training
from sft_kernels.trial import Forward

Kernel = Callable[..., Any]

FLA_ACTIVATIONS = (None, "silu", "swish")  # of flash-linear-attention's convolution
MIN_FLA_STATE = 16  # features of a state: the minimum for tensor cores

# The documents of the call in progress. Not an argument: a mixer's original implementation would
# not pass it on.
_documents: ContextVar[Documents | None] = ContextVar("documents", default=None)


@contextmanager
def documents_of_call(batch: Documents | None) -> Iterator[None]:
    """Make kernels called inside this context start again at each document of a packed batch."""
    token = _documents.set(batch)
    try:
        yield
    finally:
        _documents.reset(token)


@functools.cache
def rebound(forward: Callable) -> Callable | None:
    """Return a copy of a mixer's forward method that calls the kernels of this module.

    Return None if it calls no kernel that this module knows.
    """
    function = inspect.unwrap(forward)
    known = [name for name in function.__code__.co_names if name in KERNELS]
    if not known:
        return None
    replaced = dict(function.__globals__)
    for name in known:
        replaced[name] = KERNELS[name](function.__globals__[name])
    copied = FunctionType(
        function.__code__, replaced, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _boundaries(batch: Documents | None) -> dict[str, Tensor]:
    """Return the document boundaries as arguments of flash-linear-attention."""
    if batch is None:
        return {}
    return {
        "cu_seqlens": indices.long_boundaries(batch),
        "cu_seqlens_cpu": indices.boundaries_on_cpu(batch),
    }


def _convolution(own: Kernel) -> Kernel:
    """Return a causal convolution of (1, C, T) with weights (C, W)."""

    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the convolution (1, C, T) of hidden states (1, C, T)."""
        batch = _documents.get()
        is_tree = batch is not None and batch.tree is not None
        if uses_fla(hidden_states) and activation in FLA_ACTIVATIONS and not is_tree:
            x = hidden_states.transpose(1, 2)
            mixed = fla_convolution(x, weight, bias, activation, **_boundaries(batch))
            return mixed.transpose(1, 2)
        if batch is None:
            return own(hidden_states, weight, bias, activation=activation)
        found, places = indices.places_with_ancestors(batch, weight.shape[-1] - 1)
        spread = functional.pad(hidden_states, (0, 1))[..., found]  # zeros before a document
        with documents_of_call(None):
            return convolve(spread, weight, bias, activation)[..., places]

    return convolve


def _delta_rule(own: Kernel, name: str) -> Kernel:
    """Return a delta rule; `name` is the operator in flash-linear-attention."""
    in_groups = _in_groups(own, ("query", "key", "value", "g", "beta"), dim=1)

    def delta_rule(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        """Return the delta rule, with the state reset at each document."""
        batch = _documents.get()
        inputs = (query, key, value, kwargs["g"], kwargs["beta"])
        is_normed = kwargs["use_qk_l2norm_in_kernel"]
        if batch is not None and batch.tree is not None:
            run = partial(_delta_rule_of_segments, own, name, is_normed)
            return _by_levels(run, inputs, indices.segments(batch)), None
        is_plain = not kwargs.get("output_final_state")
        if not (uses_fla(query) and is_plain):
            return in_groups(query, key, value, **kwargs)
        return fla_delta_rule(name, *inputs, is_normed=is_normed, **_boundaries(batch))[0], None

    return delta_rule


def _by_levels(
    run: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], segments: indices.Segments
) -> Tensor:
    """Return the outputs (1, T, ...) of a scan over trees: a segment begins with a state before it.

    `run(inputs, level, states)` returns the outputs of a level's segments, and their last states.
    """
    outputs: list[Tensor] = []
    states: Tensor | None = None
    for level in segments.levels:
        if states is not None:
            states = states.index_select(0, level.parents)
        own = [tensor.index_select(1, level.tokens) for tensor in inputs]
        output, states = run(own, level, states)
        outputs.append(output)
    return torch.cat(outputs, dim=1).index_select(1, segments.places)


def _delta_rule_of_segments(
    own: Kernel,
    name: str,
    is_normed: bool,
    inputs: Sequence[Tensor],
    level: indices.Level,
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the delta rule (1, T, H, P) of segments, and their last states (S, H, ...)."""
    options = {"initial_state": states, "output_final_state": True}
    if uses_fla(inputs[0]):
        return fla_delta_rule(name, *inputs, is_normed=is_normed, **level.boundaries, **options)
    found = []
    parts = zip(*(tensor.split(level.lengths, dim=1) for tensor in inputs), strict=True)
    for number, (query, key, value, decay, beta) in enumerate(parts):
        if states is not None:
            options["initial_state"] = states[number : number + 1]
        found.append(
            own(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=is_normed, **options)
        )
    outputs, last = zip(*found, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(last)


def _mamba2_scan(own: Kernel) -> Kernel:
    """Return the scan of Mamba 2: inputs (1, T, H, P), steps (1, T, H), decays (H,)."""
    in_groups = _in_groups(own, ("hidden_states", "dt", "B", "C"), dim=1)

    def scan(*args: Any, **kwargs: Any) -> Any:
        """Return the scan (1, T, H, P)."""
        hidden, _, _, key, *_ = args
        is_plain = kwargs.get("z") is None and not kwargs.get("return_final_states")
        if uses_fla(hidden) and is_plain and key.shape[-1] >= MIN_FLA_STATE:
            return _mamba2_by_linear_attention(*args, **kwargs)
        return in_groups(*args, **kwargs)

    return scan


def _mamba2_by_linear_attention(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Return Mamba 2's scan, computed as linear attention with one decay per head and token.

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t and y_t = C_t h_t + D x_t: queries C, keys B and values
    dt x (Dao and Gu 2024, equation 1). The kernel chooses its chunk size.
    """
    heads = hidden_states.shape[2]
    steps = dt.float()  # (1, T, H)
    if dt_bias is not None:
        steps = steps + dt_bias.float()
    if dt_softplus:
        steps = functional.softplus(steps)
    steps = steps.clamp(*dt_limit)
    queries = C.repeat_interleave(heads // C.shape[2], dim=2)  # (1, T, H, S)
    keys = B.repeat_interleave(heads // B.shape[2], dim=2)
    values = (hidden_states * steps[..., None]).to(hidden_states.dtype)
    decays = steps * A.float()
    boundaries = _boundaries(_documents.get())
    mixed = fla_linear_attention(queries, keys, values, decays, **boundaries)
    if D is not None:
        mixed = mixed + (hidden_states * D[:, None]).to(mixed.dtype)
    return mixed


def _not_available(own: Kernel) -> Kernel:
    """Return a kernel that computes nothing, so that the mixer calls its separate functions.

    The real kernel computes convolution, scan and output projection in one call. It ignores the
    documents and the adapter of the projection.
    """
    return lambda *_, **__: None


def _in_groups(own: Kernel, names: tuple[str, ...], dim: int) -> Kernel:
    """Return a kernel that runs `own` on groups of documents of similar length, one per row.

    Each tensor in `names` has one row, with its tokens in dimension `dim`.
    """
    signature = inspect.signature(own)

    def scan(*args: Any, **kwargs: Any) -> Any:
        """Return what `own` returns, computed with each document as a row of a batch."""
        batch = _documents.get()
        if batch is None:
            return own(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        flat = {name: call.arguments.get(name) for name in names}
        outputs: list[Tensor] = []
        for tokens in indices.groups(batch).tokens:
            for name, value in flat.items():
                if value is not None:  # to a document per row
                    rows = value.index_select(dim, tokens.flatten()).unflatten(dim, tokens.shape)
                    call.arguments[name] = rows.squeeze(0).movedim(dim - 1, 0)
            output = own(*call.args, **call.kwargs)
            mixed = output[0] if isinstance(output, tuple) else output
            outputs.append(mixed.movedim(0, dim - 1).flatten(dim - 1, dim))
        together = torch.cat(outputs, dim=dim - 1)
        mixed = together.index_select(dim - 1, indices.groups(batch).places)[None]
        return (mixed, None) if isinstance(output, tuple) else mixed

    return scan


# The names of the kernels that the mixers of transformers call
KERNELS: dict[str, Callable[[Kernel], Kernel]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": partial(_delta_rule, name="chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": partial(_delta_rule, name="chunk_kda"),
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _not_available,
    # inputs and steps (1, C, T), B and C (1, S, T)
    "mamba_selective_scan": partial(
        _in_groups, names=("hidden_states", "dt", "B", "C", "z"), dim=2
    ),
    "mamba_inner_fn": _not_available,
}

# Arguments that tell attention about documents. A mixer's original implementation that reads them
# may reset its state at the wrong tokens, or reset only one of its two states.
LEFT_OUT = (*BOUNDARIES, "seq_idx")


# Those that pass a state on from a tree's trunk to each branch
OF_TREES = {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}


@dataclass
class MixerState:
    """How one mixer runs: set on its module as `mixer_state`."""

    packed: PackedDocuments
    fast: Forward | None  # its class's forward method with the functions of KERNELS

    @property
    def takes_trees(self) -> bool:
        return self.fast is not None and {*self.fast.__code__.co_names} & {*KERNELS} <= OF_TREES


def install_mixer(module: nn.Module, packed: PackedDocuments, is_fast: bool = True) -> None:
    """Make a mixer reset its state at each document of the batches in `packed`."""
    fast = rebound(type(module).forward) if is_fast else None
    module.mixer_state = MixerState(packed, fast)
    fuse([module], mixer_forward)


def mixer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward method of a stateful mixer.

    Evaluation and generation run the original implementation, with its masks and its cache.
    """
    state: MixerState = self.mixer_state
    batch = state.packed.batch
    own = type(self).forward
    # drop the mask if the batch needs none
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
    """Return a mixer's output for the documents of a packed batch.

    All documents run in one call of `fast`, or one after another if it is None.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in LEFT_OUT}
    if fast is None:
        lengths = packed.batch.lengths
        with packed.showing(None):  # hide it from mixers within this one
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
