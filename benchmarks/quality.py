"""What delivered and float8_quality share: options, and runs by `sft_play train`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport


def make_parser(description: str | None, **defaults: object) -> argparse.ArgumentParser:
    """Return the parser. `defaults` are those of --length, --steps, --batch and --rate."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="data/tiny_llama")
    add("--rows", type=Path, default=Path("data/desk"), help="folder of train, val and test")
    add("--length", type=int, help="tokens of the longest row")
    add("--steps", type=int, help="of each run")
    add("--batch", type=int, help="rows per step")
    add("--rate", type=float)
    parser.set_defaults(**defaults)
    return parser


def model_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of the model and its rows."""
    parts = {f"data.{part}_path": args.rows / f"{part}.jsonl" for part in ("train", "val", "test")}
    return {"model.name": args.model, "model.max_seq_len": args.length, **parts}


def train(
    args: argparse.Namespace, folder: Path, name: str, more: Mapping[str, object]
) -> RunReport:
    """Train in `folder` with more settings, and return the report of the run."""
    settings = {
        **model_settings(args),
        "data.cache_dir": folder / "cache",
        "train.max_steps": args.steps,
        "train.batch_size": args.batch,
        "train.effective_batch_size": args.batch,
        "train.learning_rate": args.rate,
        "train.output_dir": folder,
        "train.run_name": name,
        "train.predict_with_generate": "false",
        "train.save_strategy": "no",
        **more,
    }
    words = [f"--set={setting}={value}" for setting, value in settings.items()]
    command = [sys.executable, "-m", "sft_play", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunFolder(folder / name).read_report()
