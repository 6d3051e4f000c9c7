"""Changes of settings that would make a step fit, ranked by their cost in speed. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from sft_play.config import deepspeed, rules
from sft_play.config.backends import backend_of
from sft_play.config.schema import env_name
from sft_play.errors import ConfigError
from sft_play.plan.candidates import SHARING_RANKS, plan_step
from sft_play.plan.inputs import Draft, PlanInputs, rank_step, why_not_offloaded, why_not_shared
from sft_play.plan.memory import GIB
from sft_play.plan.needs import may_be_float8, refuse_combinations
from sft_play.plan.ranks import Machine, Strategy
from sft_play.plan.step import LONG_ROW
from sft_play.plan.strategy import ZERO_CONFIGS, why_not_fsdp

MIN_ROW_TOKENS = 256  # shorter rows are never suggested
MAX_COMBINED = 3  # changes at once
ON_HOST = ("offloading", "weights")  # groups of options that use host memory


@dataclass(frozen=True)
class Advised:
    """Settings that make a step fit."""

    words: str  # to type
    costs: str  # other than speed; "" if nothing
    predicted_peak: int  # bytes per rank
    relative_speed: float | None  # of the step that does not fit, had it room; None: unknown


@dataclass(frozen=True)
class Option:
    """One change that frees memory: other settings, and other ranks if `machine` is not None."""

    words: str
    group: str  # options in the same group exclude each other
    costs: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Machine | None = None

    @property
    def key(self) -> list[str]:
        """The words that no second change repeats: only the longest rows that fit are offered."""
        return [self.group] if self.group in ("length", "batch") else self.words.split()

    def applied(self, inputs: PlanInputs) -> PlanInputs:
        """Return the inputs with the change."""
        return replace(inputs.changed(self.settings), machine=self.machine or inputs.machine)


def changes(draft: Draft) -> tuple[Advised, ...]:
    """Return the changes that make a step fit on such a host.

    All settings of a change are needed. Changes that train the same thing come first, then the
    others; both are sorted by speed, fastest first. Empty if no three settings make it fit.
    """
    inputs = replace(draft.inputs, is_exact=False).changed(
        {
            "train.activation_offloading": draft.step.offload_activations,
            "train.weight_offloading": draft.step.offloaded_weight_layers > 0,
            "train.context_parallel": draft.step.context_parallel,
        }
    )
    options = list(_options(replace(draft, inputs=inputs)))
    before = draft.tokens_per_second()
    found: dict[frozenset[str], Advised] = {}
    for count in range(1, MAX_COMBINED + 1):
        for combined in combinations(options, count):
            key = frozenset(word for option in combined for word in option.key)
            groups = {option.group for option in combined}
            if len(groups) < count or any(fewer <= key for fewer in found):
                continue
            change = _change(inputs, combined, before)
            if change is not None:
                found[key] = change
        if any(not change.costs for change in found.values()):
            break
    return tuple(
        sorted(found.values(), key=lambda each: (bool(each.costs), -(each.relative_speed or 0.0)))
    )


def _draft(inputs: PlanInputs) -> Draft | None:
    """Return the step of other settings or ranks, None if they contradict each other."""
    if rules.broken(inputs.config, str):
        return None
    try:
        refuse_combinations(inputs, str)
        return plan_step(inputs, rank_step(inputs))
    except ConfigError:
        return None


def _change(inputs: PlanInputs, options: Sequence[Option], before: float | None) -> Advised | None:
    """Return the combined effect of the options, None if the step still does not fit."""
    for option in options:
        inputs = option.applied(inputs)
    machine = inputs.machine
    is_float16 = machine.precision == "fp16"
    if machine.ranks.strategy == "fsdp" and why_not_fsdp(inputs.config, is_float16):
        return None
    draft = _draft(inputs)
    if draft is None or not draft.fits:
        return None
    on_host, layout = sum(draft.host_bytes.values()), draft.layout
    if on_host > machine.host_budget_bytes:
        return None
    costs = [option.costs for option in options if option.costs]
    if any(option.group in ON_HOST for option in options):
        costs.append(f"{on_host / GIB:.0f} GiB of host memory for each GPU")
    batch = f"TRAIN_BATCH_SIZE={layout.batch_size} TRAIN_GRAD_ACCUM={layout.grad_accum}"
    words = [batch if option.group == "batch" else option.words for option in options]
    words.sort(key=lambda word: not word.startswith("make"))
    after = draft.tokens_per_second()
    return Advised(
        words=" ".join(words),
        costs=", ".join(costs),
        predicted_peak=draft.peak_bytes,
        relative_speed=after / before if before and after else None,
    )


def _options(draft: Draft) -> Iterator[Option]:
    """Yield every setting that can free memory here."""
    inputs, machine = draft.inputs, draft.inputs.machine
    train = inputs.config.train
    tuning = inputs.config.tuning
    if train.batch_size != "auto":
        open_batch = {"train.batch_size": "auto", "train.grad_accum": "auto"}
        rows = {"train.effective_batch_size": draft.layout.rows_per_step}
        yield Option("", "batch", settings={**open_batch, **rows})
    if train.gradient_checkpointing is False:
        yield _setting({"train.gradient_checkpointing": "auto"}, "checkpointing")
    if inputs.can_offload_activations and not draft.step.offload_activations:
        yield _setting({"train.activation_offloading": True}, "offloading")
    if not train.weight_offloading and why_not_offloaded(inputs.config, machine.ranks) is None:
        yield _setting({"train.weight_offloading": True}, "weights")
    yield from _engine_options(inputs)
    yield from _context_options(inputs)
    if tuning.mode == "full":
        is_float32 = inputs.config.model.dtype in ("auto", "float32")
        if is_float32 and machine.is_half and not machine.zero_stage:
            costs = "weights are updated in 16 bits"
            yield _setting({"model.dtype": "bfloat16"}, "dtype", costs)
        yield _setting({"tuning.mode": "lora"}, "mode", "trains adapters")
    if machine.is_gpu and "8bit" not in train.optim:
        yield _setting({"train.optim": "adamw_8bit"}, "optim", "optimizer state in 8 bits")
    if tuning.mode != "qlora":
        unquantized = {"tuning.base_dtype": "auto"} if tuning.has_float8_base else {}
        costs = "trains adapters over 4-bit weights"
        yield _setting({"tuning.mode": "qlora", **unquantized}, "mode", costs)
    if draft.step.has_adapted_experts and tuning.lora.experts != "shared":
        costs = "shares one adapter among the experts of a layer"
        yield _setting({"tuning.lora.experts": "shared"}, "experts", costs)
    if may_be_float8(inputs.config, machine.card) and not machine.zero_stage:
        yield _setting({"tuning.base_dtype": "float8"}, "mode", "trains adapters over float8")
    tokens = inputs.config.model.max_seq_len // 2
    while tokens >= MIN_ROW_TOKENS:
        costs = f"rows of at most {tokens} tokens"
        yield _setting({"model.max_seq_len": tokens}, "length", costs)
        tokens //= 2


def _setting(settings: dict[str, str | int], group: str, costs: str = "") -> Option:
    """Return the option that changes settings."""
    words = []
    for path, value in settings.items():
        words.append(f"{env_name(path)}={'true' if value is True else value}")
    return Option(" ".join(words), group, costs, settings)


def _engine_options(inputs: PlanInputs) -> Iterator[Option]:
    """Yield FSDP and ZeRO on the plan's GPUs, and on all GPUs of the host if some are idle."""
    machine, ranks = inputs.machine, inputs.machine.ranks
    if not machine.is_gpu:
        return
    train = inputs.config.train
    no_map = "" if inputs.config.model.device_map is None else " MODEL_DEVICE_MAP=null"
    for per_node in sorted({ranks.per_node, machine.gpu_count}):
        if per_node * ranks.nodes < 2 or per_node < ranks.per_node:
            continue
        is_more = per_node > ranks.per_node
        number = f" NUM_GPUS={per_node}" * is_more
        fsdp = _on_ranks(machine, "fsdp", per_node)
        if is_more or ranks.strategy != "fsdp":
            words = f"make train-distributed{number} TRAIN_STRATEGY=fsdp{no_map}"
            yield Option(words, "engine", machine=fsdp)
        offloading = replace(fsdp, offload_weights=True)
        draft = _draft(replace(inputs, machine=offloading))
        has_room = draft and draft.host_bytes["train.fsdp_offload"] <= offloading.host_budget_bytes
        if has_room and not machine.offload_weights:
            named = " TRAIN_STRATEGY=fsdp" * (train.strategy not in ("auto", "fsdp"))
            words = f"make train-distributed{number} TRAIN_FSDP_OFFLOAD=true{named}{no_map}"
            yield Option(words, "engine", machine=offloading)
        if not backend_of(inputs.config).runs_under_deepspeed:
            continue
        for stage in range(max(2, machine.zero_stage + (not is_more)), 4):
            name = f"zero{stage}"
            raw = deepspeed.read_deepspeed_json(ZERO_CONFIGS[name])  # the JSON that ships
            named = f" TRAIN_STRATEGY={name}" * (train.strategy != "auto")
            file = f"configs/deepspeed_{name}.json"
            words = f"make train-deepspeed{number} DEEPSPEED_CONFIG={file}{named}{no_map}"
            zero = replace(
                _on_ranks(machine, "deepspeed", per_node),
                zero_stage=stage,
                fetching=deepspeed.fetching(raw, inputs.model.hidden),
            )
            yield Option(words, "engine", machine=zero)


def _context_options(inputs: PlanInputs) -> Iterator[Option]:
    """Yield the smallest number of GPUs for long rows, even if this host has fewer."""
    machine, ranks = inputs.machine, inputs.machine.ranks
    if inputs.config.model.max_seq_len < LONG_ROW or not machine.is_gpu:
        return
    for count in SHARING_RANKS:
        per_node = max(ranks.per_node, count)
        strategy = "ddp" if ranks.strategy == "single" else ranks.strategy
        more = _on_ranks(machine, strategy, per_node)
        words = f"make train-distributed NUM_GPUS={per_node} TRAIN_CONTEXT_PARALLEL={count}"
        words += " TRAIN_ACTIVATION_OFFLOADING=auto"
        costs = ""
        if per_node > machine.gpu_count:
            costs = f"{per_node} GPUs"
            more = replace(more, host_budget_bytes=machine.host_budget_bytes)  # of another host
        settings = {"train.activation_offloading": "auto", "train.context_parallel": count}
        option = Option(words, "engine", costs, settings, more)
        shared = option.applied(inputs)
        is_more = count > inputs.config.train.context_parallel
        is_possible = is_more and why_not_shared(shared, rank_step(shared), count) is None
        draft = _draft(shared) if is_possible else None
        if draft and draft.fits:
            yield option
            return


def _on_ranks(machine: Machine, strategy: Strategy, per_node: int) -> Machine:
    """Return a machine without DeepSpeed, on which each rank has one GPU."""
    return replace(
        machine,
        ranks=replace(machine.ranks, strategy=strategy, per_node=per_node, gpus_per_process=1),
        zero_stage=0,
        offload=False,
        offload_weights=False,
        host_budget_bytes=machine.host_budget_bytes * machine.ranks.per_node // per_node,
    )
