"""Stands in for Unsloth, as on hosts without a GPU: the names that notebooks use, over transformers.

It computes nothing of its own. As Unsloth does, it lets TRL's trainer take the keywords of its
older versions.
"""

import inspect
import os
from typing import Any

import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

if not torch.cuda.is_available():  # else the trainer sees no launcher
    os.environ["ACCELERATE_USE_CPU"] = "true"
OLDER_NAMES = {"max_seq_length": "max_length"}


class FastLanguageModel:
    """Loads a model and gives it adapters."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: Any = None,
        load_in_4bit: bool = True,
        device_map: Any = "sequential",
    ) -> tuple[Any, Any]:
        assert not load_in_4bit, "the stand-in loads no 4 bits"
        placed = {"device_map": device_map} if torch.cuda.is_available() else {}
        model = AutoModelForCausalLM.from_pretrained(
            model_name, dtype=dtype or torch.float32, **placed
        )
        return model, AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(
        model: Any, random_state: int = 3407, use_gradient_checkpointing: Any = None, **lora: Any
    ) -> Any:
        set_seed(random_state)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))

    @staticmethod
    def for_inference(model: Any) -> Any:
        return model.eval()


class SFTTrainer(trl.SFTTrainer):
    """TRL's trainer with the keywords that it took before."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        if "tokenizer" in keywords:
            keywords["processing_class"] = keywords.pop("tokenizer")
        now = inspect.signature(trl_trainer.__init__).parameters
        for name in set(keywords) - set(now):
            setattr(keywords["args"], OLDER_NAMES.get(name, name), keywords.pop(name))
        super().__init__(*args, **keywords)

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        """Compute transformers' loss: TRL's needs Triton, and so a GPU."""
        return Trainer.compute_loss(self, *args, **keywords)


trl_trainer = trl.SFTTrainer
trl.SFTTrainer = SFTTrainer


def is_bfloat16_supported() -> bool:
    return False
