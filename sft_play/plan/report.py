"""The text of `make plan`. Pure: no torch, no I/O."""

import math
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from sft_play.plan.advice import Change
from sft_play.plan.launch import Launch
from sft_play.plan.resolve import GIB, RESERVE, Plan, precision
from sft_play.plan.workload import Workload

WIDTH = 110  # columns
LABEL = 14  # of them, for what a line is about
TYPES = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}
STRATEGIES = {"single": "one process", "ddp": "DDP", "deepspeed": "DeepSpeed ZeRO-"}
NAMES = {
    "logits": "logits and loss",
    "buckets": "gradient buckets",
    "context": "context, libraries",
}  # else as the component is called


def lines(
    plan: Plan, command: Launch, make_words: Iterable[str], workload: Workload | str
) -> list[str]:
    """Return a plan as a person reads it: what and where, bytes by phase, batch, speed, hours, and what to type.

    `make_words` start the run; `workload` is what it trains, or why that is not known.
    """
    shown = [
        *_line("plan", _what(plan)),
        *_line("on", _where(plan)),
        *(text for warning in plan.warnings for text in _line("warning", warning)),
        "",
        *_table(plan),
        "",
        *_line("memory", _memory(plan)),
        *_line("batch", _batch(plan)),
        *_line("checkpointing", _checkpointing(plan)),
        *_line("packing", _packing(plan)),
        *_line("precision", _precision(plan)),
        *_line("speed", _speed(plan)),
        *_line("run", _run(workload)),
    ]
    if plan.changes:
        shown += ["", "it fits, by estimate, with"]
        shown += [line for change in plan.changes for line in _change(change)]
    elif not plan.fits:
        shown += [
            "",
            "no three settings together make it fit: a smaller model, or GPUs with more memory",
        ]
    if not plan.fits and not plan.is_batch_explicit:
        return shown  # which `make train` refuses
    env = [f"{name}={shlex.quote(value)}" for name, value in command.env.items() if name != "PATH"]
    return [
        *shown,
        "",
        *_command("start", make_words),
        *_command("which runs", [*env, *map(shlex.quote, command.argv)]),
    ]


def _line(about: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{about:<{LABEL}}{text}",
        WIDTH,
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _command(about: str, words: Iterable[str]) -> list[str]:
    """Words of a shell command, on as many lines as it takes, which a shell reads as one."""
    rows, indent = [f"{about:<{LABEL - 1}}"], " " * (LABEL - 1)
    for word in words:
        if len(rows[-1]) + len(word) + 3 > WIDTH and rows[-1].strip() not in ("", about):
            rows[-1] += " \\"
            rows.append(indent)
        rows[-1] += f" {word}"
    return rows


def _what(plan: Plan) -> str:
    tuning, how = plan.config.tuning, "full fine-tuning"
    if tuning.mode != "full":
        targets = tuning.lora.target_modules
        how = f"{tuning.mode} of rank {tuning.lora.r} on {'all linear layers' if targets == 'all-linear' else ', '.join(targets)}"
    kernels = (
        "Unsloth"
        if tuning.backend == "unsloth"
        else "fused kernels"
        if plan.step.is_fast
        else "no fused kernels"
    )
    return f"{plan.config.model.name} ({_count(plan.shape.parameters)} weights), {how}, {kernels}"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _where(plan: Plan) -> str:
    ranks = plan.ranks
    strategy = STRATEGIES[ranks.strategy] + (str(plan.zero_stage) if plan.deepspeed else "")
    if ranks.strategy != "single" and ranks.world_size == 1:
        strategy += " of one process"
    device = " and ".join(sorted(set(plan.setup.gpu_names))) or "a process on the CPU"
    machines = f"{ranks.nodes} machines x " if ranks.nodes > 1 else ""
    return f"{machines}{ranks.per_node} x {device}, {strategy}"


def _table(plan: Plan) -> list[str]:
    """Components of each phase in GiB; the phase that needs most has a star."""
    phases, peak = plan.memory.phases, plan.memory.peak_phase
    device = "GPU" if plan.ranks.device == "cuda" else "process"
    rows = [(f"GiB on each {device}", *(f"{name}{'*' if name == peak else ''}" for name in phases))]
    columns = [asdict(phase) for phase in phases.values()]
    for component in columns[0]:
        label = (
            f"weights ({_weights(plan)})"
            if component == "weights"
            else NAMES.get(component, component)
        )
        rows.append((label, *(_gib(column[component]) for column in columns)))
    rows.append(("total", *(_gib(phase.total) for phase in phases.values())))
    return [
        f"{label:<32}{''.join(f'{cell:>13}' for cell in cells)}".rstrip() for label, *cells in rows
    ]


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}" if number else "-"


def _weights(plan: Plan) -> str:
    tuning = plan.config.tuning
    if tuning.mode == "qlora":
        return tuning.bnb_4bit_quant_type.upper() + (
            ", double quantised" if tuning.bnb_4bit_use_double_quant else ""
        )
    computed = TYPES[precision(plan.config)]
    if plan.zero_stage and plan.step.compute_bytes == 2:
        return computed  # DeepSpeed turns them to it
    return (
        "float32"
        if plan.step.weight_bytes == 4
        else plan.config.model.dtype
        if plan.config.model.dtype != "auto"
        else computed
    )


def _memory(plan: Plan) -> str:
    peak, budget = plan.memory.predicted_peak / GIB, plan.budget_bytes / GIB
    free, where = (
        budget / (1 - RESERVE),
        "on each GPU" if plan.ranks.device == "cuda" else "of the host for each process",
    )
    verdict = "fits" if plan.fits else f"does NOT fit, by {peak - budget:.2f} GiB"
    shares = f"{peak / budget:.0%} of the {budget:.2f} GiB that may be used, {peak / free:.0%} of the {free:.2f} GiB free {where}"
    return f"{verdict}: {peak:.2f} GiB in the {plan.memory.peak_phase} phase, {shares}; {RESERVE:.0%} are kept in reserve"


def _batch(plan: Plan) -> str:
    chosen, ranks = plan.chosen, plan.ranks
    one, each = ("GPU", "GPUs") if ranks.device == "cuda" else ("process", "processes")
    world = f"{ranks.world_size} {each if ranks.world_size > 1 else one}"
    arithmetic = f"{chosen.batch_size} x {world} x {chosen.grad_accum} = {chosen.effective_batch}"
    return f"{arithmetic} rows a step (micro-batch x {each} x accumulation), of at most {plan.config.model.max_seq_len:,} tokens"


def _checkpointing(plan: Plan) -> str:
    chosen = plan.chosen
    if chosen.checkpointing == "none":
        return "none: no layer is computed twice"
    which = (
        "all" if chosen.checkpointing == "full" else f"the first {chosen.checkpointed_layers} of"
    )
    return f"{which} {chosen.layers} layers are computed again in the backward pass"


def _packing(plan: Plan) -> str:
    if plan.packing:
        return "on: rows share sequences up to the longest, so a step may take fewer micro-batches"
    return f"off: {plan.unpacked_because}" if plan.unpacked_because else "off"


def _precision(plan: Plan) -> str:
    computed, optim = TYPES[precision(plan.config)], plan.config.train.optim
    if plan.config.tuning.mode == "full":
        return f"computes in {computed}; weights in {_weights(plan)}; optimizer {optim}"
    return f"computes in {computed}; base weights in {_weights(plan)}, adapters in {computed if plan.zero_stage else 'float32'}; optimizer {optim}"


def _speed(plan: Plan) -> str:
    speed, world = plan.speed, plan.ranks.world_size
    if speed is None:
        if plan.ranks.device == "cpu":
            return "not known on a CPU"
        if plan.step.compute_bytes == 4:
            return "not known in float32"
        return f"not known: {' and '.join(sorted(set(plan.setup.gpu_names)))} is no card whose data sheet is known here"
    share = f" ({speed.tokens_per_second / world:,.0f} a GPU)" if world > 1 else ""
    waiting = speed.collective_seconds / speed.step_seconds
    hidden = f", {waiting:.0%} of it waiting for other GPUs" if waiting > 0.005 else ""
    return f"{speed.tokens_per_second:,.0f} tokens/s{share} where rows are full, MFU {speed.mfu:.0%}; a step takes {_duration(speed.step_seconds)}{hidden}"


def _run(workload: Workload | str) -> str:
    if isinstance(workload, str):
        return f"length not known: {workload}"
    counted = "estimated from the files" if workload.is_estimated else "counted"
    epochs = f"{workload.epochs:.3g} epoch{'' if workload.epochs == 1 else 's'}"
    text = f"{workload.steps:,} steps: {epochs} of {workload.samples:,} rows, {workload.tokens:,} tokens ({counted})"
    if workload.seconds is None or workload.gpu_hours is None:
        return text
    rows = f"{workload.tokens_per_second:,.0f} tokens/s on these rows"
    return f"{text}; {_duration(workload.seconds)} of training, {workload.gpu_hours:.2f} GPU-hours, {rows}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _change(change: Change) -> list[str]:
    speed = (
        f", {change.relative_speed:.2f} x the speed" if change.relative_speed is not None else ""
    )
    text = f"  {change.words}  ({change.predicted_peak / GIB:.2f} GiB{speed}{f'; {change.costs}' if change.costs else ''})"
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )
