"""How near the plan has been: predictions of finished runs beside what they measured. Loads no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sft_play.plan.memory import PHASES
from sft_play.runs.folder import RunFolder, listing


@dataclass(frozen=True)
class Spread:
    """Measured / predicted over several runs, 1.0 where a prediction was exact."""

    count: int
    least: float
    median: float
    most: float

    def words(self) -> str:
        """Return the spread as percent of the prediction: `within -3.1 .. +2.4 %`."""
        least, most = f"{100 * (self.least - 1):+.1f}", f"{100 * (self.most - 1):+.1f}"
        return f"{most} %" if least == most else f"within {least} .. {most} %"


@dataclass(frozen=True)
class Accuracy:
    """What the finished runs on one kind of GPU say about its plans; None where no run has both numbers."""

    gpu: str | None  # its name, None for a CPU
    runs: int
    peak: Spread | None
    phases: Mapping[str, Spread]
    tokens_per_second: Spread | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def of_runs(output_dir: Path, device: str, gpu: str | None) -> Accuracy:
    """Return how near the plans of the runs below `output_dir` were that measured a peak; only those on `device` and GPUs named `gpu` count."""
    peaks: list[float] = []
    speeds: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    found = 0
    for plan, report in map(_read, listing(output_dir)):
        peak = report.get("peak_bytes", {})
        if (plan.get("device"), plan.get("gpu")) != (device, gpu) or not peak.get("measured"):
            continue
        found += 1
        memory, speed = report.get("memory", {}), plan.get("speed") or {}
        peaks += _ratio(peak["measured"], peak["predicted"])
        speeds += _ratio(report["tokens_per_second"], speed.get("tokens_per_second"))
        for name, ratios in phases.items():
            ratios += _ratio(
                memory.get("measured", {}).get(name), memory.get("predicted", {}).get(name)
            )
    return Accuracy(
        gpu,
        found,
        _spread(peaks),
        {name: _spread(ratios) for name, ratios in phases.items() if ratios},
        _spread(speeds),
    )


def lines(accuracy: Accuracy) -> list[str]:
    """Return what a person reads of it below a plan; nothing where no run has finished."""
    if accuracy.peak is None:
        return []
    runs = f"{accuracy.runs} run{'' if accuracy.runs == 1 else 's'} on {accuracy.gpu or 'the CPU'}"
    speed = f", tokens/s {accuracy.tokens_per_second.words()}" if accuracy.tokens_per_second else ""
    by_phase = ", ".join(
        f"{name} {100 * (spread.median - 1):+.1f} %" for name, spread in accuracy.phases.items()
    )
    return [
        f"on this machine: {runs}, peak {accuracy.peak.words()} of the prediction{speed}",
        *([f"  median by phase: {by_phase}"] if by_phase else []),
    ]


def _read(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    return folder.read_plan(), folder.read_report()


def _ratio(measured: float | None, predicted: float | None) -> list[float]:
    return [measured / predicted] if measured and predicted else []


def _spread(ratios: list[float]) -> Spread | None:
    return Spread(len(ratios), min(ratios), median(ratios), max(ratios)) if ratios else None
