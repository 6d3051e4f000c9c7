"""sft_play.plan.strategy and placement: one model over the GPUs of one process."""

from dataclasses import replace
from typing import Any

import pytest
from plan_examples import CPU, EIGHT_B, LAYOUT, STEP, plan_for

from sft_play.errors import ConfigError
from sft_play.plan import placement
from sft_play.plan.launch import launch_command
from sft_play.plan.memory import step_bytes
from sft_play.plan.run_plan import PlannedRun

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "model.name=meta-llama/Llama-3.1-70B-Instruct"


def placed(
    gpus: str, device_map: str, *settings: str, distributed: bool = False, **options: Any
) -> PlannedRun:
    """Return the plan of make train, or of make train-distributed, with a device map."""
    words = (f"model.device_map={device_map}", LLAMA_8B, *settings)
    return plan_for(gpus, *words, distributed=distributed, **options)


def test_make_train_with_a_map_is_one_process_that_sees_all_gpus(tmp_path) -> None:
    plan = placed("4xH200", "auto").plan
    assert (plan.ranks.strategy, plan.ranks.world_size) == ("single", 1)
    assert plan.ranks.gpus_per_process == 4
    assert len(plan.gpu_names) == len(plan.used_before_bytes) == 4
    command = launch_command(plan.ranks, tmp_path, {})
    assert command.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert plan.layout.world_size == 1, "one stream of batches"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1, 2)),
        ({"NUM_GPUS": "1"}, (1, 1)),
        ({"UNSLOTH_FORCE_SINGLE_GPU": "1"}, (1, 1)),
        ({"NUM_GPUS": "2"}, (2, 1)),
    ],
)
def test_num_gpus_counts_processes_of_one_gpu_each(
    environ: dict[str, str], expected: tuple[int, int]
) -> None:
    ranks = placed("2xH200", "balanced", environ=environ).plan.ranks
    assert (ranks.world_size, ranks.gpus_per_process) == expected


def test_several_processes_hold_a_whole_copy_each_and_the_plan_says_so() -> None:
    planned = placed("2xH200", "auto", distributed=True)
    assert planned.plan.ranks.strategy == "ddp"
    assert planned.config.model.device_map is None
    (warning,) = [text for text in planned.plan.warnings if "device_map" in text]
    assert "each rank has a full copy (ddp)" in warning


def test_where_no_copy_fits_several_processes_divide_it() -> None:
    settings = (LLAMA_70B, "tuning.mode=lora")
    planned = placed("2xH200", "balanced", *settings, distributed=True)
    assert planned.plan.ranks.strategy == "fsdp"
    assert any("they divide its weights" in text for text in planned.plan.warnings)


def test_a_model_too_large_for_one_gpu_fits_on_two() -> None:
    resident = "train.weight_offloading=false"
    alone = plan_for("1xH200", LLAMA_70B, "tuning.mode=lora", resident).plan
    both = placed("2xH200", "auto", LLAMA_70B, "tuning.mode=lora").plan
    assert (alone.fits, both.fits) == (False, True)
    assert both.step.layers_by_gpu == (40, 40)
    assert both.memory.peak.weights < 0.52 * alone.memory.peak.weights


def test_a_placed_model_is_as_fast_as_the_original_implementation_on_one_gpu() -> None:
    words = (LLAMA_8B, "train.batch_size=4", "train.gradient_checkpointing=false")
    one = plan_for("1xH200", *words, "train.fast_path=false", distributed=False).plan
    planned = placed("2xH200", "auto", *words)
    two = planned.plan
    assert planned.config.train.fast_path is False
    assert any("no fused kernels" in text for text in two.warnings)
    assert two.speed.tokens_per_second == pytest.approx(one.speed.tokens_per_second)


def test_the_run_folder_names_the_map_that_runs() -> None:
    assert placed("2xH200", "auto").config.model.device_map == "balanced"
    assert placed("2xH200", "sequential").config.model.device_map == "sequential"
    assert placed("1xH200", "auto").config.model.device_map is None
    assert plan_for("2xH200").config.model.device_map is None


def test_sequential_fills_the_first_gpu_and_low_0_leaves_it_the_embedding() -> None:
    assert placed("2xH200", "sequential").plan.step.layers_by_gpu == (32,)
    first, second = placed("2xH200", "sequential", LLAMA_70B).plan.step.layers_by_gpu
    assert first > second > 0
    assert first + second == 80
    assert placed("3xH200", "balanced_low_0").plan.step.layers_by_gpu == (0, 16, 16)


def test_a_mapping_is_counted_by_its_names() -> None:
    devices = {"": 0, "model.layers": 1, "model.layers.0": 0, "model.layers.12": 0, "lm_head": 1}
    assert placement.counts(placement.map_layers(devices, 32)) == (2, 30)
    assert placement.counts(placement.map_layers({"transformer.h.3": 1, "": 0}, 4)) == (3, 1)


REFUSED = [
    ("auto", ("train.strategy=fsdp",), {}, "use make train"),
    ("auto", ("train.strategy=zero3",), {}, "DeepSpeed divides the model itself"),
    ("auto", (), {"use_deepspeed": True}, "set MODEL_DEVICE_MAP=null"),
    ("auto", ("tuning.backend=unsloth",), {}, "set TUNING_BACKEND=bnb"),
    ("auto", ("train.fast_path=true",), {}, "Type TRAIN_FAST_PATH=auto"),
    ('{"": 0, lm_head: 1}', (), {"distributed": True}, "MODEL_DEVICE_MAP=auto for a full copy"),
    ('{"": 0, lm_head: 2}', (), {}, "lm_head is put on GPU 2, and this run sees 2"),
    ('{"": 0, lm_head: cpu}', (), {}, "lm_head is placed on the CPU"),
    ('{"": 0, lm_head: 1}', (), {"environ": {"NUM_GPUS": "1"}}, "this run sees 1"),
    ('{"": 0}', (), {"gpus": CPU}, "computes on the CPU; write cpu"),
]


@pytest.mark.parametrize(("device_map", "settings", "options", "words"), REFUSED)
def test_what_cannot_be_is_refused_with_what_to_type(
    device_map: str, settings: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    hardware = {"gpus": "2xH200", **options}
    with pytest.raises(ConfigError, match=words):
        placed(hardware.pop("gpus"), device_map, *settings, **hardware)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("cuda:1", {"": 1}),
        ("{lm_head: cuda:3, model: 0}", {"lm_head": 3, "model": 0}),
        ("1", {"": 1}),
    ],
)
def test_devices_are_read_as_other_programs_write_them(written: str, read: dict[str, int]) -> None:
    assert placed("4xH200", written).config.model.device_map == read


@pytest.mark.parametrize("written", ["disk", "{model: disk}", "{model: -1}", "blanced"])
def test_what_is_no_device_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="auto, balanced, balanced_low_0, sequential"):
        placed("2xH200", written)


def test_more_gpus_never_need_more_bytes_on_one() -> None:
    peaks = []
    for counts in ((), (16, 16), (11, 11, 10), (8, 8, 8, 8)):
        step = replace(STEP, layers_by_gpu=counts)
        peaks.append(step_bytes(step, LAYOUT).predicted_peak)
    assert peaks == sorted(peaks, reverse=True)
    assert sum((16, 16)) == EIGHT_B.layers


def test_a_single_gpu_has_all_layers_also_if_the_first_one_is_to_be_empty() -> None:
    assert placement.count_layers("balanced_low_0", 32, 1) == (32,)
    assert placement.count_layers("balanced_low_0", 32, 2) == (0, 32)
