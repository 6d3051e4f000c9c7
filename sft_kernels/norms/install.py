"""Find a decoder's RMSNorms and pre-norm layers, and install their fused functions.

Gated RMSNorms of token mixers use one kernel of flash-linear-attention instead of ten:

    y = w x / rms(x) * act(z)    or    y = w u / rms(u),  u = x * silu(z)

The rms is over all features or over groups of them. To find out which one a module computes, each
kernel is compared with it on real inputs.
"""

import inspect
from dataclasses import replace

from torch import Tensor, nn

from sft_kernels import triton_kernels
from sft_kernels.attention.forward import attention_forward
from sft_kernels.linear_attention import uses_fla
from sft_kernels.needs import ZERO_3, has_liger
from sft_kernels.norms import residual
from sft_kernels.norms.residual import AllocatedRmsNorm, epsilon
from sft_kernels.proof import prove
from sft_kernels.recognize import layer_roles_of, norm_kind_of
from sft_kernels.training_setup import TrainingSetup, Unsupported, fuse, is_fused, is_training


def install_norms(setup: TrainingSetup) -> int:
    """Fuse RMSNorms, with residual adds or by Liger's kernel on a GPU; return how many."""
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
    agreed = prove(others, residual.norm_forward, setup)
    fuse(agreed, residual.norm_forward)
    return len(fused_with_add) + len(agreed)


def _norms_before_linears(
    setup: TrainingSetup, norms: set[nn.Module], layers: dict[nn.Module, residual.LayerRoles]
) -> set[nn.Module]:
    """Return the norms whose output is not added to the residual stream.

    Nothing else reads the gradient of their output, so it may be overwritten.
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


def norm_then_silu(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * silu(gate)."""
    if triton_kernels.is_traced:
        return AllocatedRmsNorm.apply(x, gate, False)
    from fla.modules.norm.fused_norm_gate import rms_norm_gated  # imports Triton, which needs a GPU

    return rms_norm_gated(x, gate, norm.weight, None, "swish", eps=epsilon(norm))


def norm_then_sigmoid(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * sigmoid(gate)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, norm.weight, None, "sigmoid", eps=epsilon(norm))


def silu_then_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w u / rms(u) for u = x * silu(gate), in groups of features if the norm has groups."""
    from fla.modules.norm.layernorm_gated import rmsnorm_fn

    features = x.shape[-1]
    group = getattr(norm, "group_size", None) or features // getattr(norm, "n_groups", 1)
    options = {"group_size": group, "norm_before_gate": False}
    return rmsnorm_fn(x, norm.weight, None, z=gate, eps=epsilon(norm), **options)


def gated_norms(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules with one vector of weights whose forward method also has a gate."""
    found: list[nn.Module] = []
    for module in decoder.modules():
        if [weight.dim() for weight in module.parameters()] == [1]:
            names = list(inspect.signature(type(module).forward).parameters)
            if len(names) >= 3 and names[2] in ("gate", "z"):
                found.append(module)
    return found


def install_gated_norms(setup: TrainingSetup) -> None:
    """Fuse the gated norms of a decoder in training, each with the kernel that computes it."""
    waiting = [module for module in gated_norms(setup.decoder) if uses_fla(module.weight)]
    for kernel in (norm_then_silu, norm_then_sigmoid, silu_then_norm):
        try:
            agreed = prove(waiting, kernel, setup)
        except Unsupported:
            continue
        for module in agreed:
            module.gated_norm = kernel
        fuse(agreed, gated_norm_forward)
        waiting = [module for module in waiting if module not in agreed]
    setup.left_out.clear()  # reasons for norms that another kernel computes, or no kernel


def gated_norm_forward(
    self: nn.Module, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Forward method of a gated norm: fused in training, otherwise the one of its class."""
    if gate is None or not is_training(self):
        return type(self).forward(self, hidden_states, gate)
    return self.gated_norm(self, hidden_states, gate)
