"""Resolve a config for this machine: every `auto` becomes a number. Loads no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from sft_play.config import deepspeed
from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.layers import Layer
from sft_play.config.loader import CHOSEN, LoadedConfig, is_default
from sft_play.config.schema import Config
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError
from sft_play.plan import advice, memory, needs, recipe, sources, strategy
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.devices import Hardware
from sft_play.plan.inputs import (
    Draft,
    PlanInputs,
    plan_step,
    rank_step,
)
from sft_play.plan.needs import resolve_packing
from sft_play.plan.ranks import (
    Precision,
    Ranks,
    choose_precision,
    machine_of,
    plan_ranks,
    used_before,
)
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun, RunPlan
from sft_play.plan.strategy import (
    ChosenStrategy,
    asked_strategy,
    resolved_name,
)
from sft_play.plan.warnings import shortage, warnings_of
from sft_play.plan.weight_offloading import resident_first
from sft_play.runs import stamp

NCCL_SECONDS = 1800


def resolve_plan(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    distributed: bool,
    use_deepspeed: bool,
    compares: bool = False,
) -> PlannedRun:
    """Return the plan of a run, which need not fit.

    `distributed` asks for all GPUs if NUM_GPUS says nothing; `use_deepspeed` for ZeRO. Of the
    engines that the settings leave open, the first that fits is planned; `compares` plans all, and
    takes the fastest that fits. If no speed of a card is known, that is the first one.

    Raises: EnvironmentFault for more processes than GPUs, a missing backend or model; ConfigError
    for numbers that contradict; DataError for a missing data file.
    """
    loaded = recipe.settle_autos(loaded, recipe.RecipeFacts())  # what a look at the rows left open
    asked = asked_strategy(loaded, invocation, use_deepspeed)
    distributed = distributed or asked.is_shared
    ranks = plan_ranks(invocation, hardware, environ, distributed, asked.uses_deepspeed)
    ranks = strategy.apply_device_map(loaded, asked, ranks, invocation, hardware, environ)
    sources.require_rows(loaded)
    compares &= asked.name == "auto" and ranks.world_size > 1 and ranks.device == "cuda"

    def plan_engines(loaded: LoadedConfig) -> PlannedRun:
        """Return the plan of an engine that fits, otherwise that of the first one."""
        needs.require_needs(loaded, hardware)
        is_float16 = choose_precision(loaded, hardware, {}).precision == "fp16"  # without a JSON
        plans = []
        for engine in asked.engines(loaded.config, ranks, is_float16, compares):
            plans.append(_resolve(loaded, invocation, hardware, environ, ranks, engine))
            if plans[-1].plan.fits and (not compares or plans[-1].plan.is_unbeaten):
                return plans[-1]
        return max(plans, key=_fits_and_speed) if compares else plans[0]

    has_idle_gpus = hardware.count > ranks.gpus_per_node
    for tried in resident_first(loaded, has_idle_gpus):
        first = plan_engines(tried)
        if first.plan.fits:
            return first
        for settings in _smaller_adapters(tried, first.plan):
            smaller = plan_engines(tried.with_values(settings))
            if smaller.plan.fits:
                return smaller
    return first


def fastest(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
) -> PlannedRun:
    """Return the plan of the fastest strategy that fits on all GPUs, unless one is requested.

    A device map requires one process. Raises: as `resolve_plan`.
    """
    distributed = loaded.config.model.device_map is None
    return resolve_plan(loaded, invocation, hardware, environ, distributed, False, compares=True)


def _fits_and_speed(planned: PlannedRun) -> tuple[bool, float]:
    speed = planned.plan.speed
    return planned.plan.fits, speed.tokens_per_second if speed else 0.0


def _smaller_adapters(loaded: LoadedConfig, plan: RunPlan) -> Iterator[Layer]:
    """Yield settings that need less memory than a plan, the largest adapters on experts first.

    Experts that are published in 4 bits also remain so, unless the user set a mode.
    """
    config, step = loaded.config, plan.step
    lora = config.tuning.lora
    is_given = config.model.adapter or config.train.resume_from or config.tuning.backend != "bnb"
    if is_given or lora.experts != "auto" or not step.has_adapted_experts:
        return
    shared = Located("shared", f"{CHOSEN}one for each expert does not fit")
    fewer = [{"tuning.lora.experts": shared}]
    if lora.target_modules == "all-linear":
        none = Located("none", f"{CHOSEN}adapters on experts do not fit")
        fewer.append({"tuning.lora.experts": none})
    weight_bytes = memory.base_weight_bytes(step, step.weight_bytes)
    if weight_bytes < plan.budget_bytes * plan.ranks.world_size:
        yield from fewer
    is_open = is_default(loaded.origin["tuning.mode"]) and config.tuning.mode == "lora"
    if is_open and step.model.in_mxfp4:
        needed = f"{plan.memory.predicted_peak / memory.GIB:.0f} GiB on each GPU"
        reason = f"lora needs {needed}; experts stay in MXFP4, as published, others become NF4"
        mode = {"tuning.mode": Located("qlora", f"{CHOSEN}{reason}")}
        yield from (mode | settings for settings in ({}, *fewer))


def _resolve(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    ranks: Ranks,
    engine: ChosenStrategy,
) -> PlannedRun:
    """Return the plan under one strategy."""
    config = loaded.config
    ranks = replace(ranks, strategy=engine.strategy)
    deepspeed_path = engine.deepspeed_path
    raw = deepspeed.read_deepspeed_json(deepspeed_path) if deepspeed_path else {}
    model = load_counted_shape(config, environ)
    precision, warnings = choose_precision(loaded, hardware, raw, deepspeed_path)
    if deepspeed_path and precision == "bf16" and hardware.kind != "cuda":
        needs.refuse_bfloat16(loaded, deepspeed_path, raw)
    machine = machine_of(hardware, ranks, precision, raw, config.train.fsdp_offload, model.hidden)
    is_set = loaded.is_set("train.effective_batch_size")
    inputs = PlanInputs(config, is_set, machine, model, environ, invocation.exact)
    needs.refuse_combinations(loaded, inputs)
    step = rank_step(inputs)
    needs.refuse_misspelt_targets(step)
    needs.refuse_shared_rows(loaded, inputs, step)
    draft = plan_step(inputs, step)
    layout = draft.layout
    warnings += warnings_of(loaded, draft, hardware, environ)
    packing, unpacked_because = resolve_packing(config, model.model_type)
    lack = shortage(draft)
    plan = RunPlan(
        ranks=ranks,
        request=draft.request,
        step=draft.step,
        layout=layout,
        packing=packing,
        unpacked_because=unpacked_because,
        memory=memory.step_bytes(draft.step, layout),
        budget_bytes=machine.budget_bytes,
        gpu_names=machine.gpu_names,
        used_before_bytes=used_before(hardware, ranks),
        deepspeed=_deepspeed_plan(raw, deepspeed_path, draft, precision),
        shortage=lack,
        changes=advice.changes(draft, hardware.count) if lack else (),
        warnings=tuple(warnings),
        recipe=recipe.sentences(loaded),
    )
    planned = PlannedRun(_resolved(config, plan, precision, environ), plan)
    return planned.with_layout(layout, plan.memory)


def _deepspeed_plan(
    raw: deepspeed.DeepSpeedJson,
    path: Path | None,
    draft: Draft,
    precision: Precision,
) -> DeepSpeedPlan | None:
    if path is None:
        return None
    run = deepspeed.DeepSpeedRun(
        micro_batch=draft.layout.batch_size,
        grad_accum=draft.layout.grad_accum,
        world_size=draft.layout.world_size,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        max_grad_norm=draft.inputs.config.train.max_grad_norm,
        hidden_size=draft.step.model.hidden,
    )
    settings = deepspeed.resolve_deepspeed(raw, run, source=str(path))
    return DeepSpeedPlan(settings, str(path), stamp.digest_of_text(path.read_text("utf-8")))


def _resolved(
    config: Config, plan: RunPlan, precision: Precision, environ: Mapping[str, str]
) -> Config:
    """Return the config with no auto left and every path absolute.

    So the run folder explains itself anywhere.
    """
    is_gpu = plan.ranks.device == "cuda"
    train = config.train
    settings: dict[str, object] = {
        "data": sources.resolved(config.data),
        "model.device_map": strategy.resolved_map(config.model.device_map, plan.ranks),
        "train.fast_path": train.fast_path if plan.ranks.gpus_per_process == 1 else False,
        "train.strategy": resolved_name(plan.ranks.strategy, plan.zero_stage),
        "train.packing": plan.packing,
        "train.activation_offloading": plan.step.offload_activations,
        "train.weight_offloading": plan.step.offloaded_weight_layers > 0,
        "train.context_parallel": plan.layout.context_parallel,
        "train.bf16": precision == "bf16",
        "train.fp16": precision == "fp16",
        "train.ddp_timeout": train.ddp_timeout or _nccl_timeout(environ),
        "train.resume_from": train.resume_from or None,
    }
    paths = {
        "model.name": Path(config.model.name).is_dir(),
        "model.chat_template": config.model.has_template_file,
        "train.resume_from": train.resume_from,
    }
    for path, is_path in paths.items():
        if is_path:
            settings[path] = str(Path(attrgetter(path)(config)).resolve())
    if train.dataloader_pin_memory == "auto":
        settings["train.dataloader_pin_memory"] = is_gpu
    if train.probe == "auto":
        settings["train.probe"] = is_gpu and backend_of(config).supports_probe
    return config.changed(settings)


def _nccl_timeout(environ: Mapping[str, str]) -> int:
    """Return NCCL_TIMEOUT in seconds, a variable that people set and no library reads."""
    text = environ.get("NCCL_TIMEOUT") or str(NCCL_SECONDS)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"NCCL_TIMEOUT={text}: write whole seconds, such as NCCL_TIMEOUT={NCCL_SECONDS}"
        )
    return int(text)
