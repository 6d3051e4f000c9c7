"""Where the time of a step goes: some steps under torch's profiler, by kind of kernel.

On a GPU those are its kernels; on a CPU torch's operations, each without those that it calls.
"""

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def find_kind(name: str) -> str:
    """Return the kind of a kernel or operation."""
    small = name.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, small)), OTHER)


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time in which a kernel ran, from the begin and end of each in microseconds."""
    busy = 0.0
    reached = float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / 1e6


def kinds_table(kernels: Iterable[Any], steps: int, step_seconds: float) -> str:
    """Return a line for each kind: milliseconds, share of a step, how often; the longest first.

    `kernels` are torch's averages over all calls of a kernel, or of an operation on a CPU.
    """
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        kind = find_kind(kernel.key)
        on_gpu = kernel.device_type == DeviceType.CUDA
        own = kernel.self_device_time_total if on_gpu else kernel.self_cpu_time_total
        seconds[kind] += own / 1e6 / steps
        counts[kind] += kernel.count
    lines = []
    for kind in sorted(seconds, key=seconds.__getitem__, reverse=True):
        part = seconds[kind] / step_seconds
        count = counts[kind] / steps
        lines.append(f"{seconds[kind] * 1e3:9.2f} ms {part:6.1%} {count:9,.0f} x  {kind}")
    return "\n".join(lines)


class StepProfile(TrainerCallback):
    """Records `steps` steps of the main rank from FIRST_STEP on, and writes what they took."""

    def __init__(self, folder: Path, steps: int, process: Process):
        self.folder = folder
        self.steps = steps if process.is_main else 0
        self.device = process.device
        self._is_gpu = process.is_gpu
        self.profiler: torch.profiler.profile | None = None
        self.taken = 0  # steps of this process: one that resumes compiles its kernels anew

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin to record with the FIRST_STEP."""
        if not self.steps or self.taken + 1 != FIRST_STEP:
            return
        self._synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_gpu:
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
        kernels = [each for each in profiler.key_averages() if self._is_kernel(each)]
        ran = [event.time_range for event in profiler.events() if self._is_kernel(event)]
        idle = 1 - busy_seconds((span.start, span.end) for span in ran) / seconds
        kinds = kinds_table(kernels, steps, seconds / steps)
        head = (
            f"profile of steps {last_step - steps + 1} to {last_step}: "
            f"{seconds / steps * 1e3:.1f} ms a step under the profiler, {idle:.1%} of it without a "
            "kernel"
        )
        self.folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        by_time = "self_device_time_total" if self._is_gpu else "self_cpu_time_total"
        names = profiler.key_averages().table(
            sort_by=by_time, row_limit=-1, max_name_column_width=SHOWN_NAME
        )
        text = f"{head}\n\n{kinds}\n\n{names}\n"
        (self.folder / "kernels.txt").write_text(text, encoding="utf-8")
        logger.info("%s; %s has each kernel\n%s", head, self.folder, kinds)

    def _is_kernel(self, event: Any) -> bool:
        """Return whether a profiler's event is a kernel of the GPU, or an operation of the CPU."""
        wanted = DeviceType.CUDA if self._is_gpu else DeviceType.CPU
        # an annotation of the code lies over the kernels that it started
        return event.device_type == wanted and not event.is_user_annotation

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self.device)
