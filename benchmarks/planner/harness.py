"""A loaded model in the loop of a run, whose steps are timed within a memory limit.

Import it only after the environment of the launcher is set: it loads torch.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch
from transformers import set_seed

from sft_kernels.process import DTYPES, Process
from sft_kernels.trees import Branch
from sft_play.data.batch import Batch
from sft_play.data.collate import TokenSequence
from sft_play.data.pipeline import build_run_data
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ExitClass, OutOfMemory
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.load import load_model
from sft_play.plan.ranks import config_precision
from sft_play.plan.run_plan import PlannedRun
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.arguments import training_arguments
from sft_play.training.batches import collate_for_step
from sft_play.training.build import build_loop
from sft_play.training.classify import classify
from sft_play.training.context import RunContext
from sft_play.training.memory import MemoryMeter
from sft_play.training.probe import Probe, ProbeResult
from sft_play.training.resume import make_stamp

TIMED_SECONDS = 0.5  # least time that a combination is timed, after one warm-up step
T = TypeVar("T")


class Harness:
    """A model in its loop. After `warm_up` it has gradients and optimizer state, as in a run.

    The memory of the device can be limited: by the allocator on a GPU, else by the kernel.
    """

    def __init__(self, planned: PlannedRun, folder: Path):
        config = planned.config
        plan = planned.plan
        device = torch.device("cuda", 0) if plan.ranks.device == "cuda" else torch.device("cpu")
        self.process = Process.alone(device, DTYPES[config_precision(config)])
        self.is_gpu = device.type == "cuda"
        self.memory = MemoryMeter(self.process, plan.used_before_bytes[0])
        set_seed(config.train.seed)
        runtime.allow_tf32(self.process)
        tokenizer = load_tokenizer(config)
        data = build_run_data(config, tokenizer)
        arguments = training_arguments(planned, RunFolder(folder))
        self.model = load_model(config, self.process)
        self.context = RunContext(
            planned, RunFolder(folder), self.process, MemoryMeter(self.process)
        )
        run_stamp = make_stamp(self.context, data, tokenizer)
        self.loop = build_loop(self.context, arguments, tokenizer, data, self.model, run_stamp)
        self.engine = self.loop.engine
        self.engine.prepare(steps=1)
        self.vocab_size = len(tokenizer)

    def limit(self, limit_bytes: int) -> None:
        """Limit this process to `limit_bytes` in total."""
        if self.is_gpu:
            total = torch.cuda.mem_get_info()[1]
            fraction = (limit_bytes - self.memory.context_bytes()) / total
            torch.cuda.set_per_process_memory_fraction(fraction)
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        used = psutil.Process().memory_info()
        soft = used.data + max(0, limit_bytes - used.rss)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift_limit(self) -> None:
        """Remove the limit."""
        if self.is_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0)
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def reset(self) -> None:
        """Free unused memory, and reset the peak."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the most reserved bytes since `reset`, with those outside the allocator.

        None without a GPU.
        """
        if not self.is_gpu:
            return None
        return torch.cuda.max_memory_reserved() + self.memory.context_bytes()

    def wait(self) -> None:
        """Wait until the GPU is idle."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def probed(self, planned: PlannedRun, limit_bytes: int | None) -> ProbeResult | None:
        """Return what the probe of a run chooses within `limit_bytes` (None: no limit).

        None if nothing fits. Call it before `warm_up`: a run probes before it trains.
        """
        self.reset()
        if limit_bytes is not None:
            self.limit(limit_bytes)
        try:
            return Probe(replace(self.context, planned=planned), self.loop).run()
        except OutOfMemory:
            return None
        finally:
            self.lift_limit()

    def warm_up(self, steps: int) -> float:
        """Run optimizer steps; return the seconds of the fastest, including clipping."""
        self.micro_steps(self.batch(1, self.loop.collator.max_seq_len), 1)
        return min(self._optimizer_step() for _ in range(steps))

    def batch(self, rows: int, width: int) -> Batch:
        """Return a micro-batch of `rows` documents of `width` tokens from the run's own collator.

        All tokens but the first of a row have a label. The batch is on the device: a run copies
        its batches there ahead of time, from pinned memory, so no micro-step waits for them.
        """
        ids = np.random.default_rng(0).integers(self.vocab_size, size=(rows, width))
        labels = np.where(np.arange(width) == 0, IGNORE_INDEX, ids)
        sequences = [
            TokenSequence(ids[row], labels[row], ((Branch(0, width),),)) for row in range(rows)
        ]
        batch = collate_for_step(replace(self.loop.collator, max_seq_len=width), sequences)
        return batch.to(self.process.device)

    def micro_steps(self, batch: Batch, count: int) -> float:
        """Compute gradients of a micro-batch `count` times; return the seconds of one."""
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            self.loop.compute_gradients(batch, batch.loss.total_weight, is_last=True)
        self.wait()
        return (time.perf_counter() - started) / count

    def _optimizer_step(self) -> float:
        self.wait()
        started = time.perf_counter()
        self.engine.clip_gradients()
        self.engine.optimizer.step()
        self.wait()
        return time.perf_counter() - started

    def time(self, rows: int, width: int, layers: int) -> tuple[float, int | None] | None:
        """Return the seconds and the peak bytes of a micro-batch with `layers` checkpointed.

        None if memory runs out.
        """
        batch = self.batch(rows, width)

        def run() -> tuple[float, int | None]:
            self.micro_steps(batch, 1)  # warms up
            seconds = self.micro_steps(batch, 1)
            if seconds < TIMED_SECONDS:
                seconds = self.micro_steps(batch, int(TIMED_SECONDS / seconds) + 1)
            return seconds, self.peak_bytes()

        return self._unless_out_of_memory(run, layers)

    def fits(self, rows: int, width: int, layers: int, limit_bytes: int | None) -> bool:
        """Return whether a micro-batch fits into `limit_bytes` (None: no limit)."""
        batch = self.batch(rows, width)

        def run() -> bool:
            if limit_bytes is not None:
                self.limit(limit_bytes)
            self.micro_steps(batch, 1)
            return True

        return bool(self._unless_out_of_memory(run, layers))

    def _unless_out_of_memory(self, run: Callable[[], T], layers: int) -> T | None:
        """Return what `run` returns, None if memory runs out.

        Before and after it, only the state of a run is in memory: weights, gradients, optimizer.
        """
        checkpoint_layers(self.model, layers)
        self.reset()
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            self.lift_limit()  # before anything else is allocated
            if classify(error)[0] is not ExitClass.OUT_OF_MEMORY:
                raise
            return None
        finally:
            self.lift_limit()
            # gradients stay allocated, as between the micro-batches of a step
            self.engine.optimizer.zero_grad(set_to_none=False)
            self.reset()
