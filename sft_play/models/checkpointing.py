"""Checkpoint the activations of single decoder layers, which saves memory and costs time.

Why whole layers: with fused kernels, a layer saves little besides the inputs of its matrix
multiplications. Saving their outputs and recomputing the rest (selective checkpointing by
operation) would free a seventh of the bytes. Attention and MLP save bytes in proportion to their
time, so neither half is a better candidate for recomputation. An 8B model with adapters on an H200,
8192 tokens per step:

    checkpointed layers of 32    0      8      16     31
    tokens/s                 18.4k  16.5k   14.9k  12.7k
    GiB                       43.0   36.8    30.5   18.7

Why the first layers: the backward pass reaches them last, when later layers have freed their
activations.

Inputs in host memory (`LayerOffloading`): a checkpointed layer saves only its input. For an 8B
model and a row of 262,144 tokens, the inputs of all layers are 64 GiB. Each input is copied to
pinned host memory while the next layer computes. It is fetched back while the layer after it runs
its backward pass. Both copies run on their own stream. With such long rows, a layer computes for
longer than its input needs over PCIe.

The GPU stores IN_FLIGHT inputs in the forward pass. The last ones are still on the GPU when the
backward pass starts, and are not fetched. Fetched inputs are bitwise identical.

Lifetimes: an input is freed after the compute stream has been made to wait for its copy. So its
memory is reused only by work that comes after the copy. Pinned memory is kept for the next step.
Pinning it again would stop the GPU. torch's own pool would double if the CPU is a step ahead.
"""

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import varlen  # noqa: F401 - registers its operation
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_kernels.linears.tiles import set_tiled
from sft_kernels.training_setup import base_model_of
from sft_play.models.architecture import decoder_layers, encoders_of
from sft_play.models.weight_offloading import CopyStream, pin

logger = logging.getLogger(__name__)

IN_FLIGHT = 2  # inputs on the GPU that wait for their copy to the host
MIN_BYTES = 2**20  # the smallest tensor worth a copy: e.g. masks stay on the GPU


def checkpoint_layers(
    model: PreTrainedModel, count: int, offloaded: int = 0, keeps_attention: bool = False
) -> None:
    """Checkpoint the first `count` decoder layers, and no others.

    In training they save only their input, and recompute the rest in the backward pass. With
    `keeps_attention`, the outputs of attention are saved as well. The inputs of the first
    `offloaded` layers are saved in host memory. A model without checkpointable layers uses its own
    checkpointing, for the full model.

    Raises: ValueError if the model does not support checkpointing at all.
    """
    layers = decoder_layers(model)
    function = functools.partial(checkpoint, use_reentrant=False)
    if keeps_attention:
        contexts = functools.partial(create_selective_checkpoint_contexts, _attention_operations())
        function = functools.partial(function, context_fn=contexts)
    for layer in _layers_of_trained_encoders(model):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function
    if not layers:
        _checkpoint_whole_model(model, is_on=count > 0)
        return
    # Not model.gradient_checkpointing_enable: for reentrant checkpointing it makes the embeddings'
    # output require a gradient. The first layer would then compute its input gradient.
    offloading = functools.partial(LayerOffloading().checkpoint, function)
    is_placed = len(set(getattr(base_model_of(model), "hf_device_map", {}).values())) > 1
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < count
        set_tiled(layer, number < count)
        own = offloading if number < offloaded else function
        if is_placed:
            own = functools.partial(_checkpoint_on, next(layer.parameters()).device, own)
        layer._gradient_checkpointing_func = own


def _checkpoint_on(
    device: torch.device, checkpoints: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    """Checkpoint a layer after moving its arguments to its device.

    The checkpoint then restores that device's random state.
    """
    return checkpoints(function, *send_to_device(args, device))


def _attention_operations() -> list[OpOverload]:
    """Return the operations whose outputs are worth saving for long rows."""
    aten = torch.ops.aten
    return [
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]


def _layers_of_trained_encoders(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers of trained encoders: always recomputed, because patches are many."""
    found = []
    for encoder in encoders_of(base_model_of(model)).values():
        if any(parameter.requires_grad for parameter in encoder.parameters()):
            found += [
                one for one in encoder.modules() if isinstance(one, GradientCheckpointingLayer)
            ]
    return found


def _checkpoint_whole_model(model: PreTrainedModel, is_on: bool) -> None:
    if is_on:
        logger.warning(
            "checkpointing: %s has no layers to choose from: it checkpoints in its own way",
            type(model).__name__,
        )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()


class Offloaded:
    """A saved tensor that is on the host, on its device, or being copied."""

    def __init__(self, tensor: Tensor, previous: Callable[[], "Offloaded | None"]):
        self.on_device: Tensor | None = tensor
        self.on_host: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # the end of the latest copy
        self.device = tensor.device
        self.previous = previous  # returns the tensor saved before; None if it is not needed


class LayerOffloading:
    """Checkpoints the layers of one model and stores their inputs in host memory."""

    def __init__(self, min_bytes: int = MIN_BYTES):
        self.min_bytes = min_bytes
        self._waiting: deque[Offloaded] = deque()
        self._last: Callable[[], Offloaded | None] = lambda: None  # a weak reference
        self._streams: dict[torch.device, CopyStream] = {}
        # free buffers in host memory, by the device whose stream fills them
        self._free: dict[torch.device, list[Tensor]] = {}

    def checkpoint(
        self, checkpoints: Callable[..., Any], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Checkpoint a layer so that its large arguments are saved on the host."""
        # checkpoint hides what the layer saves from these hooks: they see only its arguments
        with saved_tensors_hooks(self._pack, self._unpack):
            return checkpoints(function, *args)

    def _pack(self, tensor: Tensor) -> Tensor | Offloaded:
        if not tensor.is_floating_point() or tensor.nbytes < self.min_bytes:
            return tensor
        tensor = tensor.detach()
        saved = Offloaded(tensor, self._last)
        saved.on_host = self._host_memory(saved, tensor)
        saved.copied = self._stream_of(saved).copy(saved.on_host, tensor)
        self._last = weakref.ref(saved)
        self._waiting.append(saved)
        while len(self._waiting) > IN_FLIGHT:
            oldest = self._waiting.popleft()
            self._stream_of(oldest).wait(oldest.copied)
            oldest.on_device = None
        return saved

    def _unpack(self, saved: Tensor | Offloaded) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved in self._waiting:
            self._waiting.remove(saved)
        self._fetch(saved)
        self._stream_of(saved).wait(saved.copied)
        tensor = saved.on_device
        saved.on_device = None
        previous = saved.previous()
        if previous is not None:
            self._fetch(previous)
        return tensor

    def _host_memory(self, saved: Offloaded, tensor: Tensor) -> Tensor:
        """Return memory for a tensor: the smallest free buffer that is large enough, or a new one.

        The memory is free again when `saved` is deleted. All copies of a device are on one stream,
        so a later copy into it waits for an earlier copy out of it.
        """
        free = self._free.setdefault(tensor.device, [])
        enough = [buffer for buffer in free if len(buffer) >= tensor.nbytes]
        if enough:
            buffer = min(enough, key=len)
            free[:] = [other for other in free if other is not buffer]
        else:
            if free:
                free.pop()  # too small: the new buffer replaces it
            buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
            if tensor.is_cuda:
                pin(buffer, "train.activation_offloading", "set a smaller MODEL_MAX_SEQ_LEN")
        weakref.finalize(saved, free.append, buffer).atexit = False
        return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _fetch(self, saved: Offloaded) -> None:
        """Start the copy to the device, if it is not there."""
        if saved.on_device is None:
            saved.on_device = torch.empty_like(saved.on_host, device=saved.device)
            saved.copied = self._stream_of(saved).copy(saved.on_device, saved.on_host)

    def _stream_of(self, saved: Offloaded) -> CopyStream:
        if saved.device not in self._streams:
            self._streams[saved.device] = CopyStream(saved.device)
        return self._streams[saved.device]
