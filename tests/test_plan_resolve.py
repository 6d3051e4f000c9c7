"""sft_play.plan.resolve: every `auto` of a config becomes a number, or the plan says why not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_examples import CPU, plan_for
from test_plan_report import lines
from test_plan_run_plan import assert_agree

from sft_play.config.loader import PROJECT_ROOT
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan import report
from sft_play.plan.cards import parse_hardware
from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.memory import GIB

CONFIGS = sorted(path.name for path in (PROJECT_ROOT / "configs").glob("*.yaml"))
LLAMA_70B = "model.name=meta-llama/Llama-3.1-70B-Instruct"
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def json_file(path: Path, value: Any) -> dict[str, str]:
    """Write a DeepSpeed JSON; return the variable that names it."""
    path.write_text(json.dumps(value))
    return {"DEEPSPEED_CONFIG": str(path)}


# Configs that ship


def test_gemma_27b_on_two_h200_trains_4_x_2_x_4():
    plan = plan_for("2xH200", config="configs/multi_gpu_config.yaml").plan
    layout = plan.layout
    assert (layout.batch_size, layout.world_size, layout.grad_accum) == (4, 2, 4)
    assert layout.rows_per_step == 32
    assert layout.checkpointed_layers == plan.step.model.layers == 62
    assert plan.ranks.strategy == "ddp"
    assert not plan.warnings


@pytest.mark.parametrize(
    "gpus, model, batch_size, grad_accum, rows",
    [
        ("2x4090", "Qwen/Qwen2.5-14B-Instruct", 4, 4, 32),
        ("2xH100", "google/gemma-3-27b-it", 8, 4, 64),
        ("4xH200", "meta-llama/Llama-3.1-70B-Instruct", 16, 2, 128),
    ],
)
def test_a_batch_of_the_guides_fits_on_their_hardware(gpus, model, batch_size, grad_accum, rows):
    batch = (f"train.batch_size={batch_size}", f"train.grad_accum={grad_accum}")
    words = (f"model.name={model}", "model.max_seq_len=2048", "tuning.mode=qlora", *batch)
    plan = plan_for(gpus, *words).plan
    assert plan.fits
    assert plan.layout.rows_per_step == rows


def test_a_deepspeed_run_of_single_rows_keeps_its_accumulation():
    settings = ("train.batch_size=1", "train.grad_accum=64", "model.max_seq_len=1024")
    plan = plan_for("2xH200", *settings, config="run_bnb", use_deepspeed=True).plan
    assert plan.layout.rows_per_step == plan.deepspeed.settings["train_batch_size"] == 128
    assert plan.layout.max_seq_len == 1024


@pytest.mark.parametrize("gpus", ["1x24GiB", "2xH200", "2x4090", "8xA100-80", "1xV100-16"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_shipped_config_plans_or_says_why_not(config, gpus):
    if config == "run_unsloth.yaml":
        with pytest.raises(EnvironmentFault, match="make install-unsloth"):
            plan_for(gpus, config=f"configs/{config}")
        return
    planned = plan_for(gpus, config=f"configs/{config}")
    plan = planned.plan
    layout = plan.layout
    assert layout.batch_size * layout.grad_accum * plan.ranks.world_size == layout.rows_per_step
    assert layout.rows_per_step == planned.config.train.effective_batch_size
    assert plan.fits == (plan.memory.predicted_peak <= plan.budget_bytes)
    assert plan.fits == (plan.shortage is None)
    assert_agree(planned)
    shown = lines(planned)
    longest_word = max(len(word) for row in shown for word in row.split())
    assert max(map(len, shown)) <= max(report.LINE_WIDTH, report.LABEL_WIDTH + longest_word + 2)
    if plan.fits:
        assert plan.changes == ()
    elif plan.is_batch_explicit:
        assert plan.shortage.startswith(f"train.batch_size={layout.batch_size} ")
    else:
        assert plan.shortage.startswith("train.batch_size=auto: ")


# Memory


def test_a_budget_is_what_is_free_less_a_reserve():
    h200 = parse_hardware("1xH200").gpus[0]
    assert plan_for("2xH200").plan.budget_bytes == int(h200.free_bytes * 0.92)
    on_cpu = plan_for(CPU, environ={"NUM_GPUS": "4", "DEVICE": "cpu"})
    assert on_cpu.plan.budget_bytes == int(16 * GIB * 0.92)


@pytest.mark.parametrize("distributed, free_gib", [(True, 20), (False, 70)])
def test_a_budget_is_that_of_the_fullest_gpu_in_use(distributed, free_gib):
    first = Gpu(0, "a", 80 * GIB, 70 * GIB, (8, 0))
    second = Gpu(1, "b", 80 * GIB, 20 * GIB, (8, 0))
    host = Hardware("cuda", (first, second), 8, 64 * GIB)
    plan = plan_for(host, distributed=distributed).plan
    assert plan.budget_bytes == int(free_gib * GIB * 0.92)


@pytest.mark.parametrize(
    "hardware, device", [("1x24GiB", "a GPU"), (Hardware("cpu", (), 8, 24 * GIB), "this host")]
)
def test_what_does_not_fit_names_the_device(hardware, device):
    plan = plan_for(hardware, LLAMA_70B).plan
    assert not plan.fits
    assert device in plan.shortage and "22.08 GiB" in plan.shortage


def test_a_plan_notes_what_others_hold_of_each_gpu():
    gpus = tuple(
        replace(gpu, free_bytes=gpu.total_bytes - (gpu.index + 1) * GIB)
        for gpu in parse_hardware("4xH200").gpus
    )
    host = Hardware("cuda", gpus, 8, 64 * GIB)
    every = plan_for(host).plan
    assert set(every.gpu_names) == {every.gpu} == {"NVIDIA H200"} and every.card is not None
    assert every.used_before_bytes == (GIB, 2 * GIB, 3 * GIB, 4 * GIB)
    assert plan_for(host, distributed=False).plan.used_before_bytes == (GIB,)
    on_cpu = plan_for(CPU, environ={"NUM_GPUS": "2", "DEVICE": "cpu"}).plan
    assert (on_cpu.gpu, on_cpu.used_before_bytes) == (None, (0, 0))
    assert (on_cpu.card, on_cpu.speed) == (None, None)


# The resolved config


def test_a_resolved_config_holds_numbers_and_absolute_paths():
    planned = plan_for("2xH200", "train.resume_from=outputs/x")
    config = planned.config
    settings = {**config.train.model_dump(), **config.data.model_dump()}
    # the model itself is asked for the loss of its routers and, part by part, for the fast path,
    # the tokenized rows for the longest answer, and what was saved for whether it is opened again
    unresolved = {name for name, value in settings.items() if value == "auto"}
    expected = {"router_aux_loss_coef", "fast_path", "generation_max_new_tokens", "reopen_saved"}
    expected |= {
        "too_long",
        "format",
        "dataloader_num_workers",
        "share_prefixes",
        "logging_steps",
    }  # by the kind of each row
    assert unresolved == expected
    data = config.data
    for path in (data.train_path, data.val_path, data.test_path):
        assert Path(path).is_absolute()
        assert Path(path).is_file()
    assert config.model.name == str(PROJECT_ROOT / "data" / "tiny_llama")
    assert config.train.resume_from == str(PROJECT_ROOT / "outputs" / "x")
    assert config.train.eval_batch_size == planned.plan.layout.batch_size
    assert config.train.dataloader_pin_memory is True
    assert plan_for(CPU).config.train.dataloader_pin_memory is False


def test_a_probe_is_planned_on_a_gpu_alone():
    assert plan_for("1xH200").config.train.probe is True
    assert plan_for(CPU).config.train.probe is False
    assert plan_for("1xH200", "train.probe=false").config.train.probe is False


def test_an_effective_batch_that_gives_way_is_a_warning_with_both_values():
    (warning,) = plan_for("3xH200").plan.warnings
    for words in ("size=32 (configs/base.yaml:", "33", "size=11", "TRAIN_EFFECTIVE_BATCH_SIZE=33"):
        assert words in warning
    assert plan_for("3xH200", "train.effective_batch_size=33").plan.warnings == ()
    explicit = plan_for("3xH200", "train.batch_size=2", "train.grad_accum=1")
    assert explicit.plan.warnings == ()


@pytest.mark.parametrize(
    "environ, settings, seconds",
    [
        ({}, (), 1800),
        ({"NCCL_TIMEOUT": "1"}, (), 1),
        ({"NCCL_TIMEOUT": "60"}, (), 60),
        ({"NCCL_TIMEOUT": "60"}, ("train.ddp_timeout=90",), 90),
        ({"NCCL_TIMEOUT": ""}, (), 1800),
    ],
)
def test_nccl_timeout_is_read_where_the_config_says_nothing(environ, settings, seconds):
    planned = plan_for("2xH200", *settings, environ=environ)
    assert planned.config.train.ddp_timeout == seconds


# What is refused


def test_unsloth_is_refused_where_it_is_not_installed_and_under_deepspeed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"make install-unsloth.* TUNING_BACKEND=bnb"):
        plan_for("1xH200", "tuning.backend=unsloth")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    planned = plan_for("1xH200", "tuning.backend=unsloth")
    assert planned.config.tuning.backend == "unsloth"
    with pytest.raises(ConfigError, match=r"train-distributed.* TUNING_BACKEND=bnb"):
        plan_for("2xH200", "tuning.backend=unsloth", use_deepspeed=True)


# DeepSpeed


def test_a_deepspeed_plan_has_numbers_for_every_auto():
    plan = plan_for("2xH200", use_deepspeed=True).plan
    settings = plan.deepspeed.settings
    assert plan.zero_stage == 2
    assert plan.deepspeed.source == str(PROJECT_ROOT / "configs" / "deepspeed_zero2.json")
    assert settings["train_micro_batch_size_per_gpu"] == plan.layout.batch_size
    assert settings["train_batch_size"] == plan.layout.rows_per_step == 32
    assert settings["bf16"]["enabled"] is True
    assert settings["fp16"]["enabled"] is False


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize(
    "deepspeed",
    [OFFLOAD, {"zero_optimization": {"stage": 2, "cpu_offload": True}}],
    ids=["offload_optimizer", "cpu_offload"],
)
def test_offload_with_adamw_is_planned_and_needs_less(deepspeed, optim, tmp_path):
    environ = json_file(tmp_path / "a.json", deepspeed)
    planned = plan_for("2xH200", f"train.optim={optim}", environ=environ, use_deepspeed=True)
    assert planned.plan.memory.phases["optimizer"].optimizer == 0


@pytest.mark.parametrize(
    "gpus, zero_stage, fits",
    [
        ("4xA100-80", 2, True),
        ("8xA100-40", 3, True),
        ("4x4090", 2, False),  # where neither fits, the first is shown
    ],
)
def test_the_first_zero_stage_that_fits_is_taken(gpus, zero_stage, fits):
    model = "model.name=Qwen/Qwen2.5-32B-Instruct"
    plan = plan_for(gpus, model, use_deepspeed=True).plan
    assert (plan.zero_stage, plan.fits) == (zero_stage, fits)


@pytest.mark.parametrize("tokens, is_said", [(1024, False), (1088, True)])
def test_rows_beyond_the_positions_of_the_model_are_said(tokens, is_said):
    warnings = plan_for(CPU, f"model.max_seq_len={tokens}", config="tiny").plan.warnings
    said = [warning for warning in warnings if "the 1024 tokens of the model's config" in warning]
    assert bool(said) is is_said
    if is_said:
        assert said[0].endswith("or set MODEL_MAX_SEQ_LEN=1024")


@pytest.mark.parametrize("event", ["save", "eval"])
def test_a_number_of_steps_that_no_strategy_reads_is_named(event):
    steps = f"train.{event}_steps=2"
    strategy = f"train.{event}_strategy"
    warnings = plan_for(CPU, steps, f"{strategy}=epoch").plan.warnings
    (sentence,) = (warning for warning in warnings if steps in warning)
    assert f"{strategy}=epoch (--set" in sentence
    assert f"TRAIN_{event.upper()}_STRATEGY=steps" in sentence
    assert not plan_for(CPU, steps, f"{strategy}=steps").plan.warnings
    assert not plan_for(CPU, f"{strategy}=epoch").plan.warnings


def test_an_adapted_layer_may_be_named_in_full():
    names = ("q_proj", "layers.0.self_attn.v_proj", "lm_head")
    planned = plan_for("1xH200", f"tuning.lora.target_modules=[{','.join(names)}]")
    assert planned.plan.step.adapters.targets == names


# Adapters on experts


@pytest.mark.parametrize(
    "gpus, settings, mode, experts, fits",
    [
        ("1xH100", "model.name=openai/gpt-oss-120b", "qlora", "shared", True),
        ("1xH200", "model.name=openai/gpt-oss-120b", "qlora", "auto", True),  # one for each
        ("1xH100", "model.name=openai/gpt-oss-120b tuning.mode=lora", "lora", "auto", False),
        ("1xH100", "model.name=Qwen/Qwen3-30B-A3B tuning.lora.r=128", "lora", "shared", True),
        (
            "1xH100",
            "model.name=Qwen/Qwen3-30B-A3B tuning.lora.r=128 tuning.lora.experts=per_expert",
            "lora",
            "per_expert",
            False,
        ),
    ],
)
@pytest.mark.usefixtures("traces_nothing")
def test_the_largest_adapters_on_experts_that_fit_are_chosen(gpus, settings, mode, experts, fits):
    planned = plan_for(gpus, *settings.split())
    assert (planned.plan.fits, planned.config.tuning.mode) == (fits, mode)
    assert planned.config.tuning.lora.experts == experts
    told = "\n".join(planned.plan.recipe)
    assert ("tuning.mode=qlora (auto: lora needs" in told) == (mode == "qlora")
    assert ("tuning.lora.experts=shared (auto: " in told) == (experts == "shared")
