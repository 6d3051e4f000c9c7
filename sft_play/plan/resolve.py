"""Resolve a config for this machine: every `auto` becomes a number. Loads no torch."""

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from sft_play.config import deepspeed
from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan import advice, memory, recipe, sources, strategy
from sft_play.plan.candidates import Asked, Candidate, search
from sft_play.plan.devices import Hardware
from sft_play.plan.inputs import Draft
from sft_play.plan.needs import resolve_packing
from sft_play.plan.ranks import Precision, plan_ranks, used_before
from sft_play.plan.run_plan import DeepSpeedPlan, PlannedRun, RunPlan
from sft_play.plan.strategy import ChosenStrategy, asked_strategy
from sft_play.plan.warnings import shortage, warnings_of
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
    exact = invocation.exact
    found = search(Asked(loaded, asked, ranks, hardware, environ, exact, compares))
    return _planned(found, hardware, environ)


def fastest(
    loaded: LoadedConfig, invocation: Invocation, hardware: Hardware, environ: Mapping[str, str]
) -> PlannedRun:
    """Return the plan of the fastest strategy that fits on all GPUs, unless one is requested.

    A device map requires one process. Raises: as `resolve_plan`.
    """
    distributed = loaded.config.model.device_map is None
    return resolve_plan(loaded, invocation, hardware, environ, distributed, False, compares=True)


def _planned(found: Candidate, hardware: Hardware, environ: Mapping[str, str]) -> PlannedRun:
    """Return the plan of a candidate."""
    loaded, draft = found.loaded, found.draft
    config, machine, step = loaded.config, draft.inputs.machine, draft.step
    packing, unpacked_because = resolve_packing(config, step.model.model_type)
    lack = shortage(draft)
    plan = RunPlan(
        ranks=machine.ranks,
        request=draft.request,
        step=step,
        layout=draft.layout,
        packing=packing,
        unpacked_because=unpacked_because,
        memory=memory.step_bytes(step, draft.layout),
        budget_bytes=machine.budget_bytes,
        gpu_names=machine.gpu_names,
        used_before_bytes=used_before(hardware, machine.ranks),
        deepspeed=_deepspeed_plan(found.engine, draft),
        shortage=lack,
        changes=advice.changes(draft) if lack else (),
        warnings=(*found.warnings, *warnings_of(loaded, draft, hardware, environ)),
        recipe=recipe.sentences(loaded),
    )
    planned = PlannedRun(_resolved(config, plan, machine.precision, environ), plan)
    return planned.with_layout(draft.layout, plan.memory)


def _deepspeed_plan(engine: ChosenStrategy, draft: Draft) -> DeepSpeedPlan | None:
    path = engine.deepspeed_path
    if path is None:
        return None
    precision = draft.inputs.machine.precision
    run = deepspeed.DeepSpeedRun(
        micro_batch=draft.layout.batch_size,
        grad_accum=draft.layout.grad_accum,
        world_size=draft.layout.world_size,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        max_grad_norm=draft.inputs.config.train.max_grad_norm,
        hidden_size=draft.step.model.hidden,
    )
    settings = deepspeed.resolve_deepspeed(engine.deepspeed_json, run, source=str(path))
    return DeepSpeedPlan(settings, str(path), stamp.digest_of_text(path.read_text("utf-8")))


def _resolved(
    config: Config, plan: RunPlan, precision: Precision, environ: Mapping[str, str]
) -> Config:
    """Return the config with no auto left and every path absolute.

    So the run folder explains itself anywhere.
    """
    is_gpu = plan.ranks.device == "cuda"
    train = config.train
    # in seconds, a variable that people set and no library reads
    nccl_timeout = environ.get("NCCL_TIMEOUT") or str(NCCL_SECONDS)
    if not train.ddp_timeout and (not nccl_timeout.isdecimal() or int(nccl_timeout) < 1):
        raise ConfigError(
            f"NCCL_TIMEOUT={nccl_timeout}: write whole seconds, such as NCCL_TIMEOUT={NCCL_SECONDS}"
        )
    engine = plan.ranks.strategy
    zero = f"zero{plan.zero_stage}" if plan.zero_stage else "auto"
    names = {"single": "ddp", "deepspeed": zero}  # DDP with one process is that process
    device_map = config.model.device_map
    if device_map == "auto":
        device_map = "balanced"
    if plan.ranks.gpus_per_process == 1 and not isinstance(device_map, dict):
        device_map = None  # each process has one device
    settings: dict[str, object] = {
        "data": sources.resolved(config.data),
        "model.device_map": device_map,
        "train.fast_path": train.fast_path if plan.ranks.gpus_per_process == 1 else False,
        "train.strategy": names.get(engine, engine),
        "train.packing": plan.packing,
        "train.activation_offloading": plan.step.offload_activations,
        "train.weight_offloading": plan.step.offloaded_weight_layers > 0,
        "train.context_parallel": plan.layout.context_parallel,
        "train.bf16": precision == "bf16",
        "train.fp16": precision == "fp16",
        "train.ddp_timeout": train.ddp_timeout or int(nccl_timeout),
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
