"""What a run that ran out of memory says: who held it beside what was predicted, and what to type next."""

import logging
import re
from dataclasses import dataclass
from typing import Any

from sft_play.errors import CheckpointError
from sft_play.plan.next_command import after_out_of_memory
from sft_play.plan.run_plan import PlannedRun
from sft_play.process import Process
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder
from sft_play.training.memory import MemoryMeter, components
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

GIB = 2**30
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
# "Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.10 GiB of which 416.00 MiB is free", "you tried to allocate 4096 bytes"
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
FREE = re.compile(r"of which ([\d.]+) (bytes|[KMGT]iB) is free")
STEPPING = ("forward", "backward", "optimizer")
TRANSIENT = (
    "activations",
    "logits",
    "buckets",
    "measured_beyond",
)  # what the plan tells apart, the last where it was probed, and a measurement does not


@dataclass
class Explanation:
    """Says of an error for want of memory where it happened, what was held, and what fits. `trainer` is None before there is one."""

    planned: PlannedRun
    folder: RunFolder
    process: Process
    memory: MemoryMeter
    trainer: SftTrainer | None = None

    def __call__(self, error: BaseException) -> tuple[str, dict[str, Any]]:
        """Return the cause in one line, and run.json's `out_of_memory`; log the table of the two."""
        phase, step = self.memory.current_phase, self._step()
        place = str(self.process.device) if self.process.device.type == "cuda" else "the host"
        asked, free = amount(ASKED, error), amount(FREE, error)
        command = after_out_of_memory(
            self.planned.config,
            self.planned.plan,
            self.folder.path,
            phase or "forward",
            self._has_checkpoint(),
        )
        held = self._components(phase)
        for line in table(held):
            logger.warning("%s", line)
        where = (
            f"in {phase or 'training'}{f' at step {step}' if step else ' before the first step'}"
        )
        wanted = (
            f"; {_gib(asked)} GiB more were asked for{f', {_gib(free)} were free' if free is not None else ''}"
            if asked is not None
            else ""
        )
        facts = {
            "rank": self.process.rank,
            "device": place,
            "step": step,
            "phase": phase,
            "asked_bytes": asked,
            "free_bytes": free,
        }
        return (
            f"rank {self.process.rank} ran out of memory on {place} {where}{wanted}; try {command}",
            {**facts, "components": held, "next": command},
        )

    def _step(self) -> int:
        """Return the step that runs or was the last, 0 before the first: while the model loads, while the plan is tried."""
        return (
            self.trainer.state.global_step + (self.memory.current_phase in STEPPING)
            if self.trainer
            else 0
        )

    def _components(self, phase: str | None) -> dict[str, dict[str, int | None]]:
        """Return predicted and measured bytes by component; a CPU's activations and context cannot be told apart."""
        memory = self.planned.plan.memory
        plan = (memory.phases[phase] if phase else memory.peak).components()
        predicted = {
            name: size
            for name, size in plan.items()
            if name not in (*TRANSIENT, "total", "predicted_peak")
        }
        predicted["activations"] = sum(plan.get(name, 0) for name in TRANSIENT)
        measured: dict[str, int | None] = {}
        if self.trainer is not None:
            measured |= components(self.trainer.model, self.trainer.optimizer, self.process.device)
        if self.process.device.type == "cuda":
            measured["activations"] = max(0, self.memory.peak_bytes() - sum(measured.values()))
            measured["context"] = self.memory.context_bytes()
        return {
            name: {"predicted": predicted[name], "measured": measured.get(name)}
            for name in predicted
        }

    def _has_checkpoint(self) -> bool:
        try:
            stamp.latest_checkpoint(self.folder.path)
        except CheckpointError:
            return False
        return True


def table(held: dict[str, dict[str, int | None]]) -> list[str]:
    """Return a line a component: what was predicted, what was held."""
    rows = [
        (
            name,
            _gib(sizes["predicted"]),
            "-" if sizes["measured"] is None else _gib(sizes["measured"]),
        )
        for name, sizes in held.items()
    ]
    return [
        f"{name:<12}{predicted:>12}{measured:>12}"
        for name, predicted, measured in [("GiB", "predicted", "measured"), *rows]
    ]


def amount(words: re.Pattern[str], error: BaseException) -> int | None:
    """Return the bytes that a library's error names, None where it does not."""
    found = words.search(str(error))
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def _gib(size_bytes: int | None) -> str:
    return f"{size_bytes / GIB:.2f}"
