"""Select the linear layers that servers run in 8 or 4 bits, and round their weights.

The formats are those of compressed-tensors. Its functions are the reference and write the files
(`inference.export_compressed`). If a run trains for a format, its matrix multiplications use
weights that are rounded here (`models.delivered`).

A weight (O, I) is rounded in the dtype of the files, 16 bits. Each group of G inputs shares a scale
(fp8: all I inputs of an output):

    fp8    e4m3(w / s) s,    s = max |w| / 448, and inputs in the same way, per token
    int4   round(w / s) s,   s = max |w| / 7.5, in -8 to 7
    nvfp4  e2m1(w / s) s,    s = e4m3(g max |w| / 6) / g,  g = 2688 / max |w| of the full weight

On a GPU, a Triton kernel rounds several groups per program, one per row of a tile, and reads them
once.

Legend: O outputs, I inputs, G numbers that share a scale.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_kernels.needs import FLOAT8_CAPABILITY
from sft_kernels.triton_kernels import on_device_of, program_number, tl, triton
from sft_play.errors import ConfigError
from sft_play.models.architecture import decoder_layers

# Layers that route tokens or that control how a recurrence forgets. They are small, and nothing
# averages out their error.
GATES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
GROUPS = (128, 64, 32)  # G of int4 that servers have kernels for


class CompressedFormat(NamedTuple):
    """A format of the files."""

    preset: str  # name in compressed-tensors
    format: str


KINDS = {
    "fp8": CompressedFormat("FP8_DYNAMIC", "float-quantized"),  # inputs are quantized at run time
    "int4": CompressedFormat("W4A16", "pack-quantized"),
    "nvfp4": CompressedFormat("NVFP4A16", "nvfp4-pack-quantized"),
}


class Linears(NamedTuple):
    """The linear layers of a model: those to quantize, by name, and the names of the others."""

    chosen: dict[str, nn.Linear]
    others: list[str]


def quantized_linears(model: PreTrainedModel) -> Linears:
    """Return the linear layers to quantize: those of the decoder, without routers and gates.

    `model` has no adapters.
    """
    within = {module for layer in decoder_layers(model) for module in layer.modules()}
    chosen, others = {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module in within and name.rpartition(".")[2] not in GATES:
            chosen[name] = module
        else:
            others.append(name)
    return Linears(chosen, others)


def scheme_of(kind: str, inputs: Iterable[int], source: str) -> QuantizationScheme:
    """Return the scheme of a format; int4 uses the largest group that divides all `inputs` I.

    Raises: ConfigError if no group size divides the inputs of the model `source`.
    """
    scheme = preset_name_to_scheme(KINDS[kind].preset, ["Linear"])
    wanted = GROUPS if kind == "int4" else (scheme.weights.group_size or 1,)
    common = math.gcd(*inputs)
    group = next((size for size in wanted if common % size == 0), None)
    if group is None:
        raise ConfigError(
            f"{kind}: a layer of {source} has inputs that are no multiple of {min(wanted)}; fp8 "
            "takes any"
        )
    if scheme.weights.group_size is not None:
        weights = scheme.weights.model_copy(update={"group_size": group})
        scheme = scheme.model_copy(update={"weights": weights})
    return scheme.model_copy(update={"format": KINDS[kind].format})


class Scales(NamedTuple):
    """The scales that round a weight."""

    scale: Tensor  # (O, I / G) in the dtype of the weight, for nvfp4 float32
    zero: Tensor
    whole: Tensor | None  # (1,) float32, only for nvfp4


def scales_of(weight: Tensor, scheme: QuantizationScheme) -> Scales:
    """Return the scales of a weight (O, I) in 16 bits."""
    grouped = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
    whole = None
    if scheme.format == KINDS["nvfp4"].format:
        whole = generate_gparam(weight.min(), weight.max())
    bounds = (grouped.amin(-1), grouped.amax(-1))  # (O, I / G)
    return Scales(*calculate_qparams(*bounds, scheme.weights, global_scale=whole), whole)


@dataclass(frozen=True)
class Rounding:
    """How a format rounds weights, and inputs if it quantizes them."""

    kind: str
    scheme: QuantizationScheme

    @classmethod
    def of(cls, kind: str, linears: Iterable[nn.Linear], source: str) -> "Rounding":
        """Return the rounding of a model's linear layers. Raises: as `scheme_of`."""
        return cls(kind, scheme_of(kind, (linear.in_features for linear in linears), source))

    def weight(self, weight: Tensor) -> Tensor:
        """Return a weight (O, I) in 16 bits with the values that are read back from the files."""
        if has_rounding_kernel(weight):
            group = self.scheme.weights.group_size or weight.shape[1]
            return rounded_groups(weight, self.kind, group)
        scale, zero, whole = scales_of(weight, self.scheme)
        wide = fake_quantize(weight.float(), scale, zero, self.scheme.weights, global_scale=whole)
        return wide.to(weight.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x (..., I), inputs of a matrix multiplication, as servers round them."""
        arguments = self.scheme.input_activations
        if arguments is None:
            return x
        tokens = x.reshape(-1, x.shape[-1])
        if has_rounding_kernel(tokens):
            return rounded_groups(tokens, self.kind, x.shape[-1]).view(x.shape)
        scale, zero = compute_dynamic_scales_and_zp(tokens[None], arguments, None)
        wide = fake_quantize(tokens[None].float(), scale, zero, arguments)
        return wide.to(x.dtype).view(x.shape)


def has_rounding_kernel(tensor: Tensor) -> bool:
    """Return whether a kernel can round a tensor: on GPUs that support e4m3."""
    if not tensor.is_cuda or tensor.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= FLOAT8_CAPABILITY


TILE = 4096  # numbers per program, at least one group
WARP_NUMBERS = 1024  # numbers of a tile per warp
_E4M3, _LARGEST = tl.constexpr(448.0), tl.constexpr(2688.0)  # e4m3, and 6 (e2m1) times that
_ONE_APART = tl.constexpr(1.5 * 2**23)  # float32 numbers of this size are one apart


@triton.jit
def _nearest(x):
    """Return x rounded to an integer, halves to even; |x| must be below 2^22."""
    return (x + _ONE_APART) - _ONE_APART


@triton.jit
def _as(x, like):
    """Return x in float32, rounded to the dtype of `like`."""
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _e4m3(x):
    return tl.clamp(x, -_E4M3, _E4M3).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _e2m1(x):
    """Return x rounded to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign; ties go to the even code."""
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    rounded = _nearest(size / step) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _round(
    x,
    output,
    largest_of_all,
    groups,
    group,
    kind: tl.constexpr,
    rows: tl.constexpr,
    padded: tl.constexpr,
):
    """Write `rows` groups of x (M, G), rounded. `largest_of_all` (1,) is read only for nvfp4."""
    row = program_number() * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, padded)[None, :]
    inside = (row < groups) & (column < group)
    stored = tl.load(x + row * group + column, inside, 0)
    wide = stored.to(tl.float32)
    largest = tl.reduce(tl.abs(wide), 1, _larger)[:, None]
    if kind == "nvfp4":
        of_all = tl.load(largest_of_all).to(tl.float32)
        whole = tl.where(of_all > 0, _as(tl.div_rn(_LARGEST, of_all), stored), 1.0)
        scale = _e4m3(whole * _as(tl.div_rn(largest, 6.0), stored))
        scale = tl.div_rn(tl.where(scale == 0, 0.125, scale), whole)
    elif kind == "int4":
        scale = _as(tl.div_rn(largest, 7.5), stored)
    else:
        scale = _as(tl.div_rn(largest, _E4M3), stored)
    scale = tl.where(scale == 0, 1.0, scale)  # for zeros
    code = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape))
    if kind == "nvfp4":
        code = _e2m1(code)
    elif kind == "int4":
        code = _nearest(tl.clamp(code, -8.0, 7.0))
    else:
        code = _e4m3(code)
    tl.store(output + row * group + column, (code * scale).to(stored.dtype), inside)


def rounded_groups(x: Tensor, kind: str, group: int) -> Tensor:
    """Return x (..., I) in 16 bits, rounded in groups of `group` numbers, which must divide I."""
    x = x.contiguous()
    output = torch.empty_like(x)
    largest = x.abs().max() if kind == "nvfp4" else x
    padded = triton.next_power_of_2(group)
    rows = max(1, TILE // padded)
    groups = x.numel() // group
    warps = min(16, max(4, rows * padded // WARP_NUMBERS))
    with on_device_of(x):
        _round[(triton.cdiv(groups, rows),)](
            x, output, largest, groups, group, kind, rows, padded, num_warps=warps
        )
    return output
