"""One row of many tokens: 8B with adapters, tokens/s and GiB beside the plan's.

Each row is one step. Weights are random, of the real shape, and `make train-distributed` trains.

python -m benchmarks.long_rows --tokens 131072 524288
python -m benchmarks.long_rows --tokens 131072 --gpus 1 2 --mode qlora
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.inputs import fixed_rows
from benchmarks.machine import GIB, ROOT
from sft_play.runs import metrics

SHAPE = "meta-llama/Meta-Llama-3.1-8B"
SPEED = "tokens_per_second"
HELD_OUT_TOKENS = 1024


def write_inputs(folder: Path, layers: int | None) -> None:
    """Write the model and short held-out rows."""
    words = ["--shape", SHAPE, "--out", str(folder), "--rows", "0"]
    words += ["--layers", str(layers)] if layers else []
    # a process of its own: it would keep the GPU's memory
    subprocess.run([sys.executable, "-m", "benchmarks.inputs", *words], check=True, cwd=ROOT)
    fixed_rows(folder / "held.jsonl", HELD_OUT_TOKENS, 2, seed=1)


def train(folder: Path, tokens: int, gpus: int, steps: int, words: list[str]) -> dict[str, object]:
    """Train on rows of so many tokens; return speed, memory and losses, or the end of the log."""
    rows = folder / f"{tokens}.jsonl"
    if not rows.is_file():
        fixed_rows(rows, tokens, steps)
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": f"{tokens}-{gpus}",
        "NUM_GPUS": gpus,
        "MODEL_NAME": folder / "model",
        "MODEL_MAX_SEQ_LEN": tokens,
        "DATA_TRAIN_PATH": rows,
        "DATA_VAL_PATH": folder / "held.jsonl",
        "DATA_TEST_PATH": folder / "held.jsonl",
        "TRAIN_OUTPUT_DIR": folder,
        "TRAIN_EFFECTIVE_BATCH_SIZE": 1,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_LEARNING_RATE": 2e-4,
        "TRAIN_WARMUP_STEPS": 0,
        "TRAIN_LR_SCHEDULER_TYPE": "constant",
        "TRAIN_LOGGING_STEPS": 1,
        "TRAIN_PROBE": "false",
        "TRAIN_EVAL_STRATEGY": "no",
        "TRAIN_REOPEN_SAVED": "false",
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
        "PY": sys.executable,
    }
    command = [
        "make",
        "train-distributed",
        *(f"{name}={value}" for name, value in settings.items()),
    ]
    log = folder / f"{tokens}-{gpus}.log"
    with log.open("wb") as file:
        code = subprocess.call([*command, *words], cwd=ROOT, stdout=file, stderr=file)
    if code:
        return {"failed": log.read_text(errors="replace")[-1500:]}
    run = folder / f"{tokens}-{gpus}"
    report = json.loads((run / "run.json").read_text(encoding="utf-8"))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    lines = metrics.read(run / "metrics.jsonl").lines
    speeds = [line.values[SPEED] for line in lines if SPEED in line.values]
    peaks = report["peak_bytes"]
    return {
        "tokens_per_second": round(statistics.median(speeds)) if speeds else None,
        "train_seconds": report["seconds"]["train"],
        "peak_gib": round(peaks["measured"] / GIB, 2),
        "predicted_gib": round(peaks["predicted"] / GIB, 2),
        "context_parallel": plan["layout"]["context_parallel"],
        "checkpointed_layers": plan["layout"]["checkpointed_layers"],
        "offloaded": plan["step"]["offload_activations"],
        "loss": [round(entry["loss"], 4) for entry in report["loss"]],
    }


def main() -> None:
    """Train each row on each number of GPUs; print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[131072])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1])
    parser.add_argument("--mode", default="lora", choices=["lora", "qlora", "full"])
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep model and runs here")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of make")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").is_dir():
            write_inputs(folder, args.layers)
        words = [f"TUNING_MODE={args.mode}", *args.set]
        for tokens in args.tokens:
            for gpus in args.gpus:
                found = train(folder, tokens, gpus, args.steps, words)
                print(tokens, gpus, args.mode, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
