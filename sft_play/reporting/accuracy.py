"""How near the plan has been: finished runs, predicted and measured. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sft_play.errors import EnvironmentFault
from sft_play.plan.memory import PHASES
from sft_play.plan.run_plan import read_plan
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.folder import list_runs


@dataclass(frozen=True)
class Spread:
    """Measured / predicted over several runs, 1.0 if a prediction was exact."""

    count: int
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Spread | None":
        """Return the spread of ratios, None if there is none."""
        if not ratios:
            return None
        return cls(len(ratios), min(ratios), median(ratios), max(ratios))

    def describe(self) -> str:
        """Return the spread as percent of the prediction: `within -3.1 .. +2.4 %`."""
        least = f"{100 * (self.least - 1):+.1f}"
        most = f"{100 * (self.most - 1):+.1f}"
        return f"{most} %" if least == most else f"within {least} .. {most} %"


@dataclass(frozen=True)
class Accuracy:
    """What the finished runs on one kind of GPU say about its plans.

    None if no run has both numbers.
    """

    gpu: str | None  # its name, None for a CPU
    runs: int
    peak: Spread | None
    phases: Mapping[str, Spread]
    tokens_per_second: Spread | None


def of_runs(output_dir: Path, device: str, gpu: str | None) -> Accuracy:
    """Return how near the plans of the runs below `output_dir` were.

    Only runs count that measured a peak, on `device` and GPUs named `gpu`.
    """
    peaks: list[float] = []
    speeds: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    count = 0
    for run in map(RunFacts.read, list_runs(output_dir)):
        peak = run.report.peak_bytes
        try:
            plan = read_plan(run.folder)
        except EnvironmentFault:  # written by another version
            continue
        if (plan.ranks.device, plan.gpu) != (device, gpu) or not (peak and peak.measured):
            continue
        count += 1
        peaks += _ratio(peak.measured, peak.predicted)
        if plan.speed:
            measured = run.report.distinct_tokens_per_second or run.report.tokens_per_second
            speeds += _ratio(measured, plan.speed.tokens_per_second)
        for each in run.memory:
            phases[each.phase] += _ratio(each.measured, each.predicted)
    return Accuracy(
        gpu=gpu,
        runs=count,
        peak=Spread.of(peaks),
        phases={name: Spread.of(ratios) for name, ratios in phases.items() if ratios},
        tokens_per_second=Spread.of(speeds),
    )


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """Return what a person reads of it below a plan; nothing if no run has finished."""
    if accuracy.peak is None:
        return []
    plural = "" if accuracy.runs == 1 else "s"
    first = (
        f"on this machine: {accuracy.runs} run{plural} on {accuracy.gpu or 'the CPU'}, "
        f"peak {accuracy.peak.describe()} of the prediction"
    )
    if accuracy.tokens_per_second:
        first += f", tokens/s {accuracy.tokens_per_second.describe()}"
    by_phase = [
        f"{name} {100 * (spread.median - 1):+.1f} %" for name, spread in accuracy.phases.items()
    ]
    if not by_phase:
        return [first]
    return [first, f"  median by phase: {', '.join(by_phase)}"]


def _ratio(measured: float | None, predicted: float | None) -> list[float]:
    return [measured / predicted] if measured and predicted else []
