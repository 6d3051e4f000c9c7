"""Quantize base weights to 4 bits with bitsandbytes, including experts, on GPUs and CPUs.

transformers packs only linear layers. Without a warning, it leaves the experts, which are most of
the weights, in 16 bits. Here experts are packed too, one parameter at a time on its device, so at
most one of them is in 16 bits.

A packed parameter is a `Params4bit` whose quant_state has the 3-D shape. `experts.packed_weight`
finds it. Code that reads the parameter by its name gets it in 16 bits: torch's parametrization
unpacks it once per forward pass. Fused kernels unpack it themselves.
"""

import contextlib
import copy
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from sft_kernels import mxfp4
from sft_kernels.expert_modules import packed_weight
from sft_kernels.linears.four_bit import keep_differentiable
from sft_kernels.mxfp4 import Mxfp4State
from sft_kernels.sharded import run_within
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.models.architecture import empty_model, empty_twin, encoders_of
from sft_play.models.base_files import stored_config
from sft_play.models.experts import expert_weights, is_expert_weight, unquantized_linears
from sft_play.models.parameters import dtype_name, log_packed
from sft_play.models.sharding import has_rows_alone, store_as
from sft_play.models.stored_weights import replaced


def storage_type(compute_dtype: torch.dtype, zero_stage: int, is_fsdp: bool = False) -> torch.dtype:
    """Return the dtype that stores the bytes of a 4-bit base: uint8 if it is not sharded.

    DeepSpeed shards only floating-point tensors, and so does FSDP in torch before 2.13. DeepSpeed
    casts tensors whose dtype is not the compute dtype. FSDP copies several tensors in one kernel,
    which converts 16-bit numbers to float32 and back. This changes bytes that form a NaN. float32
    bytes are not changed.
    """
    if zero_stage == 3:
        return compute_dtype
    return torch.float32 if is_fsdp else torch.uint8


def quantization_config(
    config: Config, compute_dtype: torch.dtype, storage: torch.dtype = torch.uint8
) -> BitsAndBytesConfig:
    """Return the 4-bit config of a qlora base whose bytes are stored as `storage`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.tuning.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.tuning.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=storage,
    )


def plain_quantization(config: Config, compute_dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the same config as plain values, for a process that loads a qlora base by itself."""
    if config.tuning.mode != "qlora":
        return None
    asked = quantization_config(config, compute_dtype)
    names = ("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    values = {name: getattr(asked, name) for name in names}
    values["bnb_4bit_compute_dtype"] = dtype_name(compute_dtype)
    stored = stored_config(config)
    if getattr(stored, "quantization_config", None) is None:
        model = empty_model(stored, compute_dtype, config.model.trust_remote_code)
        whole = kept_whole(model)
        if whole:  # plain transformers would pack them, too
            values["llm_int8_skip_modules"] = [*get_keys_to_not_convert(model), *whole]
    return values


def kept_whole(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that stay in 16 bits besides the head: routers, encoders."""
    return [*sorted(unquantized_linears(model)), *encoders_of(model)]


def set_compute_dtype(stored: PretrainedConfig, compute_dtype: torch.dtype) -> None:
    """Let a base that is stored in 4 bits compute in `compute_dtype`."""
    for part in (stored, stored.get_text_config()):
        if getattr(part, "quantization_config", None):
            part.quantization_config["bnb_4bit_compute_dtype"] = dtype_name(compute_dtype)


def finish_loading(model: nn.Module, storage: torch.dtype) -> None:
    """Make a packed model trainable on this device, and log what is packed.

    If the checkpoint was in 4 bits, its bytes are also converted to `storage`.

    Raises: EnvironmentFault if this CPU unpacks a weight to other numbers than were packed.
    """
    for weight in model.parameters():
        if isinstance(weight, Params4bit) and weight.dtype != storage:
            store_as(weight, storage)
    keep_differentiable(model)
    refuse_wrong_unpacking(model)
    log_packed(model)


def refuse_wrong_unpacking(model: nn.Module) -> None:
    """Raise EnvironmentFault if this CPU unpacks a weight to other numbers than were packed.

    On CPUs with AVX512, bitsandbytes 0.50 reads the scales of wrong blocks if rows do not consist
    of full blocks (of 64 weights).
    """
    if any(weight.is_cuda for weight in model.parameters()):  # others are moved to the GPU later
        return
    looked_at = set()
    for name, weight in model.named_parameters():
        is_on_cpu = isinstance(weight, Params4bit) and weight.device.type == "cpu"
        if not is_on_cpu or has_rows_alone(weight):
            continue
        state = weight.quant_state
        if isinstance(state, Mxfp4State):
            continue
        if state.shape[-1] % state.blocksize and state.shape not in looked_at:
            looked_at.add(state.shape)
            if not is_unpacked_rightly(weight):
                raise EnvironmentFault(
                    f"tuning.mode=qlora: this CPU unpacks {name} {tuple(state.shape)} to other "
                    f"numbers than were packed: its rows are no whole blocks of {state.blocksize}; "
                    "set TUNING_MODE=lora, or train on a GPU"
                )


def is_unpacked_rightly(weight: Params4bit) -> bool:
    """Return whether a packed weight is unpacked to the same numbers as its flat copy."""
    flat: Tensor = weight.data.view(-1, 1)
    unpacked = dequantize_4bit(flat, weight.quant_state)
    state = copy.copy(weight.quant_state)
    state.shape = torch.Size([unpacked.numel()])
    return torch.equal(unpacked.flatten(), dequantize_4bit(flat, state).flatten())


BNB = "bitsandbytes_4bit"  # transformers' name of the quantizer
# bitsandbytes counts the weights of a tensor in 32 bits
MAX_WEIGHTS = 2**31 - 1
CACHE_HOOKS = "unpacking_cache_hooks"  # attribute of a module whose packed weights are read by name


class ExpertQuantizer(Bnb4BitHfQuantizer):
    """transformers' 4-bit quantizer, which also packs 3-D experts and does not pack routers."""

    keeps_mxfp4 = False

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is stored in 4 bits."""
        module, name = get_module_from_name(model, param_name)
        if _is_packable(module, name):
            return not self.pre_quantized
        return super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that packs a parameter."""
        return _PackWeights(self)

    def _process_model_before_weight_loading(self, model: nn.Module, *args: Any, **kwargs: Any):
        if expert_weights(model) and is_deepspeed_zero3_enabled():
            raise ConfigError(
                "tuning.mode=qlora: ZeRO-3 cannot share out experts in 4 bits; set "
                "TUNING_MODE=lora, or train with make train-distributed TRAIN_STRATEGY=fsdp"
            )
        self.whole = kept_whole(model)
        if self.pre_quantized:
            self.whole = []  # its config.json lists what is in 16 bits
        super()._process_model_before_weight_loading(model, *args, **kwargs)

    def get_modules_to_not_convert(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return the names of the modules that stay in 16 bits: head, routers and encoders."""
        return [*super().get_modules_to_not_convert(*args, **kwargs), *self.whole]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        unpack_on_access(model)
        return super()._process_model_after_weight_loading(model, **kwargs)


class _PackWeights(Bnb4bitQuantize):
    """Packs the weights of linear layers and of experts."""

    def convert(
        self, input_dict: dict[str, Any], model: nn.Module | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the tensors by name, packed if they are weights of linear layers or experts."""
        packed: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            module, own_name = get_module_from_name(model, name)
            if _is_packable(module, own_name):
                packed[name] = self._packed(tensor, module)
            else:
                packed |= super().convert({name: tensor}, model=model, **kwargs)
        return packed

    def _packed(self, weight: Tensor, experts: nn.Module) -> Params4bit:
        found = None
        if self.hf_quantizer.keeps_mxfp4:
            found = mxfp4.pack_mxfp4(weight, getattr(experts, "is_transposed", False))
        return pack_4bit(weight, self.hf_quantizer.quantization_config) if found is None else found


class Mxfp4Keeper(ExpertQuantizer):
    """An ExpertQuantizer that keeps experts in MXFP4 if this represents every number exactly."""

    keeps_mxfp4 = True


def packing_experts(are_mxfp4: bool) -> contextlib.AbstractContextManager[Any]:
    """Let `from_pretrained` pack experts in this context; MXFP4 experts stay in MXFP4."""
    quantizer = Mxfp4Keeper if are_mxfp4 else ExpertQuantizer
    return replaced(AUTO_QUANTIZER_MAPPING, **{BNB: quantizer})


def pack_4bit(weight: Tensor, quantization: BitsAndBytesConfig) -> Params4bit:
    """Return a weight of any shape in 4 bits, on its device."""
    packed = Params4bit(
        weight.detach(),
        requires_grad=False,
        compress_statistics=quantization.bnb_4bit_use_double_quant,
        quant_type=quantization.bnb_4bit_quant_type,
        quant_storage=quantization.bnb_4bit_quant_storage,
    )
    return packed._quantize(weight.device)


has_shapes_alone = False  # while PEFT adds adapters, which reads experts for their shapes


def unpack_4bit(packed: Params4bit) -> Tensor:
    """Return a packed weight in its original dtype; if it has no values, return only its shape."""
    if has_shapes_alone or has_rows_alone(packed):
        nothing = torch.empty((), dtype=packed.quant_state.dtype, device=packed.device)
        return nothing.expand(packed.quant_state.shape)
    if isinstance(packed.quant_state, Mxfp4State):
        return mxfp4.unpack_mxfp4(packed.data, packed.quant_state)
    return dequantize_4bit(packed.data, packed.quant_state)


def packed_names(model: PreTrainedModel, quantization: BitsAndBytesConfig) -> set[str]:
    """Return the names of the parameters that a 4-bit model of this kind packs.

    The model may have adapters and no weights.
    """
    empty = empty_twin(model)
    names = {
        weight.name
        for weight in expert_weights(empty)
        if _is_packable(empty.get_submodule(weight.module_name), weight.parameter_name)
    }
    ExpertQuantizer(quantization, pre_quantized=False).preprocess_model(empty, device_map=None)
    for name, module in empty.named_modules():
        if isinstance(module, Linear4bit):
            names.add(f"{name}.weight")
    return names


def unpack_on_access(model: nn.Module) -> None:
    """Let every packed parameter be read in 16 bits by its name."""
    for weight in expert_weights(model):
        module = model.get_submodule(weight.module_name)
        parameter = module._parameters.get(weight.parameter_name)
        if isinstance(parameter, Params4bit):
            if not parametrize.is_parametrized(module):
                # unpacked once per forward pass, not at every access
                vars(module)[CACHE_HOOKS] = run_within(module, parametrize.cached)
            parametrize.register_parametrization(
                module, weight.parameter_name, _Unpacked(), unsafe=True
            )


class _Unpacked(nn.Module):
    """The parametrization of a packed parameter."""

    @torch.no_grad()
    def forward(self, packed: Params4bit) -> Tensor:
        return unpack_4bit(packed)


class _WithAdapter(nn.Module):
    """The parametrization that adds an adapter of experts: W + scaling x B A for each expert.

    Experts may share one adapter.
    """

    def __init__(self, wrapper: ParamWrapper, adapter: str):
        super().__init__()
        self.factors = _factors(wrapper, adapter)
        self.scaling = wrapper.scaling[adapter]

    def forward(self, weight: Tensor) -> Tensor:
        left, right = (
            factor.to(weight.dtype).expand(len(weight), -1, -1) for factor in self.factors
        )
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=self.scaling)


def unpack_with_adapter(wrapper: ParamWrapper) -> None:
    """Let PEFT's wrapper add its adapter to a packed parameter in the wrapper's forward pass.

    PEFT 0.21 does not find its parametrization if the parameter already has another one. It would
    leave one more parametrization after every pass. It also unpacks the weight several times,
    although once is enough.
    """
    experts = wrapper.get_base_layer()
    if packed_weight(experts, wrapper.parameter_name) is None:
        return
    wrapper._activate_lora = MethodType(_activate_lora, wrapper)
    for hook in vars(experts).pop(CACHE_HOOKS, ()):
        hook.remove()  # the wrapper caches by itself, and hooks would prevent fusing


@contextlib.contextmanager
def _activate_lora(self: ParamWrapper, active_adapters: list[str]) -> Iterator[None]:
    steps = self.get_base_layer().parametrizations[self.parameter_name]
    unpacked = len(steps)
    for adapter in active_adapters:
        if adapter in self.lora_A:
            steps.append(_WithAdapter(self, adapter))
    try:
        with parametrize.cached():
            yield
    finally:
        del steps[unpacked:]


def _factors(wrapper: ParamWrapper, adapter: str) -> tuple[Tensor, Tensor]:
    """Return the factors of an adapter's weight change, in the weight's layout.

    (experts, out, r) and (experts, r, in), or (experts, in, r) and (experts, r, out).
    """
    experts = wrapper.num_experts
    a = wrapper.lora_A[adapter].weight  # (experts * r, in)
    b = wrapper.lora_B[adapter].weight  # (out, r * experts)
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    if wrapper._did_swap_in_out_features:
        return b, a
    return a.transpose(1, 2), b.transpose(1, 2)


def _is_packable(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return is_expert_weight(module, parameter) and parameter.numel() <= MAX_WEIGHTS
