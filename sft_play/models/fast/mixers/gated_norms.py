"""Gated RMSNorms of token mixers: one kernel of flash-linear-attention instead of ten.

    y = w x / rms(x) * act(z)    or    y = w u / rms(u),  u = x * silu(z)

where rms is that of all features or of groups of them. Which one a module computes is proved on its
real inputs, kernel by kernel.

Legend: N rows of D features.
"""

import inspect

from torch import Tensor, nn

from sft_play.models.fast.norms.rms import epsilon
from sft_play.models.fast.proof import prove
from sft_play.models.fast.setup import TrainingSetup, Unsupported, fuse, is_training
from sft_play.models.linear_attention import uses_fla


def norm_then_silu(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * silu(gate)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated  # imports Triton, which needs a GPU

    return rms_norm_gated(x, gate, norm.weight, None, "swish", eps=epsilon(norm))


def norm_then_sigmoid(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * sigmoid(gate)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, norm.weight, None, "sigmoid", eps=epsilon(norm))


def silu_then_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w u / rms(u) of u = x * silu(gate), in groups of features if the norm has some."""
    from fla.modules.norm.layernorm_gated import rmsnorm_fn

    features = x.shape[-1]
    group = getattr(norm, "group_size", None) or features // getattr(norm, "n_groups", 1)
    options = {"group_size": group, "norm_before_gate": False}
    return rmsnorm_fn(x, norm.weight, None, z=gate, eps=epsilon(norm), **options)


def gated_norms(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules with one vector of weights whose forward method takes a gate too."""
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
        for module in waiting:
            module.gated_norm = kernel
        try:
            agreed = prove(waiting, gated_norm_forward, setup, kernel=kernel.__name__)
        except Unsupported:
            continue
        fuse(agreed, gated_norm_forward)
        waiting = [module for module in waiting if module not in agreed]
    setup.left_out.clear()  # norms that another kernel computes, or none


def gated_norm_forward(
    self: nn.Module, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Forward method of a gated norm: fused in training, its class's own otherwise."""
    if gate is None or not is_training(self):
        return type(self).forward(self, hidden_states, gate)
    return self.gated_norm(self, hidden_states, gate)
