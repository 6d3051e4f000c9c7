"""The parts of a model on the GPUs of one process, as steps of smaller models. Pure: no torch.

Each part counts as a model of its layers with one matrix of the vocabulary, which is the embedding
of the first and the output head of the last, and with the loss. Parts between them need less.
"""

from dataclasses import replace

from sft_play.plan.layout import Layout
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.step import StepSpec
from sft_play.plan.structure import Structure
from sft_play.plan.traced import TracedStep


def parts_by_gpu(step: StepSpec, layout: Layout) -> list[tuple[StepSpec, Layout]]:
    """Return what each GPU computes that holds layers, one part for GPUs that hold as much.

    The first layers of the model are those that are checkpointed.
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
    share = layers / step.model.layers
    traced = None if step.traced is None else _part_of_trace(step.traced, share)
    return replace(step, model=_part_of_model(step.model, layers), traced=traced, layers_by_gpu=())


def _part_of_model(model: ModelShape, layers: int) -> ModelShape:
    structure = model.structure
    if structure is not None:
        structure = _part_of_structure(structure, model, layers / model.layers)
    return replace(model, layers=layers, is_tied=True, structure=structure)


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


def _part_of_trace(traced: TracedStep, share: float) -> TracedStep:
    """Return the trace of a share of the layers: what they keep is as much less."""
    plain = traced.plain.with_kept_share(share)
    checkpointed = traced.checkpointed.with_kept_share(share)
    return replace(traced, plain=plain, checkpointed=checkpointed)
