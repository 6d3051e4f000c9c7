"""Fake GPU kernels for a trace: they allocate what the real kernels do, without computing.

Each has the outputs, the tensors saved for backward and the buffers of the kernel that it replaces.

Legend: B rows, T tokens of a row, N tokens of all rows, H query heads, K key and value heads,
D features of a head, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import masking_utils

from sft_play.models import fake_mixer_kernels, linear_attention
from sft_play.models.fast.attention import forward as attention_forward
from sft_play.models.fast.attention import kernels as attention_kernels
from sft_play.models.fast.attention.reference import attend_lengths
from sft_play.models.fast.experts import function as experts_function
from sft_play.models.fast.experts import products as experts_products
from sft_play.models.fast.experts.products import UNPACKED_BYTES
from sft_play.models.fast.linears import glu, lora, mlp
from sft_play.models.fast.linears import products as linear_products
from sft_play.models.fast.loss import head as loss_head
from sft_play.models.fast.loss import linear_cross_entropy
from sft_play.models.fast.mixers import kernels as mixer_kernels
from sft_play.models.fast.norms import install as norms_install
from sft_play.models.fast.norms import residual
from sft_play.models.fast.setup import Gradients
from sft_play.models.float8 import linear as float8_linear
from sft_play.models.float8.format import FLOAT8, Quantized
from sft_play.plan.fast import MIN_CAPABILITY


class FakeFlashAttention(torch.autograd.Function):
    """Flash attention over (B, H, T, D), or flattened (N, H, D).

    Saves queries, keys, values, its output and a float32 for each query. The memory-efficient
    kernel also saves the mask, as an additive one in the dtype of the queries. Backward sums the
    gradient of the queries in float32, and those of grouped keys and values for each query head.
    """

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return an output with the dtype and layout of the queries and the features of values."""
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:  # latent attention
            out = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return gradients with the layouts of queries, keys and values."""
        query, key, value, *_ = ctx.saved_tensors
        # alive while the gradients are allocated
        buffers = [
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        ]
        if key.numel() < query.numel():
            buffers += [torch.empty_like(query), torch.empty_like(query)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


torch_attention = functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *more: Any,
    **settings: Any,
) -> Tensor:
    """Torch's attention on a GPU, in the dtype of autocast.

    Real tensors are attended to: `recognize` asks on numbers what a module computes.
    """
    if not isinstance(query, FakeTensor):
        return torch_attention(query, key, value, attn_mask, *more, **settings)
    cast = [lora.to_compute_dtype(tensor) for tensor in (query, key, value)]
    return FakeFlashAttention.apply(*cast, attn_mask)


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Torch's variable-length attention: (N, H, V) of query (N, H, D), key and value (N, K, V)."""
    features = value.shape[-1]
    padded = attention_kernels.padded_to_one_size(query, key, value)
    return FakeFlashAttention.apply(*padded, None)[..., :features]


def attend_whole_rows(
    query: Tensor, key: Tensor, value: Tensor, scoring: Any, documents: Any
) -> Tensor:
    """`attention.kernels._attend_by_document` of a traced step, whose rows are whole documents."""
    whole, rest = divmod(len(query), documents.longest)
    lengths = [documents.longest] * whole + [rest] * bool(rest)
    return attend_lengths(query, key, value, scoring, lengths)


class FakeRmsNorm(torch.autograd.Function):
    """Liger's RMSNorm. Saves its input and a float32 per token; backward may overwrite `grad`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        """Return an output like x."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.in_place = in_place
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return the gradients of x and of the weight if it is trained."""
        x, weight, _ = ctx.saved_tensors
        grad_x = grad if ctx.in_place else torch.empty_like(x)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def normalize(x: Tensor, weight: Tensor, eps: float, kind: Any) -> Tensor:
    """`norms.residual.normalize`."""
    return FakeRmsNorm.apply(x, weight, kind.in_place)


class FakeRotary(torch.autograd.Function):
    """Liger's rotary embedding. Overwrites queries, keys and their gradients; saves cos and sin."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the queries and keys."""
        ctx.save_for_backward(cos, sin)
        return query.view_as(query), key.view_as(key)

    @staticmethod
    def backward(ctx, query: Tensor, key: Tensor) -> Gradients:
        """Return the gradients of the outputs unchanged."""
        return query, key, None, None


class FakeResidualKernels:
    """`norms.residual_kernels`: a residual add and the norm after it in one pass."""

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        kind: Any,
        in_float8: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Quantized | None]:
        """Return y and s like x, a float32 for each token, and y in float8 if asked for."""
        y = torch.empty_like(x)
        s = x if residual is None else torch.empty_like(x)
        inverse = x.new_empty(x.shape[:-1], dtype=torch.float32)
        return y, s, inverse, quantize(y.flatten(0, -2)) if in_float8 else None

    @staticmethod
    def backward(dy: Tensor, ds: Tensor, s: Tensor, *_: Any) -> Tensor:
        """Return dx like s."""
        return torch.empty_like(s)


class FakeGroupedProduct(torch.autograd.Function):
    """`functional.grouped_mm`, which takes no float32 fake tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor, groups: int) -> Tensor:
        """Return (S, out) of x (S, in) and matrices (E, in, out); (E, in, out) of two matrices."""
        ctx.save_for_backward(x, other)
        if other.dim() == 2:
            return x.new_empty(groups, x.shape[0], other.shape[1])
        return x.new_empty(x.shape[0], other.shape[2])

    @staticmethod
    def backward(ctx, grad: Tensor) -> Gradients:
        """Return the gradients that are needed."""
        gradients: list[Tensor | None] = [None, None, None]
        for index, tensor in enumerate(ctx.saved_tensors):
            if ctx.needs_input_grad[index]:
                gradients[index] = torch.empty_like(tensor)
        return tuple(gradients)


def grouped_mm(x: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """`functional.grouped_mm` of two-dimensional x, which allocates only its output."""
    return FakeGroupedProduct.apply(x, other, len(offs))


def sum_choices(values: Tensor, routing: Any, weights: Tensor | None = None) -> Tensor:
    """`experts.products.sum_choices`: allocates only its output (N, H)."""
    return values.new_empty(len(routing.rows), values.shape[1])


def rows_times(x: Tensor, matrices: Any, routing: Any, *_: Any, **__: Any) -> Tensor:
    """`experts.products.rows_times`: allocates its output, and a few experts of packed ones."""
    if not isinstance(matrices, Tensor):
        experts, *sides = matrices.shape
        whole = experts * math.prod(sides)
        x.new_empty(min(whole, max(math.prod(sides), UNPACKED_BYTES // x.itemsize)))
    return x.new_empty(len(routing.order), matrices.shape[2])


def rows_outer(x: Tensor, y: Tensor, routing: Any, out: Tensor, *_: Any, **__: Any) -> None:
    """`experts.products.rows_outer`: allocates nothing."""


def gate_forward(gate: Any, y: Tensor, *_: Any) -> Tensor:
    """`experts.function.ClampedGlu.forward`: allocates only its output."""
    return y.new_empty(len(y), y.shape[1] // 2)


def gate_backward(gate: Any, dh: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of a gate of experts: two gradients; dh is overwritten."""
    return torch.empty_like(y), y.new_empty(len(y), dtype=torch.float32), dh


def nll_and_gradient_(logits: Tensor, *_: Any) -> Tensor:
    """`loss.kernel.nll_and_gradient_`: allocates a float32 per token."""
    return logits.new_empty(len(logits), dtype=torch.float32).sum()


def quantize(x: Tensor, *_: Any) -> Quantized:
    """`float8.quantize.quantize`: allocates its output and a float32 for each row."""
    scales = x.new_empty(len(x), dtype=torch.float32)
    return Quantized(torch.empty_like(x, dtype=FLOAT8), scales)


def float8_product(x: Quantized, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`float8.quantize.product`: allocates only its output."""
    return x.scales.new_empty(len(x.scales), len(weight), dtype=dtype)


def float8_input_product(dy: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`float8.quantize.input_product`: allocates its output, and a transposed weight."""
    transposed = torch.empty_like(weight)
    dx = dy.scales.new_empty(len(dy.scales), weight.shape[1], dtype=dtype)
    del transposed
    return dx


_is_autocast_enabled = torch.is_autocast_enabled


def is_autocast_enabled(device_type: str = "cpu") -> bool:
    """`torch.is_autocast_enabled`, whose default device is the GPU; here it is the CPU.

    PEFT calls it without a device, and leaves 16-bit inputs as they are under autocast.
    """
    return _is_autocast_enabled(device_type)


def dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout on a GPU, which keeps a mask of one byte per element; a CPU keeps floats."""
    return torch.native_dropout(tensor, p, True)[0] if p and training else tensor


# Functions that read the values of tensors, which fake tensors do not have, by where they are
VALUE_READERS: dict[Any, dict[str, Any]] = {
    experts_function: {"rows_times": rows_times},
    experts_products: {"rows_outer": rows_outer},
    functional: {"grouped_mm": grouped_mm},
    # tests check this for every model of plan.fast
    loss_head: {"_logits_come_from_head": lambda *_: True},
    attention_kernels: {"_attend_by_document": attend_whole_rows},
    # the step passes its own mask for packed rows
    masking_utils: {"find_packed_sequence_indices": lambda position_ids: None},
}
FLOAT8_PRODUCTS = {
    "quantize": quantize,
    "product": float8_product,
    "input_product": float8_input_product,
}
GATE = {"forward": gate_forward, "backward": gate_backward}
GPU_KERNELS: dict[Any, dict[str, Any]] = {
    attention_kernels: {"_attend_by_document": attend_by_document},
    functional: {"scaled_dot_product_attention": scaled_dot_product_attention, "dropout": dropout},
    torch: {"is_autocast_enabled": is_autocast_enabled},
    attention_forward: {"apply_rotary": FakeRotary.apply},
    linear_products: FLOAT8_PRODUCTS,
    float8_linear: FLOAT8_PRODUCTS,
    # a GLU allocates its output alone; its gradients are written to memory that is there
    glu: {
        "glu_forward": lambda gate, *_: gate.new_empty(gate.shape),
        "glu_backward": lambda *_, **__: None,
    },
    mlp: {
        "glu_forward_float8": lambda gate, *_: (gate.new_empty(gate.shape), quantize(gate)),
        "glu_backward_float8": lambda dh, *_: (quantize(dh), quantize(dh)),
    },
    experts_function: {"sum_choices": sum_choices},
    experts_function.Glu: GATE,
    residual: {"_kernels": lambda x: FakeResidualKernels, "normalize": normalize},
    linear_cross_entropy: {"nll_and_gradient_": nll_and_gradient_},
    mixer_kernels: {
        "uses_fla": linear_attention.will_use_fla,
        "fla_convolution": fake_mixer_kernels.fla_convolution,
        "fla_delta_rule": fake_mixer_kernels.fla_delta_rule,
        "fla_linear_attention": fake_mixer_kernels.fla_linear_attention,
    },
    norms_install: {
        "uses_fla": linear_attention.will_use_fla,
        "norm_then_silu": fake_mixer_kernels.gated_norm,
    },
    torch.cuda: {"get_device_capability": lambda device=None: MIN_CAPABILITY},
}


@contextlib.contextmanager
def fake_kernels(is_gpu: bool) -> Iterator[None]:
    """Replace the functions that read values and, for a run on a GPU, those that need one."""
    with contextlib.ExitStack() as stack:
        for table in (VALUE_READERS, GPU_KERNELS if is_gpu else {}):
            for owner, fakes in table.items():
                stack.enter_context(patch.multiple(owner, **fakes))
        yield
