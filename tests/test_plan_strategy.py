"""sft_play.plan.strategy: what train.strategy and the target ask for, or why it cannot be."""

import json
from dataclasses import replace
from typing import Any

import pytest
from plan_examples import plan_for

from sft_play.errors import ConfigError
from sft_play.plan import memory
from sft_play.plan.cards import parse_hardware
from sft_play.plan.devices import Gpu
from sft_play.plan.strategy import ZERO_CONFIGS

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "model.name=meta-llama/Llama-3.1-70B-Instruct"
MIXTURE = "model.name=Qwen/Qwen3-30B-A3B"  # 128 experts in 48 layers


def planned(gpus: str, strategy: str, *settings: str, **options: Any) -> tuple[str, int, bool]:
    """Return strategy, ZeRO stage, and whether it fits."""
    plan = plan_for(gpus, f"train.strategy={strategy}", *settings, **options).plan
    return plan.ranks.strategy, plan.zero_stage, plan.fits


@pytest.mark.parametrize(
    "strategy, settings, expected",
    [
        ("auto", (LLAMA_8B,), ("ddp", 0, True)),
        ("auto", (LLAMA_70B,), ("fsdp", 0, True)),
        ("auto", (LLAMA_8B, "tuning.mode=full"), ("fsdp", 0, True)),
        ("auto", (LLAMA_70B, "tuning.mode=full"), ("ddp", 0, False)),
        ("ddp", (LLAMA_70B,), ("ddp", 0, True)),  # with weights in host memory
        ("ddp", (LLAMA_70B, "train.weight_offloading=false"), ("ddp", 0, False)),
        ("fsdp", (LLAMA_8B,), ("fsdp", 0, True)),
        ("zero1", (LLAMA_8B,), ("deepspeed", 1, True)),
        ("zero2", (LLAMA_8B,), ("deepspeed", 2, True)),
        ("zero3", (LLAMA_8B,), ("deepspeed", 3, True)),
    ],
)
def test_a_strategy_is_taken_as_it_is_asked_and_auto_divides_what_does_not_fit(
    strategy, settings, expected
):
    assert planned("2xH200", strategy, "tuning.mode=lora", *settings) == expected


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3", "ep"])
def test_a_strategy_for_several_gpus_takes_all_of_them(strategy):
    model = MIXTURE if strategy == "ep" else LLAMA_8B
    plan = plan_for("4xH200", f"train.strategy={strategy}", model, distributed=False).plan
    assert plan.ranks.world_size == 4


def test_zero_3_says_where_fsdp_is_expected_to_be_faster(tmp_path):
    def said(*settings, gpus="2xH200", **environ):
        planned = plan_for(gpus, "train.strategy=zero3", *settings, environ=environ)
        return [words for words in planned.plan.warnings if "FSDP is expected" in words]

    (words,) = said(LLAMA_8B, "tuning.mode=lora")
    assert words.startswith("train.strategy=zero3: FSDP is expected to train 1.")
    assert words.endswith("times as fast; try make train-distributed TRAIN_STRATEGY=fsdp")
    # where FSDP cannot run, where nobody knows how fast a card is, where the host's memory is asked
    assert not said(LLAMA_8B, "tuning.mode=full", "train.optim=adamw_8bit")
    assert not said(LLAMA_8B, gpus=replace(parse_hardware("2xH200"), gpus=unknown_cards()))
    path = tmp_path / "offloading.json"
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    assert not said(LLAMA_8B, "tuning.mode=lora", DEEPSPEED_CONFIG=str(path))


def unknown_cards() -> tuple[Gpu, ...]:
    return tuple(replace(gpu, name="some card") for gpu in parse_hardware("2xH200").gpus)


@pytest.mark.parametrize("strategy, resolved", [("auto", "ddp"), ("zero3", "zero3")])
def test_the_run_folder_names_the_strategy_that_runs(strategy, resolved):
    setting = f"train.strategy={strategy}"
    assert plan_for("2xH200", setting).config.train.strategy == resolved
    alone = plan_for("1xH200", "train.strategy=auto")
    assert (alone.plan.ranks.strategy, alone.config.train.strategy) == ("single", "ddp")


def test_ranks_that_share_experts_hold_their_part_of_weights_and_of_what_is_trained():
    ddp, ep = (plan_for("4xH200", MIXTURE, f"train.strategy={name}").plan for name in ("ddp", "ep"))
    held = [plan.memory.phases["optimizer"] for plan in (ddp, ep)]
    model = ddp.step.model
    experts = sum(kind.weights for kind in model.matrices if kind.is_stacked)
    assert experts > 0.9 * model.parameters
    assert held[0].weights - held[1].weights == 2 * experts * 3 // 4
    adapters = ddp.step.adapter_weights - ep.step.without_experts().adapter_weights
    for name, size in (("adapters", 4), ("gradients", 4), ("optimizer", 8)):
        assert getattr(held[0], name) - getattr(held[1], name) == size * adapters * 3 // 4
    assert ep.memory.phases["forward"].activations > ddp.memory.phases["forward"].activations
    assert ep.speed.collective_seconds > ddp.speed.collective_seconds


@pytest.mark.long
def test_what_fsdp_cannot_divide_is_ddp_where_nothing_is_asked():
    in_float16 = planned(
        "2xT4", "auto", "tuning.mode=full", "model.name=Qwen/Qwen2.5-1.5B-Instruct"
    )
    assert in_float16[0] == "ddp"
    full = ("tuning.mode=full", "train.optim=adamw_8bit", LLAMA_70B)
    assert planned("2xH200", "auto", *full)[0] == "ddp"


def test_a_json_of_another_stage_is_refused_with_both_stages(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    environ = {"DEEPSPEED_CONFIG": str(path)}
    with pytest.raises(ConfigError, match=r"zero3.*stage=2 in DEEPSPEED_CONFIG=.*mine.json"):
        planned("2xH200", "zero3", environ=environ)
    plan = plan_for("2xH200", "train.strategy=zero2", environ=environ).plan
    assert plan.deepspeed.source == str(path)


def test_every_stage_has_a_json_that_ships():
    assert all(path.is_file() for path in ZERO_CONFIGS.values())


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_offloaded_weights_are_the_hosts_and_what_trains_them_too(mode):
    words = (LLAMA_8B, f"tuning.mode={mode}", "train.batch_size=1", "train.strategy=fsdp")
    on_gpu = plan_for("2xH200", *words).plan
    offloaded = plan_for("2xH200", *words, "train.fsdp_offload=true").plan
    assert (offloaded.ranks.strategy, offloaded.is_fsdp) == ("fsdp", True)
    before, after = (plan.memory.phases["optimizer"] for plan in (on_gpu, offloaded))
    assert (before.weights > 0, after.weights) == (True, 0)
    assert (after.optimizer == 0) == (after.gradients == 0) == (mode == "full")
    assert after.adapters == before.adapters
    moved = before.weights
    if mode == "full":
        moved += before.gradients + before.optimizer
    assert memory.host_bytes(offloaded.step, offloaded.layout) == moved
    assert memory.host_bytes(on_gpu.step, on_gpu.layout) == 0


def test_offloading_asks_for_fsdp_by_itself_and_takes_all_gpus():
    planned = plan_for("2xH200", "train.fsdp_offload=true", distributed=False)
    assert planned.plan.ranks.strategy == "fsdp"
    assert planned.plan.ranks.world_size == 2


def test_a_host_without_room_for_offloaded_weights_is_warned_of():
    small = replace(parse_hardware("2xH200"), ram_available_bytes=8 * memory.GIB)
    plan = plan_for(small, LLAMA_8B, "tuning.mode=full", "train.fsdp_offload=true").plan
    assert any("of host memory for each process" in warning for warning in plan.warnings)
