"""LoRA adapters through PEFT: which layers, and what stays frozen."""

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import Config
from sft_play.errors import ConfigError


def add_adapters(model: PreTrainedModel, config: Config) -> PeftModel:
    """Return the model with trainable adapters in float32 over frozen base weights.

    peft.prepare_model_for_kbit_training is not used: it copies embeddings, norms and head to float32, 4 GiB for an 8B
    model, without an effect on the loss. Raises: ConfigError when a target names no linear layer.
    """
    lora = config.tuning.lora
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        bias="none",
    )
    if isinstance(lora.target_modules, list):
        _check_targets(model, lora.target_modules)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return get_peft_model(model, adapters)


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linears = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    ]
    unknown = [
        target
        for target in targets
        if not any(f".{name}".endswith(f".{target}") for name in linears)
    ]  # PEFT's rule
    if unknown:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
        raise ConfigError(
            f"tuning.lora.target_modules: the model has no linear layer {', '.join(unknown)}; it has {known}"
        )


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameters; partitioned (ZeRO-3) and packed 4-bit weights count in full."""
    trainable = total = 0
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", None) or parameter.numel()
        if hasattr(parameter, "quant_state"):
            count = count * parameter.element_size() * 2  # two 4-bit weights a byte
        total += count
        trainable += count if parameter.requires_grad else 0
    return trainable, total
