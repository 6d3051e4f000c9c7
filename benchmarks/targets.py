"""The training targets on one workload, each as a user types it, and a table of their run.json.

python benchmarks/inputs.py --out /tmp/8b
python benchmarks/targets.py --inputs /tmp/8b --steps 20 bnb-lora ddp-lora fsdp-lora zero3-lora
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import GIB, ROOT
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import PeakBytes, RunReport


class Arm(NamedTuple):
    """A make target, how it tunes, and how its GPUs share a run."""

    target: str
    mode: str
    strategy: str = "auto"


ARMS = {
    "bnb-lora": Arm("train-bnb", "lora"),
    "bnb-qlora": Arm("train-bnb", "qlora"),
    "unsloth-lora": Arm("train-unsloth", "lora"),
    "unsloth-qlora": Arm("train-unsloth", "qlora"),
}
for strategy in ("ddp", "fsdp", "zero2", "zero3"):
    for mode in ("lora", "qlora", "full"):
        ARMS[f"{strategy}-{mode}"] = Arm("train-distributed", mode, strategy)


class ArmRun(NamedTuple):
    """The exit status of make, and run.json."""

    status: int
    report: RunReport


def run_arm(name: str, inputs: Path, steps: int, out: Path, seconds: int) -> ArmRun:
    """Run one target on the inputs."""
    arm = ARMS[name]
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
        "TUNING_MODE": arm.mode,
        "TRAIN_STRATEGY": arm.strategy,
    }
    command = ["timeout", "-k", "20", str(seconds), "make", arm.target]
    command += [f"{variable}={value}" for variable, value in settings.items()]
    with (out / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    return ArmRun(done.returncode, RunFolder(out / name).read_report())


def line(name: str, run: ArmRun) -> str:
    """Return an arm's row of the table."""
    report = run.report
    status = "-" if report == RunReport() else report.status
    peak = report.peak_bytes or PeakBytes(predicted=0)
    gib = f"{(peak.measured or 0) / GIB:.1f}/{peak.predicted / GIB:.1f}"
    trend = "-"
    if report.loss:
        trend = f"{report.loss[0].loss:.3f} -> {report.loss[-1].loss:.3f}"
    return (
        f"{name:<14} make={run.status} {status:<7} steps={report.global_step or 0:<3} "
        f"world={report.world_size or '-'} engine={report.engine or '-':<23} "
        f"tokens/s={report.tokens_per_second or 0:>8.0f} peak/predicted GiB={gib:<12} loss {trend}"
    )


def main() -> None:
    """Run the arms and print the table."""
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
        run = run_arm(arm, args.inputs, args.steps, args.out, args.seconds)
        rows.append(line(arm, run))
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))


if __name__ == "__main__":
    main()
