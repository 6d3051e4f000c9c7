"""What the folder of a run says of it: the one reader of reports, comparisons, cards and `watch`.

Everything here was recorded by the run. What a run did not record is None, and not guessed. Files
are read once, when they are asked for: a run that trains has no scores yet, and one whose run.json
is damaged is still listed. Loads no torch.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from operator import attrgetter, getitem
from typing import Literal, NamedTuple, Self, TypeVar

from sft_play.config import schema
from sft_play.config.messages import word
from sft_play.errors import ExitClass
from sft_play.plan.devices import GIB
from sft_play.plan.memory import PHASES
from sft_play.reporting import answers
from sft_play.reporting.answers import OF_SOURCE, AnsweredRow, AnswerLine, Evaluation, is_loss
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.verdict import Score, Verdict, verdict
from sft_play.runs import metrics
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import GpuSample, MetricsLine, NewLines
from sft_play.runs.report import GOING_ON, LengthHistogram, RunReport
from sft_play.runs.resumed import VALUE_LENGTH, AskedRun, AskedSetting

State = Literal["passed", "failed", "look"]  # look: no error, and worth a look
MOST_CUT = 0.05  # of the answers, before the cut ones are worth a look
MOST_ABOVE = 1.1  # measured / predicted peak
JOULES_A_KWH = 3.6e6

T = TypeVar("T")
LEDGER_COUNTS = {
    "rows_in": "rows read",
    "rows_used": "rows used",
    "samples": "samples that they give",
    "tokens": "tokens",
    "trained_tokens": "tokens with loss",
    "lost_trained_tokens": "tokens with loss that were lost",
}
# Settings that differ between any two runs, or say where files are: nothing of the weights
OF_THE_FOLDER = ("data.cache_dir", "data.image_folder", "train.output_dir", "train.run_name")
NOTHING_READ = NewLines([], 0)
SPLITS = ("train", "validation", "test")
SHORTEST = 0.5  # percent of the whole that a part must have taken to be shown
# names of a timeline in words
TIMES = {
    "imports": "torch and transformers imported",
    "data": "rows mapped",
    "preflight": "checks before loading",
    "load": "weights loaded",
    "training": "training with its evaluations and checkpoints",
    "save": "last scores; weights saved and checked",
}


@dataclass(frozen=True)
class ShownCheck:
    """A check with its result in words."""

    name: str
    state: State
    found: str | None


@dataclass(frozen=True)
class PartTime:
    """The seconds of a part of a run, and its place in percent of the whole."""

    name: str
    seconds: float
    left: float
    width: float


@dataclass(frozen=True)
class UsedSetting:
    """A setting as the run used it, as it was asked for, and where that was written."""

    name: str
    value: str
    asked: str | None  # if it differs from `value`, such as auto
    origin: str | None
    is_chosen: bool  # by the user, not by the schema or configs/base.yaml


@dataclass(frozen=True)
class PhaseMemory:
    """Peak bytes of a phase on the fullest rank."""

    phase: str
    predicted: int | None
    measured: int | None


@dataclass(frozen=True)
class LedgerLine:
    """A count of the data ledger, by split."""

    name: str
    counts: dict[str, int | None]


class Energy(NamedTuple):
    """What the GPUs took while the run logged, by NVML."""

    kwh: float
    gpus: int


@dataclass(frozen=True)
class RunFacts:
    """One run, read from its folder."""

    folder: RunFolder
    report: RunReport
    read_at: float  # seconds since the epoch
    earlier: NewLines = NOTHING_READ  # of metrics.jsonl

    @classmethod
    def read(cls, folder: RunFolder, report: RunReport | None = None) -> Self:
        """Return the facts of a run, whose report may not be written yet."""
        return cls(folder, report or folder.read_report(), time.time())

    def read_again(self) -> "RunFacts":
        """Return the facts of now. Of metrics.jsonl only the new lines are read."""
        report = self.folder.read_report()
        return RunFacts(self.folder, report, time.time(), self.metrics)

    # metrics.jsonl

    @cached_property
    def metrics(self) -> NewLines:
        """All lines of metrics.jsonl, and where to read on."""
        new = metrics.read_metrics(self.folder.metrics, self.earlier.offset)
        return NewLines(self.earlier.lines + new.lines, new.offset)

    @property
    def lines(self) -> Sequence[MetricsLine]:
        return self.metrics.lines

    @property
    def new_lines(self) -> Sequence[MetricsLine]:
        """The lines that were not there when the run was read before."""
        return self.lines[len(self.earlier.lines) :]

    @cached_property
    def begun(self) -> MetricsLine | None:
        """The first line of this run, not of one that it continues from."""
        return next((line for line in self.lines if line.time is not None), None)

    def logged(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of everything logged under a name."""
        return [(line.step, line.values[name]) for line in self.lines if name in line.values]

    @property
    def gpus(self) -> list[GpuSample]:
        """The last sample of each GPU."""
        last = {sample.rank: sample for line in self.lines for sample in line.gpus}
        return [last[rank] for rank in sorted(last)]

    @property
    def energy(self) -> Energy | None:
        """The energy between the first and the last line, None if NVML gave no watts."""
        joules, gpus = 0.0, 0
        timed = [line for line in self.lines if line.time is not None]
        for before, line in pairwise(timed):
            watts = [sample.watts for sample in line.gpus if sample.watts is not None]
            joules += sum(watts) * (line.time - before.time)
            gpus = max(gpus, len(watts))
        return Energy(joules / JOULES_A_KWH, gpus) if joules else None

    # run.json

    @property
    def run(self) -> str:
        return self.folder.name

    @property
    def goes_on(self) -> bool:
        return self.report.state in GOING_ON

    @property
    def reached_step(self) -> int:
        """The last step that the run is known to have reached, also if it was killed."""
        reached = self.report.global_step or 0
        if self.report.state == "died":
            reached = max([reached, *(line.step for line in self.lines)])
        return reached

    @property
    def hardware(self) -> str | None:
        """The devices of the run, such as `2 × NVIDIA H200`."""
        names = Counter(rank.name for rank in self.report.memory_by_rank or [])
        return ", ".join(f"{count} × {name}" for name, count in names.items()) or None

    @property
    def lengths(self) -> dict[str, LengthHistogram]:
        return _in_order(self.report.lengths or {})

    @property
    def memory(self) -> list[PhaseMemory]:
        if self.report.memory is None:
            return []
        predicted, measured = self.report.memory.predicted, self.report.memory.measured
        phases = [phase for phase in PHASES if phase in predicted or phase in measured]
        return [PhaseMemory(phase, predicted.get(phase), measured.get(phase)) for phase in phases]

    @property
    def times(self) -> list[PartTime]:
        """The parts of the timeline by their start."""
        timeline = sorted(self.report.timeline or [], key=attrgetter("start"))
        first = min((span.start for span in timeline), default=0.0)
        whole = max((span.end for span in timeline), default=0.0) - first
        parts = []
        for span in timeline:
            seconds = span.end - span.start
            left, width = (100 * each / (whole or 1) for each in (span.start - first, seconds))
            if width > SHORTEST:
                parts.append(PartTime(TIMES.get(span.name, span.name), seconds, left, width))
        return parts

    @property
    def ledger(self) -> list[LedgerLine]:
        """The counts of the rows: what was read, used, and dropped and why."""
        splits = _in_order(self.report.data or {})
        if not splits:
            return []

        def line(name: str, key: str, group: str = "", default: int | None = None) -> LedgerLine:
            groups = {name: of.get(group) or {} if group else of for name, of in splits.items()}
            return LedgerLine(name, {split: of.get(key, default) for split, of in groups.items()})

        lines = [line(name, key) for key, name in LEDGER_COUNTS.items()]
        for group in ("dropped", "shortened"):
            reasons = (reason for of in splits.values() for reason in of.get(group) or {})
            lines += [line(f"{group}: {each}", each, group, 0) for each in dict.fromkeys(reasons)]
        quantiles = ("p50", "p90", "p99", "max")
        return lines + [line(f"tokens of a sample, {key}", key, "lengths") for key in quantiles]

    @property
    def checks(self) -> list[ShownCheck]:
        """The checks that the run made, in order, and those that its numbers allow."""
        return list(self._shown_checks())

    def _shown_checks(self) -> Iterator[ShownCheck]:
        report = self.report
        for check in report.checks or []:
            otherwise = "look" if check.passed is None else "failed"
            yield _judged(check.name, check.passed, check.found, otherwise)
        yield from _row_checks(report.rows("train"))
        is_finite = report.exit_class != ExitClass.DIVERGED
        if report.history or not is_finite:
            found = f"{len(report.history)} logs" if is_finite else report.cause_line
            yield _judged(
                "loss, gradient norm and weights stayed finite", is_finite, found, "failed"
            )
        if report.measured_peak is not None:
            measured, predicted = report.measured_peak, report.peak_bytes.predicted
            found = f"measured {measured / GIB:.2f} GiB, predicted {predicted / GIB:.2f} GiB"
            is_planned = measured <= MOST_ABOVE * predicted
            yield _judged("peak memory is no larger than planned", is_planned, found)
        known = [answer.was_cut for answer in self.after.answers if answer.was_cut is not None]
        if known:
            found = f"{sum(known)} of {len(known)} answers reached train.generation_max_new_tokens"
            is_ended = sum(known) <= MOST_CUT * len(known)
            yield _judged("answers end by themselves", is_ended, found)

    # config.yaml and asked.json

    @cached_property
    def asked(self) -> AskedRun:
        return AskedRun.read(self.folder)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        return self.asked.command

    @cached_property
    def settings(self) -> list[UsedSetting]:
        """Every setting, those that the user chose first. Raises EnvironmentFault."""
        tree = self.folder.read_config().model_dump()
        lines = []
        for name in schema.settings():
            value = word(reduce(getitem, name.split("."), tree), VALUE_LENGTH)
            asked = self.asked.settings.get(name, AskedSetting(value, None, is_chosen=False))
            other = asked.value if asked.value != value else None
            lines.append(UsedSetting(name, value, other, asked.origin, asked.is_chosen))
        return sorted(lines, key=lambda line: not line.is_chosen)

    @cached_property
    def values(self) -> dict[str, str]:
        """The settings that the run used, by dotted name."""
        return {line.name: line.value for line in self.settings}

    @property
    def model(self) -> str:
        return self.values["model.name"]

    @property
    def facts(self) -> list[str]:
        """Model, mode, device and start, as far as they are known."""
        report = self.report
        mode = f"{self.values['tuning.mode']} with {self.values['tuning.backend']}"
        facts = [self.model, mode]
        if report.world_size:
            facts.append(f"{report.world_size} × {report.device} ({report.strategy})")
        if report.started_at:
            facts.append(f"started {report.started_at}")
        return facts

    # eval/

    @cached_property
    def before(self) -> Evaluation:
        return Evaluation.read(self.folder, self.report, "before")

    @cached_property
    def after(self) -> Evaluation:
        return Evaluation.read(self.folder, self.report, "after")

    @cached_property
    def scores(self) -> list[Score]:
        """The scores in run.json: the loss, that of each source, and those of the answers."""
        before, after = self.before.recorded, self.after.recorded
        titles = sorted({**after, **before}, key=lambda title: not is_loss(title))
        return [answers.changed(name, before.get(name), after.get(name)) for name in titles]

    @property
    def last_scores(self) -> dict[str, Estimate | None]:
        """The scores after training."""
        return {score.name: score.after for score in self.scores}

    @property
    def whole_scores(self) -> list[Score]:
        """The scores of all test rows."""
        return [score for score in self.scores if not score.name.startswith(OF_SOURCE)]

    @cached_property
    def verdict(self) -> Verdict:
        return verdict(self.folder, self.report, self.whole_scores)

    @cached_property
    def pairs(self) -> list[tuple[AnswerLine, AnswerLine]]:
        """The answers before and after training of the rows that are scored in both.

        None if these are not the same rows.
        """
        before, after = self.before.answers, self.after.answers
        if [answer.row for answer in before] != [answer.row for answer in after]:
            return []
        pairs = zip(before, after, strict=True)
        return [pair for pair in pairs if None not in (pair[0].rouge_l, pair[1].rouge_l)]

    @property
    def rows_scored(self) -> int:
        return len(self.pairs)

    @property
    def improved(self) -> list[AnsweredRow]:
        return answers.most_changed(self.pairs, 1)

    @property
    def worsened(self) -> list[AnsweredRow]:
        return answers.most_changed(self.pairs, -1)


def _in_order(by_split: dict[str, T]) -> dict[str, T]:
    """Return what each split has, the training rows first."""
    return {split: by_split[split] for split in SPLITS if split in by_split}


def _row_checks(train: Json) -> Iterator[ShownCheck]:
    """Yield what the ledger of the training rows says of evaluation rows and lost tokens."""
    if train.get("overlap") is not None:
        shared = {split: equal["normalized"] for split, equal in train["overlap"].items()}
        counts = ", ".join(f"{count:,} {split} rows" for split, count in shared.items() if count)
        found = f"compared with {', '.join(shared)} rows"
        if counts:
            found = f"equal to {counts}; data.on_overlap decides what happens to them"
        yield _judged("no training row is an evaluation row", not counts, found)
    if train:
        lost = train["lost_fraction"]
        found = f"{train['trained_tokens']:,} tokens with loss"
        if lost:
            found = f"{lost:.2%} of the tokens with loss were lost"
        yield _judged("no token with loss is over model.max_seq_len", not lost, found)


def _judged(
    name: str, is_as_it_should_be: bool | None, found: str | None, otherwise: State = "look"
) -> ShownCheck:
    return ShownCheck(name, "passed" if is_as_it_should_be else otherwise, found)
