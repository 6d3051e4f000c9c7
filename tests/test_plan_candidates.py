"""sft_play.plan.candidates: the ways to train that are tried, and which one is planned."""

import pytest
from plan_examples import EMPTY, plan_for

from sft_play.config import invocation
from sft_play.config.loader import load_merged
from sft_play.errors import ConfigError
from sft_play.plan import candidates
from sft_play.plan.cards import parse_hardware
from sft_play.plan.resolve import fastest

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B"
GEMMA_27B = "model.name=google/gemma-3-27b-it"


@pytest.mark.parametrize(
    "gpus, settings, strategy",
    [
        ("2x4090", (LLAMA_8B, "tuning.lora.use_dora=true"), "ddp"),  # not under ZeRO-3
        ("2x4090", (LLAMA_8B, "tuning.lora.modules_to_save=[lm_head]"), "ddp"),
        ("4xA100-80", (GEMMA_27B, "tuning.encoders=lora"), "fsdp"),  # not under DeepSpeed
    ],
)
def test_an_engine_that_nobody_requested_refuses_no_settings(gpus, settings, strategy):
    loaded = load_merged(EMPTY, {}, settings)
    planned = fastest(loaded, invocation.read_invocation({}), parse_hardware(gpus), {})
    assert planned.plan.fits and planned.plan.ranks.strategy == strategy


def test_an_engine_that_is_requested_refuses_settings_that_it_cannot_train():
    with pytest.raises(ConfigError, match="ZeRO-3 shards over the GPUs"):
        plan_for("2x4090", LLAMA_8B, "tuning.lora.use_dora=true", "train.strategy=zero3")


def test_weights_in_host_memory_that_fsdp_cannot_place_are_no_reason_to_refuse_ddp():
    settings = ("model.name=meta-llama/Llama-3.1-70B", "train.weight_offloading=true")
    plan = plan_for("2x12GiB", *settings, "tuning.mode=lora").plan
    assert not plan.fits and plan.ranks.strategy == "ddp"


@pytest.mark.parametrize(
    "gpus, name, experts",
    [
        # with its states an adapter for each expert takes 16 GiB, as much as 10 layers
        ("1xL40S", "openai/gpt-oss-120b", "shared"),
        ("1x3060", "openai/gpt-oss-20b", "auto"),  # for each expert: shared ones gain 4 %
    ],
)
def test_experts_share_adapters_next_to_weights_on_the_host_if_that_is_clearly_faster(
    gpus, name, experts
):
    planned = plan_for(gpus, f"model.name={name}", "tuning.mode=qlora")
    assert planned.plan.fits and planned.plan.step.offloaded_weight_layers
    assert planned.config.tuning.lora.experts == experts


@pytest.mark.parametrize(
    "gpus, settings, engines",
    [
        ("2x4090", (LLAMA_8B, "tuning.mode=lora", "model.max_seq_len=16384"), ["ddp", "fsdp"]),
        ("2x4090", (LLAMA_8B, "tuning.mode=full"), ["ddp", "fsdp", "deepspeed", "deepspeed"]),
        # FSDP does not run DoRA
        ("2x4090", (LLAMA_8B, "tuning.lora.use_dora=true"), ["ddp", "deepspeed", "deepspeed"]),
    ],
)
def test_deepspeed_is_compared_if_all_weights_are_trained_or_fsdp_cannot_run(
    gpus, settings, engines, monkeypatch
):
    tried, plan_engine = [], candidates._candidate

    def noted(asked, loaded, engine):
        tried.append(engine.strategy)
        return plan_engine(asked, loaded, engine)

    monkeypatch.setattr(candidates, "_candidate", noted)
    loaded = load_merged(EMPTY, {}, settings)
    fastest(loaded, invocation.read_invocation({}), parse_hardware(gpus), {})
    assert tried == engines
