"""The text and the JSON of `make plan`. Pure: no torch, no I/O."""

import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, replace

from sft_play.config.backends import backend_of
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.advice import Advised
from sft_play.plan.launch import Launch
from sft_play.plan.memory import GIB, offloaded_weight_bytes
from sft_play.plan.ranks import DTYPE_NAMES, RESERVE, config_precision
from sft_play.plan.recipe import format_count, model_summary
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.workload import Workload, describe_float8, describe_run, describe_speed

LINE_WIDTH = 110
LABEL_WIDTH = 14  # of a line's first column, the label
STRATEGIES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "ep": "experts shared",
    "deepspeed": "DeepSpeed ZeRO-",
}
MEMORY_SOURCES = {
    "closed form": "by the closed form",
    "traced": "by a trace of the model's code",
    "guess": "a guess",
}
# Components whose displayed name differs
COMPONENT_NAMES = {
    "logits": "logits and loss",
    "buckets": "gradient buckets",
    "gathered": "gathered layers",
    "context": "context, libraries",
}


def plan_line(planned: PlannedRun) -> str:
    """Return the plan as one line of facts."""
    plan = planned.plan
    layout = plan.layout
    zero = f" zero={plan.zero_stage}" if plan.deepspeed else ""
    checkpointing: str = plan.checkpointing
    if checkpointing == "selective":
        checkpointing += f":{layout.checkpointed_layers}/{plan.step.model.layers}"
    if plan.step.keeps_attention and layout.checkpointed_layers:
        checkpointing += ",attention kept"
    if plan.step.offload_activations:
        checkpointing += ",offloaded"
    shared = layout.context_parallel
    context = f" context_parallel={shared}" if shared > 1 else ""
    return (
        f"plan device={plan.ranks.device} world={layout.world_size} "
        f"strategy={plan.ranks.strategy}{zero}{context}{_on_host(plan)} "
        f"batch={layout.batch_size} x {layout.replicas} x accum={layout.grad_accum} "
        f"= {layout.rows_per_step} packing={str(plan.packing).lower()} "
        f"checkpointing={checkpointing} compute={config_precision(planned.config)} "
        f"predicted_peak={_gib(plan.memory.predicted_peak)}GiB of {_gib(plan.budget_bytes)}GiB"
    )


def _on_host(plan: RunPlan) -> str:
    """Return text in parentheses on the weights that are in host memory, "" if none are."""
    step = plan.step
    if not step.offloaded_weight_layers:
        return ""
    size = f"{offloaded_weight_bytes(step) / GIB:.1f} GiB of host memory"
    return f" ({step.offloaded_weight_layers} of {step.model.layers} layers in {size})"


def packing_line(plan: RunPlan, unpacked: int) -> str:
    """Return how many micro-batches a packed run needs per step, instead of `unpacked`."""
    layout = plan.layout
    sequences = f"{layout.sequences} sequence{'s' * (layout.sequences > 1)}"
    return (
        f"packing rows={layout.rows_per_step} a step in micro_batches={layout.micro_batches} of "
        f"each rank, at most {sequences} of {layout.capacity} tokens, "
        f"predicted_peak={_gib(plan.memory.predicted_peak)}GiB; "
        f"without packing {unpacked}"
    )


def plan_json(plan: RunPlan, command: Launch, workload: Workload | None) -> dict[str, object]:
    """Return the JSON that `plan --json` prints."""
    ranks = plan.ranks
    layout = plan.layout
    zero = plan.deepspeed
    return {
        "strategy": ranks.strategy,
        "device": ranks.device,
        "world_size": ranks.world_size,
        "per_device_batch_size": layout.batch_size,
        "grad_accum": layout.grad_accum,
        "effective_batch": layout.rows_per_step,
        "packing": plan.packing,
        "micro_batches": layout.micro_batches,
        "sequences": layout.sequences,
        "checkpointing": plan.checkpointing,
        "checkpointed_layers": layout.checkpointed_layers,
        "gradient_checkpointing": layout.checkpointed_layers > 0,
        "zero_stage": plan.zero_stage,
        "deepspeed": zero and zero.settings,
        "deepspeed_source": zero and zero.source,
        "deepspeed_digest": zero and zero.source_digest,
        "backend_of_collectives": ranks.collective_backend,
        "memory": {**plan.memory.peak.components(), "predicted_peak": plan.memory.predicted_peak},
        "phases": {
            name: {**phase.components(), "total": phase.total}
            for name, phase in plan.memory.phases.items()
        },
        "budget_bytes": plan.budget_bytes,
        "longest_row": asdict(plan.longest_rows),
        "parameters": plan.step.model.parameters,
        "memory_source": plan.step.memory_source,
        "active_parameters": plan.step.model.active_parameters,
        "request": asdict(plan.request),
        "step": asdict(plan.step),
        "fits": plan.fits,
        "changes": [asdict(change) for change in plan.changes],
        "speed": asdict(plan.speed) if plan.speed else None,
        "gpu": plan.gpu,
        "used_before_bytes": list(plan.used_before_bytes),
        "warnings": list(plan.warnings),
        "argv": list(command.argv),
        "env": command.env,
        "workload": asdict(workload) if workload else None,
    }


def plan_lines(
    planned: PlannedRun, command: Launch, make_words: Iterable[str], workload: Workload | str
) -> list[str]:
    """Return a plan as text for people.

    It contains hardware, bytes by phase, batch, speed, hours, and what to type. `make_words` start
    the run; `workload` is what it trains, or why that is not known.
    """
    plan = planned.plan
    is_composite = plan.step.model.composite is not None
    shown = _labelled(
        ("model", describe_encoders(planned) if is_composite else None),
        ("plan", _what(planned)),
        ("on", _where(plan)),
        *(("warning", warning) for warning in plan.warnings),
    )
    shown += ["", *_phase_table(planned), ""]
    shown += _labelled(
        ("memory", _memory(plan)),
        ("batch", _batch(plan)),
        ("checkpointing", _checkpointing(plan)),
        ("longest row", plan.longest_rows.describe()),
        ("packing", _packing(plan)),
        *(("" if number else "recipe", text) for number, text in enumerate(plan.recipe)),
        ("experts", _experts(plan)),
        ("precision", _precision(planned)),
        ("speed", describe_speed(plan)),
        ("float8", describe_float8(planned)),
        ("run", describe_run(workload)),
        # a text has neither: it is why the rows are not known
        *((name, getattr(workload, name, None)) for name in ("warning", "conversations")),
    )
    if plan.changes:
        shown += ["", "it fits, by estimate, with"]
        for change in plan.changes:
            shown += _change(change)
    elif not plan.fits:
        advice = "a smaller model, or GPUs with more memory"
        shown += ["", f"no three settings together make it fit: {advice}"]
    if not plan.fits and not plan.is_batch_explicit:
        return shown  # `make train` refuses it
    variables = {name: value for name, value in command.env.items() if name != "PATH"}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words += map(shlex.quote, command.argv)
    return [*shown, "", *_command("start", make_words), *_command("which runs", words)]


def _labelled(*facts: tuple[str, str | None]) -> list[str]:
    """Return the lines of labels and texts; a text of None has no line."""
    shown = []
    for label, text in facts:
        if text:
            shown += _wrapped(f"{label:<{LABEL_WIDTH}}{text}", LABEL_WIDTH)
    return shown


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        LINE_WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command(label: str, words: Iterable[str]) -> list[str]:
    """Return a shell command on several lines if needed, which a shell reads as one."""
    indent = " " * (LABEL_WIDTH - 1)
    rows = [f"{label:<{LABEL_WIDTH - 1}}"]
    is_empty = True
    for word in words:
        if not is_empty and len(rows[-1]) + len(word) + 3 > LINE_WIDTH:
            rows[-1] += " \\"
            rows.append(indent)
        rows[-1] += f" {word}"
        is_empty = False
    return rows


ENCODERS = {"frozen": "frozen", "drop": "dropped", "lora": "with adapters", "full": "trained"}


def describe_encoders(planned: PlannedRun) -> str:
    """Return what is trained of a model with encoders, and what happens to the encoders."""
    model = planned.plan.step.model
    encoders = ENCODERS[planned.config.tuning.encoders]
    size = f", {format_count(model.counts.encoders)} weights" if model.counts.encoders else ""
    return (
        f"text of {model.composite or model.model_type}; encoders {encoders}{size}, kept in exports"
    )


def _experts(plan: RunPlan) -> str | None:
    """Return the weights of adapters on experts, both ways to have them; None without them."""
    step = plan.step
    if not step.has_adapted_experts:
        return None
    ways = (replace(step.adapters, experts=way) for way in ("per_expert", "shared"))
    each, shared = (format_count(way.weights(step.model)) for way in ways)
    return f"{each} weights with an adapter per expert, {shared} with TUNING_LORA_EXPERTS=shared"


def _what(planned: PlannedRun) -> str:
    tuning = planned.config.tuning
    model = planned.plan.step.model
    method = "full fine-tuning"
    if tuning.mode != "full":
        targets = tuning.lora.target_modules
        layers = "all linear layers" if targets == "all-linear" else ", ".join(targets)
        adapted = planned.plan.step.adapted_matrices
        if targets == "all-linear" and any(kind.is_stacked for kind in adapted):
            layers += " and experts"
        layers += planned.plan.step.adapters.describe()
        method = f"{tuning.mode} of rank {tuning.lora.r} on {layers}"
    kernels = planned.plan.step.kernels.describe()
    backend = backend_of(planned.config)
    if backend.has_own_kernels:
        kernels = backend.title
    return f"{planned.config.model.name} ({model_summary(model)}), {method}, {kernels}"


def _where(plan: RunPlan) -> str:
    ranks = plan.ranks
    strategy = STRATEGIES[ranks.strategy]
    if plan.deepspeed:
        strategy += str(plan.zero_stage)
    if ranks.strategy != "single" and ranks.world_size == 1:
        strategy += " of one process"
    machines = f"{ranks.nodes} machines x " if ranks.nodes > 1 else ""
    if ranks.gpus_per_process > 1:
        layers = " + ".join(map(str, plan.step.layers_by_gpu))
        return f"{ranks.gpus_per_process} x {plan.gpus} for one process, {layers} layers"
    return f"{machines}{ranks.per_node} x {plan.gpus or 'a process on the CPU'}, {strategy}"


def _phase_table(planned: PlannedRun) -> list[str]:
    """Return the components of each phase in GiB; the phase that needs most has a star."""
    plan = planned.plan
    device = "GPU" if plan.ranks.device == "cuda" else "process"
    names = [name + "*" * (name == plan.memory.peak_phase) for name in plan.memory.phases]
    rows = [_row(f"GiB on each {device}", names)]
    phases = [phase.components() for phase in plan.memory.phases.values()]
    for component in dict.fromkeys(name for phase in phases for name in phase):
        label = COMPONENT_NAMES.get(component, component)
        if component == "weights":
            label = f"weights ({_weight_types(planned)})"
        rows.append(_row(label, [_gib_or_dash(phase.get(component, 0)) for phase in phases]))
    totals = plan.memory.totals().values()
    return [*rows, _row("total", [_gib_or_dash(size) for size in totals])]


def _row(label: str, cells: Iterable[str]) -> str:
    columns = "".join(f"{cell:>13}" for cell in cells)
    return f"{label:<32}{columns}".rstrip()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _gib_or_dash(size_bytes: int) -> str:
    return _gib(size_bytes) if size_bytes else "-"


def _weight_types(planned: PlannedRun) -> str:
    tuning = planned.config.tuning
    step = planned.plan.step
    if step.is_float8:
        return "float8"
    if tuning.mode == "qlora":
        in_4_bits = tuning.bnb_4bit_quant_type.upper()
        if step.model.in_mxfp4:
            return f"MXFP4 and {in_4_bits}"
        return in_4_bits + ", double quantized" * tuning.bnb_4bit_use_double_quant
    computed = DTYPE_NAMES[config_precision(planned.config)]
    if planned.plan.zero_stage and step.is_half:
        return computed  # DeepSpeed converts them
    if step.weight_bytes == 4:
        return "float32"
    dtype = planned.config.model.dtype
    return computed if dtype == "auto" else dtype


def _memory(plan: RunPlan) -> str:
    peak = plan.memory.predicted_peak / GIB
    budget = plan.budget_bytes / GIB
    free = budget / (1 - RESERVE)
    where = "on each GPU" if plan.ranks.device == "cuda" else "of the host for each process"
    verdict = "fits" if plan.fits else f"does NOT fit, by {peak - budget:.2f} GiB"
    return (
        f"{verdict}: {peak:.2f} GiB in the {plan.memory.peak_phase} phase, {peak / budget:.0%} of "
        f"the {budget:.2f} GiB that may be used, {peak / free:.0%} of the {free:.2f} GiB free "
        f"{where}; {RESERVE:.0%} are kept in reserve; {MEMORY_SOURCES[plan.step.memory_source]}"
    )


def _batch(plan: RunPlan) -> str:
    layout = plan.layout
    noun, nouns = "process", "processes"
    if plan.ranks.device == "cuda" and plan.ranks.gpus_per_process == 1:
        noun, nouns = "GPU", "GPUs"
    if layout.context_parallel > 1:
        noun, nouns = (
            f"{each} of {layout.context_parallel} {nouns}" for each in ("group", "groups")
        )
    world = f"{layout.replicas} {nouns if layout.replicas > 1 else noun}"
    return (
        f"{layout.batch_size} x {world} x {layout.grad_accum} = {layout.rows_per_step} rows per "
        f"step (micro-batch x {nouns} x accumulation), of at most {layout.max_seq_len:,} tokens"
    )


def _checkpointing(plan: RunPlan) -> str:
    if plan.checkpointing == "none":
        return "none: no layer is computed twice"
    which = "all"
    if plan.checkpointing == "selective":
        which = f"the first {plan.layout.checkpointed_layers} of"
    where = " but for attention" if plan.step.keeps_attention else ""
    if plan.step.offload_activations:
        held = offloaded_bytes(plan.step, plan.layout) / GIB
        where = f"; their inputs wait in {held:.1f} GiB of host memory for each GPU"
    return f"{which} {plan.step.model.layers} layers are computed again in the backward pass{where}"


def _packing(plan: RunPlan) -> str:
    if plan.packing:
        larger = ", and larger ones that need more memory" if plan.may_grow else ""
        return (
            "on: rows share sequences up to the longest, so a step may take fewer micro-batches"
            f"{larger}"
        )
    return f"off: {plan.unpacked_because}" if plan.unpacked_because else "off"


def _precision(planned: PlannedRun) -> str:
    computed = DTYPE_NAMES[config_precision(planned.config)]
    weights = _weight_types(planned) + _on_host(planned.plan)
    optim = planned.config.train.optim
    if planned.plan.step.is_full:
        return f"computes in {computed}; weights in {weights}; optimizer {optim}"
    adapters = computed if planned.plan.zero_stage in (1, 2) else "float32"
    return (
        f"computes in {computed}; base weights in {weights}, adapters in {adapters}; "
        f"optimizer {optim}"
    )


def _change(change: Advised) -> list[str]:
    facts = f"{_gib(change.predicted_peak)} GiB"
    if change.relative_speed is not None:
        facts += f", {change.relative_speed:.2f} x the speed"
    if change.costs:
        facts += f"; {change.costs}"
    return _wrapped(f"  {change.words}  ({facts})", 6)
