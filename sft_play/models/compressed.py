"""Select the linear layers that servers run in 8 or 4 bits, and round their weights.

The formats are those of compressed-tensors. Its functions are the reference and write the files
(`inference.export_compressed`). If a run trains for a format, its matrix multiplications use
weights that are rounded here (`models.delivered`).

A weight (O, I) is rounded in the dtype of the files, 16 bits. Each group of G inputs shares a scale
(fp8: all I inputs of an output):

    fp8    e4m3(w / s) s,    s = max |w| / 448, and inputs in the same way, per token
    int4   round(w / s) s,   s = max |w| / 7.5, in -8 to 7
    nvfp4  e2m1(w / s) s,    s = e4m3(g max |w| / 6) / g,  g = 2688 / max |w| of the full weight

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

from sft_play.errors import ConfigError
from sft_play.models.architecture import decoder_layers
from sft_play.plan.needs import FLOAT8_CAPABILITY

# Layers that route tokens or that control how a recurrence forgets. They are small, and nothing
# averages out their error.
GATES = ("gate", "router", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")
GROUPS = (128, 64, 32)  # G of int4 that servers have kernels for


class Kind(NamedTuple):
    """A format of the files."""

    preset: str  # name in compressed-tensors
    format: str


KINDS = {
    "fp8": Kind("FP8_DYNAMIC", "float-quantized"),  # inputs are quantized at run time
    "int4": Kind("W4A16", "pack-quantized"),
    "nvfp4": Kind("NVFP4A16", "nvfp4-pack-quantized"),
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
        if has_kernel(weight):
            from sft_play.models import compressed_kernels  # Triton needs a GPU

            group = self.scheme.weights.group_size or weight.shape[1]
            return compressed_kernels.rounded(weight, self.kind, group)
        scale, zero, whole = scales_of(weight, self.scheme)
        wide = fake_quantize(weight.float(), scale, zero, self.scheme.weights, global_scale=whole)
        return wide.to(weight.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x (..., I), inputs of a matrix multiplication, as servers round them."""
        arguments = self.scheme.input_activations
        if arguments is None:
            return x
        tokens = x.reshape(-1, x.shape[-1])
        if has_kernel(tokens):
            from sft_play.models import compressed_kernels  # Triton needs a GPU

            return compressed_kernels.rounded(tokens, self.kind, x.shape[-1]).view(x.shape)
        scale, zero = compute_dynamic_scales_and_zp(tokens[None], arguments, None)
        wide = fake_quantize(tokens[None].float(), scale, zero, arguments)
        return wide.to(x.dtype).view(x.shape)


def has_kernel(tensor: Tensor) -> bool:
    """Return whether a kernel can round a tensor: on GPUs that support e4m3."""
    if not tensor.is_cuda or tensor.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= FLOAT8_CAPABILITY
