"""Find the RMSNorms of a decoder and its pre-norm layers, and install their fused functions."""

from dataclasses import replace

from torch import nn

from sft_play.models.fast.attention.forward import attention_forward
from sft_play.models.fast.norms import residual, rms
from sft_play.models.fast.proof import prove
from sft_play.models.fast.recognize import layer_roles_of, norm_kind_of
from sft_play.models.fast.setup import TrainingSetup, Unsupported, fuse, is_fused
from sft_play.plan.fast import ZERO_3, has_liger


def install_norms(setup: TrainingSetup) -> int:
    """Fuse RMSNorms: with the residual adds before them, or with Liger's kernel on a GPU."""
    if setup.has_packed_parts:
        raise Unsupported(ZERO_3)
    kinds = {}
    for module in setup.decoder.modules():
        kind = norm_kind_of(module)
        if kind is not None:
            kinds[module] = kind
    if not kinds:
        raise Unsupported("no RMSNorm")
    layers = {}
    for layer in setup.decoder.modules():
        roles = layer_roles_of(layer, kinds)
        if roles is not None:
            layers[layer] = roles
    own_gradient = _norms_before_linears(setup, set(kinds), layers)
    for module, kind in kinds.items():
        module.norm_kind = replace(kind, in_place=module in own_gradient)
    fused_with_add = _install_residual_adds(setup, layers)
    others = [module for module in kinds if module not in fused_with_add]
    reason = None
    if not setup.on_gpu:
        reason = "the kernels are for GPUs"
    elif not has_liger():
        reason = "liger-kernel is not installed"
    if reason:
        if not fused_with_add:
            raise Unsupported(reason)
        return len(fused_with_add)
    agreed = prove(others, rms.norm_forward, setup)
    fuse(agreed, rms.norm_forward)
    return len(fused_with_add) + len(agreed)


def _norms_before_linears(
    setup: TrainingSetup, norms: set[nn.Module], layers: dict[nn.Module, residual.LayerRoles]
) -> set[nn.Module]:
    """Return the norms whose output is not added to the residual stream.

    The gradient of their output belongs to nobody else, and may be overwritten.
    """
    # the norm before the output head; if there are more, one may be added to embeddings
    found = norms & set(setup.decoder.children())
    if len(found) > 1:
        found = set()
    for layer, roles in layers.items():
        found |= {getattr(layer, roles.norm1), getattr(layer, roles.norm2)}
    for module in setup.decoder.modules():
        if is_fused(module, attention_forward):
            found.update(module.children())
    return found


def _install_residual_adds(
    setup: TrainingSetup, layers: dict[nn.Module, residual.LayerRoles]
) -> set[nn.Module]:
    """Fuse the residual adds of pre-norm layers with the norms after them; return the norms."""
    candidates = []
    for layer, roles in layers.items():
        pair = (getattr(layer, roles.norm1), getattr(layer, roles.norm2))
        if not any(norm.weight.requires_grad for norm in pair):
            layer.fused_roles = roles
            candidates.append(layer)
    try:
        agreed = prove(candidates, residual.layer_forward, setup)
    except Unsupported as reason:
        setup.left_out.append(str(reason))
        return set()
    fuse(agreed, residual.layer_forward)
    fused: set[nn.Module] = set()
    for layer in agreed:
        fused |= {getattr(layer, layers[layer].norm1), getattr(layer, layers[layer].norm2)}
    return fused
