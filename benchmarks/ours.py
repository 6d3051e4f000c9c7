"""Arms of SFT-Play: the make target that a user types, and what its run folder says.

No setting that concerns speed is given, unless the arm names it: the program chooses them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import GIB, ROOT
from benchmarks.processes import Ended, clean_environment
from benchmarks.results import Result
from benchmarks.samples import Inputs, Samples
from benchmarks.workloads import LORA_ALPHA, LORA_RANK, SEED, Case
from sft_play.errors import ExitClass
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs import metrics
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import MetricsLine
from sft_play.runs.report import RunReport

REFUSAL = re.compile(r"^(.*)\n\s*exit class (\d+) \(\w+\)\s*$", re.MULTILINE)
PLAN_SECONDS = 120.0  # limit of `plan`, which usually needs two


def make_settings(case: Case, inputs: Inputs, out: Path, steps: int) -> dict[str, str]:
    """Return the variables of make: the workload, and how it is logged."""
    workload = case.workload
    settings = {
        "CONFIG": workload.config,
        "RUN": "run",
        "PY": sys.executable,
        "MODEL_NAME": inputs.model,
        "MODEL_MAX_SEQ_LEN": workload.max_seq_len,
        "DATA_TRAIN_PATH": inputs.rows,
        "DATA_CACHE_DIR": inputs.folder / "cache",
        "TRAIN_OUTPUT_DIR": out,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": workload.learning_rate,
        "TRAIN_LOGGING_STEPS": workload.warm_up or steps,
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "TRAIN_REOPEN_SAVED": str(workload.saves).lower(),
    }
    if workload.with_images:
        settings["TRAIN_EVAL_STRATEGY"] = "no"
    else:
        settings["DATA_VAL_PATH"] = inputs.held_out
    if not workload.follows_config:
        settings |= {
            "TUNING_MODE": workload.mode,
            "TUNING_LORA_R": LORA_RANK,
            "TUNING_LORA_ALPHA": LORA_ALPHA,
            "TRAIN_LR_SCHEDULER_TYPE": "constant",
            "TRAIN_WARMUP_STEPS": 0,
            "TRAIN_SEED": SEED,
        }
    if not workload.follows_config or workload.config.endswith("base.yaml"):
        settings["TRAIN_EFFECTIVE_BATCH_SIZE"] = workload.rows_per_step
    if workload.mode == "full":
        settings["MODEL_DTYPE"] = "bfloat16"
    return {name: str(value) for name, value in (settings | case.variables).items()}


def make_command(case: Case, settings: Mapping[str, str]) -> list[str]:
    """Return the make command. If GPU memory is limited, another process holds the rest of it."""
    workload, arm = case.workload, case.arm
    settings = {**settings, **gpu_variables(case)}
    target = arm.program.replace("ours", "train")
    if case.gpus > 1:
        target = "train-deepspeed" if "DEEPSPEED_CONFIG" in settings else "train-distributed"
        if not workload.follows_config:
            settings["TUNING_BACKEND"] = arm.program.removeprefix("ours-")
    command = ["make", target, *(f"{name}={value}" for name, value in settings.items())]
    if workload.leave_gib is None:
        return command
    holder = [sys.executable, "-m", "benchmarks.smaller_gpus", f"{workload.leave_gib:g}"]
    return [*holder, *command]


def gpu_variables(case: Case) -> dict[str, str]:
    """Return the variables of make for several GPUs, {} for one."""
    if case.gpus == 1:
        return {}
    strategy = {} if case.strategy == "auto" else {"TRAIN_STRATEGY": case.strategy}
    return {"NUM_GPUS": str(case.gpus), **strategy}


def print_plan(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the output of `plan --json`, also if the step does not fit. One GPU is the default.

    Raises: CalledProcessError if there is no plan.
    """
    words = [sys.executable, "-m", "sft_play", "plan", "--config", settings["CONFIG"], "--json"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=clean_environment(os.environ) | {"NUM_GPUS": "1"} | dict(settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PLAN_SECONDS,
    )
    if done.returncode != ExitClass.OUT_OF_MEMORY:
        done.check_returncode()
    return json.loads(done.stdout)


def read_run(case: Case, inputs: Inputs, out: Path, ended: Ended) -> Result:
    """Return what a run measured, from run.json, tb/ and the saved weights, or why it failed."""
    folder = RunFolder(out / "run")
    report = folder.read_report()
    if report.status != "done" or ended.status is None:
        return Result(*case.key, *_read_failure(report, ended))
    steps = report.global_step
    lines = metrics.read_metrics(folder.metrics).lines
    logged = {line.step: line for line in lines if "grad_norm" in line.values}
    workload, rows = case.workload, report.data["train"]
    first = workload.warm_up or steps
    figures = {
        "ready_seconds": logged[first].time - ended.started,
        "ending_seconds": ended.at - logged[steps].time,
        "least_grad_norm": min(line.values["grad_norm"] for line in logged.values()),
        "untrained": _untrained_adapters(folder.path / "adapter"),
        "process_gib": _gib(report.peak_bytes.measured),
        "reserved_gib": [rank.peak_bytes / GIB for rank in report.memory_by_rank or []],
        "rows_used": rows["rows_used"],
        "timed_steps": steps - first,
        "scores": report.scores("after"),
    }
    speed = report.tokens_per_second
    if inputs.samples.exists() and case.has_samples:
        timed = Samples.read(inputs.samples).step_tokens(workload.rows_per_step)[first:steps]
        figures |= {
            "seconds": seconds_between(logged, first, steps),
            "tokens": sum(step.real for step in timed),
            "labelled_tokens": sum(step.labelled for step in timed),
        }
        speed = figures["tokens"] / figures["seconds"]
        labelled_speed = figures["labelled_tokens"] / figures["seconds"]
        figures["labelled_tokens_per_second"] = labelled_speed
    elif workload.with_images or workload.answers:
        seconds = seconds_between(logged, first, steps)
        figures["rows_per_second"] = workload.rows_per_step * (steps - first) / seconds
        for name in ("tokens", "distinct_tokens"):
            figures[f"{name}_per_row"] = rows[name] / rows["rows_used"]
        speed = figures["rows_per_second"] * figures["tokens_per_row"]
    return Result(
        *case.key,
        tokens_per_second=speed,
        peak_gib=_gib(report.peak_bytes.reserved),
        planned_gib=_gib(report.peak_bytes.predicted),
        losses=report.loss,
        settings=_chosen_settings(folder, report),
        figures=figures,
    )


def _read_failure(report: RunReport, ended: Ended) -> tuple[str, str]:
    """Return the status and the cause of a run that is not done.

    It is `refused` if the plan refused it before it started.
    """
    if ended.status is None:
        return "out of time", ended.cause
    if report.cause is not None:
        ran_out = report.exit_class == ExitClass.OUT_OF_MEMORY
        return "out of memory" if ran_out else "failed", report.cause
    refusal = REFUSAL.search(ended.log.read_text(encoding="utf-8", errors="replace"))
    if refusal and int(refusal[2]) == ExitClass.OUT_OF_MEMORY:
        return "refused", refusal[1].strip()
    return "failed", ended.cause


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _chosen_settings(folder: RunFolder, report: RunReport) -> dict[str, object]:
    """Return what the plan chose."""
    planned = PlannedRun.read(folder)
    plan, train = planned.plan, planned.config.train
    return {
        "batch_size": plan.layout.batch_size,
        "checkpointed_layers": plan.layout.checkpointed_layers,
        "context_parallel": plan.layout.context_parallel,
        "fused": " ".join(sorted(report.fast_path["on"])) or "nothing",
        "gradient_checkpointing": train.gradient_checkpointing,
        "micro_batches": plan.layout.micro_batches,
        "offload_activations": plan.step.offload_activations,
        "optim": train.optim,
        "packing": plan.packing,
        "strategy": report.strategy,
    }


def seconds_between(logged: Mapping[int, MetricsLine], first: int, last: int) -> float:
    """Return the time of the steps after `first`, up to `last`. Both must be logged.

    The times of the logs would be less exact: evaluations and saves come in between.
    """
    total, before = 0.0, first
    for step in sorted(logged):
        if first < step <= last:
            total += (step - before) * logged[step].values["step_seconds"]
            before = step
    assert before == last, f"step {last} was not logged"
    return total


def _untrained_adapters(adapter: Path) -> list[str]:
    from safetensors.torch import load_file

    from benchmarks.stopwatch import untrained_adapters

    weights = adapter / "adapter_model.safetensors"
    return untrained_adapters(load_file(weights)) if weights.exists() else []
