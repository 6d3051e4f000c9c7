"""Linear layers that compute with the weight that servers will run (`train.deliver_as`).

    forward    y = q(x) Q(W + s B A)^T + b
    backward   dx = dy Q(W + s B A), and gradients of W, A and B as without rounding:
               they pass Q and q straight through (Bengio et al., arXiv:1308.3432)

Q rounds in the same way as the writer of the files (`models.compressed`). So training uses the
weights that are written: rounding is part of the loss, and adapters compensate for it. Fused
linears compute the same in training. This module is their reference, which evaluations also use.

Legend: N tokens, `in` and `out` features, r rank.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from sft_kernels.partitioned import is_partitioned
from sft_kernels.training_setup import to_compute_dtype
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.experts import expert_weights


class DeliveredLinear(nn.Linear):
    """A linear layer whose frozen or trained weight is rounded before each multiplication."""

    rounding: Any  # has `weight` and `inputs`, which round them
    is_rounded = True  # see `as_trained`

    def forward(self, x: Tensor) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        return _Product.of(x, self) if self.is_rounded else super().forward(x)

    @torch.no_grad()
    def rounded_weight(
        self, a: Tensor | None = None, b: Tensor | None = None, scale: float = 0.0
    ) -> Tensor:
        """Return Q(W + s B A) (out, in) in 16 bits, for A (r, in) and B (out, r)."""
        weight = self.weight if a is None else merged_weight(self.weight, a, b, scale)
        return self.rounding.weight(weight if weight.dtype == torch.float16 else weight.bfloat16())


class DeliveredLoraLinear(PeftLinear):
    """PEFT's LoRA linear over a rounded one: the adapter is rounded together with the weight."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return y (..., out) of x (..., in)."""
        base = self.base_layer
        name = next((name for name in self.active_adapters if name in self.lora_A), None)
        if self.disable_adapters:
            return nn.Linear.forward(base, x)
        if name is None or self.merged or not base.is_rounded:
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return _Product.of(x, base, a, b, self.scaling[name])


class _Product(torch.autograd.Function):
    """Computes y of one linear layer, with or without A and B."""

    @staticmethod
    def of(x: Tensor, linear: DeliveredLinear, *adapter: Any) -> Tensor:
        """Return y (..., out) of x (..., in), in autocast's dtype if it is on."""
        x = to_compute_dtype(x)
        y = _Product.apply(x, linear, linear.weight, *(adapter or (None, None, 0.0)))
        return y if linear.bias is None else y + linear.bias.to(x.dtype)

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        linear: DeliveredLinear,
        weight: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return q(x) Q(W + s B A)^T (..., out); W (out, in) is the weight of `linear`."""
        ctx.save_for_backward(x)
        # not saved: FSDP frees the weight's memory and later gathers it into the same tensor
        ctx.linear, ctx.adapter = linear, (a, b, scale)
        rounded = linear.rounded_weight(a, b, scale).to(x.dtype)
        return linear.rounding.inputs(x) @ rounded.t()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W, A and B."""
        (x,) = ctx.saved_tensors
        a, b, scale = ctx.adapter
        dx = dy @ ctx.linear.rounded_weight(a, b, scale).to(dy.dtype)
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)  # (N, out) and (N, in)
        dw, da, db = None, None, None
        if ctx.needs_input_grad[2]:
            dw = (dy.t() @ x).to(ctx.linear.weight.dtype)
        if a is not None:
            da = ((scale * dy @ b.to(dy.dtype)).t() @ x).to(a.dtype)
            db = (scale * dy.t() @ (x @ a.to(x.dtype).t())).to(b.dtype)
        return dx, None, dw, da, db, None


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A (out, in) from W, A (r, in) and B (out, r).

    On a GPU it is computed in the dtype of W. Some weights then differ from a float32 merge by one
    rounding step of that dtype.
    """
    dtype = weight.dtype if weight.is_cuda else torch.float32
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.to(dtype), b.to(dtype), a.to(dtype), alpha=scale)


def deliver(model: PreTrainedModel, config: Config) -> None:
    """Round the linear layers of a model without adapters if train.deliver_as is set.

    Raises: ConfigError for a model that is not quantized here.
    """
    kind = config.train.deliver_as
    if kind is None:
        return
    from sft_play.models.compressed import Rounding, quantized_linears  # takes seconds to import

    if expert_weights(model):
        raise ConfigError(
            f"train.deliver_as={kind}: the experts of {type(model).__name__} are not rounded in "
            "training; set TRAIN_DELIVER_AS=null, and export the run as fp8 or int4"
        )
    linears = quantized_linears(model).chosen
    rounding = Rounding.of(kind, linears.values(), config.model.name)
    for name, linear in linears.items():
        if type(linear) is not nn.Linear or is_partitioned(linear.weight):
            raise ConfigError(
                f"train.deliver_as={kind}: {name} is quantized to 4 bits or sharded by ZeRO-3; "
                "set TRAIN_STRATEGY=fsdp or ddp, or MODEL_NAME to a base in 16 bits"
            )
        linear.__class__ = DeliveredLinear
        linear.rounding = rounding


def deliver_adapters(model: nn.Module) -> None:
    """Make PEFT's linear layers over rounded ones round the adapter, too."""
    for module in model.modules():
        if type(module) is PeftLinear and isinstance(module.base_layer, DeliveredLinear):
            module.__class__ = DeliveredLoraLinear


def rounds_inputs(model: nn.Module) -> bool:
    """Return whether linear layers of a model round their inputs."""
    delivered = (part.rounding for part in model.modules() if isinstance(part, DeliveredLinear))
    return any(rounding.scheme.input_activations is not None for rounding in delivered)


@contextlib.contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Compute without rounding in this context, with the weights that are saved."""
    linears = [module for module in model.modules() if isinstance(module, DeliveredLinear)]
    for linear in linears:
        linear.is_rounded = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_rounded = True
