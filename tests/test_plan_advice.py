"""sft_play.plan.advice: settings that make a run fit, none of them idle, the costliest last."""

import re
from typing import Any

import pytest
from marks import long
from plan_examples import plan_for

from sft_play.config.schema import env_name
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.advice import Advised
from sft_play.plan.memory import GIB, host_bytes, offloaded_weight_bytes
from sft_play.plan.run_plan import RunPlan

pytestmark = pytest.mark.usefixtures("traces_nothing")

LLAMA_3B = "meta-llama/Llama-3.2-3B-Instruct"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
QWEN_32B = "Qwen/Qwen2.5-32B-Instruct"
QWEN_30B_A3B = "Qwen/Qwen3-30B-A3B"
RESIDENT = "train.weight_offloading=false"
# Hardware, model and settings of runs that do not fit
EXPLICIT_70B = (
    "tuning.mode=qlora",
    "model.max_seq_len=4096",
    "train.batch_size=16",
    "train.grad_accum=2",
    "train.strategy=ddp",
    "train.activation_offloading=false",
    RESIDENT,
)
EXPLICIT_EXPERTS = ("tuning.mode=qlora", "model.max_seq_len=512", "tuning.lora.experts=per_expert")
EXPLICIT_EXPERTS += (RESIDENT,)
EXPLICIT_8B = ("tuning.mode=lora", "train.batch_size=4", "train.gradient_checkpointing=false")
SHORT = [
    ("1x4090", LLAMA_8B, ("tuning.mode=full",)),
    ("1xT4", LLAMA_8B, ("tuning.mode=lora", RESIDENT)),
    ("1x4090", QWEN_30B_A3B, EXPLICIT_EXPERTS),
    long("4x4090", QWEN_32B, ("tuning.mode=lora", RESIDENT)),
    long("8xH200", LLAMA_70B, ("tuning.mode=full",)),
    ("2xH100", LLAMA_8B, ("tuning.mode=full", "train.strategy=ddp")),
    ("4xH200", LLAMA_70B, EXPLICIT_70B),
    ("1x4090", LLAMA_8B, EXPLICIT_8B),
    ("8xV100-32", LLAMA_8B, ("tuning.mode=full", "train.strategy=ddp")),  # float16: no FSDP
    ("2xA100-80", LLAMA_8B, ("tuning.mode=full", "train.optim=muon")),  # no DeepSpeed
    # host or FSDP
    ("2x4090", QWEN_30B_A3B, ("model.max_seq_len=32768", "tuning.lora.experts=per_expert")),
]


def plan_of(gpus: str, model: str, *settings: str, **options: Any) -> RunPlan:
    named = (f"model.name={model}", *settings)
    return plan_for(gpus, *named, config="configs/base.yaml", **options).plan


def plan_with(change: Advised, gpus: str, model: str, *settings: str) -> RunPlan:
    """Return the plan once the words of a change are typed, in the place of what they replace."""
    environ = dict(word.split("=", 1) for word in change.words.split() if "=" in word)
    kept = [setting for setting in settings if env_name(setting.split("=")[0]) not in environ]
    use_deepspeed = "train-deepspeed" in change.words
    return plan_of(gpus, model, *kept, environ=environ, use_deepspeed=use_deepspeed)


@pytest.mark.parametrize("gpus, model, settings", SHORT)
def test_whoever_types_what_is_advised_gets_a_run_that_fits(gpus, model, settings):
    plan = plan_of(gpus, model, *settings)
    assert not plan.fits
    assert plan.changes
    for change in plan.changes:
        after = plan_with(change, gpus, model, *settings)
        assert after.fits
        assert after.memory.predicted_peak == change.predicted_peak <= after.budget_bytes
        if not change.costs:
            assert after.layout.rows_per_step == plan.layout.rows_per_step
        if on_host := re.search(r"(\d+) GiB of host memory", change.costs):
            weights = offloaded_weight_bytes(after.step) // after.ranks.per_node
            found = weights + offloaded_bytes(after.step, after.layout)
            found += host_bytes(after.step, after.layout)  # of FSDP, if its trace is cached
            assert int(on_host[1]) == round(found / GIB)
    sets = [frozenset(change.words.split()) for change in plan.changes]
    assert not any(one < other for one in sets for other in sets), "no setting could be left out"
    # changes that train the same come first, and the fastest of each kind
    order = [(bool(change.costs), -change.relative_speed) for change in plan.changes]
    assert order == sorted(order)


def test_what_is_advised_instead_of_a_device_map_fits_each_gpu_and_the_host():
    settings = ("tuning.mode=full", "model.max_seq_len=16384", "model.device_map=auto")
    plan = plan_of("4x4090", LLAMA_3B, *settings, distributed=False)
    assert plan.step.layers_by_gpu and not plan.fits
    divided = [change for change in plan.changes if "MODEL_DEVICE_MAP=null" in change.words]
    assert divided
    for change in divided:
        after = plan_with(change, "4x4090", LLAMA_3B, *settings)
        assert after.fits
        assert after.memory.predicted_peak == change.predicted_peak


def test_weights_are_offloaded_to_the_host_memory_that_each_of_more_processes_has():
    settings = ("tuning.mode=full", "model.max_seq_len=4096", "model.device_map=auto")
    plan = plan_of("2x4090", LLAMA_8B, *settings, distributed=False)
    assert not plan.fits
    assert not [change for change in plan.changes if "FSDP_OFFLOAD" in change.words]
    typed = plan_of("2x4090", LLAMA_8B, *settings[:2], "train.fsdp_offload=true")
    assert [warning for warning in typed.warnings if "of host memory" in warning]


def test_a_smaller_micro_batch_keeps_the_effective_batch_and_is_named_in_numbers():
    plan = plan_of("4xH200", LLAMA_70B, *EXPLICIT_70B)
    assert (plan.layout.rows_per_step, plan.fits) == (16 * 4 * 2, False)
    best = plan.changes[0]
    batch_size, grad_accum = (int(word.split("=")[1]) for word in best.words.split())
    assert (batch_size * grad_accum, best.costs) == (16 * 2, "")


def test_zero_is_advised_on_the_gpus_that_are_there_and_on_those_that_idle():
    idle = plan_of("4x4090", LLAMA_70B, "tuning.mode=qlora", distributed=False)
    assert idle.ranks.world_size == 1
    words = "make train-deepspeed NUM_GPUS=4 DEEPSPEED_CONFIG=configs/deepspeed_zero3.json"
    assert any(words in change.words for change in idle.changes)
    alone = plan_of("1x4090", LLAMA_70B, "tuning.mode=qlora")
    assert not any("deepspeed" in change.words for change in alone.changes)


def test_the_zero_that_is_advised_offloads_nothing(tmp_path):
    """The JSON that ships does not, whatever the one that is used does."""
    used = tmp_path / "offload.json"
    used.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    environ = {"DEEPSPEED_CONFIG": str(used)}
    settings = ("tuning.mode=lora", "train.batch_size=2")
    plan = plan_of("4xH100", LLAMA_70B, *settings, environ=environ, use_deepspeed=True)
    advised = [change for change in plan.changes if "train-deepspeed" in change.words]
    assert plan.step.offload
    assert advised
    for change in advised:
        after = plan_with(change, "4xH100", LLAMA_70B, *settings)
        assert after.memory.predicted_peak == change.predicted_peak


@pytest.mark.parametrize("gpus", ["2x4090", "1xH200", "8xA100-80"])
def test_what_fits_needs_no_advice(gpus):
    plan = plan_of(gpus, "Qwen/Qwen2.5-7B-Instruct", "tuning.mode=qlora")
    assert plan.fits
    assert plan.changes == ()


def test_advice_leaves_out_gpus_that_a_step_has_no_rows_for():
    settings = ("tuning.mode=full", "train.effective_batch_size=4")
    plan = plan_of("8xH200", LLAMA_70B, *settings, distributed=False)
    assert plan.changes and not any("NUM_GPUS" in change.words for change in plan.changes)
