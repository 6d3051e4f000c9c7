"""sft_play.plan.candidates: how many layers leave their weights on the host, and what it costs."""

from dataclasses import replace

import pytest
from plan_examples import plan_for

from sft_play.errors import ConfigError
from sft_play.plan import candidates
from sft_play.plan.cards import CARDS, parse_hardware
from sft_play.plan.memory import GIB, layer_bytes, offloaded_weight_bytes, step_bytes
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.speed import predict

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B"
LLAMA_70B = "model.name=meta-llama/Llama-3.1-70B"
QLORA = "tuning.mode=qlora"
LORA = "tuning.mode=lora"
ON = "train.weight_offloading=true"


def layers_of(planned: PlannedRun) -> int:
    return planned.plan.step.offloaded_weight_layers


@pytest.mark.parametrize("gpus", ["1x4090", "2x4090"])
def test_a_model_larger_than_the_gpu_fits_with_weights_in_host_memory(gpus):
    planned = plan_for(gpus, LLAMA_70B, QLORA, "model.max_seq_len=1024")
    plan = planned.plan
    assert plan.fits and 2 < layers_of(planned) <= 80
    assert plan.memory.phases["load"].total < plan.budget_bytes
    assert planned.config.train.weight_offloading is True
    resident = plan_for(gpus, LLAMA_70B, QLORA, "train.weight_offloading=false")
    assert not resident.plan.fits


def test_weights_stay_on_the_gpu_if_they_fit_or_other_gpus_are_idle():
    assert layers_of(plan_for("1xH200", LLAMA_8B, LORA)) == 0
    idle = plan_for("8xH200", LLAMA_70B, LORA, distributed=False)
    assert not idle.plan.fits
    words = [change.words for change in idle.plan.changes]
    assert any("NUM_GPUS" in each for each in words)
    assert layers_of(plan_for("2xH200", LLAMA_70B, LORA)) == 0, "FSDP holds it on the GPUs"


def test_as_many_layers_are_offloaded_as_the_host_has_room_for():
    # a host has as much memory as its GPUs: 24 GiB, and 70B in bfloat16 is 131 GiB
    planned = plan_for("1x4090", LLAMA_70B, LORA)
    assert not planned.plan.fits and layers_of(planned) == 0
    assert any("GiB of free host memory" in text for text in planned.plan.warnings)


@pytest.mark.parametrize("gib", [11.6, 15.6])
def test_the_number_of_layers_on_the_host_is_the_one_that_trains_fastest(gib, monkeypatch):
    """Fewer are copied in less time; more leave room for layers that are not computed again."""
    tried, place = [], candidates.with_weights_on_host
    monkeypatch.setattr(
        candidates, "with_weights_on_host", lambda draft: tried.append(draft) or place(draft)
    )
    hardware = parse_hardware("1xH200")
    small = replace(hardware, gpus=(replace(hardware.gpus[0], free_bytes=int(gib * GIB)),))
    settings = ("train.effective_batch_size=4", "tuning.lora.experts=shared")
    planned = plan_for(small, "model.name=openai/gpt-oss-20b", QLORA, *settings)
    every = [candidates.with_layers_on_host(tried[0], count) for count in range(3, 25)]
    speeds = {draft.step.offloaded_weight_layers: draft.rank for draft in every}
    assert speeds[layers_of(planned)] == max(speeds.values())


def test_two_layers_stay_on_the_gpu_and_each_one_more_on_the_host_frees_its_bytes():
    plan = plan_for("1xH200", LLAMA_8B, LORA, ON).plan
    layer = layer_bytes(plan.step, 2)
    assert offloaded_weight_bytes(plan.step) == 32 * layer
    weights = []
    for count in (0, 2, 3, 32):
        step = replace(plan.step, offloaded_weight_layers=count)
        phases = step_bytes(step, plan.layout).phases
        assert phases["load"].weights == phases["backward"].weights
        weights.append(phases["backward"].weights)
    assert weights[0] - weights[1] == 0
    assert weights[0] - weights[2] == layer
    assert weights[0] - weights[3] == 30 * layer


def test_copies_hide_behind_large_micro_batches_and_set_the_pace_of_small_ones():
    plan = plan_for("1xH200", LLAMA_8B, LORA, ON, "train.batch_size=1").plan
    card, link = CARDS["H200"], CARDS["H200"].host_link_bytes

    def seconds(rows: int, layers: int) -> float:
        layout = replace(plan.layout, batch_size=rows, grad_accum=1, fullest_step=None)
        step = replace(plan.step, offloaded_weight_layers=layers)
        return predict(step, layout, card).compute_seconds

    assert seconds(16, 32) == pytest.approx(seconds(16, 0))
    copies = 2 * offloaded_weight_bytes(plan.step) / link
    assert seconds(1, 32) == pytest.approx(copies, rel=0.2)
    assert seconds(1, 32) > 1.5 * seconds(1, 0)


def test_the_plan_says_which_weights_are_on_the_host():
    planned = plan_for("1xH200", LLAMA_8B, LORA, ON)
    size = offloaded_weight_bytes(planned.plan.step) / GIB
    from sft_play.plan.report import plan_line

    assert f"(32 of 32 layers in {size:.1f} GiB of host memory)" in plan_line(planned)


@pytest.mark.parametrize(
    "gpus, words, remedy",
    [
        ("1xH200", "tuning.mode=full", "TUNING_MODE=lora"),
        ("2xH200", "train.strategy=fsdp tuning.mode=lora", "TRAIN_STRATEGY=ddp"),
        ("2xH200", "train.strategy=zero2 tuning.mode=lora", "TRAIN_STRATEGY=ddp"),
        ("1xH200", "model.device_map=auto tuning.mode=lora", "MODEL_DEVICE_MAP=null"),
    ],
)
def test_what_cannot_be_offloaded_names_the_setting_and_what_to_type(gpus, words, remedy):
    with pytest.raises(ConfigError) as error:
        plan_for(gpus, LLAMA_8B, ON, *words.split())
    for part in ("train.weight_offloading=true", remedy, "TRAIN_WEIGHT_OFFLOADING=false"):
        assert part in str(error.value)
