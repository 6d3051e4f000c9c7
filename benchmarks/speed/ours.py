"""Our arms: the make target that a user types, and what its run folder says. Nothing that concerns speed is set: that is the program's work."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.samples import ROOT, Inputs, Samples, step_tokens
from benchmarks.speed.workloads import LORA_ALPHA, LORA_RANK, SEED, WARM_UP, Arm, Work
from sft_play.errors import ExitClass

GIB = 2**30
SECTIONS = (
    "MODEL_",
    "TUNING_",
    "TRAIN_",
    "DATA_",
)  # settings of SFT-Play: those of the caller's shell stay out
OF_MAKE = (
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "MAKEOVERRIDES",
    "WORKS",
    "ARMS",
    "STEPS",
    "SECONDS",
    "CONFIG",
    "RUN",
)


def command(work: Work, arm: Arm, inputs: Inputs, out: Path, steps: int, on_cpu: bool) -> list[str]:
    """Return the command: the work, how it is logged, and that neither checkpoints nor answers are wanted."""
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": "run",
        "PY": sys.executable,
        "MODEL_NAME": inputs.model,
        "MODEL_MAX_SEQ_LEN": work.max_seq_len,
        "TUNING_MODE": work.mode,
        "TUNING_LORA_R": LORA_RANK,
        "TUNING_LORA_ALPHA": LORA_ALPHA,
        "DATA_TRAIN_PATH": inputs.rows,
        "DATA_VAL_PATH": inputs.held_out,
        "DATA_CACHE_DIR": out / "cache",
        "TRAIN_OUTPUT_DIR": out,
        "TRAIN_EFFECTIVE_BATCH_SIZE": work.rows_per_step,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": work.learning_rate,
        "TRAIN_LR_SCHEDULER_TYPE": "constant",
        "TRAIN_WARMUP_STEPS": 0,
        "TRAIN_SEED": SEED,
        "TRAIN_LOGGING_STEPS": WARM_UP,
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        **({"MODEL_DTYPE": "bfloat16"} if work.mode == "full" and not on_cpu else {}),
        **({"DEVICE": "cpu"} if on_cpu else {}),
    }
    return [
        "make",
        arm.program.replace("ours", "train"),
        *(f"{name}={value}" for name, value in settings.items()),
    ]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment without settings of SFT-Play and without what this make tells its own."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(SECTIONS) and name not in OF_MAKE
    }


def limited(
    command: list[str], log: Path, seconds: float, cwd: Path, environ: Mapping[str, str]
) -> int | None:
    """Run a command with its output in `log`; return its status, None when it was ended, with all its children, after `seconds`."""
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environ),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # the time is up, or the benchmark itself was told to stop
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read(work: Work, out: Path, samples: Path, steps: int, started: float) -> dict[str, Any]:
    """Return what a run of ours measured, from run.json, tb/ and the weights that it saved."""
    run = out / "run"
    facts = (
        json.loads((run / "run.json").read_text(encoding="utf-8"))
        if (run / "run.json").exists()
        else {}
    )
    if facts.get("status") != "done":
        is_memory = facts.get("exit_class") == ExitClass.OUT_OF_MEMORY
        return {
            "status": "out of memory" if is_memory else "failed",
            "error": facts.get("cause") or last_lines(out / "log"),
        }
    tokens = step_tokens(work, Samples.read(samples), steps)
    clock = _logged_at(run / "tb")
    timed = tokens[WARM_UP:steps]
    plan, settings = (json.loads((run / "plan.json").read_text()), _settings(run))
    return {
        "status": "done",
        "seconds": clock[steps][0] - clock[WARM_UP][0],
        "real_tokens": sum(real for real, _ in timed),
        "trained_tokens": sum(labelled for _, labelled in timed),
        "ready_seconds": clock[WARM_UP][0] - started,
        "own_tokens_per_second": facts[
            "tokens_per_second"
        ],  # behind the first step, by its own clock
        "losses": facts["loss"],
        "least_grad_norm": min(norm for _, norm in clock.values()),
        "untrained": _untrained(run / "adapter"),
        "rows_used": facts["data"]["train"]["rows_used"],
        "peak_reserved_gib": facts["peak_bytes"]["reserved"] / GIB,
        "peak_allocated_gib": None,
        "predicted_gib": facts["peak_bytes"]["predicted"] / GIB,
        "settings": {
            **settings,
            "packing": plan["packing"],
            "micro_batches": plan["micro_batches"],
            "fused": " ".join(sorted(facts["fast_path"]["on"])) or "nothing",
        },
    }


def _settings(run: Path) -> dict[str, Any]:
    """Return what the plan chose."""
    import yaml

    train = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["train"]
    return {name: train[name] for name in ("batch_size", "gradient_checkpointing", "optim")}


def _logged_at(folder: Path) -> dict[int, tuple[float, float]]:
    """Return (clock, gradient norm) of each logged step: TensorBoard's events carry the time at which the loss was read off the GPU."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    norms = {event.step: event.value for event in events.Scalars("train/grad_norm")}
    return {
        event.step: (event.wall_time, norms[event.step]) for event in events.Scalars("train/loss")
    }


def _untrained(adapter: Path) -> list[str]:
    from safetensors.torch import load_file

    from benchmarks.speed.watch import untrained

    weights = adapter / "adapter_model.safetensors"
    return untrained(load_file(weights)) if weights.exists() else []


def last_lines(log: Path) -> str:
    return (
        " ".join(log.read_text(encoding="utf-8", errors="replace").split()[-60:])
        if log.exists()
        else "no log"
    )


def repository_commit() -> str | None:
    """Return the commit of the tree that is measured, None where there is no git."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None
