"""Shard base weights across the ranks with torch's FSDP2 (`fully_shard`).

Each decoder layer is a unit. Its weights are gathered before its forward pass and freed after it,
and again around its backward pass. Meanwhile the next unit's weights are being transferred. Weights
outside the layers belong to the root, mainly the output head. The root stays gathered from the
forward to the backward pass.

Adapters belong to no unit: every rank stores them in full, in float32, and DDP sums their
gradients. A frozen unit has nothing to reduce. If every weight is trained, units gather them in the
compute dtype and sum gradients in float32.

With train.fsdp_offload a rank's shards are in host memory, and gathered weights are on the GPU. If
every weight is trained, gradients and the optimizer state are in host memory too.

A gathered weight has the same memory address each time. References from the forward pass are valid
again in the backward pass, so fused kernels need no special code.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading

from sft_kernels.process import Process
from sft_kernels.sharded import gathered_unit, is_sharded, outermost_layers, units_by_module
from sft_play.errors import ConfigError
from sft_play.models.architecture import encoders_of, replace_tensors
from sft_play.models.stored_weights import changing_model, changing_weights, replaced

MIN_BYTES = 1024  # the smallest weight worth the constants of each tensor
PACKED_TYPE = torch.float32  # of the bytes of 4-bit weights: see `bnb.storage_type`
OWN_ROWS = "own_rows"  # attribute of a parameter: this rank's rows of it


@contextlib.contextmanager
def sharding_while_loading(
    process: Process, trains_weights: bool, offloads: bool
) -> Iterator[None]:
    """Let from_pretrained shard a model once it is built, on the meta device.

    transformers reads only this rank's rows into a sharded parameter. So no rank ever stores a full
    model, on its GPU or on the host. With `offloads`, the rows stay in host memory.
    """

    def divide(model: PreTrainedModel) -> None:
        model.tie_weights()
        _divide(model, process, trains_weights, offloads, adapters=set())

    creating_shards = contextlib.nullcontext()
    if offloads:
        # this function of transformers creates a rank's shard, on the ranks' kind of device
        creating_shards = replaced(
            core_model_loading, _dtensor_from_local_like=_part_in_host_memory
        )
    # after transformers itself shards a model, by lists of names that few models have
    with changing_model(divide), creating_shards:
        yield


def _part_in_host_memory(part: Tensor, divided: DTensor) -> DTensor:
    """Return this rank's shard as a DTensor like `divided`, with all its shards on hosts.

    `DTensor.from_local` would move the shard to the GPU.
    """
    like = torch.empty_like(divided, device="cpu")
    like.to_local().copy_(part)
    return like


def _divide(
    model: PreTrainedModel,
    process: Process,
    trains_weights: bool,
    offloads: bool,
    adapters: set[nn.Parameter],
) -> None:
    """Shard the weights of a model across the ranks, except those of `adapters`.

    `trains_weights` means that weights are trained, and not only adapters. `offloads` stores a
    rank's shards in host memory.

    Raises: ConfigError for a model without layers to shard.
    """
    policy = MixedPrecisionPolicy()
    if trains_weights and process.compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=process.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    layers = outermost_layers(model)
    # Encoders are not sharded, and are a small part: ranks without an image do not run them, so
    # they would gather nothing.
    encoders = encoders_of(model).values()
    left_whole = adapters.union(*(encoder.parameters() for encoder in encoders))
    inside = {module for encoder in encoders for module in encoder.modules()}
    layers = [layer for layer in layers if layer not in inside]
    if not layers:
        raise ConfigError(
            f"train.strategy=fsdp: {type(model).__name__} has no layers that could be gathered one "
            "at a time; set TRAIN_STRATEGY=zero3"
        )
    offload_policy = OffloadPolicy()
    if offloads:
        offload_policy = CPUOffloadPolicy(pin_memory=process.is_gpu)
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    units: list[nn.Module] = [*layers]
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        units.append(embedding)  # a tied embedding is the head, and belongs to the root
    for unit in (*units, model):
        own_class = type(unit)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            ignored_params=left_whole,
        )
        # transformers loads models whose class is from another package in another way
        type(unit).__module__ = own_class.__module__


def keeping_local_rows(process: Process, offloads: bool) -> contextlib.AbstractContextManager[None]:
    """Let from_pretrained keep only this rank's rows of each layer's weights, until `_divide`.

    This is for weights that are quantized as they are read: every rank reads and quantizes all of
    them. The parameter has its shape, but no memory.
    """

    def keep(weight: nn.Parameter, _: str) -> None:
        """Replace the values of a weight with this rank's rows."""
        if weight.nbytes < MIN_BYTES:
            return
        if isinstance(weight, Params4bit) and weight.dtype != PACKED_TYPE:
            store_as(weight, PACKED_TYPE)
        parts = weight.data.chunk(process.world_size)
        rows = parts[process.rank] if process.rank < len(parts) else weight.data[:0]
        setattr(weight, OWN_ROWS, rows.cpu() if offloads else rows.clone())
        weight.data = weight.data.new_empty(()).expand(weight.shape)

    return changing_weights(outermost_layers, keep)


def store_as(packed: Params4bit, storage: torch.dtype) -> None:
    """Store the bytes of a packed weight as numbers of another type."""
    packed.data = packed.data.flatten().view(storage)[:, None]
    packed.quant_storage = storage


def has_rows_alone(weight: Tensor) -> bool:
    """Return whether only this rank's rows of a weight exist: the weight has no values to read."""
    return OWN_ROWS in vars(weight)


def shard_quantized(
    model: PreTrainedModel, process: Process, offloads: bool, check: Callable[[nn.Module], None]
) -> None:
    """Shard a quantized model below adapters, of which this rank has stored only its rows so far.

    A rank stores the constants of each block of 4-bit weights in full. FSDP gathers plain bytes,
    into the same parameter each time. This function makes it bitsandbytes' parameter again, and it
    stays one. `check` is called with each layer while it is gathered.
    """
    adapters = {parameter for parameter in model.parameters() if parameter.requires_grad}
    packed: dict[tuple[nn.Module, str], dict[str, Any]] = {}
    own_rows: dict[tuple[nn.Module, str], Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = parameter
            if has_rows_alone(parameter):
                own_rows[module, name] = vars(parameter).pop(OWN_ROWS)
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            if isinstance(parameter, Params4bit):
                packed[module, name] = vars(parameter)
                whole = whole.data
            if whole is not parameter:
                setattr(module, name, nn.Parameter(whole, requires_grad=False))
    _divide(model, process, False, offloads, adapters)
    while own_rows:  # each is freed once it is copied
        (module, name), rows = own_rows.popitem()
        divided = module.get_parameter(name)
        if offloads:
            part = _part_in_host_memory(rows, divided)
        else:
            places = (divided.device_mesh, divided.placements)
            part = DTensor.from_local(
                rows, *places, run_check=False, shape=divided.shape, stride=divided.stride()
            )
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    units = units_by_module(model)
    for unit in dict.fromkeys(units[module] for module, _ in packed):
        names = [(module, name) for module, name in packed if units[module] is unit]
        for module, name in names:
            vars(module.get_parameter(name)).update(packed[module, name])
        with gathered_unit(unit):
            for module, name in names:
                whole = module.get_parameter(name)
                whole.__class__ = Params4bit
                vars(whole).update(packed[module, name])
            check(unit)


@torch.no_grad()
def move_unsharded(model: nn.Module, process: Process) -> None:
    """Move what FSDP does not shard to this rank's device, if it was loaded to the host.

    This includes buffers, and adapters that PEFT has put on their module's device.
    """

    def moved(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(process.device)
        tensor.data = tensor.data.to(process.device)
        return tensor

    replace_tensors(model, moved)


def trains_sharded(model: nn.Module) -> bool:
    """Return whether sharded weights are trained, and not only adapters."""
    return any(isinstance(p, DTensor) and p.requires_grad for p in model.parameters())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor; return any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def run_one_token(base: PreTrainedModel, process: Process) -> None:
    """Run one token through a sharded model, after it is known which weights are trained.

    FSDP treats the first unit that runs as the root, so that unit must be the root.
    """
    if not is_sharded(base):
        return
    was_training = base.training
    token = torch.zeros((1, 1), dtype=torch.int64, device=process.device)
    with process.autocast():
        base.eval()(input_ids=token, use_cache=False)
    base.train(was_training)


def reshard(model: nn.Module) -> None:
    """Free the weights that are still gathered after the last forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def resharding(model: nn.Module) -> Iterator[None]:
    """Free, on exit, the weights still gathered after a forward pass without a backward pass.

    Reading weights to save them frees these too, but only on the main rank. The ranks would then
    disagree about what the next forward pass has to gather.
    """
    try:
        yield
    finally:
        reshard(model)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return all full weights, tied ones once, in the main rank's host memory; {} on other ranks.

    Every rank must call it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    once = {name for name, _ in model.named_parameters()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in once:
            state.pop(name, None)
    return state
