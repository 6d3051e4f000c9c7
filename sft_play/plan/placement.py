"""Which GPU of one process stores which part of a model: model.device_map. Pure: no torch, no I/O.

A model is a sequence of blocks in the order of computation: modules before the layers, the layers,
modules after them. A GPU stores consecutive blocks, so that hidden states move from one GPU to the
next only once per pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sft_play.config.sections.model import MapRule
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.step import Layout, StepSpec
from sft_play.plan.structure import Structure

# The last names of modules that contain all layers: of most models, GPT-2, MPT, BLOOM, and so on
CONTAINERS = frozenset(
    ("", "model", "transformer", "decoder", "language_model", "backbone", "gpt_neox", "layers")
) | {"h", "blocks", "block"}


def count_layers(rule: MapRule, layers: int, gpus: int, most_layers: int = 0) -> tuple[int, ...]:
    """Return the number of layers on each GPU, in the order of computation.

    Layers are divided evenly, because their activations need more memory than the embedding and the
    head. sequential fills GPUs one after the other with `most_layers`; 0 if no step is planned.

    >>> count_layers("balanced_low_0", 32, 4)
    (0, 11, 11, 10)
    """
    if rule == "sequential" and most_layers:
        return tuple(min(most_layers, layers - begin) for begin in range(0, layers, most_layers))
    empty = int(rule == "balanced_low_0" and gpus > 1)
    share, rest = divmod(layers, gpus - empty)
    return (0,) * empty + tuple(share + (gpu < rest) for gpu in range(gpus - empty))


def map_layers(devices: Mapping[str, int | str], layers: int) -> list[int]:
    """Return the GPU of each layer by a mapping of module names, as far as the names show it.

    The mapping is checked against the model's modules when the model is loaded.
    """
    places: list[int] = []
    for number in range(layers):
        named = [name for name in devices if _holds_layer(name, number)]
        device = devices[max(named, key=len)] if named else 0
        places.append(0 if device == "cpu" else int(device))
    return places


def _holds_layer(name: str, number: int) -> bool:
    last = name.rpartition(".")[2]
    return last == str(number) if last.isdecimal() else last in CONTAINERS


def counts(places: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers on each GPU.

    >>> counts([0, 0, 1, 1, 1])
    (2, 3)
    """
    gpus = max(places, default=0) + 1
    return tuple(sum(place == gpu for place in places) for gpu in range(gpus))


def parts_by_gpu(step: StepSpec, layout: Layout) -> list[tuple[StepSpec, Layout]]:
    """Return the work of each GPU with layers; GPUs that store the same amount form one part.

    The checkpointed layers are the first ones of the model.
    """
    parts: dict[tuple[int, int], tuple[StepSpec, Layout]] = {}
    begin = 0
    for layers in step.layers_by_gpu:
        checkpointed = min(layers, max(0, layout.checkpointed_layers - begin))
        begin += layers
        if layers:
            part = _part(step, layers), replace(layout, checkpointed_layers=checkpointed)
            parts[layers, checkpointed] = part
    return list(parts.values())


def _part(step: StepSpec, layers: int) -> StepSpec:
    """Return the step of some of the layers, and of one matrix of the vocabulary."""
    model, traced = step.model, step.traced
    share = layers / model.layers
    structure = model.structure
    if structure is not None:
        structure = _part_of_structure(structure, model, share)
    if traced is not None:
        traced = replace(
            traced,
            plain=traced.plain.with_kept_share(share),
            checkpointed=traced.checkpointed.with_kept_share(share),
        )
    part = replace(model, layers=layers, is_tied=True, structure=structure)
    return replace(step, model=part, traced=traced, layers_by_gpu=())


def _part_of_structure(structure: Structure, model: ModelShape, share: float) -> Structure:
    """Return the counts of a share of the layers, and of one matrix of the vocabulary."""
    matrices = []
    for kind in structure.matrices:
        matrices.append(replace(kind, count=max(1, round(share * kind.count))))
    kinds = []
    for kind in structure.layers:
        kinds.append(replace(kind, count=max(1, round(share * kind.count))))
    part = replace(structure, matrices=tuple(matrices), layers=tuple(kinds))
    others = structure.parameters - structure.product_weights
    active = structure.active_parameters - structure.active_product_weights
    head = 0 if model.is_tied else model.vocab * model.hidden
    return replace(
        part,
        parameters=part.product_weights + others - head,
        active_parameters=part.active_product_weights + active - head,
    )
