"""A plan's step and its layout, chosen from the config, the machine and the model.

`rank_step` may trace the model in another process. Everything else is arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan import activations, batch, memory, speed
from sft_play.plan.batch import BatchRequest
from sft_play.plan.counting import Uncounted, load_trace
from sft_play.plan.fast import UNKNOWN_KERNELS, FastSetup, fuses_loss, is_fast, plan_kernels
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape
from sft_play.plan.ranks import Machine, Ranks
from sft_play.plan.step import Adapters, Layout, StepSpec
from sft_play.plan.traced import TracedStep

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PlanInputs:
    """The inputs that determine a step and its layout."""

    config: Config
    is_effective_set: bool  # train.effective_batch_size, by the user
    machine: Machine
    model: ModelShape
    environ: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = False  # also trace a model like Llama

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Return the inputs with other settings of the user."""
        is_set = self.is_effective_set or "train.effective_batch_size" in settings
        return replace(self, config=self.config.changed(settings), is_effective_set=is_set)

    @property
    def can_offload_activations(self) -> bool:
        """Whether activation_offloading has an effect here."""
        return self.machine.is_gpu and backend_of(self.config).recomputes_by_layer

    @property
    def may_offload_weights(self) -> bool:
        """Whether train.weight_offloading=auto may store layers' weights in host memory.

        It may not while GPUs are idle: they are faster than host memory.
        """
        machine = self.machine
        is_auto = machine.is_gpu and self.config.train.weight_offloading == "auto"
        has_idle_gpus = machine.gpu_count > machine.ranks.gpus_per_node
        is_open = is_auto and not has_idle_gpus
        return is_open and why_not_offloaded(self.config, machine.ranks) is None


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

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes per rank in host memory, by the setting that stores them there."""
        weights = memory.offloaded_weight_bytes(self.step) // self.inputs.machine.ranks.per_node
        return {
            "train.fsdp_offload": memory.host_bytes(self.step, self.layout),
            "train.weight_offloading": weights,
            "train.activation_offloading": activations.offloaded_bytes(self.step, self.layout),
        }

    @property
    def rank(self) -> tuple[bool, float]:
        """Whether it fits, and how fast it is: the larger, the better."""
        return self.fits, self.tokens_per_second() or 0.0

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
    fixed = speed.fixed_tokens(step, row_tokens, machine.card)
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
        overhead_tokens=fixed.overhead,
        host_tokens=fixed.host,
    )


def why_not_offloaded(config: Config, ranks: Ranks) -> str | None:
    """Return why frozen weights cannot be in host memory, and what to set; None if they can."""
    reasons = {
        "all weights are trained; set TUNING_MODE=lora": config.tuning.mode == "full",
        "Unsloth loads the weights itself; set TUNING_BACKEND=bnb": (
            not backend_of(config).recomputes_by_layer
        ),
        "model.device_map places the weights; set MODEL_DEVICE_MAP=null": (
            config.model.device_map is not None
        ),
        f"strategy {ranks.strategy} has its own places for weights; set TRAIN_STRATEGY=ddp": (
            ranks.strategy not in ("single", "ddp")
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return None


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
    for reason, holds in reasons.items():
        if holds:
            return reason
    return None
