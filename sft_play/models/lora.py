"""LoRA adapters through PEFT, over frozen base weights."""

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import Config
from sft_play.errors import ConfigError


def add_adapters(model: PreTrainedModel, config: Config) -> PeftModel:
    """Return the model with trainable adapters in float32 over frozen base weights.

    peft.prepare_model_for_kbit_training is not used: it copies embeddings, norms and head to
    float32, which costs 4 GiB for an 8B model and does not change the loss.

    Raises: ConfigError when a target names no linear layer.
    """
    lora = config.tuning.lora
    if isinstance(lora.target_modules, list):
        _check_targets(model, lora.target_modules)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        bias="none",
    )
    return get_peft_model(model, adapters)


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linears: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            linears.append(name)
    unknown = [target for target in targets if not _matches_any(target, linears)]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(
            f"tuning.lora.target_modules: the model has no linear layer {', '.join(unknown)}; "
            f"it has {', '.join(known)}"
        )


def _matches_any(target: str, names: list[str]) -> bool:
    """Return whether a target names one of the modules, by PEFT's rule."""
    return any(f".{name}".endswith(f".{target}") for name in names)
