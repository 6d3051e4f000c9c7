"""Read weights that a checkpoint stores in 8 or 4 bits as dequantized numbers.

transformers gets tensors that dequantize when they are read, under the names of unquantized
tensors. So all code that uses the files works as with a 16-bit checkpoint: fused experts, NF4,
float8, FSDP. transformers' dequantization splits a weight into as many equal blocks as it has
scales. This is wrong if the last block is only a part of one. It also reads a weight without scales
as it is.

This module imports nothing of this project: `evaluation.plain` loads it by its path.

Legend: R rows, C columns of a weight.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Block = tuple[int, int] | None
SECTIONS = ("quantization_config", "compression_config")  # of config.json
OF_4_BITS = (
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
)
# Of activations, which are in 16 bits here, of a key-value cache, and of bitsandbytes' packing
UNUSED_ENDINGS = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_format",
)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
IN_HEADERS = ("F8_E4M3", "F8_E5M2", "I8")
INT8_STEPS = 127
EXPERTS_AT_ONCE = 2


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or several that form one weight, read when it is indexed."""

    parts: dict[str, Any]
    block: Block
    device: torch.device | None
    dtype: torch.dtype | None  # in which an unquantized checkpoint would store it

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weight in float32, or in 16 bits if that is exact."""
        read = {}
        for name, part in self.parts.items():
            tensor = part[...]
            read[name] = tensor if self.device is None else tensor.to(self.device)
        if "absmax" in read:  # packed by bitsandbytes
            from bitsandbytes.functional import QuantState, dequantize_4bit

            packed = read.pop("stored")
            weight = dequantize_4bit(packed, QuantState.from_dict(read, packed.device))
        else:
            weight = dequantized(block=self.block, **read)
        return weight[index]

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        if "absmax" in self.parts:
            return list(self[...].shape)
        shape = stored_shape(self.parts["stored"])
        if "exponents" not in self.parts:
            return shape
        experts, outputs, groups, pairs = shape
        return [experts, groups * pairs * 2, outputs]

    def get_dtype(self) -> str:
        """Return the dtype by its name in the file."""
        return "BF16" if "exponents" in self.parts else "F32"


def dequantized(
    stored: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    steps: Tensor | None = None,
    exponents: Tensor | None = None,
    block: Block = None,
) -> Tensor:
    """Return a weight (..., R, C): its 8-bit numbers times their scale.

    There is one scale for the full weight, one per row, or one per block. `steps` are the largest
    numbers of the rows in bitsandbytes' 8-bit format. `exponents` are those of MXFP4.

    Raises: ValueError for scales of another shape.
    """
    if exponents is not None:
        return _of_mxfp4(stored, exponents)
    if steps is not None:
        scale = steps.float() / INT8_STEPS
    numbers = stored.float()
    if zero_point is not None:
        numbers -= _spread(zero_point.float(), numbers.shape, block)
    if scale.dtype == torch.uint8:  # powers of two, in MXFP8
        scale = (scale.float() - 127).exp2()
    return numbers.mul_(_spread(scale.float(), numbers.shape, block))


def _of_mxfp4(stored: Tensor, exponents: Tensor) -> Tensor:
    """Return experts (E, C, R), unpacked in groups: all at once needs several times the bytes.

    `stored` is (E, R, blocks, 16), `exponents` (E, R, blocks).
    """
    weight = None
    for first in range(0, len(stored), EXPERTS_AT_ONCE):
        few = slice(first, first + EXPERTS_AT_ONCE)
        numbers = convert_moe_packed_tensors(stored[few], exponents[few])
        if weight is None:
            weight = numbers.new_empty(len(stored), *numbers.shape[1:])
        weight[few] = numbers
    return weight


def _spread(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Return scales in the shape of a weight: the scale of each block is repeated over it."""
    if scale.numel() == 1:
        return scale.reshape(())
    while scale.dim() < len(shape):
        scale = scale.unsqueeze(-1)
    for dim in range(-len(shape), 0):
        size, count = shape[dim], scale.shape[dim]
        if count in (1, size):
            continue
        width = block[dim] if block and dim >= -2 else 0
        if not width or -(-size // width) != count:
            width = size // count
        if width * count < size:
            raise ValueError(f"scales {tuple(scale.shape)} do not fit a weight {tuple(shape)}")
        scale = scale.repeat_interleave(width, dim).narrow(dim, 0, size)
    return scale


def as_plain(
    tensors: Mapping[str, Any],
    block: Block = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's tensors by name, the quantized ones as `Stored`, without their scales.

    Scales that belong to no weight stay, so that code that checks all names finds them.

    Raises: ValueError for a weight of 8 bits without scales.
    """
    plain = {name: part for name, part in tensors.items() if not name.endswith(UNUSED_ENDINGS)}
    parts = {name: _parts(name, plain) for name in plain}
    beside = {other for others in parts.values() for other in others.values()}
    for name, others in parts.items():
        is_mxfp4 = "exponents" in others
        is_packed = is_mxfp4 or "absmax" in others
        if name in beside or not (is_packed or _has_eight_bits(plain[name])):
            continue
        if others.keys() <= {"zero_point"}:
            raise ValueError(f"{name} is stored in 8 bits, and its scale is not in the files")
        read = {"stored": plain.pop(name)}
        read |= {role: plain.pop(other) for role, other in others.items()}
        own_name = name.removesuffix("_blocks") if is_mxfp4 else name
        plain[own_name] = Stored(read, block, device, dtype)
    return plain


@contextlib.contextmanager
def reading_as_plain(block: Block, device: torch.device | None = None) -> Iterator[None]:
    """Let `from_pretrained` read quantized weights as plain ones, dequantized on `device`.

    The model's config then does not mention quantization.
    """
    quantizer = modeling_utils.get_hf_quantizer

    def quantizer_of_plain(config: PretrainedConfig, *args: Any, **kwargs: Any) -> Any:
        for part in (config, config.get_text_config()):
            for section in SECTIONS:
                if hasattr(part, section):
                    delattr(part, section)
        return quantizer(config, *args, **kwargs)

    with (
        replaced(modeling_utils, get_hf_quantizer=quantizer_of_plain),
        reading_changed(lambda tensors, on=None: as_plain(tensors, block, on), device),
    ):
        yield


@contextlib.contextmanager
def reading_changed(change: Callable[..., Mapping[str, Any]], *args: Any) -> Iterator[None]:
    """Let `from_pretrained` read the tensors that `change` returns for those of a base's files.

    `args` are the other arguments of `change`. Under ZeRO-3 they are not passed, because it reads
    all tensors at once.
    """
    load = modeling_utils.convert_and_load_state_dict_in_model
    divide = modeling_utils._load_state_dict_into_zero3_model

    def load_changed(*others: Any, state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        return load(*others, state_dict=change(state_dict, *args), **kwargs)

    def divide_changed(model: Any, state_dict: Mapping[str, Any], *others: Any) -> Any:
        changed = {name: part[...] for name, part in change(state_dict).items()}
        return divide(model, changed, *others)

    with replaced(
        modeling_utils,
        convert_and_load_state_dict_in_model=load_changed,
        _load_state_dict_into_zero3_model=divide_changed,
    ):
        yield


def _parts(name: str, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the tensors that form a weight, by their role."""
    stem = name.removesuffix(".weight")
    candidates = [
        ("scale", f"{name}_scale_inv"),
        ("scale", f"{name}_scale"),
        ("scale", f"{stem}.scale"),
        ("zero_point", f"{name}_zero_point"),
        ("steps", f"{stem}.SCB"),
        ("exponents", f"{name.removesuffix('_blocks')}_scales"),
        *((part, f"{name}.{part}") for part in OF_4_BITS),
    ]
    return {role: other for role, other in candidates if other in tensors and other != name}


def _has_eight_bits(tensor: Any) -> bool:
    if isinstance(tensor, Tensor):
        return tensor.dtype in EIGHT_BITS
    return tensor.get_dtype() in IN_HEADERS


def stored_shape(tensor: Any) -> list[int]:
    return list(tensor.shape) if isinstance(tensor, Tensor) else tensor.get_shape()


def changing_model(
    change: Callable[[PreTrainedModel], None],
) -> contextlib.AbstractContextManager[Any]:
    """Let from_pretrained change the model that it has built, before it reads the weights."""
    read_weights = PreTrainedModel._load_pretrained_model

    def change_and_read(model: PreTrainedModel, *args: Any) -> Any:
        change(model)
        return read_weights(model, *args)

    return replaced(PreTrainedModel, _load_pretrained_model=staticmethod(change_and_read))


@contextlib.contextmanager
def changing_weights(
    layers_of: Callable[[PreTrainedModel], Iterable[nn.Module]],
    change: Callable[[nn.Parameter, str], None],
) -> Iterator[None]:
    """Let from_pretrained change each parameter of some layers after it was read and quantized.

    `change` is called with the parameter and its name in the model. transformers then does not
    reserve GPU memory for the complete model.
    """
    set_weight = core_model_loading.set_param_for_module
    inside: set[nn.Module] = set()

    def set_and_change(model: PreTrainedModel, name: str, *args: Any) -> None:
        """Set a weight that was read, and change it if its module is in one of the layers."""
        set_weight(model, name, *args)
        if not inside:
            for layer in layers_of(model):
                inside.update(layer.modules())
        holder, _, own = name.rpartition(".")
        module = model.get_submodule(holder)
        weight = module._parameters.get(own)
        if weight is not None and module in inside:
            change(weight, name)

    with (
        replaced(core_model_loading, set_param_for_module=set_and_change),
        replaced(modeling_utils, caching_allocator_warmup=lambda *_: None),
    ):
        yield


def one_tensor_at_a_time() -> contextlib.AbstractContextManager[Any]:
    """Let transformers read a tensor only when it is needed.

    Otherwise its threads read ahead of the code that fuses experts or moves weights to the host.
    The GPU could then store up to twice the model's bytes.
    """
    return replaced(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1")


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or a class, or entries of a mapping, inside this context."""
    is_mapping = isinstance(owner, MutableMapping)
    own = owner if is_mapping else vars(owner)
    put = owner.__setitem__ if is_mapping else functools.partial(setattr, owner)
    before = {name: own[name] for name in values if name in own}
    try:
        for name, value in values.items():
            put(name, value)
        yield
    finally:
        for name in values:
            if name in before:
                put(name, before[name])
            elif is_mapping:
                del owner[name]
            else:
                delattr(owner, name)
