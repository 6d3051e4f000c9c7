"""Build a run's model without weights from config.json, with tensors that have no data.

The code that loads the real model also creates its architecture, 4-bit packing and adapters.
"""

from functools import partial
from typing import Any

import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from sft_kernels.attention.forward import keep_soft_caps
from sft_play.config.loader import environment
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault, first_line
from sft_play.models import bnb, lora
from sft_play.models.architecture import empty_model, replace_tensors
from sft_play.models.base_files import VocabularyGrowth, grow_config, read_config
from sft_play.models.bnb import ExpertQuantizer, pack_4bit
from sft_play.models.experts import expert_weights
from sft_play.models.float8 import float8_on_meta
from sft_play.models.load import attention_option, weight_dtype
from sft_play.plan.config_json import known_model
from sft_play.plan.counting import grown_vocabulary


def build_architecture(config: Config, compute_dtype: torch.dtype) -> PreTrainedModel:
    """Return the base model of a run on the meta device, unquantized.

    Raises: EnvironmentFault if there is no config.json.
    """
    options = attention_option(config)
    if options.get("attn_implementation") == "flash_attention_2":
        options["attn_implementation"] = "sdpa"  # flash-attn may not be installed here
    architecture = load_architecture(config)
    rows = architecture.get_text_config().vocab_size
    growth = VocabularyGrowth(rows, grown_vocabulary(config.model, rows, environment()))
    model = empty_model(
        grow_config(architecture, growth),
        weight_dtype(config, compute_dtype),
        config.model.trust_remote_code,
        **options,
    )
    keep_soft_caps(model)
    return model


def quantize_and_adapt(
    model: PreTrainedModel, config: Config, compute_dtype: torch.dtype, zero_stage: int
) -> PreTrainedModel:
    """Return a base model on the meta device, quantized and with adapters as in the run.

    Raises: ConfigError when adapters match no layer.
    """
    if config.tuning.mode == "qlora":
        storage = bnb.storage_type(compute_dtype, zero_stage)
        quantize_on_meta(model, bnb.quantization_config(config, compute_dtype, storage))
    if config.tuning.has_float8_base:
        float8_on_meta(model)
    if config.tuning.mode != "full":
        rows = range(len(config.trained_tokens))  # all rows have the same size
        model = lora.add_adapters(model, config, rows)
    return model


def load_architecture(config: Config) -> PretrainedConfig:
    """Return a model's transformers config: from its folder, the known names or the hub.

    Raises: EnvironmentFault if no config is found.
    """
    name = config.model.name
    known = known_model(name)
    if known is not None:
        return AutoConfig.for_model(**known.config)
    try:
        return read_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFault(
            f"model.name={name}: no config to trace could be loaded: {first_line(error)}"
        ) from None


def quantize_on_meta(model: PreTrainedModel, quantization: Any) -> None:
    """Pack the linear layers that transformers packs at loading, with bitsandbytes' code."""
    # bitsandbytes creates its table of 8-bit values once, which needs a tensor with data
    bnb_functional.quantize_blockwise(torch.zeros(1))
    quantizer = ExpertQuantizer(quantization, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.weight._quantize(torch.device("meta"))
    for weight in expert_weights(model):
        packed = pack_4bit(model.get_parameter(weight.name), quantization)
        setattr(model.get_submodule(weight.module_name), weight.parameter_name, packed)
    quantizer.postprocess_model(model)
    bnb.keep_differentiable(model)


def materialize(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace meta tensors by CPU tensors, which have no data in a FakeTensorMode.

    Autocast and device checks then work as in a run. `dtype` casts floating-point parameters.
    """
    replace_tensors(model, partial(_materialized, dtype))


def _materialized(dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device="cpu")
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    # not empty_like: torch 2.11 raises an error for bitsandbytes' class
    data = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    made = nn.Parameter(data, requires_grad=tensor.requires_grad)
    if isinstance(tensor, Params4bit):
        made.quant_state = tensor.quant_state
        made.quant_state.to("cpu")
    return made
