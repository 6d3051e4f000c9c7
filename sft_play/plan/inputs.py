"""A plan's step and its layout, chosen from the config, the machine and the model.

`rank_step` may trace the model in another process. Everything else is arithmetic.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan import activations, batch, memory, placement, speed
from sft_play.plan.batch import BatchRequest
from sft_play.plan.counting import Uncounted, load_trace
from sft_play.plan.fast import (
    UNKNOWN_KERNELS,
    FastSetup,
    fuses_loss,
    is_fast,
    plan_kernels,
)
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape
from sft_play.plan.ranks import Machine
from sft_play.plan.step import LONG_ROW, Adapters, Layout, StepSpec
from sft_play.plan.traced import TracedStep
from sft_play.plan.weight_offloading import fastest_offloaded, why_not_offloaded

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARING_RANKS = (1, 2, 4, 8)  # numbers of ranks that may share a row


@dataclass(frozen=True)
class PlanInputs:
    """The inputs that determine a step and its layout."""

    config: Config
    is_effective_set: bool  # train.effective_batch_size, by the user
    machine: Machine
    model: ModelShape
    environ: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = False  # also trace a model like Llama

    def changed(self, settings: dict[str, Any]) -> Self:
        """Return the inputs with other settings."""
        return replace(self, config=self.config.changed(settings))

    @property
    def can_offload_activations(self) -> bool:
        """Whether activation_offloading has an effect here."""
        return self.machine.is_gpu and backend_of(self.config).recomputes_by_layer

    @property
    def may_offload_weights(self) -> bool:
        """Whether train.weight_offloading=auto may store layers' weights in host memory."""
        is_auto = self.machine.is_gpu and self.config.train.weight_offloading == "auto"
        return is_auto and why_not_offloaded(self.config, self.machine.ranks) is None


@dataclass(frozen=True)
class Draft:
    """A step with the fastest layout that fits, or else the smallest layout."""

    inputs: PlanInputs
    step: StepSpec
    request: BatchRequest
    layout: Layout
    peak_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the step is expected to fit."""
        return self.peak_bytes <= self.inputs.machine.budget_bytes

    def tokens_per_second(self) -> float | None:
        """Return the speed if all rows are full; None if nothing is known of the device."""
        machine = self.inputs.machine
        found = speed.predict(self.step, self.layout, machine.card, machine.ranks.nodes)
        return None if found is None else found.tokens_per_second


def rank_step(inputs: PlanInputs) -> StepSpec:
    """Return the computation of each rank, with offloading that is auto turned off.

    A step of a model that is not like Llama is traced, which takes seconds if it is not cached.

    Raises: ConfigError if an exact plan is requested and there is no trace.
    """
    config, machine, model = inputs.config, inputs.machine, inputs.model
    if machine.ranks.gpus_per_process > 1:  # fused kernels need one GPU per process
        config = config.changed({"train.fast_path": False})
    traced, untraced = _trace(inputs, config)
    setup = FastSetup(
        config=config,
        model_type=model.model_type,
        is_gpu=machine.is_gpu,
        is_half=machine.is_half,
        zero_stage=machine.zero_stage,
        capability=machine.card.capability if machine.card else None,
        traced=traced,
    )
    kernels = plan_kernels(setup)
    tuning, train = config.tuning, config.train
    strategy = machine.ranks.strategy
    compute_bytes = 2 if machine.is_half else 4
    default_bytes = 4 if tuning.mode == "full" else compute_bytes
    return StepSpec(
        model=model,
        mode=tuning.mode,
        compute_bytes=compute_bytes,
        weight_bytes=DTYPE_BYTES.get(config.model.dtype, default_bytes),
        optim=train.optim,
        double_quant=tuning.bnb_4bit_use_double_quant,
        kernels=kernels,
        is_fast=is_fast(setup),
        fuses_loss=fuses_loss(setup),
        adapters=Adapters.of(config),
        zero_stage=machine.zero_stage,
        is_fsdp=strategy == "fsdp",
        expert_ranks=machine.ranks.world_size if strategy == "ep" else 1,
        offload=machine.offload,
        fetching=machine.fetching,
        is_gpu=machine.is_gpu,
        eval_batch_size=None if train.eval_batch_size == "auto" else train.eval_batch_size,
        generates=train.predict_with_generate,
        offload_weights=machine.offload_weights,
        offload_activations=train.activation_offloading is True and inputs.can_offload_activations,
        is_float8=tuning.has_float8_base,
        offloaded_weight_layers=model.layers if train.weight_offloading is True else 0,
        traced=traced,
        untraced=untraced,
    )


def _trace(inputs: PlanInputs, config: Config) -> tuple[TracedStep | None, str | None]:
    """Return the traced step, or why there is none; (None, None) if the closed form is used."""
    machine, model = inputs.machine, inputs.model
    is_like_llama = model.model_type in LLAMA_LIKE and not inputs.is_exact
    if is_like_llama or model.guess is not None:
        return None, model.guess
    if machine.ranks.strategy == "fsdp" and config.tuning.mode == "full" and machine.is_half:
        # gathered in the compute dtype: autocast casts no weight
        config = config.changed({"model.dtype": "bfloat16"})
    try:
        return load_trace(config, machine, inputs.environ), None
    except Uncounted as reason:
        if inputs.is_exact:
            raise ConfigError(
                f"EXACT=1 cannot trace a step of model.name={config.model.name} ({reason}); "
                "plan without EXACT"
            ) from None
        return None, str(reason)


def draft_of(inputs: PlanInputs, step: StepSpec) -> Draft:
    """Return a step with its layout. Raises: ConfigError for numbers that contradict each other."""
    request = request_of(inputs, step)
    peak_bytes = partial(memory.peak_bytes, step)
    layout = batch.choose_layout(request, peak_bytes, inputs.machine.budget_bytes)
    layout = layout or batch.smallest(request)
    return Draft(inputs, step, request, layout, peak_bytes(layout))


def request_of(inputs: PlanInputs, step: StepSpec) -> BatchRequest:
    """Return the config's settings of batch, accumulation and checkpointing."""
    train, machine = inputs.config.train, inputs.machine
    row_tokens = inputs.config.model.max_seq_len
    in_one_row = "attention" in step.kernels.on
    if step.traced is not None:
        in_one_row = step.traced.in_one_row
    return BatchRequest(
        batch_size=train.batch_size,
        grad_accum=train.grad_accum,
        effective_batch=train.effective_batch_size,
        is_effective_set=inputs.is_effective_set,
        gradient_checkpointing=train.gradient_checkpointing,
        row=Layout(
            batch_size=1,
            grad_accum=1,
            world_size=machine.ranks.world_size,
            max_seq_len=row_tokens,
            in_one_row=in_one_row,
            pair_cost=speed.pair_cost(inputs.model, step.active_adapter_weights),
            waits_each_micro_batch=step.zero_stage >= 2 or step.is_fsdp or step.expert_ranks > 1,
            context_parallel=step.context_parallel,
        ),
        layers=inputs.model.layers,
        recomputes_by_layer=backend_of(inputs.config).recomputes_by_layer,
        overhead_tokens=speed.overhead_tokens(step, row_tokens, machine.card),
        host_tokens=speed.host_tokens(step, row_tokens, machine.card),
    )


def plan_step(inputs: PlanInputs, step: StepSpec) -> Draft:
    """Return the first draft that fits, else the first one; all auto settings are decided.

    Raises: ConfigError for numbers that contradict each other.
    """
    return _first_that_fits(_drafts(inputs, _placed(inputs, step)))


def _first_that_fits(drafts: Iterator[Draft]) -> Draft:
    """Return the first draft that fits, else the first one. Later ones are not computed."""
    first = next(drafts)
    return first if first.fits else next((draft for draft in drafts if draft.fits), first)


def _drafts(inputs: PlanInputs, step: StepSpec) -> Iterator[Draft]:
    """Yield the ways to compute a step, in the order in which they are tried.

    As few ranks share a row as possible. For each number of them, activations stay on the GPU, then
    are offloaded; weights are offloaded last.

    Raises: ConfigError if a step has fewer rows than ranks, however many share a row.
    """
    asked = inputs.config.train.context_parallel
    counts = (asked,)
    if asked == "auto":  # shorter rows have other ways to fit
        counts = SHARING_RANKS if inputs.config.model.max_seq_len >= LONG_ROW else (1,)
    first = refused = None
    for count in counts:
        if count > 1 and why_not_shared(inputs, step, count) is not None:
            continue
        try:
            for draft in _drafts_by_offloading(inputs, replace(step, context_parallel=count)):
                first = first or draft
                yield draft
        except ConfigError as error:
            refused = refused or error
    if first is None:
        assert refused is not None, "one rank can always have a row"
        raise refused
    if inputs.may_offload_weights:
        machine = inputs.machine
        layer = memory.layer_bytes(first.step, first.step.weight_bytes)
        room = machine.host_budget_bytes * machine.ranks.per_node // layer
        most = min(step.model.layers, room)
        offloaded = fastest_offloaded(partial(with_layers_on_host, first), most)
        if offloaded is not None:
            yield offloaded


def why_not_shared(inputs: PlanInputs, step: StepSpec, count: int) -> str | None:
    """Return why `count` ranks cannot share each row, None if they can."""
    model, ranks, config = inputs.model, inputs.machine.ranks, inputs.config
    backend = backend_of(config)
    has_other_attention = step.kernels != UNKNOWN_KERNELS and "attention" not in step.kernels.on
    reasons = {
        f"{ranks.world_size} ranks are no multiple of it": ranks.world_size % count,
        f"the {model.heads} heads of attention cannot be divided by it": model.heads % count,
        f"the {model.kv_heads} heads of keys and values cannot be divided among as many": (
            model.kv_heads % count and count % model.kv_heads
        ),
        "recurrent layers need the tokens before theirs": model.counts.recurrent_layers,
        "model.device_map places one model on several GPUs": ranks.gpus_per_process > 1,
        f"tuning.backend={config.tuning.backend} has its own attention": (
            backend.has_own_kernels or not backend.is_traceable
        ),
        "attention is not that of the fused kernels": has_other_attention,
        "the balance of experts is counted over complete rows": (
            config.train.router_aux_loss_coef not in (None, "auto", 0)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _drafts_by_offloading(inputs: PlanInputs, step: StepSpec) -> Iterator[Draft]:
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


def with_layers_on_host(draft: Draft, count: int) -> Draft:
    """Return a draft with some layers' weights in host memory; activations can use the rest."""
    machine = draft.inputs.machine
    step = replace(draft.step, offloaded_weight_layers=count)
    share = memory.offloaded_weight_bytes(step) // machine.ranks.per_node
    left = replace(machine, host_budget_bytes=max(0, machine.host_budget_bytes - share))
    tried = _drafts_by_offloading(replace(draft.inputs, machine=left), step)
    offloaded = _first_that_fits(tried)
    return replace(offloaded, inputs=draft.inputs)


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
