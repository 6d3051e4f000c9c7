"""Capture real inputs of a decoder's modules, on which fused code is proved.

Modules that cannot differ form a kind: same class, attributes, shapes and children. The decoder
runs on a few tokens: on documents packed into one row, and on an unpacked batch. The inputs of the
first module of each kind are stored.

Legend: B rows, T tokens per row, N documents.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PretrainedConfig, PreTrainedModel

from sft_kernels.boundaries import Documents
from sft_kernels.expert_modules import find_experts, true_shape
from sft_kernels.modules import decoder_of
from sft_kernels.packed import watch_documents
from sft_kernels.process import Process
from sft_kernels.sharded import device_of

Kind = int  # the number of a kind of modules

PACKED = "packed"
PLAIN = "plain"
# Tokens per packed document. Some are shorter than the width of a convolution; the last is longer
# than a window
LENGTHS = (19, 1, 3, 23)
PAST_WINDOW = 8  # tokens by which a document exceeds the longest window
SEED = 0
# Attributes that do not change what is computed: those that differ between layers (PEFT's kwargs
# contain the layer's name), and the source of the weights
IGNORED_ATTRIBUTES = frozenset(
    {"training", "layer_idx", "gradient_checkpointing", "kwargs", "name_or_path"}
)


class ForwardCall(NamedTuple):
    """The arguments of one forward call, and the shape that the original code returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class CapturedModule:
    """A module of a kind, with its inputs for the packed and the unpacked batch."""

    module: nn.Module
    calls: dict[str, ForwardCall]


@dataclass(frozen=True)
class ProofInputs:
    """The inputs of one module of each kind of a decoder."""

    samples: dict[Kind, CapturedModule]
    kinds: dict[nn.Module, Kind]
    documents: Documents
    signature: str  # covers all kinds


def kinds_of(
    root: nn.Module, config: PretrainedConfig, numbers: dict[Any, Kind] | None = None
) -> dict[nn.Module, Kind]:
    """Return the kind of every module under `root`, itself included.

    The signature of each kind is added to `numbers`.
    """
    kinds: dict[nn.Module, Kind] = {}
    numbers = {} if numbers is None else numbers

    def visit(module: nn.Module) -> Kind:
        if module not in kinds:
            children = tuple((name, visit(child)) for name, child in module.named_children())
            # each parametrized module, e.g. experts in 4 bits, has a separate class
            own = (type_before_parametrizations(module), _attributes(module), _tensors(module))
            signature = (*own, _config_of_layer(module, config), children)
            kinds[module] = numbers.setdefault(signature, len(numbers))
        return kinds[module]

    visit(root)
    return kinds


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    """Return the simple attributes of a module, by name."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or name in IGNORED_ATTRIBUTES:
            continue
        simple = _simple(value)
        if simple is not None:
            found.append((name, simple))
    return tuple(found)


def _simple(value: Any) -> Any:
    """Return a comparable form of a number, text, function or container of them, else None."""
    if isinstance(value, bool | int | float | str):
        return (type(value), value)
    if isinstance(value, list | tuple):
        return tuple(_simple(item) for item in value)
    if isinstance(value, dict):
        return tuple((str(name), _simple(item)) for name, item in value.items())
    return getattr(value, "__qualname__", None)


def _tensors(module: nn.Module) -> tuple[Any, ...]:
    """Return what is known about a module's direct parameters, without their values."""
    return tuple(
        (name, true_shape(parameter), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters(recurse=False)
    )


def _config_of_layer(module: nn.Module, config: PretrainedConfig) -> tuple[Any, ...]:
    """Return the items in a config's per-layer lists that belong to a module's layer."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        return ()
    found = []
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            found.append((name, _simple(value[layer])))
    return tuple(found)


def capture(
    base: PreTrainedModel,
    process: Process,
    longest_row: int | None = None,
    names_documents: bool = False,
) -> ProofInputs:
    """Return the inputs of one module of each kind, from two runs of the decoder.

    Documents are longer than the longest window, but not longer than `longest_row`. Call this
    before anything is installed. With `names_documents`, the decoder runs once, on documents of
    LENGTHS. The batch then names its documents, as the collator's batches do.
    """
    decoder = decoder_of(base)
    device = device_of(next(base.parameters()))  # in a trace it differs from the process's
    numbers: dict[Any, Kind] = {}
    kinds = kinds_of(decoder, base.config.get_text_config(), numbers)
    samples: dict[Kind, CapturedModule] = {}
    window = 0 if names_documents else _longest_window(base) + PAST_WINDOW
    longest = longest_row or window + sum(LENGTHS)
    last = min(window, longest - sum(LENGTHS))  # a packed row is not longer than a training row
    batches, documents = _batches(base, device, min(window, longest), last)
    if names_documents:
        batches = {PACKED: {**batches[PACKED], **documents.arguments}}
        watch_documents(base, decoder).batch = documents
    for name, inputs in batches.items():
        with _recording(decoder, kinds, samples, name), preserving_state(decoder, device):
            decoder.eval()
            with torch.no_grad(), process.autocast(), _passing_experts(decoder):
                decoder(**inputs, use_cache=False)
    return ProofInputs(samples, kinds, documents, repr([*numbers]))


def _batches(
    base: PreTrainedModel, device: torch.device, row_tokens: int, last_tokens: int
) -> tuple[dict[str, dict[str, Any]], Documents]:
    """Return a packed row of documents and an unpacked batch of two rows.

    The rows have `row_tokens` or more, and the last document `last_tokens` or more.
    """
    last = max(LENGTHS[-1], last_tokens)
    lengths = (*LENGTHS[:-1], last)
    vocabulary = base.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)

    def draw(rows: int, tokens: int) -> Tensor:
        return torch.randint(vocabulary, (rows, tokens), generator=generator).to(device)

    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    packed = {"input_ids": draw(1, sum(lengths)), "position_ids": positions}
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    batches = {PACKED: packed, PLAIN: {"input_ids": draw(2, max(LENGTHS[-1], row_tokens))}}
    return batches, Documents(starts, last)


def _longest_window(base: PreTrainedModel) -> int:
    """Return the number of tokens in the longest sliding window or chunk of a model's config."""
    config = base.config.get_text_config()
    names = ("sliding_window", "attention_chunk_size")
    windows = [getattr(config, name, None) for name in names]
    return max((window for window in windows if isinstance(window, int)), default=0)


@contextlib.contextmanager
def _recording(
    decoder: nn.Module,
    kinds: dict[nn.Module, Kind],
    samples: dict[Kind, CapturedModule],
    batch: str,
) -> Iterator[None]:
    """Store the calls of the first module that runs of each kind."""

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        sample = samples.setdefault(kinds[module], CapturedModule(module, {}))
        if sample.module is module:
            call = ForwardCall(args, dict(kwargs), output_shape(output))
            # a later call in the same pass would have another input
            sample.calls.setdefault(batch, call)

    hooks = []
    for module in decoder.modules():
        hooks.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _passing_experts(decoder: nn.Module) -> Iterator[None]:
    """Make experts return their input: the original unpacks and adapts all in a layer."""
    before = {module: vars(module).get("forward") for module in find_experts(decoder)}
    for module in before:
        module.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:
                module.forward = own


def output_shape(output: Any) -> tuple[int, ...]:
    """Return the shape of a module's output, or of the first tensor of several."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return tuple(output.shape) if isinstance(output, Tensor) else ()


@contextlib.contextmanager
def preserving_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the training mode of every submodule, and the state of the random generators."""
    modes = [(child, child.training) for child in module.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for child, mode in modes:
            child.training = mode
