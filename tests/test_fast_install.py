"""A model made fast trains what it trained: whole tiny models of every architecture, and nothing else about them changes."""

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sft_play.config.schema import Config
from sft_play.data.collate import Batch, PackCollator, PadCollator, TrainRows
from sft_play.errors import ConfigError
from sft_play.models.fast import attention
from sft_play.models.fast.install import Installed, installed_on, make_fast, takes_boundaries
from sft_play.models.load import Placement
from sft_play.models.losses import summed_nll
from sft_play.training.isolation import measure_isolation
from test_packed_training import MAX_SEQ_LEN, VOCABULARY, documents, order_of, spread

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 7  # shorter than most documents
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
}
# Summed in another order, float32 differs in its last bits; a model of two layers has some hundred sums in a row.
SAME = 2e-6


def plain_model(name: str, mode: str = "lora", dropout: float = 0.0) -> Any:
    """A tiny model with weights large enough that its attention looks at something, in training mode, not fast."""
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if model_type == "gemma2" else "sdpa")
    spread(model, std=0.15)
    if mode == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=dropout))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)  # zeros would give lora_A no gradient
    model.config.use_cache = False
    return model.train()


def settings(mode: str = "lora", **train: Any) -> Config:
    return Config.model_validate({"tuning": {"mode": mode, "lora": {"dropout": 0.0}}, "train": train})


def make(model: Any, mode: str = "lora", zero_stage: int = 0, **train: Any) -> Installed:
    return make_fast(model, settings(mode, **train), Placement(CPU, torch.float32, zero_stage))


def batches(is_packed: bool, names_boundaries: bool) -> list[Batch]:
    rows = TrainRows(documents(16))
    collator = PackCollator(0, MAX_SEQ_LEN, names_boundaries) if is_packed else PadCollator(0, MAX_SEQ_LEN)
    return [collator([rows[sequence] for sequence in micro_batch]) for micro_batch in order_of(rows.samples, is_packed, effective=16)]


INPUTS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def step(model: Any, is_packed: bool, names_boundaries: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of 16 samples, from whole logits."""
    model.zero_grad()
    total = 0.0
    for batch in batches(is_packed, names_boundaries):
        loss = summed_nll(model(**{name: batch[name] for name in INPUTS if name in batch}).logits, batch["labels"]) / 100
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def gap(one: tuple[float, dict[str, torch.Tensor]], two: tuple[float, dict[str, torch.Tensor]]) -> float:
    """Largest difference of two steps' gradients relative to the largest of its tensor, or of their losses."""
    assert one[1].keys() == two[1].keys() and one[1]
    gradients = [((gradient - two[1][name]).abs().max() / gradient.abs().max().clamp(min=1e-6)).item() for name, gradient in one[1].items()]
    return max(*gradients, abs(one[0] - two[0]) / abs(one[0]))


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fast_step_has_the_loss_and_gradients_of_a_plain_one(name: str, is_packed: bool, mode: str) -> None:
    model = plain_model(name, mode)
    plain = step(model, is_packed)
    make(model, mode)
    assert gap(plain, step(model, is_packed, names_boundaries=takes_boundaries(model))) <= SAME
