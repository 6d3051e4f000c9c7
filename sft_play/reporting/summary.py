"""What a report says of one run and of its checks, read from its folder. Loads no torch.

Everything here was recorded by the run. What a run did not record is None, and not guessed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, TypeVar

import yaml

from sft_play.config.messages import word
from sft_play.config.schema import settings
from sft_play.errors import ExitClass
from sft_play.plan.devices import GIB
from sft_play.plan.memory import PHASES
from sft_play.reporting import answers
from sft_play.reporting.answers import (
    Answer,
    AnsweredRow,
    RowLoss,
    answer_scores,
    loss_difference,
    loss_estimate,
    read_losses,
)
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.verdict import Score, Verdict, verdict
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import LengthHistogram, LoggedStep, RunReport, logged_losses
from sft_play.runs.resumed import VALUE_LENGTH, AskedRun
from sft_play.timeline import Span

State = Literal["passed", "failed", "look"]  # look: no error, and worth a look
MOST_CUT = 0.05  # of the answers, before the cut ones are worth a look
MOST_ABOVE = 1.1  # measured / predicted peak

T = TypeVar("T")
LOSS = "loss"
MISSING = object()  # in the config.yaml of another version
LEDGER_COUNTS = {
    "rows_in": "rows read",
    "rows_used": "rows used",
    "samples": "samples that they give",
    "tokens": "tokens",
    "trained_tokens": "tokens with loss",
    "lost_trained_tokens": "tokens with loss that were lost",
}
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


def shown_checks(report: RunReport, after: Sequence[Answer]) -> Iterator[ShownCheck]:
    """Yield the checks that the run made, in order, and those that its numbers allow.

    `after` are the answers of the trained model.
    """
    for check in report.checks or []:
        yield ShownCheck(check.name, "passed" if check.passed else "failed", check.found)
    yield from _row_checks(report.rows("train"))
    finite = "loss, gradient norm and weights stayed finite"
    if report.exit_class == ExitClass.DIVERGED:
        yield ShownCheck(finite, "failed", report.cause_line)
    elif report.history:
        yield ShownCheck(finite, "passed", f"{len(report.history)} logs")
    peak = report.peak_bytes
    if peak is not None and peak.measured is not None:
        is_planned = peak.measured <= MOST_ABOVE * peak.predicted
        found = f"measured {peak.measured / GIB:.2f} GiB, predicted {peak.predicted / GIB:.2f} GiB"
        yield _judged("peak memory is no larger than planned", is_planned, found)
    known = [answer.was_cut for answer in after if answer.was_cut is not None]
    if known:
        found = f"{sum(known)} of {len(known)} answers reached train.generation_max_new_tokens"
        is_ended = sum(known) <= MOST_CUT * len(known)
        yield _judged("answers end by themselves", is_ended, found)


def _row_checks(train: dict[str, Any]) -> Iterator[ShownCheck]:
    """Yield what the ledger of the training rows says of evaluation rows and lost tokens."""
    if train.get("overlap") is not None:
        shared = {split: equal["normalised"] for split, equal in train["overlap"].items()}
        counts = ", ".join(f"{count:,} {split} rows" for split, count in shared.items() if count)
        found = f"compared with {', '.join(shared)} rows"
        if counts:
            found = f"equal to {counts}; data.on_overlap says what became of them"
        yield _judged("no training row is an evaluation row", not counts, found)
    if train:
        lost = train["lost_fraction"]
        found = f"{train['trained_tokens']:,} tokens with loss"
        if lost:
            found = f"{lost:.2%} of the tokens with loss were lost"
        yield _judged("no token with loss is over model.max_seq_len", not lost, found)


def _judged(name: str, is_as_it_should_be: bool, found: str) -> ShownCheck:
    return ShownCheck(name, "passed" if is_as_it_should_be else "look", found)


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
    asked: str | None  # where it differs from `value`, such as auto
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


@dataclass(frozen=True)
class RunSummary:
    """One run as report.json holds it."""

    run: str
    folder: str
    model: str | None
    facts: list[str]  # model, mode, device and start, those that are known
    report: RunReport
    verdict: Verdict
    scores: list[Score]
    rows_scored: int
    improved: list[AnsweredRow]
    worsened: list[AnsweredRow]
    history: list[LoggedStep]
    memory: list[PhaseMemory]
    times: list[PartTime]  # of its timeline
    ledger: list[LedgerLine]
    lengths: dict[str, LengthHistogram]
    checks: list[ShownCheck]
    settings: list[UsedSetting]
    command: str | None  # that repeats the run


def read_summary(folder: RunFolder) -> RunSummary:
    """Return what the folder of a run says of it."""
    report = folder.read_report()
    before = answers.read_answers(folder, "before")
    after = answers.read_answers(folder, "after")
    pairs = answers.scored_pairs(before, after)
    row_losses = read_losses(folder, "before"), read_losses(folder, "after")
    losses = loss_score(report, *row_losses)
    scores = [*([losses] if losses else []), *answer_scores(report, before, after)]
    asked = AskedRun.read(folder)
    used = used_settings(folder)
    return RunSummary(
        run=folder.name,
        folder=str(folder.path),
        model=used.get("model.name"),
        facts=_facts(report, used),
        report=report,
        verdict=verdict(folder, report, scores),
        scores=[*scores[:1], *source_losses(report, *row_losses), *scores[1:]],
        rows_scored=len(pairs),
        improved=answers.most_changed(pairs, 1),
        worsened=answers.most_changed(pairs, -1),
        history=report.history or [],
        memory=_memory(report),
        times=list(_times(report.timeline or [])),
        ledger=_ledger(report.data or {}),
        lengths=_in_order(report.lengths or {}),
        checks=list(shown_checks(report, after)),
        settings=_setting_lines(used, asked),
        command=asked.command,
    )


def _times(timeline: list[Span]) -> Iterator[PartTime]:
    """Yield the parts of a timeline by their start."""
    first = min((span.start for span in timeline), default=0.0)
    whole = max((span.end for span in timeline), default=0.0) - first
    for span in sorted(timeline, key=attrgetter("start")):
        seconds = span.end - span.start
        left, width = (100 * each / (whole or 1) for each in (span.start - first, seconds))
        if width > SHORTEST:
            yield PartTime(TIMES.get(span.name, span.name), seconds, left, width)


def source_losses(
    report: RunReport, before: list[RowLoss], after: list[RowLoss]
) -> Iterator[Score]:
    """Yield the loss of each source of the test rows, where there are several."""
    for name in logged_losses({**report.scores("before"), **report.scores("after")}, "eval"):
        rows = [[row for row in losses if row.source == name] for losses in (before, after)]
        found = loss_score(report, *rows, f"eval_{name}_loss")
        if found is not None:
            yield replace(found, name=f"{LOSS}, {name}")


def loss_score(
    report: RunReport, before: list[RowLoss], after: list[RowLoss], metric: str = "eval_loss"
) -> Score | None:
    """Return the loss of the test rows, None for a run that has none."""
    means = [report.scores(when).get(metric) for when in ("before", "after")]
    if means == [None, None]:
        return None
    rows = report.rows("test").get("samples", 0)
    estimates = []
    for mean, losses in zip(means, (before, after), strict=True):
        plain = None if mean is None else Estimate(mean, rows)
        estimates.append(loss_estimate(losses) if losses and plain else plain)
    difference = loss_difference(before, after)
    return Score(LOSS, *estimates, difference, higher_is_better=False)


def _facts(report: RunReport, used: dict[str, str]) -> list[str]:
    mode = used.get("tuning.mode")
    backend = used.get("tuning.backend")
    facts = [used.get("model.name")]
    if mode and backend:
        facts.append(f"{mode} with {backend}")
    if report.world_size:
        facts.append(f"{report.world_size} × {report.device} ({report.strategy})")
    if report.started_at:
        facts.append(f"started {report.started_at}")
    return [fact for fact in facts if fact]


def used_settings(folder: RunFolder) -> dict[str, str]:
    """Return the settings in config.yaml by dotted name, also of a run of another version."""
    path = folder.path / "config.yaml"
    if not path.exists():
        return {}
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = {}
    for name in settings():
        node = tree
        for key in name.split("."):
            node = node.get(key, MISSING) if isinstance(node, dict) else MISSING
        if node is not MISSING:
            found[name] = word(node, VALUE_LENGTH)
    return found


def _memory(report: RunReport) -> list[PhaseMemory]:
    if report.memory is None:
        return []
    predicted = report.memory.predicted
    measured = report.memory.measured
    phases = [phase for phase in PHASES if phase in predicted or phase in measured]
    return [PhaseMemory(phase, predicted.get(phase), measured.get(phase)) for phase in phases]


def _ledger(unordered: dict[str, Any]) -> list[LedgerLine]:
    """Return the counts of the ledger in run.json: what was read, used, and dropped and why."""
    splits = _in_order(unordered)
    lines = []
    for key, name in LEDGER_COUNTS.items():
        counts = {split: facts.get(key) for split, facts in splits.items()}
        lines.append(LedgerLine(name, counts))
    for group in ("dropped", "shortened"):
        reasons = [reason for facts in splits.values() for reason in facts.get(group) or {}]
        for reason in dict.fromkeys(reasons):
            counts = {
                split: (facts.get(group) or {}).get(reason, 0) for split, facts in splits.items()
            }
            lines.append(LedgerLine(f"{group}: {reason}", counts))
    for key in ("p50", "p90", "p99", "max"):
        counts = {split: (facts.get("lengths") or {}).get(key) for split, facts in splits.items()}
        lines.append(LedgerLine(f"tokens of a sample, {key}", counts))
    return lines if splits else []


def _in_order(by_split: dict[str, T]) -> dict[str, T]:
    """Return what each split has, the training rows first."""
    return {split: by_split[split] for split in SPLITS if split in by_split}


def _setting_lines(used: dict[str, str], asked: AskedRun) -> list[UsedSetting]:
    """Return every setting, those that the user chose first."""
    lines = []
    for name, value in used.items():
        wanted = asked.settings.get(name)
        if wanted is None:
            lines.append(UsedSetting(name, value, None, None, is_chosen=False))
        else:
            before = wanted.value if wanted.value != value else None
            lines.append(UsedSetting(name, value, before, wanted.origin, wanted.is_chosen))
    return sorted(lines, key=lambda line: not line.is_chosen)
