"""Place one model on the GPUs of one process: which GPU stores each block (model.device_map).

A block is a layer, or a module outside the layers: the embedding, the last norm, the output head.
transformers loads each weight to its GPU, and accelerate's hooks move the inputs of every module
there. They wrap forward methods, so such a run uses the model's original implementation.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sft_kernels.modules import decoder_of
from sft_kernels.process import Process
from sft_kernels.sharded import outermost_layers
from sft_play.config.schema import Config
from sft_play.config.sections.model import MapRule, ModuleDevices
from sft_play.errors import ConfigError
from sft_play.models.architecture import decoder_layers, empty_model
from sft_play.plan.placement import count_layers

DeviceMap = dict[str, torch.device]  # by module name; "" is the full model


class Block(NamedTuple):
    """A part of a model that one device stores: a module, or a parameter next to the layers."""

    name: str
    parameters: list[nn.Parameter]
    module: nn.Module | None = None


def resolve_device_map(
    config: Config, process: Process, stored: PretrainedConfig, most_layers: int = 0
) -> DeviceMap:
    """Return the device of each block of a run's base model, {"": device} if it has one device.

    `most_layers` is the plan's maximum number of layers per GPU under sequential.

    Raises: ConfigError for a mapping that does not match the model's modules, or a model without
    layers.
    """
    wanted = config.model.device_map
    if not _is_placed(wanted, process):
        return {"": process.device}
    model = empty_model(stored, torch.bfloat16, config.model.trust_remote_code)
    model.tie_weights()
    layers = decoder_layers(model)
    blocks = list(_blocks(model, "", set(outermost_layers(model))))
    if not layers:
        raise ConfigError(
            f"model.device_map: {type(model).__name__} has no layers that could be placed one by "
            "one; set MODEL_DEVICE_MAP=null"
        )
    if _names_usable_devices(wanted, process):
        devices = _devices_by_name(blocks, wanted, model)
    else:
        rule = "balanced" if isinstance(wanted, dict) else wanted
        counts = count_layers(rule, len(layers), len(process.devices), most_layers)
        devices = _devices_by_count(blocks, set(layers), counts)
    return _shared_together(blocks, devices)


def move_inputs_to_embedding(model: PreTrainedModel) -> None:
    """Move the decoder's inputs to its embedding's GPU, for the positions and masks it makes.

    accelerate's hooks move inputs to the first GPU.
    """
    device = model.get_input_embeddings().weight.device

    def move(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return send_to_device(args, device), send_to_device(kwargs, device)

    decoder_of(model).register_forward_pre_hook(move, with_kwargs=True)


def _is_placed(wanted: MapRule | ModuleDevices | None, process: Process) -> bool:
    """Return whether a map specifies more than the process's single device."""
    if wanted is None or process.world_size > 1:
        return False
    return len(process.devices) > 1 or _names_usable_devices(wanted, process)


def _names_usable_devices(wanted: MapRule | ModuleDevices, process: Process) -> bool:
    """Return whether this process has a mapping's devices; a run may be used on another machine."""
    if not isinstance(wanted, dict):
        return False
    if not process.is_gpu:
        return set(wanted.values()) == {"cpu"}
    return all(device != "cpu" and device < len(process.devices) for device in wanted.values())


def _blocks(module: nn.Module, name: str, layers: set[nn.Module]) -> Iterator[Block]:
    """Yield the blocks of a module in the order of its children."""
    if module in layers or not any(child in layers for child in module.modules()):
        yield Block(name, list(module.parameters()), module)
        return
    prefix = f"{name}." if name else ""
    for own, parameter in module.named_parameters(recurse=False):
        yield Block(prefix + own, [parameter])
    for own, child in module.named_children():
        yield from _blocks(child, prefix + own, layers)


def _devices_by_count(
    blocks: list[Block], layers: set[nn.Module], counts: Sequence[int]
) -> list[torch.device]:
    """Return the device of each block; what is before the layers is on GPU 0, after them last."""
    gpus = (gpu for gpu, count in enumerate(counts) for _ in range(count))
    gpu = 0
    devices = []
    for block in blocks:
        gpu = next(gpus) if block.module in layers else gpu
        devices.append(torch.device("cuda", gpu))
    return devices


def _devices_by_name(
    blocks: list[Block], wanted: ModuleDevices, model: nn.Module
) -> list[torch.device]:
    """Return the device of each block by a mapping: the longest matching name prefix decides.

    Raises: ConfigError for a name that does not exist or is inside a block, and for a block without
    a device.
    """
    names = [block.name for block in blocks]
    modules = dict(model.named_modules())
    for key in wanted:
        inside = [name for name in names if key.startswith(f"{name}.")]
        if inside and key in modules:
            raise ConfigError(
                f"model.device_map: {key} is inside {inside[0]}, which one GPU computes as a "
                f"whole; write {inside[0]}"
            )
        if key not in modules and key not in names:
            raise ConfigError(
                f"model.device_map: {type(model).__name__} has no module {key}; "
                f"{_instead(key, names)}"
            )
    devices: list[torch.device] = []
    for block in blocks:
        keys = [key for key in wanted if not key or f"{block.name}.".startswith(f"{key}.")]
        if keys:
            device = wanted[max(keys, key=len)]
            devices.append(torch.device("cpu") if device == "cpu" else torch.device("cuda", device))
        elif block.parameters:
            raise ConfigError(
                f"model.device_map names no GPU for {block.name}; add {block.name}: 0, or "
                '"": 0 for all that is not named'
            )
        else:
            devices.append(devices[0] if devices else torch.device("meta"))
    return devices


def _instead(key: str, names: list[str]) -> str:
    outer = dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names)
    close = difflib.get_close_matches(key, [*outer, *names], n=1)
    return f"write {close[0]}" if close else f"its parts are {', '.join(outer)}"


def _shared_together(blocks: list[Block], devices: list[torch.device]) -> DeviceMap:
    """Return the devices by name; blocks that share a weight get the same device.

    Blocks without weights, e.g. rotary positions, are on the model's first device.
    """
    found: DeviceMap = {}
    first: dict[nn.Parameter, torch.device] = {}
    for block, device in zip(blocks, devices, strict=True):
        for parameter in block.parameters:
            device = first.setdefault(parameter, device)
        if block.parameters:
            found[block.name] = device
    start = next(iter(found.values()))
    return {block.name: found.get(block.name, start) for block in blocks}
