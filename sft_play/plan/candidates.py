"""The ways to train that the settings leave open, in order of preference, and the search for one.

A new one (an engine, a place for bytes) is added here: `candidates` varies settings and engines,
`_drafts` the computation of a step. Loads no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from sft_play.config.layers import Layer
from sft_play.config.loader import CHOSEN, LoadedConfig, is_default
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError
from sft_play.plan import activations, memory, needs, placement
from sft_play.plan.batch import SATURATED_TOKENS
from sft_play.plan.counting import load_counted_shape
from sft_play.plan.devices import Hardware
from sft_play.plan.inputs import Draft, PlanInputs, draft_of, rank_step, why_not_shared
from sft_play.plan.ranks import Ranks, choose_precision, machine_of
from sft_play.plan.step import LONG_ROW, StepSpec
from sft_play.plan.strategy import (
    ZERO_CONFIGS,
    AskedStrategy,
    ChosenStrategy,
    refuse_shared,
    why_not_fsdp,
)

SHARING_RANKS = (1, 2, 4, 8)  # numbers of ranks that may share a row
CLEARLY_FASTER = 1.1  # times the speed for which experts share adapters next to offloaded weights


@dataclass(frozen=True)
class Asked:
    """What a command asks of a plan. The search decides what settings and strategy leave open."""

    loaded: LoadedConfig
    strategy: AskedStrategy
    ranks: Ranks
    hardware: Hardware
    environ: Mapping[str, str]
    is_exact: bool  # trace a model like Llama, too
    compares: bool  # all engines, for the fastest one


@dataclass(frozen=True)
class Candidate:
    """Settings and an engine, with the best step that they allow."""

    loaded: LoadedConfig
    engine: ChosenStrategy
    draft: Draft
    warnings: list[str]  # about the precision

    @property
    def is_unbeaten(self) -> bool:
        """Whether other engines gain nothing: its ranks gather nothing and have enough memory.

        Of 525 plans that compared all engines, another one was predicted faster in 4, by 3 %.
        """
        layout = self.draft.layout
        has_room = layout.tokens >= SATURATED_TOKENS and not layout.checkpointed_layers
        return has_room and self.engine.strategy == "ddp"


def search(asked: Asked) -> Candidate:
    """Return the first candidate that fits, else the first one; later ones are not computed.

    If `asked.compares`, it is the fastest engine of the first settings with which one fits. Weights
    are stored in host memory last. Then experts share adapters if that is clearly faster, as what
    an adapter for each takes is copied twice in every step.
    """
    tried = []
    for group in candidates(asked):
        if group[0].draft.fits:
            return group[0]
        tried += group
    found = None
    for candidate in tried:
        draft = with_weights_on_host(candidate.draft)
        if draft is None:
            continue
        if not found or (
            draft.step.has_adapted_experts and draft.rank[1] > CLEARLY_FASTER * found.draft.rank[1]
        ):
            found = replace(candidate, draft=draft)
    return found or tried[0]


def candidates(asked: Asked) -> Iterator[list[Candidate]]:
    """Yield the engines for each of the settings, the best one first."""
    first = _engines(asked, asked.loaded)
    yield first
    for settings in _smaller_adapters(first[0]):
        yield _engines(asked, asked.loaded.with_values(settings))


def _engines(asked: Asked, loaded: LoadedConfig) -> list[Candidate]:
    """Return the engines until one fits, or all to compare, the best one first.

    Raises: ConfigError if the first engine cannot run these settings.
    """
    needs.require_needs(loaded, asked.hardware)
    tried: list[Candidate] = []
    for engine in _open_engines(asked, loaded):
        try:
            candidate = _candidate(asked, loaded, engine)
        except ConfigError:
            if not tried:
                raise
            continue  # the settings exclude an engine that nobody requested
        if candidate.draft.fits and (not asked.compares or candidate.is_unbeaten):
            return [candidate]
        tried.append(candidate)
    if asked.compares:
        tried.sort(key=attrgetter("draft.rank"), reverse=True)
    return tried


def _open_engines(asked: Asked, loaded: LoadedConfig) -> Iterator[ChosenStrategy]:
    """Yield the engines that settings and make target leave open, in order of preference.

    `asked.compares` also includes DeepSpeed, which is otherwise tried only with its make target.
    For adapters, only if FSDP cannot run: each engine's trace takes seconds, and of 213 compared
    plans one differs.

    Raises: ConfigError if the requested one cannot run.
    """
    config, ranks, name = loaded.config, asked.ranks, asked.strategy.name
    is_float16 = choose_precision(loaded, asked.hardware, {}).precision == "fp16"  # without a JSON
    if name in ("fsdp", "ep"):
        refuse_shared(asked.strategy, config, ranks, is_float16)
        yield ChosenStrategy(name)
    elif not asked.strategy.uses_deepspeed:
        yield ChosenStrategy("single" if ranks.world_size == 1 else "ddp")
        if name == "auto" and ranks.world_size > 1 and not why_not_fsdp(config, is_float16):
            yield ChosenStrategy("fsdp")
    is_full = config.tuning.mode == "full"
    if asked.strategy.uses_deepspeed or (
        asked.compares and (is_full or why_not_fsdp(config, is_float16))
    ):
        path = asked.strategy.deepspeed_path
        stages = ("zero2", "zero3") if name == "auto" else (name,)
        for each in [path] if path else map(ZERO_CONFIGS.get, stages):
            yield ChosenStrategy("deepspeed", each)


def _candidate(asked: Asked, loaded: LoadedConfig, engine: ChosenStrategy) -> Candidate:
    """Return the step under one engine. Raises: ConfigError if it cannot run these settings."""
    config, hardware, raw = loaded.config, asked.hardware, engine.deepspeed_json
    ranks = replace(asked.ranks, strategy=engine.strategy)
    model = load_counted_shape(config, asked.environ)
    precision, warnings = choose_precision(loaded, hardware, raw, engine.deepspeed_path)
    if engine.deepspeed_path and precision == "bf16" and hardware.kind != "cuda":
        needs.refuse_bfloat16(loaded, engine.deepspeed_path, raw)
    machine = machine_of(hardware, ranks, precision, raw, config.train.fsdp_offload, model.hidden)
    is_set = loaded.is_set("train.effective_batch_size")
    inputs = PlanInputs(config, is_set, machine, model, asked.environ, asked.is_exact)
    needs.refuse_combinations(inputs, loaded.described)
    step = rank_step(inputs)
    needs.refuse_step(loaded, inputs, step)
    return Candidate(loaded, engine, plan_step(inputs, step), warnings)


def _smaller_adapters(candidate: Candidate) -> Iterator[Layer]:
    """Yield settings that need less memory than a candidate, the largest adapters on experts first.

    Experts that are published in 4 bits also remain so, unless the user set a mode.
    """
    loaded, draft = candidate.loaded, candidate.draft
    config, step, machine = loaded.config, draft.step, draft.inputs.machine
    lora = config.tuning.lora
    is_given = config.model.adapter or config.train.resume_from or config.tuning.backend != "bnb"
    if is_given or lora.experts != "auto" or not step.has_adapted_experts:
        return
    needed = f"needs {draft.peak_bytes / memory.GIB:.0f} GiB on each GPU"
    fewer = [{"tuning.lora.experts": Located("shared", f"{CHOSEN}one for each expert {needed}")}]
    if lora.target_modules == "all-linear":
        none = f"{CHOSEN}adapters on experts do not fit"
        fewer.append({"tuning.lora.experts": Located("none", none)})
    room = machine.budget_bytes * machine.ranks.world_size
    weight_bytes = memory.base_weight_bytes(step, step.weight_bytes)
    if weight_bytes < room or draft.inputs.may_offload_weights:
        yield from fewer
    is_open = is_default(loaded.origin["tuning.mode"]) and config.tuning.mode == "lora"
    if is_open and step.model.in_mxfp4:
        reason = f"lora {needed}; experts stay in MXFP4, as published, others become NF4"
        mode = {"tuning.mode": Located("qlora", f"{CHOSEN}{reason}")}
        yield from (mode | settings for settings in ({}, *fewer))


def plan_step(inputs: PlanInputs, step: StepSpec) -> Draft:
    """Return the first draft of a step that fits, else the first one.

    All auto settings are decided, except that weights remain on the GPU.

    Raises: ConfigError for numbers that contradict each other.
    """
    drafts = _drafts(inputs, _placed(inputs, step))
    first = next(drafts)
    return first if first.fits else next((draft for draft in drafts if draft.fits), first)


def _drafts(inputs: PlanInputs, step: StepSpec) -> Iterator[Draft]:
    """Yield the ways to compute a step, in the order in which they are tried.

    As few ranks share a row as possible.

    Raises: ConfigError if a step has fewer rows than ranks, however many share a row.
    """
    asked = inputs.config.train.context_parallel
    counts = (asked,)
    if asked == "auto":  # shorter rows have other ways to fit
        counts = SHARING_RANKS if inputs.config.model.max_seq_len >= LONG_ROW else (1,)
    drafts_found, refused = False, None
    for count in counts:
        if count > 1 and why_not_shared(inputs, step, count) is not None:
            continue
        try:
            yield from _by_offloading(inputs, replace(step, context_parallel=count))
            drafts_found = True
        except ConfigError as error:
            refused = refused or error
    if not drafts_found:
        assert refused is not None, "one rank can always have a row"
        raise refused


def _by_offloading(inputs: PlanInputs, step: StepSpec) -> Iterator[Draft]:
    """Yield the drafts that train.activation_offloading allows.

    Long rows save the outputs of attention if that fits. Activations are offloaded for as many
    layers as the host has memory for.
    """
    asked = inputs.config.train.activation_offloading
    row_tokens = inputs.config.model.max_seq_len // step.context_parallel
    is_long = row_tokens >= LONG_ROW and step.is_fast and inputs.can_offload_activations
    if is_long and asked is not True:
        kept = draft_of(inputs, replace(step, keeps_attention=True))
        if kept.fits:
            yield kept
    yield draft_of(inputs, step)
    if asked != "auto" or not inputs.can_offload_activations:
        return
    step = replace(step, offload_activations=True)
    offloaded = draft_of(inputs, step)
    host_bytes = activations.offloaded_bytes(step, offloaded.layout)
    if host_bytes > inputs.machine.host_budget_bytes:
        layers = offloaded.layout.checkpointed_layers
        room = inputs.machine.host_budget_bytes * layers // host_bytes
        offloaded = draft_of(inputs, replace(step, host_layers=room))
    yield offloaded


def with_weights_on_host(draft: Draft) -> Draft | None:
    """Return the fastest draft that fits with some layers' weights in host memory, or None.

    More offloaded layers allow larger micro-batches, or fewer layers that are computed again, and
    take longer to copy.
    """
    step, machine = draft.step, draft.inputs.machine
    if not draft.inputs.may_offload_weights:
        return None
    layer = memory.layer_bytes(step, step.weight_bytes)
    room = machine.host_budget_bytes * machine.ranks.per_node // layer
    most = min(step.model.layers, room)
    counts = range(memory.WEIGHT_BUFFERS + 1, most + 1)
    drafts = (with_layers_on_host(draft, count) for count in counts)
    best = max(drafts, key=attrgetter("rank"), default=draft)
    return best if best.fits else None


def with_layers_on_host(draft: Draft, count: int) -> Draft:
    """Return a draft with some layers' weights in host memory; activations can use the rest."""
    machine = draft.inputs.machine
    step = replace(draft.step, offloaded_weight_layers=count)
    share = memory.offloaded_weight_bytes(step) // machine.ranks.per_node
    left = replace(machine, host_budget_bytes=max(0, machine.host_budget_bytes - share))
    inputs = draft.inputs.changed({"train.context_parallel": step.context_parallel})
    return replace(plan_step(replace(inputs, machine=left), step), inputs=draft.inputs)


def _placed(inputs: PlanInputs, step: StepSpec) -> StepSpec:
    """Return the step with the number of layers on each GPU, if one process has several.

    sequential gives GPU 0 the largest number of layers with which a step fits.
    """
    gpus = inputs.machine.ranks.gpus_per_process
    rule = inputs.config.model.device_map
    layers = inputs.model.layers
    if gpus == 1:
        return step
    if isinstance(rule, dict):
        return replace(step, layers_by_gpu=placement.counts(placement.map_layers(rule, layers)))
    fewest = -(-layers // gpus)
    for most_layers in range(layers, fewest, -1) if rule == "sequential" else ():
        counts = placement.count_layers(rule, layers, gpus, most_layers)
        placed = replace(step, layers_by_gpu=counts)
        if draft_of(inputs, placed).fits:
            return placed
    return replace(step, layers_by_gpu=placement.count_layers(rule, layers, gpus, fewest))
