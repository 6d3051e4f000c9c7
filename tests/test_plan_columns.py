"""sft_play.plan.columns: which runs widen their weights, and the bytes of that."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plan_examples import CPU, STEP, plan_for
from transformers import LlamaConfig, LlamaForCausalLM

from sft_play.config.schema import Config
from sft_play.models.fast.install import install_fused_kernels
from sft_play.models.fast.linears.beside import put_beside_weights
from sft_play.plan.columns import column_bytes
from sft_play.plan.layout import Layout
from sft_play.plan.memory import GIB, PHASES, step_bytes
from sft_play.plan.model_shape import ModelShape
from sft_play.process import Process

LLAMA = "model.name=meta-llama/Llama-3.1-8B"
WIDE = replace(STEP, is_fast=True, widens_weights=True)
FOUR_ROWS = Layout(batch_size=4, grad_accum=1, world_size=1, max_seq_len=2048)


def test_a_plan_counts_the_columns_of_4_bit_weights() -> None:
    plan = plan_for("1xH200", LLAMA, "tuning.mode=qlora", "tuning.lora.r=64").plan
    # of queries, keys, values and what attention returns; of gate and up; of down
    outputs = (6144 + 4096) * 192 + 28672 * 128 + 4096 * 64
    inputs = 64 * (6 * 4096 + 14336)
    assert column_bytes(plan.step) == 2 * 32 * (outputs + inputs)


@pytest.mark.parametrize("gpus", ["1xH200", "2xH200"])
def test_a_plan_counts_what_widened_weights_take(gpus: str) -> None:
    plan = plan_for(gpus, LLAMA).plan
    assert plan.step.widens_weights
    assert column_bytes(plan.step) / GIB == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(
    ("gpus", "setting"),
    [
        ("1xH200", "model.dtype=float32"),
        ("1xH200", "tuning.mode=full"),
        ("1xH200", "tuning.lora.dropout=0.05"),
        ("1xH200", "tuning.lora.use_dora=true"),
        ("1xH200", "tuning.lora.modules_to_save=[input_layernorm]"),
        ("1xH200", "model.name=google/gemma-3-27b-it"),
        ("1xH200", "tuning.base_dtype=float8"),
        ("1xH200", "train.fast_path=false"),
        ("2xH200", "train.strategy=fsdp"),
        ("2xH200", "train.strategy=zero2"),
        (CPU, "train.seed=1"),
    ],
)
def test_other_runs_leave_weights_where_they_are(gpus: str, setting: str) -> None:
    assert column_bytes(plan_for(gpus, LLAMA, setting).plan.step) == 0


def test_weights_are_wide_once_they_are_loaded() -> None:
    wide, narrow = (
        step_bytes(WIDE, FOUR_ROWS),
        step_bytes(replace(WIDE, widens_weights=False), FOUR_ROWS),
    )
    assert wide.phases["load"] == narrow.phases["load"]
    for name in PHASES[1:]:
        assert wide.phases[name] == replace(narrow.phases[name], columns=column_bytes(WIDE))


def test_adapters_of_a_large_rank_widen_nothing() -> None:
    assert column_bytes(replace(WIDE, lora_rank=WIDE.model.hidden)) == 0


@pytest.mark.parametrize("rank", [1, 4, 6, 16, 17])
def test_the_bytes_are_those_of_a_model(rank: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    base = LlamaForCausalLM(config).bfloat16()
    model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))
    install_fused_kernels(
        model.train(),
        Config.model_validate({"tuning": {"mode": "lora", "lora": {"dropout": 0.0}}}),
        Process.alone(torch.device("cpu")),
    )
    before = _bytes_of(base.model)
    put_beside_weights(base.model)
    found = _bytes_of(base.model) - before
    shape = ModelShape(64, 256, 512, layers=2, heads=4, kv_heads=2, head_dim=64, is_tied=False)
    planned = column_bytes(replace(WIDE, model=shape, lora_rank=rank))
    if rank in (6, 16):  # too many columns for q, k and v, or for gate and up, too
        assert 0 < found < planned
    else:
        assert found == planned


def _bytes_of(model: torch.nn.Module) -> int:
    storages = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            storage = module.weight.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
