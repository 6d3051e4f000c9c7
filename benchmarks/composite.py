"""Text rows on checkpoints as they are published, with towers, beside their language models alone.

Both have random weights of the real shape, are trained by the same command, one after the other.

python -m benchmarks.composite --shapes google/gemma-3-12b-pt Qwen/Qwen3.5-4B
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.inputs import fixed_rows
from benchmarks.machine import GIB, ROOT
from sft_play.runs import metrics

INPUTS = Path(__file__).with_name("inputs.py")
TOKENS = 2048  # of each row
ROWS_PER_STEP = 4
HELD_OUT_ROWS = 4
SPEED = "tokens_per_second"
WARM_LOGS = 5  # before kernels are compiled and chosen
KINDS = {"as published": True, "language model": False}


def write_rows(folder: Path, steps: int) -> None:
    """Write rows to train on, and a few that are held out."""
    fixed_rows(folder / "train.jsonl", TOKENS, steps * ROWS_PER_STEP)
    fixed_rows(folder / "held.jsonl", TOKENS, HELD_OUT_ROWS, seed=1)


def run_make(target: str, variables: dict[str, object], log: Path) -> None:
    """Run a make target. Exits with the end of its log where it fails."""
    words = [f"{name}={value}" for name, value in variables.items()]
    with log.open("wb") as file:
        done = subprocess.run(["make", target, *words], cwd=ROOT, stdout=file, stderr=file)
    if done.returncode:
        sys.exit(f"make {target}: {log.read_text()[-3000:]}")


def measure(
    shape: str, as_published: bool, layers: int | None, steps: int, folder: Path
) -> dict[str, object]:
    """Train an adapter; return speed and memory. Exits with the run's words where it fails."""
    model = folder / "model"
    words = ["--shape", shape, "--out", str(folder), "--rows", "0"]
    words += ["--as-published"] if as_published else []
    words += ["--layers", str(layers)] if layers else []
    # a process of its own: it would keep the GPU's memory
    subprocess.run([sys.executable, INPUTS, *words], check=True)
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": "run",
        "MODEL_NAME": model,
        "MODEL_MAX_SEQ_LEN": TOKENS,
        "TUNING_MODE": "lora",
        "DATA_TRAIN_PATH": folder / "train.jsonl",
        "DATA_VAL_PATH": folder / "held.jsonl",
        "DATA_TEST_PATH": folder / "held.jsonl",
        "TRAIN_OUTPUT_DIR": folder,
        "TRAIN_EFFECTIVE_BATCH_SIZE": ROWS_PER_STEP,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": 2e-4,
        "TRAIN_LOGGING_STEPS": 2,
        "TRAIN_REOPEN_SAVED": "false",
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
    }
    run_make("train-bnb", {**settings, "PY": sys.executable}, folder / "train.log")
    report = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    logged = metrics.read(folder / "run" / "metrics.jsonl").lines
    speeds = [line.values[SPEED] for line in logged if SPEED in line.values]
    plan = json.loads((folder / "run" / "plan.json").read_text(encoding="utf-8"))
    peaks = report["peak_bytes"]
    shutil.rmtree(model)
    shutil.rmtree(folder / "run")
    return {
        "tokens_per_second": round(statistics.median(speeds[WARM_LOGS:])),
        "peak_gib": round(peaks["measured"] / GIB, 2),
        "predicted_gib": round(peaks["predicted"] / GIB, 2),
        "loss": [round(report["metrics"][when]["eval_loss"], 4) for when in ("before", "after")],
        "checkpointed_layers": plan["layout"]["checkpointed_layers"],
    }


def main() -> None:
    """Measure each shape as published and as its language model alone; print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["google/gemma-3-12b-pt", "Qwen/Qwen3.5-4B"])
    parser.add_argument("--layers", type=int, help="of the language model (default: all)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1, help="times that both are trained")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, args.steps)
        for shape in args.shapes:
            for kind, as_published in [*KINDS.items()] * args.rounds:
                found = measure(shape, as_published, args.layers, args.steps, folder)
                print(shape, kind, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
