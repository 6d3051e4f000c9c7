"""Offload decoder layers' frozen weights to host memory, except while their layer computes.

The frozen tensors of an offloaded layer are one block of pinned host memory, which all ranks of a
machine share. On the GPU, offloaded layers alternate between two buffers: layer i uses buffer i %
2. A layer's block is copied to its buffer while the previous layer computes, in the forward pass
and again in the backward pass. Frozen weights do not change, so nothing is copied back. A layer
that is recomputed finds its weights already in the buffer.

A parameter is a view of its layer's buffer and always has the same address. So fused kernels,
autograd and bitsandbytes can store references to it as if it stayed on the GPU. Results are bitwise
identical. Code that reads a layer's weights outside of its passes calls `bring` first.

A copy into a buffer waits for the work that was queued before: the last pass of the layer that used
it.
"""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from sft_kernels.modules import ATTRIBUTE
from sft_kernels.process import Process
from sft_play.errors import EnvironmentFault
from sft_play.models.architecture import decoder_layers
from sft_play.models.sharding import move_unsharded
from sft_play.models.stored_weights import changing_weights


class CopyStream:
    """The stream of a GPU on which copies run; on a CPU, copies run at once."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Start a copy after all work queued so far; return an event at its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: "torch.cuda.Event | None") -> None:
        """Make computation that is queued from now on wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


def pin(buffer: Tensor, setting: str, remedy: str) -> None:
    """Pin a tensor's memory; torch would round its size up to the next power of two.

    Raises: EnvironmentFault if CUDA refuses. The message names `setting` and ends with `remedy`.
    """
    address = buffer.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0))
    if error:
        size = f"{buffer.nbytes / 2**30:.1f} GiB of host memory"
        raise EnvironmentFault(
            f"{setting}: {size} could not be pinned (CUDA error {error}); {remedy}"
        )
    weakref.finalize(buffer, _unpin, address).atexit = False


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still read it
    torch.cuda.cudart().cudaHostUnregister(address)


BUFFERS = 2
ALIGNMENT = 256  # bytes, as in the allocator's memory, so that the same kernels are chosen
MIN_BYTES = 1024  # smaller tensors stay on the GPU


class OffloadedLayers:
    """Layers whose frozen weights are in host memory, and the buffers in which they compute."""

    def __init__(
        self, layers: Sequence[nn.Module], frozen: Sequence[list["FrozenTensor"]], process: Process
    ):
        self.numbers: dict[nn.Module, int] = {}  # index of the layer that a module belongs to
        sizes = [sum(_aligned(place.tensor.nbytes) for place in places) for places in frozen]
        self.memory, is_filling = _host_memory(sum(sizes), process)
        self.on_host = self.memory.split(sizes)  # one block per layer
        self.buffers: list[Tensor] = []
        for _ in range(BUFFERS):
            buffer = torch.empty(max(sizes), dtype=torch.uint8, device=process.device)
            self.buffers.append(buffer)
        self.stream = CopyStream(process.device)
        self.copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self.present: list[int | None] = [None] * BUFFERS  # index of the layer in each buffer
        for number, layer in enumerate(layers):
            self.numbers.update(dict.fromkeys(layer.modules(), number))
            self._move(number, frozen[number], is_filling)
        process.gather(None)  # now the memory is filled
        if process.is_gpu:
            pin(self.memory, "train.weight_offloading", "set TRAIN_WEIGHT_OFFLOADING=false")
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, number))
            layer.register_forward_hook(partial(self._after_forward, number))

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself: the hooks of a layer's copy bring the same weights."""
        return self

    def bring(self, module: nn.Module) -> None:
        """Copy the weights of a module's layer to the GPU, if the layer is offloaded."""
        if module in self.numbers:
            self._bring(self.numbers[module])

    def _move(self, number: int, places: list["FrozenTensor"], is_filling: bool) -> None:
        """Copy the tensors of a layer to host memory, and make them views of its buffer."""
        start = 0
        for place in places:
            tensor = place.tensor
            part = slice(start, start + tensor.nbytes)
            if is_filling:
                _viewed_as(tensor, self.on_host[number][part]).copy_(tensor)
            on_device = _viewed_as(tensor, self.buffers[number % BUFFERS][part])
            setattr(place.owner, place.name, on_device)
            start += _aligned(tensor.nbytes)

    def _before_forward(self, number: int, *_: Any) -> None:
        self._bring(number)
        if _is_in_backward():  # recomputed
            return
        following = number + 1
        if following == len(self.on_host):
            if torch.is_grad_enabled() or not number % BUFFERS:  # backward follows, or no buffer
                return
            following = 0
        self._start_copy(following)

    def _after_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and not _is_in_backward():
            hidden.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, _: Tensor) -> None:
        self._bring(number)
        if number:
            self._start_copy(number - 1)

    def _bring(self, number: int) -> None:
        """Make computation that is queued from now on find a layer's weights in its buffer."""
        self._start_copy(number)
        self.stream.wait(self.copied[number % BUFFERS])

    def _start_copy(self, number: int) -> None:
        turn = number % BUFFERS
        if self.present[turn] != number:
            self.present[turn] = number
            source = self.on_host[number]
            self.copied[turn] = self.stream.copy(self.buffers[turn][: len(source)], source)


class FrozenTensor(NamedTuple):
    """A frozen tensor of a layer: the data of a parameter, or the scales of a 4-bit parameter."""

    owner: Any
    name: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.name)


def chosen_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return `count` decoder layers, evenly spread: the other layers hide these layers' copies."""
    layers = decoder_layers(model)
    return [layers[number * len(layers) // count] for number in range(count)]


@torch.no_grad()
def offload_layers(model: nn.Module, base: PreTrainedModel, process: Process, count: int) -> None:
    """Offload the frozen weights of `count` decoder layers of a model with adapters.

    Everything else is moved to the device.
    """
    owners = Counter(weight for layer in decoder_layers(base) for weight in layer.parameters())
    layers = chosen_layers(base, count)
    frozen: list[list[FrozenTensor]] = []
    moved: set[nn.Parameter] = set()
    for layer in layers:
        places = []
        for weight in layer.parameters():
            is_own = owners[weight] == 1  # layers may share weights
            if is_own and not weight.requires_grad and weight.nbytes >= MIN_BYTES:
                moved.add(weight)
                places.append(FrozenTensor(weight, "data"))
                if _has_scales(weight):
                    places.append(FrozenTensor(weight.quant_state, "absmax"))
        frozen.append(places)
    vars(base)[ATTRIBUTE] = OffloadedLayers(layers, frozen, process)
    move_unsharded(model, process)
    for weight in base.parameters():
        if _has_scales(weight):
            weight.quant_state.to(process.device)
    # every rank reads the same files, and DDP would send the buffers again for each layer
    kept = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ())]
    kept += [name for name, weight in model.named_parameters() if weight in moved]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, kept)


def leaving_on_host(process: Process, count: int) -> contextlib.AbstractContextManager[None]:
    """Let from_pretrained move the weights of `count` decoder layers to the host as it reads them.

    Each weight is read, and quantized, on the GPU. Only the first rank of a machine stores the
    values. The memory that other ranks allocate is never written.
    """

    def move_to_host(weight: nn.Parameter, _: str) -> None:
        if weight.nbytes < MIN_BYTES:
            return
        on_host = torch.empty_like(weight.data, device="cpu")
        weight.data = on_host.copy_(weight.data) if process.local_rank == 0 else on_host
        if _has_scales(weight):
            weight.quant_state.to("cpu")

    return changing_weights(partial(chosen_layers, count=count), move_to_host)


def _has_scales(weight: Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _viewed_as(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return bytes as a tensor with the dtype, shape and strides of another."""
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _host_memory(size: int, process: Process) -> tuple[Tensor, bool]:
    """Return memory that the ranks of a machine share, and whether this rank must fill it."""
    if process.world_size == 1:
        return torch.empty(size, dtype=torch.uint8), True
    is_first = process.local_rank == 0
    file = None
    if is_first:
        file = os.memfd_create("frozen weights")
        os.ftruncate(file, size)
    opened = process.gather((os.getpid(), file))
    pid, number = opened[process.rank - process.local_rank]
    path = f"/proc/{pid}/fd/{number}"
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    process.gather(None)  # every rank has opened it
    if is_first:
        os.close(file)
    return memory, is_first
