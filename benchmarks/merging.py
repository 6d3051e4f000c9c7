"""Seconds, memory and accuracy of `make merge`, after a short run that trains the adapter.

A folder that is not there is made first: a model of --shape with random weights. Needs no network.

python -m benchmarks.merging --model /tmp/8b --mode qlora
python -m benchmarks.merging --model data/tiny_llama --tokens 64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.inputs import fixed_rows, random_model
from benchmarks.machine import GIB, ROOT

STEPS = 4
ROWS_PER_STEP = 4
HELD_OUT_ROWS = 16
SAMPLE_SECONDS = 0.1  # between two looks at the memory of a target's processes


class Cost(NamedTuple):
    """What a make target took."""

    seconds: float
    peak_bytes: int  # of the host's memory, in its largest process, with the files that it maps
    own_bytes: int  # of all its processes together, without files, which the system can drop


def run_make(target: str, variables: dict[str, object], log: Path) -> Cost:
    """Run a make target. Exits with its words where it fails."""
    words = [f"{name}={value}" for name, value in variables.items()]
    started = time.perf_counter()
    own_bytes = 0
    with log.open("wb") as file:
        made = subprocess.Popen(["make", target, *words], cwd=ROOT, stdout=file, stderr=file)
        ended = 0
        while not ended:
            time.sleep(SAMPLE_SECONDS)
            own_bytes = max(own_bytes, own_memory(made.pid))
            ended, status, used = os.wait4(made.pid, os.WNOHANG)
    seconds = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"make {target}: {log.read_text()[-3000:]}")
    return Cost(seconds, used.ru_maxrss * 1024, own_bytes)


def own_memory(pid: int) -> int:
    """Return the bytes that a process and its children hold, without the files that they map."""
    found = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(OSError):  # one that has just ended
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
                found += sum(map(int, re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)))
    return found * 1024


def write_rows(folder: Path, tokens: int) -> tuple[Path, Path]:
    """Write rows to train on and other rows that are held out."""
    both = folder / "both.jsonl"
    fixed_rows(both, tokens, STEPS * ROWS_PER_STEP + HELD_OUT_ROWS)
    lines = both.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = folder / "rows.jsonl"
    held_out = folder / "held-out.jsonl"
    rows.write_text("".join(lines[HELD_OUT_ROWS:]), encoding="utf-8")
    held_out.write_text("".join(lines[:HELD_OUT_ROWS]), encoding="utf-8")
    return rows, held_out


def train(args: argparse.Namespace, folder: Path) -> Path:
    """Train an adapter for a few steps at a rate that moves it, and return the run's folder."""
    rows, held_out = write_rows(folder, args.tokens)
    settings = {
        "CONFIG": "configs/base.yaml",
        "RUN": "run",
        "MODEL_NAME": args.model.resolve(),
        "MODEL_MAX_SEQ_LEN": args.tokens,
        "TUNING_MODE": args.mode,
        "DATA_TRAIN_PATH": rows,
        "DATA_VAL_PATH": held_out,
        "TRAIN_OUTPUT_DIR": folder,
        "TRAIN_EFFECTIVE_BATCH_SIZE": ROWS_PER_STEP,
        "TRAIN_MAX_STEPS": STEPS,
        "TRAIN_LEARNING_RATE": 1e-3,
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_PREDICT_WITH_GENERATE": "false",
    }
    run_make("train-bnb", {**settings, "PY": sys.executable}, folder / "train.log")
    return folder / "run"


def merge(run: Path) -> dict[str, Any]:
    """Merge the adapter of a run, and return what it took and the report of it."""
    cost = run_make("merge", {"RUN": run, "PY": sys.executable}, run.parent / "merge.log")
    report = json.loads((run / "merge_report.json").read_text(encoding="utf-8"))
    return {
        "seconds": round(cost.seconds, 1),
        "peak_host_gib": round(cost.peak_bytes / GIB, 2),
        "peak_own_gib": round(cost.own_bytes / GIB, 2),
        "report": report,
    }


def main() -> None:
    """Train, merge, and print what merging took and how near the merged model is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder of a model")
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--mode", default="qlora", choices=("lora", "qlora"))
    parser.add_argument("--tokens", type=int, default=512, help="of each row")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    args = parser.parse_args()
    if not args.model.is_dir():
        random_model(args.shape, args.model)
    with tempfile.TemporaryDirectory(dir=args.model.resolve().parent) as folder:
        found = merge(train(args, Path(folder)))
    text = json.dumps(found, indent=2, sort_keys=True)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
