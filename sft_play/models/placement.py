"""Place one model on the GPUs of one process: which GPU stores each block (model.device_map).

A block is a layer, or a module outside the layers: the embedding, the last norm, the output head.
transformers loads each weight to its GPU, and accelerate's hooks move the inputs of every module
there. They wrap forward methods, so such a run uses the model's original implementation.
"""

import difflib
import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sft_play.config.schema import Config
from sft_play.config.sections.model import MapRule, ModuleDevices
from sft_play.errors import ConfigError
from sft_play.models.architecture import decoder_of, empty_model
from sft_play.models.sharding import outermost_layers
from sft_play.plan.memory import NF4_BYTES
from sft_play.plan.placement import places_by_rule
from sft_play.process import Process

logger = logging.getLogger(__name__)

DeviceMap = dict[str, torch.device]  # by module name; "" is the full model


class Block(NamedTuple):
    """A part of a model that one device stores: a module, or a parameter next to the layers."""

    name: str
    parameters: list[nn.Parameter]
    is_layer: bool = False


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
    blocks = list(_blocks(model, "", set(outermost_layers(model))))
    if not any(block.is_layer for block in blocks):
        raise ConfigError(
            f"model.device_map: {type(model).__name__} has no layers that could be placed one by "
            "one; set MODEL_DEVICE_MAP=null"
        )
    if _names_usable_devices(wanted, process):
        devices = _devices_by_name(blocks, wanted, model)
    else:
        rule = "balanced" if isinstance(wanted, dict) else wanted
        places = _places(blocks, rule, config.tuning.mode == "qlora", process, most_layers)
        devices = [process.devices[place] for place in places]
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
        yield Block(name, list(module.parameters()), module in layers)
        return
    prefix = f"{name}." if name else ""
    for own, parameter in module.named_parameters(recurse=False):
        yield Block(prefix + own, [parameter])
    for own, child in module.named_children():
        yield from _blocks(child, prefix + own, layers)


def _places(
    blocks: list[Block], rule: MapRule, is_packed: bool, process: Process, most_layers: int
) -> list[int]:
    """Return the GPU index of each block by a rule."""
    numbers = [number for number, block in enumerate(blocks) if block.is_layer]
    first, behind = numbers[0], numbers[-1] + 1
    sizes: list[int] = []
    seen: set[nn.Parameter] = set()  # tied parameters count where they appear first
    for block in blocks:
        own = [parameter for parameter in block.parameters if parameter not in seen]
        seen.update(own)
        sizes.append(_bytes(own, is_packed and block.is_layer))
    before, *of_layers, last = places_by_rule(
        rule,
        before=sum(sizes[:first]),
        layers=sizes[first:behind],
        behind=sum(sizes[behind:]),
        gpus=len(process.devices),
        most_layers=most_layers,
    )
    return [before] * first + of_layers + [last] * (len(blocks) - behind)


def _bytes(parameters: list[nn.Parameter], is_packed: bool) -> int:
    """Return the bytes of parameters, whose matrices may be packed in 4 bits."""
    total = 0.0
    for parameter in parameters:
        is_matrix = is_packed and parameter.dim() > 1
        total += parameter.numel() * (NF4_BYTES if is_matrix else parameter.element_size())
    return int(total)


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
    first: dict[nn.Parameter, Block] = {}
    for block, device in zip(blocks, devices, strict=True):
        sharing = [first[parameter] for parameter in block.parameters if parameter in first]
        if sharing and found[sharing[0].name] != device:
            device = found[sharing[0].name]
            logger.info(
                "device map: %s shares its weights with %s and is on %s too",
                block.name,
                sharing[0].name,
                device,
            )
        first |= {parameter: block for parameter in block.parameters if parameter not in first}
        found[block.name] = device
    start = next(found[block.name] for block in blocks if block.parameters)
    return found | {block.name: start for block in blocks if not block.parameters}
