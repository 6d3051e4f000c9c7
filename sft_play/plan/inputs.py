"""What a plan is made from: config, model, processes and devices. Pure: no torch, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from sft_play.config.backends import backend_of
from sft_play.config.deepspeed_json import DEFAULT_FETCHING, Fetching
from sft_play.config.schema import Config
from sft_play.config.sections.model import MapRule
from sft_play.plan import activations, batch, cards, memory, placement, speed
from sft_play.plan.batch import BatchRequest
from sft_play.plan.counting import Device, Uncounted, load_trace
from sft_play.plan.fast import (
    NEEDED,
    FastPlan,
    FastSetup,
    GraphSetup,
    fuses_loss,
    is_fast,
    plan_kernels,
    records_graphs,
)
from sft_play.plan.memory import GIB
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import LONG_ROW, AdapterOptions, Layout, StepSpec
from sft_play.plan.traced import TracedStep

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOY_PARAMETERS = 3e8  # a smaller model trains in minutes, whoever sets the pace


@dataclass(frozen=True)
class PlanInputs:
    """What batch and checkpointing follow from."""

    config: Config
    is_effective_set: bool  # train.effective_batch_size, by the user
    model: ModelShape
    ranks: Ranks
    is_half: bool  # matrix products in 16 bits
    zero_stage: int  # 0 without DeepSpeed
    offload: bool  # of the optimizer's state
    offload_weights: bool  # of ZeRO-3
    budget_bytes: int  # that one rank may take
    gpu_names: tuple[str, ...]  # of this machine's ranks; () on a CPU
    host_budget_bytes: int = 0  # that one rank may take of host memory
    environ: Mapping[str, str] = field(default_factory=dict)
    fetching: Fetching = DEFAULT_FETCHING  # of ZeRO-3
    layers_by_gpu: tuple[int, ...] = ()  # of one model on the GPUs of one process; (): on one
    is_float16: bool = False  # the half is float16, which scales the loss
    context_parallel: int = 1  # ranks that share each row
    keeps_attention: bool = False  # outputs of attention in layers that are recomputed
    host_layers: int | None = None  # whose inputs the host has room for; None: all

    @cached_property
    def request(self) -> BatchRequest:
        """What the config says of batch, accumulation and checkpointing."""
        train = self.config.train
        row_tokens = self.config.model.max_seq_len
        return BatchRequest(
            batch_size=train.batch_size,
            grad_accum=train.grad_accum,
            effective_batch=train.effective_batch_size,
            is_effective_set=self.is_effective_set,
            gradient_checkpointing=train.gradient_checkpointing,
            max_seq_len=row_tokens,
            world_size=self.ranks.world_size,
            layers=self.model.layers,
            recomputes_by_layer=backend_of(self.config).recomputes_by_layer,
            in_one_row=self._takes_one_row,
            pair_cost=speed.pair_cost(self.model, self.step.active_adapter_weights),
            waits_each_micro_batch=self.zero_stage >= 2 or self.ranks.strategy in ("fsdp", "ep"),
            context_parallel=self.context_parallel,
            overhead_tokens=speed.overhead_tokens(self.step, row_tokens, self.card),
            host_tokens=speed.host_tokens(self.step, row_tokens, self.card),
        )

    @property
    def _takes_one_row(self) -> bool:
        """Whether the packed documents of a micro-batch may be one long row."""
        if isinstance(self.trace, TracedStep):
            return self.trace.in_one_row
        return self.kernels is not None and "attention" in self.kernels.on

    @property
    def kernels(self) -> FastPlan | None:
        """The fused parts, None if they are not known before the model is loaded."""
        if isinstance(self.trace, TracedStep):
            return FastPlan(self.trace.on, self.trace.off)
        if backend_of(self.config).has_own_kernels:
            return FastPlan(NEEDED, {})
        if self.model.model_type not in LLAMA_LIKE:
            return None
        return plan_kernels(self.fast_setup)

    @property
    def kernel_config(self) -> Config:
        """The config by which kernels are chosen: a model on several GPUs has no fused ones."""
        if self.ranks.gpus_per_process == 1:
            return self.config
        train = self.config.train.model_copy(update={"fast_path": False})
        return self.config.model_copy(update={"train": train})

    @property
    def fast_setup(self) -> FastSetup:
        """What the choice of kernels follows from."""
        return FastSetup(
            config=self.kernel_config,
            model_type=self.model.model_type,
            is_gpu=self.ranks.device == "cuda",
            is_half=self.is_half,
            zero_stage=self.zero_stage,
            capability=self.card.capability if self.card else None,
        )

    @cached_property
    def trace(self) -> TracedStep | str | None:
        """The traced step, why there is none, or None if the closed form fits."""
        if self.model.model_type in LLAMA_LIKE or self.model.guess is not None:
            return self.model.guess
        device = Device(self.ranks.device, self.is_half, self.zero_stage)
        try:
            return load_trace(self.kernel_config, device, self.environ)
        except Uncounted as reason:
            return str(reason)

    @cached_property
    def step(self) -> StepSpec:
        """What each rank computes."""
        tuning = self.config.tuning
        train = self.config.train
        compute_bytes = 2 if self.is_half else 4
        default_bytes = 4 if tuning.mode == "full" else compute_bytes
        targets = tuning.lora.target_modules
        is_gpu = self.ranks.device == "cuda"
        eval_batch_size = None if train.eval_batch_size == "auto" else train.eval_batch_size
        step = StepSpec(
            model=self.model,
            mode=tuning.mode,
            compute_bytes=compute_bytes,
            weight_bytes=DTYPE_BYTES.get(self.config.model.dtype, default_bytes),
            lora_rank=tuning.lora.r,
            lora_targets=targets if isinstance(targets, str) else tuple(targets),
            optim=train.optim,
            double_quant=tuning.bnb_4bit_use_double_quant,
            is_fast=is_fast(self.fast_setup),
            fuses_loss=fuses_loss(self.fast_setup),
            adapter_options=AdapterOptions.of(self.config),
            zero_stage=self.zero_stage,
            is_fsdp=self.ranks.strategy == "fsdp",
            expert_ranks=self.ranks.world_size if self.ranks.strategy == "ep" else 1,
            offload=self.offload,
            fetching=self.fetching,
            is_gpu=is_gpu,
            eval_batch_size=eval_batch_size,
            generates=train.predict_with_generate,
            offload_weights=self.offload_weights,
            offload_activations=self.offloads_activations,
            shares_rows=self.context_parallel > 1,
            keeps_attention=self.keeps_attention,
            host_layers=self.host_layers,
            layers_by_gpu=self.layers_by_gpu,
            is_float8=tuning.has_float8_base,
            records_graphs=records_graphs(self.graph_setup),
        )
        if isinstance(self.trace, TracedStep):
            return step.with_trace(self.trace)
        return replace(step, untraced=self.trace)

    def host_share(self, layout: Layout) -> float:
        """Return how long the CPU launches a micro-batch, in the GPU's time for it; 0 for toys."""
        is_toy = self.model.parameters < TOY_PARAMETERS
        return 0.0 if is_toy else self.request.host_tokens / layout.mean_tokens

    @property
    def graph_setup(self) -> GraphSetup:
        """What is known of recording the layers, where none is offloaded."""
        return GraphSetup(self.config, self.ranks, self.kernels)

    @property
    def offloads_activations(self) -> bool:
        """Whether inputs of checkpointed layers go to the host."""
        return self.config.train.activation_offloading is True and self.can_offload_activations

    @property
    def can_offload_activations(self) -> bool:
        """Whether activation_offloading does anything here."""
        is_gpu = self.ranks.device == "cuda"
        return is_gpu and backend_of(self.config).recomputes_by_layer

    @property
    def may_keep_attention(self) -> bool:
        """Whether attention takes most of a row's time, and recomputed layers may keep it."""
        row_tokens = self.config.model.max_seq_len // self.context_parallel
        return row_tokens >= LONG_ROW and self.can_offload_activations and self.step.is_fast

    @property
    def card(self) -> cards.Card | None:
        """What is known of the GPUs."""
        return cards.card_of(self.gpu_names)

    def fits(self, layout: Layout) -> bool:
        """Return whether a step is expected to fit."""
        return memory.peak_bytes(self.step, layout) <= self.budget_bytes

    def speed(self, layout: Layout) -> speed.Speed | None:
        """Return the speed where all rows are full; None if nothing is known of the device."""
        work = speed.full_rows(layout)
        return speed.predict(self.step, layout, work, self.card, self.ranks.nodes)


def choose_layout(inputs: PlanInputs) -> Layout:
    """Return the fastest layout that fits, else the smallest one.

    Raises: ConfigError when the user's numbers contradict each other.
    """
    peak_bytes = partial(memory.peak_bytes, inputs.step)
    chosen = batch.choose(inputs.request, peak_bytes, inputs.budget_bytes)
    return chosen or batch.smallest(inputs.request)


def with_placement(inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with the layers of each GPU, where one process has several.

    sequential gives GPU 0 the most layers with which a step fits.
    """
    gpus = inputs.ranks.gpus_per_process
    rule = inputs.config.model.device_map
    layers = inputs.model.layers
    if gpus == 1:
        return replace(inputs, layers_by_gpu=())
    if isinstance(rule, dict):
        return replace(inputs, layers_by_gpu=placement.counts(placement.map_layers(rule, layers)))
    fewest = -(-layers // gpus)
    if rule != "sequential":
        return _with_layers_placed(inputs, rule, fewest)
    for most_layers in range(layers, fewest, -1):
        placed = _with_layers_placed(inputs, rule, most_layers)
        if placed.fits(choose_layout(placed)):
            return placed
    return _with_layers_placed(inputs, rule, fewest)


def _with_layers_placed(inputs: PlanInputs, rule: MapRule, most_layers: int) -> PlanInputs:
    step = inputs.step
    matrix = step.weight_bytes * step.model.vocab * step.model.hidden
    others = matrix if step.model.is_tied else 2 * matrix
    layer = max(1, memory.base_weight_bytes(step, step.weight_bytes) - others) // step.model.layers
    places = placement.places_by_rule(
        rule,
        before=matrix,
        layers=[layer] * step.model.layers,
        behind=0 if step.model.is_tied else matrix,
        gpus=inputs.ranks.gpus_per_process,
        most_layers=most_layers,
    )
    return replace(inputs, layers_by_gpu=placement.counts(places[1:-1]))


def with_offloading(inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with train.activation_offloading decided where it is auto.

    It is on where no layout fits without it, and one does with it: with as many layers as the host
    has room for. Long rows keep the outputs of attention where that fits without it.
    """
    train = inputs.config.train
    if inputs.may_keep_attention:
        kept = replace(_with_offloading_set(inputs, False), keeps_attention=True)
        if train.activation_offloading is not True and kept.fits(choose_layout(kept)):
            return kept
    if train.activation_offloading != "auto":
        return inputs
    without = _with_offloading_set(inputs, False)
    if inputs.fits(choose_layout(without)) or not inputs.can_offload_activations:
        return without
    offloaded = _with_offloading_set(inputs, True)
    layout = choose_layout(offloaded)
    host_bytes = activations.offloaded_bytes(offloaded.step, layout)
    if host_bytes > inputs.host_budget_bytes:
        room = inputs.host_budget_bytes * layout.checkpointed_layers // host_bytes
        offloaded = replace(offloaded, host_layers=room)
        layout = choose_layout(offloaded)
    return offloaded if offloaded.fits(layout) else without


def _with_offloading_set(inputs: PlanInputs, is_on: bool) -> PlanInputs:
    train = inputs.config.train.model_copy(update={"activation_offloading": is_on})
    return replace(inputs, config=inputs.config.model_copy(update={"train": train}))


def shortage(inputs: PlanInputs, layout: Layout) -> str | None:
    """Return why a layout is not expected to fit, None if it is."""
    request = inputs.request
    peak_bytes = memory.peak_bytes(inputs.step, layout)
    if peak_bytes <= inputs.budget_bytes:
        return None
    needed = f"{peak_bytes / GIB:.2f} GiB"
    budget = f"{inputs.budget_bytes / GIB:.2f} GiB"
    if request.batch_size != "auto":
        return (
            f"train.batch_size={layout.batch_size} is estimated to need {needed} and {budget} "
            "are there"
        )
    device = "a GPU" if inputs.ranks.device == "cuda" else "this host for each process"
    rows = "1 row"
    if layout.batch_size > 1:
        called_for = f"train.grad_accum={request.grad_accum} calls for"
        rows = f"{layout.batch_size} rows, which {called_for},"
    recomputed = " with checkpointing" if layout.checkpointed_layers else ""
    return (
        f"train.batch_size=auto: even {rows} of {request.max_seq_len} tokens{recomputed} needs "
        f"{needed}{_needed_offloaded(inputs, peak_bytes)}, {device} has {budget} to give"
    )


def _needed_offloaded(inputs: PlanInputs, peak_bytes: int) -> str:
    """Say what the smallest step needs with activations offloaded, where that is less."""
    if inputs.step.offload_activations or not inputs.can_offload_activations:
        return ""
    offloaded = _with_offloading_set(inputs, True)
    layout = batch.smallest(offloaded.request)
    layouts = [layout]
    if offloaded.request.gradient_checkpointing == "auto" and layout.checkpointed_layers > 1:
        # the last layer, kept, is freed before another is recomputed
        layouts.append(replace(layout, checkpointed_layers=layout.checkpointed_layers - 1))
    needed_bytes = min(memory.peak_bytes(offloaded.step, each) for each in layouts)
    if needed_bytes >= peak_bytes:
        return ""
    return f", {needed_bytes / GIB:.2f} GiB with TRAIN_ACTIVATION_OFFLOADING=true"


def offloading_warnings(inputs: PlanInputs, layout: Layout) -> list[str]:
    """Return what to know of offloaded weights and activations."""
    step = inputs.step
    weights = memory.host_bytes(step, layout)
    inputs_of_layers = activations.offloaded_bytes(step, layout)
    offloaded = (
        ("train.fsdp_offload", weights, "set TUNING_MODE=qlora, or use more machines"),
        ("train.activation_offloading", inputs_of_layers, "set a smaller MODEL_MAX_SEQ_LEN"),
    )
    warnings = []
    for setting, needed, remedy in offloaded:
        if needed > inputs.host_budget_bytes:
            warnings.append(
                f"{setting}=true needs {needed / GIB:.1f} GiB of host memory for each process, "
                f"and {inputs.host_budget_bytes / GIB:.1f} GiB are there; {remedy}"
            )
    wants_offloading = inputs.config.train.activation_offloading is True
    if wants_offloading and not inputs.can_offload_activations:
        warnings.append(
            "train.activation_offloading=true does nothing here: it is for backend bnb on GPUs"
        )
    return warnings
