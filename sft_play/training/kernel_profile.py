"""Where the time of a step goes: some steps under torch's profiler, by kind of kernel.

On a GPU those are its kernels; on a CPU torch's operations, each without those that it calls.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from transformers import TrainerCallback

from sft_play.process import Process

logger = logging.getLogger(__name__)

FIRST_STEP = 6  # by then kernels are chosen and compiled
SHOWN_NAME = 100  # characters of a kernel's
# The first pattern that a name has, in small letters, says its kind
KINDS = {
    "communication": r"nccl|gloo|c10d|all_reduce|allreduce|all_gather|reduce_scatter",
    "attention": r"flash|fmha|sdpa|scaled_dot_product|attn|attention",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|scaled_mm|::linear$"
    r"|::(add|b|badd)?mm_?$",
    "optimizer": r"adam|optimizer|lion|sgd",
    "copies": r"memcpy|memset|copy|::to\b|::clone|::contiguous|transpose|::cat|catarray",
    "element by element": r"elementwise|multi_tensor|reduce|softmax|foreach|index|fill|scatter"
    r"|::(add|sub|mul|div|exp|pow|square|sigmoid|silu|sum|mean|neg|rsqrt|where)_?$",
    "fused by Triton": r"^_|triton",
}
OTHER = "other"


class Kernel(NamedTuple):
    """A kernel that ran, or an operation of torch on a CPU."""

    name: str
    begin: float  # microseconds on the profiler's clock
    end: float
    seconds: float  # of its own


class Share(NamedTuple):
    """The time of the kernels of one kind, or of one name, in a step."""

    name: str
    seconds: float
    count: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operation."""
    small = name.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, small)), OTHER)


def shares(kernels: Iterable[tuple[str, Kernel]], steps: int) -> list[Share]:
    """Return the time a step by label, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for label, kernel in kernels:
        seconds[label] += kernel.seconds
        counts[label] += 1
    found = [Share(label, seconds[label] / steps, counts[label] / steps) for label in seconds]
    return sorted(found, key=lambda share: -share.seconds)


def busy_seconds(kernels: Sequence[Kernel]) -> float:
    """Return the time in which at least one kernel ran."""
    busy = 0.0
    reached = float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        busy += max(0.0, kernel.end - max(kernel.begin, reached))
        reached = max(reached, kernel.end)
    return busy / 1e6


def table(found: Sequence[Share], step_seconds: float) -> str:
    """Return lines of milliseconds, share of a step, how often, and what."""
    lines = []
    for share in found:
        part = share.seconds / step_seconds
        lines.append(
            f"{share.seconds * 1e3:9.2f} ms {part:6.1%} {share.count:9,.0f} x  {share.name}"
        )
    return "\n".join(lines)


class StepProfile(TrainerCallback):
    """Records `steps` steps of the main rank from FIRST_STEP on, and writes what they took."""

    def __init__(self, folder: Path, steps: int, process: Process):
        self.folder = folder
        self.steps = steps if process.is_main else 0
        self.device = process.device
        self.profiler: torch.profiler.profile | None = None
        self.taken = 0  # steps of this process: one that resumes compiles its kernels anew

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record with the FIRST_STEP."""
        if not self.steps or self.taken + 1 != FIRST_STEP:
            return
        self._synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.profiler.start()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step, and end with the last one that is to be recorded."""
        self.taken += 1
        if self.profiler is not None and self._recorded == self.steps:
            self._finish(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with fewer steps where training ends before, and say so where there is none."""
        if self.steps and self._recorded <= 0:
            logger.warning(
                "train.profile_steps=%d: nothing is recorded, as training ends after %d steps and "
                "recording begins with the %dth",
                *(self.steps, self.taken, FIRST_STEP),
            )
        elif self.profiler is not None:
            self._finish(state.global_step)

    @property
    def _recorded(self) -> int:
        return self.taken - FIRST_STEP + 1

    def close(self) -> None:
        """Stop recording where an error ends the run."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _finish(self, last_step: int) -> None:
        """Write the trace and the tables, and log the table of kinds."""
        self._synchronize()
        seconds = time.perf_counter() - self.started
        profiler = self.profiler
        self.close()
        steps = self._recorded
        step_seconds = seconds / steps
        on_gpu = self.device.type == "cuda"
        kernels = kernels_of(profiler.events(), on_gpu)
        idle = 1 - busy_seconds(kernels) / seconds
        kinds = table(shares(((kind_of(each.name), each) for each in kernels), steps), step_seconds)
        names = shares(((each.name[:SHOWN_NAME], each) for each in kernels), steps)
        head = (
            f"profile of steps {last_step - steps + 1} to {last_step}: "
            f"{step_seconds * 1e3:.1f} ms a step under the profiler, {idle:.1%} of it without a "
            "kernel"
        )
        self.folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        text = f"{head}\n\n{kinds}\n\n{table(names, step_seconds)}\n"
        (self.folder / "kernels.txt").write_text(text, encoding="utf-8")
        logger.info("%s; %s has each kernel\n%s", head, self.folder, kinds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def kernels_of(events: Iterable[Any], on_gpu: bool) -> list[Kernel]:
    """Return the kernels of a GPU, or the operations of a CPU, among a profiler's events."""
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = []
    for event in events:
        # an annotation of the code lies over the kernels that it started
        if event.device_type != wanted or event.is_user_annotation:
            continue
        ran = event.time_range
        own = ran.elapsed_us() if on_gpu else event.self_cpu_time_total
        found.append(Kernel(event.name, ran.start, ran.end, own / 1e6))
    return found
