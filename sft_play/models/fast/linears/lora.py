"""LoRA linears as one autograd function: one linear, or several that read the same input.

    forward    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T
    backward   dU_i = s_i dy_i B_i,  dB_i = s_i dy_i^T (x A_i^T),  dA_i = dU_i^T x,
               dx = sum_i dU_i A_i + dy_i W_i

The reference is PEFT's own forward. Here the adapter's part is added in the float32 accumulator of
the large product, not in another pass over the output. Saved for backward: x, which other modules
save too, and x A^T. PEFT also saves x as float32, and the adapter's output.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share
an input.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.bnb import Linear4bit as PeftLinear4bit
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from sft_play.models.architecture import decoder_of
from sft_play.models.delivered import DeliveredLinear, DeliveredLoraLinear
from sft_play.models.fast.linears.products import (
    Adapters,
    FrozenLinear,
    adapter_dtype,
    adapter_gradients,
    adapters_in,
    flatten_tokens,
    input_gradient,
    project,
    rank_and_output_gradients,
)
from sft_play.models.fast.setup import Gradients, base_model_of, is_training, to_compute_dtype
from sft_play.models.float8.format import Quantized
from sft_play.models.float8.linear import Float8Linear, Float8LoraLinear, take
from sft_play.models.partitioned import is_hooked_by_deepspeed, is_missing, is_partitioned
from sft_play.models.sharding import is_divided
from sft_play.plan.fast import DORA, DROPOUT, ZERO_3


class Bound(NamedTuple):
    """Linears that share an input, as long as their modules stay as they are."""

    linears: tuple[FrozenLinear, ...]
    adapters: tuple[Tensor | None, ...]  # A_1, B_1, A_2, ...; None: no adapter


class LinearGroup:
    """Linears that read the same input, bound once, and again if one of them has changed."""

    def __init__(self, *modules: nn.Module):
        self.modules = modules
        self.copies: Adapters | None = None  # the adapters in the dtype of products
        self._state: list[Any] | None = None
        self._bound: Bound | None = None

    def bind(self) -> Bound | None:
        """Return the linears as they are now; None if one of them must run its own forward."""
        state = state_of(self.modules)
        if state != self._state:
            self._state = state
            self._bound = bind_linears(self.modules)
            self.copies = None
        return self._bound

    def fused(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Return y_i (..., out_i) of x (..., in); None if a linear must run its own forward."""
        bound = self.bind()
        if bound is None:
            return None
        x = to_compute_dtype(x)
        return LoraLinearsFunction.apply(x, take(x), bound.linears, self.copies, *bound.adapters)


def state_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what linears were bound by: weights, active adapters, scales, dropouts and hooks."""
    state: list[Any] = []
    for module in modules:
        base = module
        if isinstance(module, LoraLayer):
            base = module.base_layer
            active = module.active_adapters
            state += (module.disable_adapters, module.merged, *active)
            for name in active:
                if name in module.lora_A:
                    a, b = module.lora_A[name].weight, module.lora_B[name].weight
                    dropout = getattr(module.lora_dropout[name], "p", 0.0)
                    state += (id(a), id(b), module.scaling[name], dropout)
        state += (id(base.weight), base.weight.requires_grad)
        for linear in (module, base):
            own = vars(linear)
            state += (
                len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]),
                len(own["_backward_hooks"]) + len(own["_backward_pre_hooks"]),
                "forward" in own,
            )
    return state


def why_not_fusable(module: nn.Module) -> str | None:
    """Return why a linear, with or without adapters, cannot be fused; None if it can."""
    if not isinstance(module, LoraLayer):
        return _why_base_not_fusable(module)
    base = module.base_layer
    if not isinstance(module, PeftLinear | PeftLinear4bit):
        return f"adapters on a {type(base).__name__}"
    return why_adapter_not_fusable(module) or why_hooked(module) or _why_base_not_fusable(base)


def active_adapters(module: LoraLayer) -> list[str]:
    """Return the names of the adapters of a module that are switched on."""
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
    if type(base) not in (nn.Linear, Linear4bit, Float8Linear, DeliveredLinear):
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
    """Return why a module's hooks forbid fusing: a fused function would skip them.

    DeepSpeed's may be skipped, if the layer gathers the module's weights.
    """
    if is_hooked_by_deepspeed(module):
        return None
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks) or "forward" in module.__dict__:
        return "hooks, or a forward of its own, on the linear"
    return None


class _FusedInTraining:
    """The forward method of PEFT's LoRA linears, fused in training."""

    fused_group: LinearGroup  # of this linear alone

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        outputs = None
        if is_training(self) and not (args or kwargs):
            outputs = self.fused_group.fused(x)
        return super().forward(x, *args, **kwargs) if outputs is None else outputs[0]


class FusedLoraLinear(_FusedInTraining, PeftLinear):
    """PEFT's LoRA linear, fused in training."""


class FusedLoraLinear4bit(_FusedInTraining, PeftLinear4bit):
    """PEFT's LoRA linear over 4-bit weights, fused in training."""


class FusedFloat8LoraLinear(_FusedInTraining, Float8LoraLinear):
    """PEFT's LoRA linear over float8 weights, fused in training."""


class FusedDeliveredLoraLinear(_FusedInTraining, DeliveredLoraLinear):
    """The LoRA linear that rounds, fused in training."""


FUSED_CLASSES = {
    DeliveredLoraLinear: FusedDeliveredLoraLinear,
    PeftLinear: FusedLoraLinear,
    PeftLinear4bit: FusedLoraLinear4bit,
    Float8LoraLinear: FusedFloat8LoraLinear,
}


def fuse_lora_linear(module: LoraLayer) -> None:
    """Make a LoRA linear use the fused function.

    Only its class changes; names, weights, saving and merging do not.

    Raises: ValueError with the reason of `why_not_fusable`.
    """
    reason = why_not_fusable(module)
    if reason:
        raise ValueError(f"a linear that cannot be fused: {reason}")
    module.__class__ = FUSED_CLASSES.get(type(module), type(module))
    module.fused_group = LinearGroup(module)


def bind_linears(modules: Sequence[nn.Module]) -> Bound | None:
    """Return linears with their adapters; None if one of them cannot be fused."""
    bases = [getattr(module, "base_layer", module) for module in modules]
    rounded = [isinstance(base, DeliveredLinear) for base in bases]
    if any(why_not_fusable(module) for module in modules) or any(rounded) != all(rounded):
        return None
    linears: list[FrozenLinear] = []
    adapters: list[Tensor | None] = []
    end = 0  # of the columns of x A^T
    for module, base in zip(modules, bases, strict=True):
        a, b, scale, rank = None, None, 0.0, 0
        if isinstance(module, LoraLayer):
            for name in active_adapters(module):  # one at most, as was checked
                a, b = module.lora_A[name].weight, module.lora_B[name].weight
                scale, rank = module.scaling[name], module.r[name]  # ZeRO-3 may have freed `a`
        linears.append(
            FrozenLinear(
                base.weight,
                base.bias,
                scale,
                rank,
                columns=slice(end, end + rank),
                row_scales=getattr(base, "weight_scale", None),
                is_partitioned=is_partitioned(base.weight),
                delivered=base if isinstance(base, DeliveredLinear) else None,
                adapter=(a, b),
            )
        )
        adapters += [a, b]
        end += rank
    return Bound(tuple(linears), tuple(adapters))


class LoraLinearsFunction(torch.autograd.Function):
    """y_i of linears that share x. Saves x, x A^T and the adapters in the dtype of the products."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        known: Quantized | None,
        linears: tuple[FrozenLinear, ...],
        copies: Adapters | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return y_i (..., out_i).

        `known` is x in float8, if the kernel that computed it has quantized it. `parameters`
        are A_1 (r_1, in), B_1 (out_1, r_1), A_2, ... in any floating type, and `copies` the same
        in the dtype of products, if there are some.
        """
        adapters = adapters_in(x.dtype, copies, parameters)
        outputs, xa = project(x, linears, adapters, known)
        ctx.save_for_backward(x, xa, adapters.a, *adapters.b)
        ctx.linears = linears
        ctx.adapter_dtype = adapter_dtype(parameters)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> Gradients:
        """Return the gradients of x and of A_1, B_1, A_2, ..."""
        x, xa, a, *b = ctx.saved_tensors
        adapters = Adapters(a, tuple(b))
        dy = [flatten_tokens(grad) for grad in grads]
        du, db = rank_and_output_gradients(dy, xa, ctx.linears, adapters, ctx.adapter_dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, du, ctx.linears, adapters).view(x.shape)
        gradients = adapter_gradients(flatten_tokens(x), du, db, ctx.linears, ctx.adapter_dtype)
        return dx, None, None, None, *gradients


def copy_adapters_at_once(model: nn.Module, wrapped: nn.Module) -> None:
    """Copy a model's adapters before each forward pass of its decoder in training.

    Only if they are complete on one device: `wrapped`, what the trainer calls, is the model or
    DDP.
    """
    decoder = decoder_of(base_model_of(model))
    groups = [group for group in groups_of(decoder) if _is_trained_in_float32(group)]
    are_complete = wrapped is model or isinstance(wrapped, DistributedDataParallel)
    if not groups or not are_complete or is_divided(model):
        return
    copies = AdapterCopies(groups)
    if len({adapter.device for adapter in copies.adapters}) == 1:
        decoder.register_forward_pre_hook(copies)


def groups_of(decoder: nn.Module) -> list[LinearGroup]:
    """Return the groups of fused linears, in the order of modules."""
    found = []
    for module in decoder.modules():
        found += [value for value in vars(module).values() if isinstance(value, LinearGroup)]
    return found


def _is_trained_in_float32(group: LinearGroup) -> bool:
    bound = group.bind()
    adapters = [] if bound is None else [each for each in bound.adapters if each is not None]
    return bool(adapters) and all(
        each.requires_grad and each.dtype == torch.float32 for each in adapters
    )


class AdapterCopies:
    """A hook that copies the adapters of groups of linears to `LinearGroup.copies`.

    Fused linears multiply in 16 bits, and adapters are trained in 32. A kernel that casts the
    adapters of one linear is too small to keep a GPU busy: 128 of them take 2 ms of a step of 8B on
    an H200, and a few for all adapters do the same work at once. Backward needs the copies anyway.
    """

    def __init__(self, groups: Sequence[LinearGroup]):
        self.groups = list(groups)
        self.adapters: list[Tensor] = []  # of each group all A, then all B
        for group in self.groups:
            bound = group.bind()
            for side in (bound.adapters[0::2], bound.adapters[1::2]):
                self.adapters += [adapter for adapter in side if adapter is not None]
        self.copies: list[Tensor] = []

    def __call__(self, decoder: nn.Module, *_: Any) -> None:
        """Refresh the copies if adapters are multiplied in another dtype than their own."""
        if not is_training(decoder):
            return
        device = self.adapters[0].device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif self.copies:  # products of weights in 16 bits find them without autocast, too
            dtype = self.copies[0].dtype
        else:
            return
        with torch.no_grad():
            if not self.copies or self.copies[0].dtype != dtype:
                self._allocate(dtype)
            torch._foreach_copy_(self.copies, self.adapters)

    def _allocate(self, dtype: torch.dtype) -> None:
        sizes = [adapter.numel() for adapter in self.adapters]
        flat = self.adapters[0].new_empty(sum(sizes), dtype=dtype)
        shapes = [adapter.shape for adapter in self.adapters]
        self.copies = [part.view(of) for part, of in zip(flat.split(sizes), shapes, strict=True)]
        remaining = iter(self.copies)
        for group in self.groups:
            bound = group.bind()
            a = [next(remaining) for each in bound.adapters[0::2] if each is not None]
            b = [None if each is None else next(remaining) for each in bound.adapters[1::2]]
            ranks = sum(map(len, a))  # the A of a group are neighbors in `flat`
            stacked = a[0].as_strided((ranks, a[0].shape[1]), (a[0].shape[1], 1))
            group.copies = Adapters(stacked, tuple(b))
