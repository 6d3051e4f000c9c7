"""A loaded model in the trainer of a run, stepped and held to less memory at will. Imported once the launcher's environment is there."""

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from sft_play import preparation
from sft_play.data.collate import TokenSequence
from sft_play.data.render import IGNORE_INDEX
from sft_play.errors import ExitClass, OutOfMemory
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.load import load_model
from sft_play.models.tokenizer import load_tokenizer
from sft_play.plan.precision import precision
from sft_play.plan.run_plan import PlannedRun
from sft_play.process import DTYPES, Process
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.arguments import training_arguments
from sft_play.training.memory import MemoryMeter
from sft_play.training.probe import Probe, ProbeResult
from sft_play.training.report import classify
from sft_play.training.trainer import REAL_TOKENS, TARGETS, for_a_step
from sft_play.training.worker import build_trainer

TIMED_SECONDS = 0.5  # of a combination, at least, behind a step that warms up
T = TypeVar("T")


class Card:
    """The memory of the device, which can be held to less: a GPU by its allocator, a process without one by the kernel."""

    def __init__(self, process: Process, used_before_bytes: int):
        self.is_gpu = process.device.type == "cuda"
        self.memory = MemoryMeter(process, used_before_bytes)

    def hold(self, limit_bytes: int | None) -> None:
        """Let this process take no more than `limit_bytes` in all; None takes the limit away."""
        if self.is_gpu:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(
                1.0 if limit_bytes is None else (limit_bytes - self.memory.context_bytes()) / total
            )
            return
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        held = psutil.Process().memory_info()
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (hard if limit_bytes is None else held.data + max(0, limit_bytes - held.rss), hard),
        )

    def reset(self) -> None:
        """Give back what nobody uses, and forget the peak."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the most that was reserved since `reset`, with what lies outside the allocator; None without a GPU."""
        return (
            torch.cuda.max_memory_reserved() + self.memory.context_bytes() if self.is_gpu else None
        )

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


class Harness:
    """A model in its trainer. After `warm_up`, gradients and the optimizer's state are there, as in the middle of a run."""

    def __init__(self, planned: PlannedRun, folder: Path):
        plan = planned.plan
        device = torch.device("cuda", 0) if plan.ranks.device == "cuda" else torch.device("cpu")
        self.process = Process.alone(device, DTYPES[precision(planned.config)])
        self.card = Card(self.process, plan.used_before_bytes[0])
        config = planned.config
        runtime.seed_everything(config.train.seed)
        runtime.allow_tf32(self.process)
        tokenizer, data = load_tokenizer(config), preparation.prepared(config)
        arguments = training_arguments(config, plan, RunFolder(folder))
        self.model = load_model(config, self.process)
        self.trainer = build_trainer(
            config, plan, self.process, tokenizer, data, self.model, arguments, {}
        )
        self.trainer.create_optimizer()
        wrapped = self.trainer.accelerator.prepare(self.trainer.model, self.trainer.optimizer)
        self.trainer.model_wrapped, self.trainer.optimizer = wrapped
        self.vocabulary, self.clip = len(tokenizer), config.train.max_grad_norm

    def probed(self, planned: PlannedRun, limit_bytes: int | None) -> ProbeResult | None:
        """Return what the probe of a run chooses within `limit_bytes`, None where it finds no room. Before `warm_up`, as in a run."""
        self.card.reset()
        self.card.hold(limit_bytes)
        try:
            return Probe(self.trainer, planned, self.process).run()
        except OutOfMemory:
            return None
        finally:
            self.card.hold(None)

    def warm_up(self, steps: int) -> float:
        """Take optimizer steps; return the seconds of the fastest, clipping included, the micro-batch not."""
        self.micro_steps(self.batch(1, self.trainer.data_collator.max_seq_len), 1)
        return min(self._optimizer_step() for _ in range(steps))

    def batch(self, rows: int, width: int) -> dict[str, Any]:
        """Return a micro-batch of `rows` documents of `width` tokens, labelled but for their first, as the run's own collator makes it.

        It is on the device: a run's batches are copied there beforehand, from pinned memory, and make no micro-step wait.
        """
        ids = np.random.default_rng(0).integers(self.vocabulary, size=(rows, width))
        labels = np.where(np.arange(width) == 0, IGNORE_INDEX, ids)
        sequences = [TokenSequence(ids[row], labels[row], (width,), width) for row in range(rows)]
        batch = for_a_step(replace(self.trainer.data_collator, max_seq_len=width), sequences)
        del batch[REAL_TOKENS]
        return self.trainer._prepare_inputs(batch)

    def micro_steps(self, batch: dict[str, Any], count: int) -> float:
        """Compute gradients `count` times; return the seconds of one."""
        self.card.wait()
        started = time.perf_counter()
        for _ in range(count):
            self.trainer.training_step(self.trainer.model_wrapped, dict(batch), len(batch[TARGETS]))
        self.card.wait()
        return (time.perf_counter() - started) / count

    def _optimizer_step(self) -> float:
        self.card.wait()
        started = time.perf_counter()
        self.trainer.accelerator.clip_grad_norm_(self.trainer.model_wrapped.parameters(), self.clip)
        self.trainer.optimizer.step()
        self.card.wait()
        return time.perf_counter() - started

    def timed(self, rows: int, width: int, layers: int) -> tuple[float, int | None] | None:
        """Return (seconds of a micro-batch, peak bytes), None where memory does not suffice."""
        batch = self.batch(rows, width)

        def run() -> tuple[float, int | None]:
            self.micro_steps(batch, 1)
            one = self.micro_steps(batch, 1)
            seconds = (
                one
                if one >= TIMED_SECONDS
                else self.micro_steps(batch, int(TIMED_SECONDS / one) + 1)
            )
            return seconds, self.card.peak_bytes()

        return self._unless_out_of_memory(run, layers)

    def fits(self, rows: int, width: int, layers: int, limit_bytes: int | None) -> bool:
        """Return whether a micro-batch can be computed within `limit_bytes`."""
        batch = self.batch(rows, width)

        def run() -> bool:
            self.card.hold(limit_bytes)
            self.micro_steps(batch, 1)
            return True

        return bool(self._unless_out_of_memory(run, layers))

    def _unless_out_of_memory(self, run: Callable[[], T], layers: int) -> T | None:
        """Return what `run` returns, None where memory does not suffice; before and behind it nothing is held but the run's state."""
        checkpoint_layers(self.model, layers)
        self.card.reset()
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            self.card.hold(None)  # before anything else is allocated
            if classify(error)[0] is not ExitClass.OUT_OF_MEMORY:
                raise
            return None
        finally:
            self.card.hold(None)
            self.trainer.optimizer.zero_grad(
                set_to_none=False
            )  # they stay, as between the micro-batches of a step
            self.card.reset()
