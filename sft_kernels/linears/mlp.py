"""Gated MLPs over LoRA linears as one autograd function (Unsloth: LoRA_MLP), and what is fused.

    y = down(h),  h = act(gate(x)) * up(x)

Saved for backward: x, the outputs of gate and up, and x A^T and h A^T of the adapters. h is
recomputed: it is elementwise, and saving it would cost I features per token (28 KiB for an 8B
model). The reference is the module's original forward with the references of `lora` and `glu`.

`install_mlp` and `install_linears` find the MLPs and linears of a decoder.

Legend: N tokens, I intermediate features.
"""

from collections.abc import Sequence
from functools import partial

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_kernels.attention.forward import attention_forward
from sft_kernels.expert_modules import find_experts
from sft_kernels.linears import tiles
from sft_kernels.linears.glu import Activation, GluFunction, glu_backward, glu_forward
from sft_kernels.linears.lora import (
    LinearGroup,
    fuse_lora_linear,
    to_compute_dtype,
    why_not_fusable,
)
from sft_kernels.linears.products import BoundLinears
from sft_kernels.proof import prove
from sft_kernels.recognize import GatedMlp, gated_mlp_of, is_linear
from sft_kernels.training_setup import (
    Gradients,
    TrainingSetup,
    Unsupported,
    fuse,
    is_fused,
    is_training,
)


def lora_mlp(x: Tensor, inner: LinearGroup, down: LinearGroup, activation: Activation) -> Tensor:
    """Return down(act(gate(x)) * up(x)), (..., out) of x (..., in).

    `inner` is gate and up, or one linear that computes both, with gate's features first (Phi 3). If
    a linear cannot be fused, for instance because its weight is trained, all linears run their own
    forward. Then only the elementwise part is fused.
    """
    bound, bound_down = inner.bind(), down.bind()
    if bound is None or bound_down is None:
        gate_output, up_output = split_halves(tuple(module(x) for module in inner.modules))
        return down.modules[0](GluFunction.apply(gate_output, up_output, activation))
    parameters = (*bound.parameters, *bound_down.parameters)
    return LoraMlpFunction.apply(to_compute_dtype(x), bound, bound_down, activation, *parameters)


def split_halves(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the outputs (..., I) of gate and up, from two linears or one that computes both."""
    return outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)


class LoraMlpFunction(torch.autograd.Function):
    """down(act(gate(x)) * up(x))."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        inner: BoundLinears,
        down: BoundLinears,
        activation: Activation,
        *parameters: Tensor,
    ) -> Tensor:
        """Return y (..., out) of x (..., in); `parameters` are those of the bound linears."""
        factors, down_factors = inner.factors(x.dtype), down.factors(x.dtype)
        outputs, xa = inner.project(x.flatten(0, -2), factors)
        (y,), ha = down.project(glu_forward(*split_halves(outputs), activation), down_factors)
        ctx.save_for_backward(x, xa, ha, *outputs, *factors, *down_factors)
        ctx.inner, ctx.down, ctx.activation = inner, down, activation
        # not a view: a model may add to the output in place
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Gradients:
        """Return the gradients of x and of the adapters."""
        inner, down = ctx.inner, ctx.down
        dy = dy.flatten(0, -2)
        x, xa, ha, *saved = ctx.saved_tensors
        outputs = saved[: len(inner.linears)]
        all_factors = saved[len(inner.linears) :]
        own = len(inner.adapters) + 1 if inner.adapters else 0
        factors, down_factors = all_factors[:own], all_factors[own:]
        du, db = down.rank_and_output_gradients([dy], ha, down_factors)
        dh = down.input_gradient([dy], du, down_factors)
        grads = [torch.empty_like(output) for output in outputs]
        halves = (*split_halves(outputs), ctx.activation, *split_halves(grads))
        # The outputs of gate and up are not overwritten: a second backward pass may need them.
        h = None if du is None else dh  # overwritten: the adapter of down reads h again
        glu_backward(dh, *halves, h=h)
        down_gradients = down.adapter_gradients(dh, du, db)
        del dh, h, du, db  # freed before the gradient of x is allocated
        du, db = inner.rank_and_output_gradients(grads, xa, factors)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = inner.input_gradient(grads, du, factors).view(x.shape)
        gradients = inner.adapter_gradients(x.flatten(0, -2), du, db)
        return dx, None, None, None, *gradients, *down_gradients


def install_mlp(setup: TrainingSetup) -> int:
    """Fuse gated MLPs, or their elementwise part if linears cannot be fused; return how many."""
    modules = []
    for module in setup.decoder.modules():
        roles = gated_mlp_of(module)
        if roles is not None:
            bind_mlp(module, roles)
            modules.append(module)
    if not modules and find_experts(setup.decoder):
        return 0
    if not modules:
        raise Unsupported("no gated MLP with SiLU or GELU (tanh)")
    agreed = prove(modules, mlp_forward, setup)
    fuse(agreed, mlp_forward)
    return len(agreed)


def bind_mlp(module: nn.Module, roles: GatedMlp) -> None:
    """Set the attributes that `mlp_forward` reads from a gated MLP."""
    names = (roles.gate,) if roles.up is None else (roles.gate, roles.up)
    module.fused_activation = roles.activation
    module.is_tiled = False  # `checkpointing` sets it if the layer is recomputed
    module.inner_linears = LinearGroup(*(getattr(module, name) for name in names))
    module.down_linear = LinearGroup(getattr(module, roles.down))


def why_mlp_linears_not_fusable(setup: TrainingSetup) -> str | None:
    """Return why the linears of the MLPs run their own forward; None if they are fused."""
    if setup.is_full:
        return None  # nothing is fused into the GEMM of a trained weight
    for module in setup.decoder.modules():
        if not is_fused(module, mlp_forward):
            continue
        for linear in module.children():
            reason = why_not_fusable(linear) if is_linear(linear) else None
            if reason:
                return reason
    return None


def mlp_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """Forward method of a gated MLP: fused in training, otherwise the one of its class.

    Shapes: (B, T, H) to (B, T, H).
    """
    is_long = hidden_states.numel() >= 2 * tiles.TILE_TOKENS * hidden_states.shape[-1]
    if not is_training(self):
        own = partial(type(self).forward, self)
        return tiles.without_gradients(own, hidden_states) if is_long else own(hidden_states)
    fused = partial(
        lora_mlp, inner=self.inner_linears, down=self.down_linear, activation=self.fused_activation
    )
    if is_long and self.is_tiled and hidden_states.requires_grad:
        return tiles.in_tiles(fused, hidden_states, self)
    return fused(hidden_states)


def install_linears(setup: TrainingSetup) -> int:
    """Fuse all adapted linears of the decoder that no larger function fuses; return how many.

    `attention_forward` calls its linears in fused form. The others get a fused forward method.
    """
    if setup.is_full:
        raise Unsupported("mode full trains the weights themselves")
    in_attention: set[nn.Module] = set()
    in_mlps: set[nn.Module] = set()
    for module in setup.decoder.modules():
        if is_fused(module, attention_forward):
            in_attention.update(module.children())
        elif is_fused(module, mlp_forward):
            in_mlps.update(module.children())
    count = 0
    reasons: dict[str, int] = {}
    for linear in setup.decoder.modules():
        if not isinstance(linear, LoraLayer) or not is_linear(linear) or linear in in_mlps:
            continue
        reason = why_not_fusable(linear)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        count += 1
        if linear not in in_attention:
            fuse_lora_linear(linear)
    if not count:
        raise Unsupported(next(iter(reasons), "no adapters there"))
    for reason, number in reasons.items():
        setup.left_out.append(f"{number} of {number + count}: {reason}")
    return count
