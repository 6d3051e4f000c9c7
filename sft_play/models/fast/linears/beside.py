"""Put the adapters of a decoder beside the weights that they belong to, as `columns` computes.

Where kernels leave room beside what linears multiply: in layers whose norms, attention and gated
MLP are fused.
"""

import logging
from collections.abc import Sequence

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sft_play.models.architecture import decoder_of
from sft_play.models.fast.attention.forward import attention_forward, projections
from sft_play.models.fast.linears.columns import COLUMNS, Adapter, Beside, columns_of
from sft_play.models.fast.linears.copies import AdapterCopies, float32_adapters
from sft_play.models.fast.linears.four_bit import has_kernel
from sft_play.models.fast.linears.install import mlp_forward
from sft_play.models.fast.linears.lora import active_adapter, adapter_of, why_not_fusable
from sft_play.models.fast.norms.residual import layer_forward
from sft_play.models.fast.recognise import GatedMlp
from sft_play.models.fast.setup import base_model_of, is_fused
from sft_play.models.sharding import is_divided
from sft_play.plan.columns import LARGEST_SHARE, room_for

logger = logging.getLogger(__name__)

CODES_A_WORD = 8  # of a 4-bit weight: rows are of whole words


def copy_adapters_at_once(model: nn.Module, wrapped: nn.Module) -> None:
    """Copy a model's adapters before each forward pass of its decoder in training.

    Only where they are whole on one device: `wrapped`, what the trainer calls, is the model or DDP.
    On a GPU they are copied to places beside the weights, too.
    """
    decoder = decoder_of(base_model_of(model))
    found = float32_adapters(decoder)
    are_whole = wrapped is model or isinstance(wrapped, DistributedDataParallel)
    if not found or not are_whole or is_divided(model):
        return
    if {parameter.device for parameter in found} == {found[0].device}:
        places = put_beside_weights(decoder) if found[0].is_cuda else []
        decoder.register_forward_pre_hook(AdapterCopies(found, places))


def put_beside_weights(decoder: nn.Module) -> list[Beside]:
    """Move weights to buffers with room for their adapters; return the places of these.

    Layer by layer, so that few weights are in memory twice.
    """
    places: list[Beside] = []
    gradient_room = 0  # beside the gradient of what the layer before returns
    for layer in decoder.modules():
        if not is_fused(layer, layer_forward):
            continue
        attention = getattr(layer, layer.fused_roles.block1)
        if is_fused(attention, attention_forward):
            room = _widen(projections(attention), places)
            attention.adapter_room = (room, gradient_room)
            gradient_room = _widen_last(attention.o_proj, places)
        else:
            gradient_room = 0
        mlp = getattr(layer, layer.fused_roles.block2)
        if is_fused(mlp, mlp_forward):
            roles: GatedMlp = mlp.fused_roles
            names = (roles.gate,) if roles.up is None else (roles.gate, roles.up)
            room = _widen([getattr(mlp, name) for name in names], places)
            mlp.adapter_room = (room, gradient_room)
            gradient_room = _widen_last(getattr(mlp, roles.down), places)
        else:
            gradient_room = 0
        torch.cuda.empty_cache()  # what the weights were in, where others do not fit
    logger.debug("adapters of %d weights lie beside them", len(places) // 2)
    return places


def _widen_last(linear: nn.Module, places: list[Beside]) -> int:
    """Widen the weight of a block's last linear; return the room beside its output's gradient."""
    before = len(places)
    _widen((linear,), places)
    if len(places) == before:
        return 0
    outputs, rank = places[before].adapter.shape  # of B
    return room_for(outputs, rank)


def _widen(linears: Sequence[nn.Module], places: list[Beside]) -> int:
    """Widen the weights of linears that share an input; return the room beside its rows.

    A linear that has no adapter stays as it is; where another one cannot be widened, all do.
    """
    if any(why_not_fusable(linear) is not None for linear in linears):
        return 0
    adapted: list[tuple[nn.Module, Adapter]] = []
    for linear in linears:
        name = active_adapter(linear)
        if name is not None:
            adapted.append((linear.base_layer, adapter_of(linear, name)))
    ranks = sum(len(adapter.a) for _, adapter in adapted)
    if not adapted or not all(_can_be_widened(*each, ranks) for each in adapted):
        return 0
    start = 0
    for base, adapter in adapted:
        rank = len(adapter.a)
        columns = columns_of(base.weight, adapter, start, ranks)
        setattr(base, COLUMNS, columns)
        own = columns.outputs[:, start : start + rank]
        places.append(Beside(adapter.b, own, adapter.scale))
        places.append(Beside(adapter.a, columns.inputs, 1.0))
        start += rank
    return room_for(adapted[0][1].a.shape[1], ranks)


def _can_be_widened(base: nn.Module, adapter: Adapter, ranks: int) -> bool:
    inputs = adapter.a.shape[1]
    if not all(
        each.requires_grad and each.dtype == torch.float32 for each in (adapter.a, adapter.b)
    ):
        return False
    if ranks * LARGEST_SHARE > inputs or hasattr(base, COLUMNS):
        return False
    if type(base) is Linear4bit:
        return has_kernel(base.weight, base.weight.quant_state) and inputs % CODES_A_WORD == 0
    return type(base) is nn.Linear and _is_plain(base.weight)


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype.itemsize == 2 and weight.is_floating_point() and weight.is_contiguous()
