"""What a trainer's steps take, written to result-RANK.json in the folder of BENCHMARK_FOLDER."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


class Recorder(TrainerCallback):
    """Times the steps of a trainer."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.step_seconds: list[float] = []
        self.loads: list[list[int]] = []  # of the GPUs, in percent

    def on_step_begin(self, args, state, control, **found: Any) -> None:
        synchronize()
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **found: Any) -> None:
        synchronize()
        self.step_seconds.append(time.perf_counter() - self.begun)
        gpus = range(torch.cuda.device_count())
        self.loads.append([torch.cuda.utilization(gpu) for gpu in gpus])

    def on_train_end(self, args, state, control, model=None, **found: Any) -> None:
        micro_batches = args.gradient_accumulation_steps * args.world_size
        weights: Counter[str] = Counter()
        for parameter in model.parameters():
            weights[str(parameter.device)] += parameter.numel()
        gpus = range(torch.cuda.device_count())
        result = {
            "step_seconds": self.step_seconds,
            "losses": [log["loss"] for log in state.log_history if "loss" in log],
            "rows_per_step": args.train_batch_size * micro_batches,
            "weights": weights,
            "busy_percent": [statistics.mean(each) for each in zip(*self.loads, strict=True)],
            "peak_bytes": {f"cuda:{gpu}": torch.cuda.max_memory_reserved(gpu) for gpu in gpus},
        }
        path = Path(os.environ["BENCHMARK_FOLDER"]) / f"result-{os.environ.get('RANK', 0)}.json"
        path.write_text(json.dumps(result), encoding="utf-8")


def synchronize() -> None:
    """Wait for the GPUs on which this process has memory."""
    for gpu in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(gpu):
            torch.cuda.synchronize(gpu)
