"""The words of speed and hours in `make plan`. Pure: no torch, no I/O."""

import math
from dataclasses import replace

from sft_play.plan.float8 import may_be_float8
from sft_play.plan.memory import GIB, step_bytes
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.speed import full_rows, predict
from sft_play.plan.step import StepSpec
from sft_play.plan.workload import Workload

# benchmarks.float8_quality on a CPU: SmolLM2 135M and the embedded model
FLOAT8_KL = "0.10 to 0.19"
FLOAT8_MEASURED = "8B on an H200: 1.4 times, in 37 GiB instead of 43"  # docs/speed-h200.md


def speed_words(plan: RunPlan) -> str:
    """Return how fast a run is where its rows are full, and how well that is known."""
    speed = plan.speed
    if speed is None:
        if plan.ranks.device == "cpu":
            return "not known on a CPU"
        if not plan.step.is_half:
            return "not known in float32"
        gpus = " and ".join(sorted(set(plan.gpu_names)))
        return f"not known: {gpus} is no card whose data sheet is known here"
    world_size = plan.ranks.world_size
    share = ""
    if world_size > 1:
        share = f" ({speed.tokens_per_second / world_size:,.0f} a GPU)"
    waiting = speed.collective_seconds / speed.step_seconds
    waits = f", {waiting:.0%} of it waiting for other GPUs" if waiting > 0.005 else ""
    unmeasured = _unmeasured(plan.step)
    about = ""
    rate = speed.tokens_per_second
    if unmeasured:
        about = f"roughly, as {unmeasured}: about "
        rate = float(f"{rate:.2g}")
    return (
        f"{about}{rate:,.0f} tokens/s{share} where rows are full, "
        f"MFU {speed.mfu:.0%}; a step takes {_duration(speed.step_seconds)}{waits}"
    )


def float8_words(planned: PlannedRun) -> str | None:
    """Return what a float8 base would change and what is known of its quality, None without one."""
    plan = planned.plan
    if plan.zero_stage or plan.speed is None or not may_be_float8(planned.config, plan.card):
        return None
    step = replace(plan.step, is_float8=True)
    speed = predict(step, plan.layout, full_rows(plan.layout), plan.card, plan.ranks.nodes)
    peak = step_bytes(step, plan.layout).predicted_peak
    faster = speed.tokens_per_second / plan.speed.tokens_per_second
    return (
        f"TUNING_BASE_DTYPE=float8 is expected to train {faster:.1f} times as fast in "
        f"{peak / GIB:.1f} GiB ({FLOAT8_MEASURED}); its KL to the base is {FLOAT8_KL} of NF4's "
        "(docs/adapters.md)"
    )


def _unmeasured(step: StepSpec) -> str | None:
    """Return why a speed is rough, None where such runs were measured."""
    model = step.model
    if model.guess is not None:
        return "the model's layers are not known"
    if step.is_float8 and not step.is_fast:
        return "no run over a float8 base without fused kernels was measured"
    if model.structure is None:
        return None
    if model.structure.experts and not (step.mode == "lora" and step.is_fast):
        return "no such run of a model with experts was measured"
    if model.structure.recurrent_layers:
        return "of models with recurrent layers one alone was measured"
    return None if step.is_fast else "no run of such a model without fused kernels was measured"


def run_words(workload: Workload | str) -> str:
    """Return how long a run takes; `workload` may be why that is not known."""
    if isinstance(workload, str):
        return f"length not known: {workload}"
    counted = "estimated from the files" if workload.is_estimated else "counted"
    plural = "" if workload.epochs == 1 else "s"
    text = (
        f"{workload.steps:,} steps: {workload.epochs:.3g} epoch{plural} of "
        f"{workload.samples:,} rows, {workload.tokens:,} tokens ({counted})"
    )
    if workload.seconds is None or workload.gpu_hours is None:
        return text
    return (
        f"{text}; {_duration(workload.seconds)} of training, {workload.gpu_hours:.2f} GPU-hours, "
        f"{workload.tokens_per_second:,.0f} tokens/s on these rows"
    )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
