"""Gated RMSNorms of token mixers: one kernel of flash-linear-attention instead of ten.

    y = w x / rms(x) * act(z)    or    y = w u / rms(u),  u = x * silu(z)

where rms is that of all features or of groups of them. Which one a module computes is tried: a
kernel is used where its result and its gradients are those of the module's own code.

Legend: N rows of D features.
"""

import inspect
from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn

from sft_play.models.fast.norms.rms import epsilon
from sft_play.models.fast.setup import is_training
from sft_play.models.linear_attention import uses_fla

GatedNorm = Callable[[nn.Module, Tensor, Tensor], Tensor]

ROWS = 64  # of the proof
MAX_DIFFERENCE = 2e-2  # relative, in the Euclidean norm: bfloat16 rounds to 4e-3


def norm_then_silu(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * silu(gate)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated  # imports Triton, which needs a GPU

    return rms_norm_gated(x, gate, norm.weight, None, "swish", eps=epsilon(norm))


def norm_then_sigmoid(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w x / rms(x) * sigmoid(gate)."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, norm.weight, None, "sigmoid", eps=epsilon(norm))


def silu_then_norm(norm: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Return w u / rms(u) of u = x * silu(gate), in groups of features where the norm has some."""
    from fla.modules.norm.layernorm_gated import rmsnorm_fn

    features = x.shape[-1]
    group = getattr(norm, "group_size", None) or features // getattr(norm, "n_groups", 1)
    options = {"group_size": group, "norm_before_gate": False}
    return rmsnorm_fn(x, norm.weight, None, z=gate, eps=epsilon(norm), **options)


CANDIDATES: tuple[GatedNorm, ...] = (norm_then_silu, norm_then_sigmoid, silu_then_norm)


def gated_norms(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules with one vector of weights whose forward method takes a gate too."""
    found: list[nn.Module] = []
    for module in decoder.modules():
        names = list(inspect.signature(type(module).forward).parameters)
        shapes = [weight.dim() for weight in module.parameters()]
        if shapes == [1] and len(names) >= 3 and names[2] in ("gate", "z"):
            found.append(module)
    return found


def install_gated_norms(decoder: nn.Module, is_proven: bool) -> int:
    """Fuse the gated norms of a decoder in training; return how many.

    Without `is_proven`, as where weights have no values, the first kernel is taken.
    """
    modules = [module for module in gated_norms(decoder) if uses_fla(module.weight)]
    chosen: dict[tuple, GatedNorm | None] = {}
    count = 0
    for module in modules:
        kind = (type(module), module.weight.shape, module.weight.dtype)
        if kind not in chosen:
            chosen[kind] = fitting_kernel(module) if is_proven else norm_then_silu
        if chosen[kind] is not None:
            module.gated_norm = chosen[kind]
            module.forward = MethodType(gated_norm_forward, module)
            count += 1
    return count


def gated_norm_forward(
    self: nn.Module, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Forward method of a gated norm: fused in training, its class's own otherwise."""
    if gate is None or not is_training(self):
        return type(self).forward(self, hidden_states, gate)
    return self.gated_norm(self, hidden_states, gate)


def fitting_kernel(module: nn.Module) -> GatedNorm | None:
    """Return the kernel with the result and gradients of a norm's own code, None if none has."""
    generator = torch.Generator(module.weight.device).manual_seed(0)
    options = {"dtype": module.weight.dtype, "device": module.weight.device}
    shape = (ROWS, len(module.weight))
    x = torch.randn(shape, generator=generator, **options)
    gate = torch.randn(shape, generator=generator, **options)
    expected = _result(type(module).forward, module, x, gate)
    for candidate in CANDIDATES:
        found = _result(candidate, module, x, gate)
        differences = [
            (one.float() - two.float()).norm() / two.float().norm()
            for one, two in zip(found, expected, strict=True)
        ]
        if max(differences) <= MAX_DIFFERENCE:
            return candidate
    return None


def _result(norm: Callable, module: nn.Module, x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    """Return the output and the gradients of x, gate and the weight."""
    with torch.enable_grad():
        inputs = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
        output = norm(module, *inputs)
        if module.weight.requires_grad:
            inputs.append(module.weight)
        gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    return (output.detach(), *gradients)
