"""Report of a run that is out of memory: bytes by component, and what to type next."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sft_play.plan.devices import GIB
from sft_play.plan.next_command import after_out_of_memory
from sft_play.runs.checkpoints import has_checkpoint
from sft_play.runs.report import ComponentBytes, OutOfMemoryReport
from sft_play.training.context import RunContext
from sft_play.training.loop import TrainingLoop
from sft_play.training.memory import components

logger = logging.getLogger(__name__)

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
# "Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.10 GiB of which 416.00 MiB is free",
# "you tried to allocate 4096 bytes"
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
FREE = re.compile(r"of which ([\d.]+) (bytes|[KMGT]iB) is free")
FULL_GPU = re.compile(r"GPU (\d+) has a total capacity")
STEP_PHASES = ("forward", "backward", "optimizer")
# Components that a measurement cannot tell apart; `measured_beyond` exists once a probe has run
TRANSIENT = ("activations", "logits", "buckets", "measured_beyond")


@dataclass
class OutOfMemoryExplainer:
    """Explains an out-of-memory error. `loop` is None until it is built."""

    context: RunContext
    loop: TrainingLoop | None = None

    def __call__(self, error: BaseException) -> tuple[str, OutOfMemoryReport]:
        """Return one line (where it happened, what fits) and a report; log the components."""
        report = self._report(error)
        for line in table(report.components):
            logger.warning("%s", line)
        return _cause(report), report

    def _report(self, error: BaseException) -> OutOfMemoryReport:
        context = self.context
        device = context.process.device
        named = FULL_GPU.search(str(error))
        if len(context.process.devices) > 1 and named is not None:  # a model placed on several GPUs
            device = torch.device("cuda", int(named[1]))
        phase = context.memory.current_phase
        step = 0  # before the first
        if self.loop is not None:
            step = self.loop.state.global_step + (phase in STEP_PHASES)
        command = after_out_of_memory(
            context.config,
            context.plan,
            context.folder.path,
            phase or "forward",
            has_checkpoint(context.folder.path),
        )
        return OutOfMemoryReport(
            rank=context.process.rank,
            device=str(device) if device.type == "cuda" else "the host",
            step=step,
            phase=phase,
            asked_bytes=parse_bytes(ASKED, error),
            free_bytes=parse_bytes(FREE, error),
            components=self._components(phase, device),
            next=command,
        )

    def _components(self, phase: str | None, device: torch.device) -> dict[str, ComponentBytes]:
        """Return the predicted and measured bytes of each component.

        The activations and the context of a CPU cannot be measured.
        """
        memory = self.context.plan.memory
        phase_bytes = memory.phases[phase] if phase else memory.peak
        planned = phase_bytes.components()
        predicted = {name: size for name, size in planned.items() if name not in TRANSIENT}
        predicted["activations"] = sum(planned.get(name, 0) for name in TRANSIENT)
        measured = self._measured(device)
        return {name: ComponentBytes(size, measured.get(name)) for name, size in predicted.items()}

    def _measured(self, device: torch.device) -> dict[str, int]:
        memory = self.context.memory
        measured: dict[str, int] = {}
        if self.loop is not None:
            measured = components(self.loop.engine.model, self.loop.engine.optimizer, device)
        if device.type == "cuda":
            lasting = sum(measured.values())
            measured["activations"] = max(0, memory.peak_bytes() - lasting)
            measured["context"] = memory.context_bytes()
        return measured


def _cause(report: OutOfMemoryReport) -> str:
    where = f"in {report.phase or 'training'}"
    when = f" at step {report.step}" if report.step else " before the first step"
    asked = ""
    if report.asked_bytes is not None:
        asked = f"; {_gib(report.asked_bytes)} GiB more were asked for"
        if report.free_bytes is not None:
            asked += f", {_gib(report.free_bytes)} were free"
    return (
        f"rank {report.rank} ran out of memory on {report.device} {where}{when}{asked}; "
        f"try {report.next}"
    )


def table(held: Mapping[str, ComponentBytes]) -> list[str]:
    """Return a table with a line for each component: predicted and measured GiB."""
    lines = [f"{'GiB':<12}{'predicted':>12}{'measured':>12}"]
    for name, size in held.items():
        measured = "-" if size.measured is None else _gib(size.measured)
        lines.append(f"{name:<12}{_gib(size.predicted):>12}{measured:>12}")
    return lines


def parse_bytes(pattern: re.Pattern[str], error: BaseException) -> int | None:
    """Return the bytes that a library's error message names, None if it names none."""
    found = pattern.search(str(error))
    if found is None:
        return None
    number, unit = found.groups()
    return int(float(number) * UNITS[unit])


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"
