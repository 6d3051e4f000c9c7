"""Unsloth's patched models. Imported only where tuning.backend is unsloth: unsloth patches transformers when it is imported."""

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INSTALL = "make install-unsloth"


def import_first() -> None:
    """Import unsloth, before anything imports transformers. Raises EnvironmentFault unless it is installed and a GPU is there."""
    if importlib.util.find_spec("unsloth") is None:
        raise EnvironmentFault(f"tuning.backend=unsloth: unsloth is not installed; on a GPU host run {INSTALL}, or set TUNING_BACKEND=bnb")
    if not torch.cuda.is_available():
        raise EnvironmentFault("tuning.backend=unsloth: needs an NVIDIA GPU and none is usable; set TUNING_BACKEND=bnb")
    importlib.import_module("unsloth")


def load(config: Config, placement: Any) -> "PreTrainedModel":
    """Return Unsloth's model with adapters (lora, qlora) or all weights trainable (full), on this rank's GPU."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=config.model.name,
        revision=config.model.revision,
        max_seq_length=config.model.max_seq_len,
        dtype=placement.compute_dtype,
        load_in_4bit=config.tuning.mode == "qlora",
        full_finetuning=config.tuning.mode == "full",
        trust_remote_code=config.model.trust_remote_code,
        device_map={"": placement.device.index or 0},
        use_gradient_checkpointing=False,
    )
    if config.tuning.mode == "full":
        return model
    lora = config.tuning.lora
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] if lora.target_modules == "all-linear" else lora.target_modules
    return FastLanguageModel.get_peft_model(
        model,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        bias="none",
        use_gradient_checkpointing="unsloth" if config.train.gradient_checkpointing is True else False,
        random_state=config.train.seed,
    )
