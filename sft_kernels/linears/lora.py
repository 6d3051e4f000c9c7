"""LoRA linears as one autograd function: one linear, or several that read the same input.

    forward    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T
    backward   dU_i = s_i dy_i B_i,  dB_i = s_i dy_i^T (x A_i^T),  dA_i = dU_i^T x,
               dx = sum_i dU_i A_i + dy_i W_i

The reference is PEFT's forward. Here the adapter's part is added in the float32 accumulator of
the large GEMM, not in another pass over the output. Saved for backward: x, which other modules
save, too, and x A^T. PEFT also saves x as float32, and the adapter's output.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share
an input.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_kernels.e4m3.linear import Float8Linear
from sft_kernels.linears.products import BoundLinears, LinearAdapter, frozen_linear
from sft_kernels.modules import decoder_of
from sft_kernels.needs import DORA, DROPOUT, ZERO_3
from sft_kernels.partitioned import is_hooked_by_deepspeed, is_missing, is_partitioned
from sft_kernels.sharded import is_sharded
from sft_kernels.training_setup import (
    Gradients,
    base_model_of,
    fuse,
    is_fused,
    is_training,
    to_compute_dtype,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearGroup:
    """Linears that read the same input. Bound once; `bind_when_changed` binds them again."""

    def __init__(self, *modules: nn.Module):
        self.modules = modules
        self.state: ModuleState | None = None  # at the time they were bound
        self.bound: BoundLinears | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a group of the copied modules, which has to be bound again."""
        return type(self)(*copy.deepcopy(self.modules, memo))

    def bind(self) -> BoundLinears | None:
        """Return the linears in bound form; None if one must run its own forward."""
        if self.state is None:
            self.state = ModuleState(self.modules)
            self.bound = bind_linears(self.modules)
        return self.bound

    def fused(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Return y_i (..., out_i) of x (..., in); None if a linear must run its own forward."""
        bound = self.bound if self.state else self.bind()
        if bound is None:
            return None
        return LoraLinearsFunction.apply(to_compute_dtype(x), bound, *bound.parameters)


class ModuleState:
    """The state that a binding depends on: weights, active adapters, scales, dropouts, hooks."""

    def __init__(self, modules: Sequence[nn.Module]):
        adapted = [each for each in modules if isinstance(each, LoraLayer)]
        linears = [*modules, *(each.base_layer for each in adapted)]
        self.containers = [getattr(each, name) for each in linears for name in HOOKS]
        self.containers += [each.merged_adapters for each in adapted]
        self.weights = [weight for each in linears for weight in each.parameters(recurse=False)]
        places: list[tuple[dict[str, Any], str]] = []  # dicts, and keys in them
        for linear in linears:
            places += [(vars(linear), "forward"), (linear._buffers, "weight_scale")]
            places += [(linear._parameters, name) for name in ("weight", "bias")]
        for linear in adapted:
            places += [(vars(linear), name) for name in ("_active_adapter", "_disable_adapters")]
            for name in linear.active_adapters:
                places.append((linear.scaling, name))
                for children in (linear.lora_A, linear.lora_B, linear.lora_dropout):
                    places.append((children._modules, name))
                    for child in [children[name]] if name in children else []:
                        places += [(child._parameters, "weight"), (vars(child), "p")]
        self.values = [(owner, name, owner.get(name)) for owner, name in places]
        self.counts: list[int] = []
        self.is_current()

    def is_current(self) -> bool:
        """Return whether nothing has changed since the last call, or since creation."""
        before = self.counts
        self.counts = [len(each) for each in self.containers]
        self.counts += [each.requires_grad for each in self.weights]
        for owner, name, value in self.values:
            if owner.get(name) is not value:
                return False
        return self.counts == before


def why_not_fusable(module: nn.Module) -> str | None:
    """Return why a linear, with or without adapters, cannot be fused; None if it can."""
    if not isinstance(module, LoraLayer):
        return _why_base_not_fusable(module)
    base = module.base_layer
    if not isinstance(module, PeftLinear | PeftLinear4bit):
        return f"adapters on a {type(base).__name__}"
    return why_adapter_not_fusable(module) or why_hooked(module) or _why_base_not_fusable(base)


def active_adapters(module: LoraLayer) -> list[str]:
    """Return the names of a module's active adapters."""
    return [name for name in module.active_adapters if name in module.lora_A]


def why_adapter_not_fusable(module: LoraLayer) -> str | None:
    """Return why the adapter of a linear, or of experts, cannot be fused; None if it can."""
    if module.disable_adapters or module.merged:
        return "adapters disabled or merged"
    active = active_adapters(module)
    if len(active) > 1:
        return f"{len(active)} active adapters"
    for name in active:
        if name in module.lora_variant:
            return DORA if module.use_dora[name] else "a variant of LoRA"
        if module.lora_bias[name]:
            return "adapters with a bias"
        if getattr(module.lora_dropout[name], "p", 0.0):
            return DROPOUT
        if is_missing(module.lora_A[name].weight):
            return ZERO_3
    return None


def _why_base_not_fusable(base: nn.Module) -> str | None:
    is_known = type(base) in (nn.Linear, Linear4bit, Float8Linear)
    if not is_known and not hasattr(base, "rounded_weight"):
        return f"a base layer of type {type(base).__name__}"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "base weights that are trained"
    if is_missing(base.weight):
        return ZERO_3
    if type(base) is Linear4bit:
        state = base.weight.quant_state
        if state is None or getattr(state, "packing_format_for_cpu", False):
            return "4-bit weights in no form to train on"
    return why_hooked(base)


def why_hooked(module: nn.Module) -> str | None:
    """Return why a module's hooks prevent fusing, because a fused function skips them; else None.

    DeepSpeed's hooks may be skipped if the layer gathers the module's weights.
    """
    if is_hooked_by_deepspeed(module):
        return None
    has_forward = "forward" in vars(module) and not is_fused(module, lora_forward)
    if has_forward or any(getattr(module, name) for name in HOOKS):
        return "hooks, or a forward of its own, on the linear"
    return None


def lora_forward(self: LoraLayer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Forward method of a LoRA linear: fused in training, otherwise the one of its class.

    Shapes: (..., in) to (..., out).
    """
    outputs = None
    if is_training(self) and not (args or kwargs):
        outputs = self.fused_group.fused(x)
    return type(self).forward(self, x, *args, **kwargs) if outputs is None else outputs[0]


def fuse_lora_linear(module: LoraLayer) -> None:
    """Make a LoRA linear use the fused function.

    Raises: ValueError with the reason of `why_not_fusable`.
    """
    reason = why_not_fusable(module)
    if reason:
        raise ValueError(f"a linear that cannot be fused: {reason}")
    module.fused_group = LinearGroup(module)
    fuse([module], lora_forward)


def bind_linears(modules: Sequence[nn.Module]) -> BoundLinears | None:
    """Return linears with their adapters; None if one of them cannot be fused."""
    bases = [getattr(module, "base_layer", module) for module in modules]
    rounded = [hasattr(base, "rounded_weight") for base in bases]
    if any(why_not_fusable(module) for module in modules) or any(rounded) != all(rounded):
        return None
    linears = []
    number, end = 0, 0  # adapters so far, and their columns in x A^T
    for module, base in zip(modules, bases, strict=True):
        adapter = None
        for name in active_adapters(module) if isinstance(module, LoraLayer) else ():
            a, b, rank = module.lora_A[name].weight, module.lora_B[name].weight, module.r[name]
            columns = slice(end, end + rank)
            adapter = LinearAdapter(a, b, module.scaling[name], rank, number, columns)
            number, end = number + 1, end + rank
        linears.append(frozen_linear(base, adapter))
    return BoundLinears(linears)


class LoraLinearsFunction(torch.autograd.Function):
    """y_i of linears that share x. Saves x, x A^T and the adapters in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, linears: BoundLinears, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return y_i (..., out_i).

        `parameters` are those of the bound linears; autograd must get them as arguments.
        """
        factors = linears.factors(x.dtype)
        outputs, xa = linears.project(x.flatten(0, -2), factors)
        ctx.save_for_backward(x, xa, *factors)
        ctx.linears = linears
        shape = x.shape[:-1]
        # not a view: a model may add to the output in place
        return tuple([torch.ops.aten._unsafe_view(y, (*shape, y.shape[1])) for y in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> Gradients:
        """Return the gradients of x and of the adapters."""
        linears: BoundLinears = ctx.linears
        x, xa, *factors = ctx.saved_tensors
        dy = [grad.flatten(0, -2) for grad in grads]
        du, db = linears.rank_and_output_gradients(dy, xa, factors)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = linears.input_gradient(dy, du, factors).view(x.shape)
        return dx, None, *linears.adapter_gradients(x.flatten(0, -2), du, db)


def groups_of(decoder: nn.Module) -> list[LinearGroup]:
    """Return the groups of fused linears, in module order."""
    found = []
    for module in decoder.modules():
        found += [value for value in vars(module).values() if isinstance(value, LinearGroup)]
    return found


def bind_when_changed(decoder: nn.Module) -> None:
    """Bind changed fused linears again before each forward pass of their decoder."""
    groups = groups_of(decoder)
    forget_changed(groups)  # proofs disable dropout
    decoder.register_forward_pre_hook(partial(forget_changed, groups))


def forget_changed(groups: Sequence[LinearGroup], *_: Any) -> None:
    """Reset groups whose modules have changed, so that they are bound again."""
    for group in groups:
        if group.state is not None and not group.state.is_current():
            group.state = None


class AdapterCopies:
    """A hook that casts the adapters of fused linears before each forward pass in training.

    Kernels that cast the adapters of one linear are too small to fill a GPU.
    """

    def __init__(self, groups: Sequence[BoundLinears], dtype: torch.dtype):
        self.adapters: list[Tensor] = []
        self.copies: list[Tensor] = []
        with torch.no_grad():
            for linears in groups:
                stacked, *b = linears.copies = linears.factors(dtype)
                self.copies += [*stacked.split(linears.ranks), *b]
                self.adapters += linears.parameters

    def __call__(self, decoder: nn.Module, *_: Any) -> None:
        """Copy the adapters as the optimizer left them."""
        if is_training(decoder):
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.adapters)


def copy_adapters_at_once(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's float32 adapters to `dtype` at once, if they are complete on one device."""
    decoder = decoder_of(base_model_of(model))
    groups = [group for group in groups_of(decoder) if all(map(is_complete, group.modules))]
    forget_changed(groups)
    bound = [linears for group in groups if (linears := group.bind()) and linears.adapters]
    forms = {(each.device, each.dtype) for linears in bound for each in linears.parameters}
    if len(forms) == 1 and forms.pop()[1] == torch.float32 != dtype:
        decoder.register_forward_pre_hook(AdapterCopies(bound, dtype))


def is_complete(module: nn.Module) -> bool:
    """Return whether no rank shards the weights of a module."""
    return not (is_sharded(module) or any(map(is_partitioned, module.parameters())))
