"""The training targets on one workload, each as a user types it, and a table of what their run.json says.

python benchmarks/inputs.py --out /tmp/8b python benchmarks/targets.py --inputs /tmp/8b --steps 20
bnb-lora bnb-qlora ddp-lora zero2-lora zero3-lora
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARMS = {  # name: (target, variables)
    "bnb-lora": ("train-bnb", {"TUNING_MODE": "lora"}),
    "bnb-qlora": ("train-bnb", {"TUNING_MODE": "qlora"}),
    "unsloth-lora": ("train-unsloth", {"TUNING_MODE": "lora"}),
    "unsloth-qlora": ("train-unsloth", {"TUNING_MODE": "qlora"}),
    "ddp-lora": ("train-distributed", {"TUNING_MODE": "lora"}),
    "ddp-qlora": ("train-distributed", {"TUNING_MODE": "qlora"}),
    "zero2-lora": ("train-deepspeed", {"TUNING_MODE": "lora"}),
    "zero3-lora": (
        "train-deepspeed",
        {"TUNING_MODE": "lora", "DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json"},
    ),
    "zero3-qlora": (
        "train-deepspeed",
        {"TUNING_MODE": "qlora", "DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json"},
    ),
}


def run_arm(name: str, inputs: Path, steps: int, out: Path, seconds: int) -> dict[str, object]:
    """Run one target on the inputs; return its run.json, with the exit status of make under `make`."""
    target, variables = ARMS[name]
    settings = {
        "MODEL_NAME": inputs / "model",
        "DATA_TRAIN_PATH": inputs / "rows.jsonl",
        "TRAIN_OUTPUT_DIR": out,
        "RUN": name,
        "TRAIN_MAX_STEPS": steps,
        "TRAIN_SAVE_STRATEGY": "no",
        "TRAIN_LOGGING_STEPS": 1,
        "TRAIN_GENERATION_MAX_ROWS": 4,
        "MODEL_MAX_SEQ_LEN": 2048,
        "CONFIG": "configs/base.yaml",
        "PY": sys.executable,
        **variables,
    }
    with (out / f"{name}.log").open("w") as log:
        command = [
            "timeout",
            "-k",
            "20",
            str(seconds),
            "make",
            target,
            *(f"{key}={value}" for key, value in settings.items()),
        ]
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    report = out / name / "run.json"
    return {**(json.loads(report.read_text()) if report.exists() else {}), "make": status}


def line(name: str, report: dict) -> str:
    """Return an arm's row of the table."""
    losses = [entry["loss"] for entry in report.get("loss", [])]
    peak = report.get("peak_bytes", {})
    gib = "/".join(f"{(peak.get(kind) or 0) / 2**30:.1f}" for kind in ("measured", "predicted"))
    speed = report.get("tokens_per_second") or 0
    trend = f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "-"
    return (
        f"{name:<14} make={report['make']} {report.get('status', '-'):<7} steps={report.get('global_step', 0):<3} world={report.get('world_size', '-')} "
        f"engine={report.get('engine', '-'):<23} tokens/s={speed:>8.0f} peak/predicted GiB={gib:<12} loss {trend}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", choices=ARMS)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=240, help="time limit of one arm")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for arm in args.arms:
        rows.append(line(arm, run_arm(arm, args.inputs, args.steps, args.out, args.seconds)))
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))
