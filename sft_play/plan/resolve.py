"""What this machine will do with a config: every `auto` becomes a number. Loads no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from sft_play.config import deepspeed
from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.loader import LoadedConfig
from sft_play.config.rules import without_effect
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan import advice, memory, needs, recipe, sources, strategy
from sft_play.plan.adapter_choice import refuse_misspelt_targets, with_largest_adapters
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.devices import Hardware
from sft_play.plan.fast import GraphSetup, graph_warnings
from sft_play.plan.inputs import (
    Draft,
    PlanInputs,
    offloading_warnings,
    plan_step,
    shortage,
    step_of,
    why_not_shared,
)
from sft_play.plan.machine import machine_of, used_before
from sft_play.plan.needs import recurrent_warnings, resolve_packing
from sft_play.plan.ranks import Precision, Ranks, choose_precision, plan_ranks
from sft_play.plan.rope import load_positions, unstretched
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun, RunPlan
from sft_play.plan.step import Layout, StepSpec
from sft_play.plan.strategy import (
    Engine,
    alternatives,
    asked_strategy,
    faster_than_zero3,
    resolved_name,
    unsharded,
)
from sft_play.plan.weight_offloading import refuse_offloading, resident_first
from sft_play.runs import stamp

NCCL_SECONDS = 1800
TOY_PARAMETERS = 3e8  # a smaller model trains in minutes, whoever sets the pace
# accelerate takes DeepSpeed's CPU Adam instead of any other optimizer too, without a message
OFFLOADED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def resolve(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    distributed: bool,
    use_deepspeed: bool,
    compares: bool = False,
) -> PlannedRun:
    """Return the plan of a run, which need not fit.

    `distributed` asks for all GPUs where NUM_GPUS says nothing; `use_deepspeed` for ZeRO. Of the
    engines that the settings leave open, the first that fits is planned; `compares` plans all, and
    takes the fastest that fits. If no speed of a card is known, that is the first one.

    Raises: EnvironmentFault for more processes than GPUs, a missing backend or model; ConfigError
    for numbers that contradict; DataError for a missing data file.
    """
    loaded = recipe.settle(loaded, recipe.RecipeFacts())  # what a look at the rows left open
    asked = asked_strategy(loaded, invocation, use_deepspeed)
    distributed = distributed or asked.is_shared
    ranks = plan_ranks(invocation, hardware, environ, distributed, asked.uses_deepspeed)
    ranks = strategy.apply_device_map(loaded, asked, ranks, invocation, hardware, environ)
    sources.require(loaded)
    compares &= asked.name == "auto" and ranks.world_size > 1 and ranks.device == "cuda"

    def plan_engines(loaded: LoadedConfig) -> PlannedRun:
        """Return the plan of an engine that fits, else that of the first one."""
        needs.require(loaded, hardware)
        is_float16 = choose_precision(loaded, hardware, {}).precision == "fp16"  # without a JSON
        engines = asked.engines(loaded.config, ranks, is_float16)
        if compares:
            engines = alternatives(loaded.config, is_float16)
        plans = []
        for engine in engines:
            plans.append(_resolve(loaded, invocation, hardware, environ, ranks, engine))
            if plans[-1].plan.fits and not compares:
                return plans[-1]
        return max(plans, key=_fits_and_speed) if compares else plans[0]

    has_idle_gpus = hardware.count > ranks.gpus_per_node
    for tried in resident_first(loaded, has_idle_gpus):
        planned = with_largest_adapters(tried, plan_engines)
        if planned.plan.fits:
            break
    return planned


def fastest(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
) -> PlannedRun:
    """Return the plan of the fastest strategy that fits on all GPUs, unless one is asked for.

    A device map asks for one process. Raises: as `resolve`.
    """
    distributed = loaded.config.model.device_map is None
    return resolve(loaded, invocation, hardware, environ, distributed, False, compares=True)


def _fits_and_speed(planned: PlannedRun) -> tuple[bool, float]:
    speed = planned.plan.speed
    return planned.plan.fits, speed.tokens_per_second if speed else 0.0


def _resolve(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    ranks: Ranks,
    engine: Engine,
) -> PlannedRun:
    """Return the plan under one strategy."""
    config = loaded.config
    ranks = replace(ranks, strategy=engine.strategy)
    deepspeed_path = engine.deepspeed_path
    raw = deepspeed.read(deepspeed_path) if deepspeed_path else {}
    model = load_counted_shape(config, environ)
    precision, warnings = choose_precision(loaded, hardware, raw, deepspeed_path)
    if deepspeed_path and precision == "bf16" and hardware.kind != "cuda":
        _refuse_bfloat16(loaded, deepspeed_path, raw)
    machine = machine_of(hardware, ranks, precision, raw, config.train.fsdp_offload, model.hidden)
    is_set = loaded.is_set("train.effective_batch_size")
    inputs = PlanInputs(config, is_set, machine, model, environ, invocation.exact)
    _refuse_combinations(loaded, inputs)
    step = step_of(inputs)
    refuse_misspelt_targets(step)
    _refuse_shared_rows(loaded, inputs, step)
    draft = plan_step(inputs, step)
    layout = draft.layout
    warnings += _model_warnings(loaded, step) + _position_warnings(loaded, environ)
    warnings += _batch_warnings(loaded, layout) + _setting_warnings(loaded)
    warnings += _machine_warnings(loaded, draft, hardware, environ)
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


def _machine_warnings(
    loaded: LoadedConfig, draft: Draft, hardware: Hardware, environ: Mapping[str, str]
) -> list[str]:
    """Return what is to be said of how the machine will run the step."""
    config, ranks, step = loaded.config, draft.inputs.machine.ranks, draft.step
    warnings = strategy.map_sentences(loaded, ranks, step.layers_by_gpu)
    warnings += recurrent_warnings(step.model, hardware) + faster_than_zero3(draft)
    warnings += offloading_warnings(draft)
    offloading = step.offloading(draft.layout.checkpointed_layers)
    host_share = 0.0
    if step.model.parameters >= TOY_PARAMETERS:
        host_share = draft.request.host_tokens / draft.layout.mean_tokens
    graphs = GraphSetup(config, ranks, step.kernels, offloading)
    return (
        warnings
        + graph_warnings(graphs, host_share)
        + needs.switch_warnings(config, ranks, environ)
    )


def _refuse_bfloat16(loaded: LoadedConfig, path: Path, raw: deepspeed.DeepSpeedJson) -> NoReturn:
    """Refuse bfloat16 under DeepSpeed without a GPU. Raises: ConfigError."""
    asked = loaded.described("train.bf16")
    if deepspeed.precision(raw) == "bf16":
        asked = f"{path}: bf16.enabled=true"
    raise ConfigError(
        f"{asked}: under DeepSpeed transformers computes in bfloat16 on GPUs alone; "
        'write "auto" there, or leave DeepSpeed out: make train-distributed'
    )


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
    settings = deepspeed.resolve(raw, run, source=str(path))
    return DeepSpeedPlan(settings, str(path), stamp.digest_of_text(path.read_text("utf-8")))


def _model_warnings(loaded: LoadedConfig, step: StepSpec) -> list[str]:
    """Say where weights and bytes are a guess."""
    name = loaded.described("model.name")
    warnings = []
    if step.model.guess is not None:
        warnings.append(
            f"{name}: its weights could not be counted ({step.model.guess}); the plan takes it for "
            "a Llama of the sizes in its config.json, which may be far off"
        )
    if step.untraced is not None:
        warnings.append(
            f"{name}: a step of it could not be traced ({step.untraced}); the memory is a guess, "
            "and train.probe measures it before the first step on a GPU"
        )
    return warnings


def _position_warnings(loaded: LoadedConfig, environ: Mapping[str, str]) -> list[str]:
    """Say where rows are longer than the sequences that the model was made for."""
    model = loaded.config.model
    if loaded.origin["model.max_seq_len"].startswith(recipe.CHOSEN):  # within them where it looked
        return []
    positions = load_positions(model, environ, may_fetch=False)
    if positions is None or model.max_seq_len <= positions:
        return []
    rope = model.rope_scaling
    own = load_positions(unstretched(model), environ, may_fetch=False)
    factor = math.ceil(model.max_seq_len / own)
    reach = f"the {own} tokens of the model's config.json"
    if rope.rope_type:
        reach = f"the {positions} tokens that {rope.rope_type} with factor {rope.factor:g} reaches"
    return [
        f"{loaded.described('model.max_seq_len')} is more than {reach}: what the model knows of "
        "positions does not reach further, and tokens behind them train badly; stretch its rope "
        f"with MODEL_ROPE_SCALING_ROPE_TYPE={rope.rope_type or 'yarn'} "
        f"MODEL_ROPE_SCALING_FACTOR={factor}, or set MODEL_MAX_SEQ_LEN={positions}"
    ]


def _batch_warnings(loaded: LoadedConfig, layout: Layout) -> list[str]:
    """Say where the step is not the effective batch of the config."""
    train = loaded.config.train
    rows = layout.rows_per_step
    if rows == train.effective_batch_size or "auto" not in (train.batch_size, train.grad_accum):
        return []
    return [
        f"{loaded.described('train.effective_batch_size')} becomes {rows}: train.batch_size="
        f"{layout.batch_size} x world={layout.replicas} x train.grad_accum={layout.grad_accum}; "
        f"TRAIN_EFFECTIVE_BATCH_SIZE={rows} says so"
    ]


def _setting_warnings(loaded: LoadedConfig) -> list[str]:
    unread = without_effect(loaded.config, loaded.is_set, loaded.described)
    return recipe.foreign_recipe(loaded) + unread


def _refuse_shared_rows(loaded: LoadedConfig, inputs: PlanInputs, step: StepSpec) -> None:
    asked = loaded.config.train.context_parallel
    reason = None
    if asked not in ("auto", 1):
        reason = why_not_shared(inputs, step, asked)
    if reason is not None:
        raise ConfigError(
            f"{loaded.described('train.context_parallel')}: {reason}; set TRAIN_CONTEXT_PARALLEL=1"
        )


def _refuse_combinations(loaded: LoadedConfig, inputs: PlanInputs) -> None:
    config, machine = loaded.config, inputs.machine
    refuse_offloading(loaded, machine.ranks)
    if machine.offload and config.train.optim not in OFFLOADED_OPTIMIZERS:
        raise ConfigError(
            f"{loaded.described('train.optim')}: with offload_optimizer DeepSpeed computes AdamW "
            "on the CPU; set TRAIN_OPTIM=adamw_torch, or delete offload_optimizer from the "
            "DeepSpeed JSON"
        )
    is_qlora = config.tuning.mode == "qlora"
    if machine.zero_stage == 3 and is_qlora and machine.ranks.device == "cpu":
        raise ConfigError(
            "ZeRO-3 with tuning.mode=qlora aborts on a CPU; set TUNING_MODE=lora, or train with "
            "make train-distributed TRAIN_STRATEGY=fsdp, or zero2"
        )
    needs.refuse_deepspeed(loaded, machine.ranks)
    if machine.ranks.strategy == "ep" and inputs.model.guess is None:
        strategy.refuse_remainder(inputs.model.counts.stacked_experts, machine.ranks.world_size)
    whole = unsharded(config)
    if machine.zero_stage == 3 and config.tuning.mode != "full" and whole:
        raise ConfigError(
            f"{', '.join(map(loaded.described, whole))}: PEFT "
            "reads whole weights for it, which ZeRO-3 shares among the GPUs; train with "
            "make train-distributed TRAIN_STRATEGY=zero2, or delete the setting"
        )
    backend = backend_of(config)
    if machine.zero_stage and not backend.runs_under_deepspeed:
        raise ConfigError(
            f"tuning.backend={backend.name} does not run under DeepSpeed; "
            "use make train-distributed, or set TUNING_BACKEND=bnb"
        )


def _resolved(
    config: Config, plan: RunPlan, precision: Precision, environ: Mapping[str, str]
) -> Config:
    """Return the config with no auto left and every path absolute.

    So the run folder explains itself anywhere.
    """
    model: dict[str, object] = {
        "device_map": strategy.resolved_map(config.model.device_map, plan.ranks)
    }
    if Path(config.model.name).is_dir():
        model["name"] = _absolute(config.model.name)
    if config.model.has_template_file:
        model["chat_template"] = _absolute(config.model.chat_template)
    is_gpu = plan.ranks.device == "cuda"
    train = config.train
    settings: dict[str, object] = {
        "fast_path": train.fast_path if plan.ranks.gpus_per_process == 1 else False,
        "strategy": resolved_name(plan.ranks.strategy, plan.zero_stage),
        "packing": plan.packing,
        "activation_offloading": plan.step.offload_activations,
        "weight_offloading": plan.step.offloaded_weight_layers > 0,
        "context_parallel": plan.layout.context_parallel,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "ddp_timeout": train.ddp_timeout or _nccl_timeout(environ),
        "resume_from": _absolute(train.resume_from) if train.resume_from else None,
    }
    if train.dataloader_pin_memory == "auto":
        settings["dataloader_pin_memory"] = is_gpu
    if train.probe == "auto":
        settings["probe"] = is_gpu and backend_of(config).supports_probe
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "train": train.model_copy(update=settings),
            "data": sources.resolved(config.data),
        }
    )


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


def _nccl_timeout(environ: Mapping[str, str]) -> int:
    """Return NCCL_TIMEOUT in seconds, a name that people set and no library reads."""
    text = environ.get("NCCL_TIMEOUT") or str(NCCL_SECONDS)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"NCCL_TIMEOUT={text}: write whole seconds, such as NCCL_TIMEOUT={NCCL_SECONDS}"
        )
    return int(text)
