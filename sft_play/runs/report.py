"""run.json: what became of a run, also while it runs, and the scores in it. Loads no torch."""

import math
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from sft_play.runs.files import Json
from sft_play.timeline import Span

STARTED_AT = "%Y-%m-%dT%H:%M:%S%z"  # of RunReport.started_at
GOING_ON = ("planned", "running")

# Names that are no score of answers, and the ends of intervals
NO_SCORES = frozenset(
    """
    eval_loss eval_loss_seconds rows answers cut_answers max_new_tokens generation_seconds loss
    loss_seconds
    """.split()
)
BOUNDS = ("_low", "_high")


@dataclass(frozen=True)
class ReportedPeaks:
    """The peak of a run on its fullest rank; None until it was measured."""

    predicted: int
    measured: int | None = None  # reserved, and what lies outside torch's allocator
    reserved: int | None = None  # by torch's allocator; on a CPU the resident memory


@dataclass(frozen=True)
class PhasePeaks:
    """The peak bytes of each of plan.memory.PHASES."""

    predicted: dict[str, int] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)  # {} on a CPU


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank's GPU, as torch's allocator reserved it; on a CPU what was resident."""

    rank: int
    host: str
    device: str  # cuda:0, as torch counts on that host, or cpu
    name: str  # of the GPU
    total_bytes: int  # of the GPU; on a CPU of the host
    before_bytes: int  # peak before training, once the weights were loaded
    peak_bytes: int  # so far; once the run has ended, of all of it

    @property
    def training_bytes(self) -> int:
        """The peak above what was reserved before training."""
        return max(0, self.peak_bytes - self.before_bytes)

    def percent(self, size_bytes: int) -> float:
        """Return `size_bytes` in percent of the GPU's memory."""
        return 100 * size_bytes / self.total_bytes


@dataclass(frozen=True)
class LoggedLoss:
    """The mean loss since the log before, in nats per labeled token."""

    step: int
    loss: float


@dataclass(frozen=True)
class LoggedStep:
    """What a run logged at one step; None if that log did not say."""

    step: int
    loss: float | None = None  # the mean since the log before, in nats per labeled token
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None  # of all ranks, without evaluations and saves
    router_aux_loss: float | None = None  # the mean load-balancing loss, without its coefficient
    eval_loss: float | None = None  # of the validation rows
    eval_rougeL: float | None = None  # the trainer's name
    eval_scores: dict[str, float] | None = None  # of train.metrics, by name
    eval_losses: dict[str, float] | None = None  # of the sources of validation rows, by name

    @classmethod
    def from_log(cls, entry: Mapping[str, Any]) -> "LoggedStep | None":
        """Return an entry of the trainer's log history; None if it has none of these."""
        names = [field.name for field in fields(cls)]
        finite = {name: entry[name] for name in names if math.isfinite(entry.get(name, math.nan))}
        others = {
            name: score
            for name, score in logged_scores(entry, "eval").items()
            if name != "rougeL" and math.isfinite(score)
        }
        if others:
            finite["eval_scores"] = others
        if losses := logged_losses(entry):
            finite["eval_losses"] = losses
        return cls(**finite) if len(finite) > 1 else None

    @property
    def scores(self) -> dict[str, float]:
        """The scores of answers to the validation rows, by name."""
        others = self.eval_scores or {}
        return others if self.eval_rougeL is None else {"rougeL": self.eval_rougeL, **others}


@dataclass(frozen=True)
class Check:
    """One check that a run made, and what it found."""

    name: str
    passed: bool | None  # None: it was not made
    found: str | None = None  # what the check says beyond its name


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint whose weights are saved, and its score."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths of samples in tokens: counts[i] samples have edges[i] <= length < edges[i + 1]."""

    edges: list[int]
    counts: list[int]


@dataclass(frozen=True)
class ComponentBytes:
    """What one component took; `measured` is None if it cannot be told from others."""

    predicted: int
    measured: int | None


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Where a run ran out of memory, what used it, and the command that fits."""

    rank: int
    device: str
    step: int  # 0 before the first one
    phase: str | None
    asked_bytes: int | None  # None if the library does not say
    free_bytes: int | None
    components: dict[str, ComponentBytes]
    next: str


@dataclass(frozen=True)
class ExpertsReport:
    """Which experts of a mixture of experts were trained. Experts have numbers from 0."""

    layers: int  # with experts whose tokens were counted
    experts: int  # of all these layers
    never_reached: dict[str, list[int]]  # experts that no trained token was sent to, by module
    largest_share: float | None  # of a layer's tokens that one expert got; even is 1 / experts
    untrained: dict[str, list[int]]  # adapters whose B is still zero; [] is a complete adapter

    @property
    def reached(self) -> int:
        """The number of experts that trained tokens were sent to."""
        return self.experts - sum(map(len, self.never_reached.values()))


@dataclass(frozen=True)
class RunReport:
    """What run.json says. A field that is None is not known yet, and not in the file."""

    run: str | None = None
    run_id: str | None = None  # the same when the run continues in its folder
    checkpoint: str | None = None  # the newest, to continue from; None before the first one
    next: str | None = None  # the command that continues from it
    resumed_from: str | None = None  # the checkpoint that this run, or its last launch, began with
    status: str = "unknown"  # planned, running, done, stopped or failed
    exit_class: int | None = None  # of errors.ExitClass; None while the run continues
    cause: str | None = None  # of its end, if it is not done
    warning: str | None = None  # of a run that is done, and went other than it was asked to
    world_size: int | None = None
    strategy: str | None = None
    device: str | None = None
    backend: str | None = None
    mode: str | None = None
    checkpointing: str | None = None
    engine: str | None = None  # the class that wraps the model
    global_step: int | None = None
    pid: int | None = None  # of the main rank; None until the worker has begun
    host: str | None = None  # of the main rank, whose pid this is
    launcher_pid: int | None = None  # before that, of the front end, which becomes the launcher
    started_at: str | None = None
    versions: dict[str, str] | None = None
    seconds: dict[str, float] | None = None  # of each part of the run
    timeline: list[Span] | None = None  # of the front end and the main rank
    tokens_per_second: float | None = None  # of all ranks; None for a run of one step
    distinct_tokens_per_second: float | None = None  # None if no samples share beginnings
    peak_bytes: ReportedPeaks | None = None
    memory: PhasePeaks | None = None
    memory_by_rank: list[RankMemory] | None = None
    metrics: dict[str, dict[str, float | int]] | None = None  # by before, after and resumed
    best: BestCheckpoint | None = None  # None without train.load_best_model_at_end
    skipped_steps: list[int] | None = None  # left out by train.on_nonfinite
    loss: list[LoggedLoss] | None = None
    history: list[LoggedStep] | None = None
    checks: list[Check] | None = None  # in the order in which they were made
    data: Json | None = None  # the ledger of each split
    lengths: dict[str, LengthHistogram] | None = None  # of each split
    padding: dict[str, int] | None = None  # tokens of an epoch
    fast_path: Json | None = None  # fused kernels that are on, and off
    experts: ExpertsReport | None = None  # None without experts, and while the run continues
    probe: Json | None = None  # None without train.probe
    out_of_memory: OutOfMemoryReport | None = None
    is_gone: bool = False  # not in the file: no process has the run's lock or is alive

    def to_json(self) -> Json:
        """Return the content of run.json."""
        nullable = {"exit_class", "cause"}
        if self.pid is not None:
            nullable.add("tokens_per_second")
        values = asdict(self).items()
        known = {name: value for name, value in values if value is not None or name in nullable}
        del known["is_gone"]
        return known

    @classmethod
    def from_json(cls, values: object) -> "RunReport":
        """Return the report in a run.json without unknown keys. Raises ValueError."""
        return _adapter().validate_python(values)

    def scores(self, when: str) -> dict[str, float | int]:
        """Return the scores of the test rows `before` or `after` training, {} for none."""
        return (self.metrics or {}).get(when, {})

    def rows(self, split: str) -> Json:
        """Return the ledger of a split, {} if it is not known."""
        return (self.data or {}).get(split) or {}

    @property
    def cause_line(self) -> str:
        """The first line of the cause."""
        return (self.cause or "").partition("\n")[0]

    @property
    def measured_peak(self) -> int | None:
        """The peak bytes of the fullest rank."""
        return self.peak_bytes.measured if self.peak_bytes else None

    @property
    def total_seconds(self) -> float | None:
        return (self.seconds or {}).get("total")

    @property
    def state(self) -> str:
        """The status, or `died` for a run that was killed before it could write how it ended."""
        return "died" if self.is_gone and self.status in GOING_ON else self.status

    @property
    def is_here(self) -> bool:
        """Whether the main rank is, or was, on this host."""
        return self.host is None or self.host == socket.gethostname()


@cache
def _adapter() -> TypeAdapter[RunReport]:
    return TypeAdapter(RunReport)


def score_names(metrics: Iterable[str]) -> list[str]:
    """Return the names of scores of answers among those of `metrics`, ROUGE-L first."""
    # a user-defined function may have such a name, too
    bounds = {f"{name}{end}" for name in metrics for end in BOUNDS}
    names = [
        name for name in metrics if name not in NO_SCORES | bounds and not name.endswith("_loss")
    ]
    return sorted(names, key=lambda name: (name != "rougeL", name))


def logged_losses(logged: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of sources, by name, that a run logged as `eval_<name>_loss`."""
    found = {name: re.fullmatch("eval_(.+)_loss", name) for name in logged}
    return {match[1]: logged[name] for name, match in found.items() if match}


def logged_scores(logged: Mapping[str, float], rows: str) -> dict[str, float]:
    """Return the scores of answers that a run logged as `<rows>_<name>`; `rows` is eval or test."""
    start = f"{rows}_"
    found = {name.removeprefix(start): logged[name] for name in logged if name.startswith(start)}
    return {name: found[name] for name in score_names(found)}
