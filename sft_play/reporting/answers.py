"""What the test rows scored before and after training, with the answers. Reads eval/; no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from sft_play.data.rows import make_visible
from sft_play.reporting import bootstrap
from sft_play.reporting.bootstrap import Estimate, recorded_scores
from sft_play.reporting.verdict import Score
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport, logged_losses

ROWS_SHOWN = 8  # of the most improved, and of the most worsened
IMAGES_SHOWN = 4  # of a row
TEXT_LENGTH = 600  # characters of a text that are shown
NO_SCORES = "origin prompt expected answer was_cut images".split()  # of a line of eval/*.jsonl
LEAST_CHANGE = 0.005  # of ROUGE-L that counts as a change, half of the last digit shown

LOSS = "loss"
OF_SOURCE = f"{LOSS}, "  # before the name of a source
ROUGE_L = "ROUGE-L"
ROUNDING = 1e-4  # of the scores of single answers in eval/*.jsonl

Row = tuple[str, str | int]  # what identifies a row, also in another run


@dataclass(frozen=True)
class AnswerLine:
    """A line of eval/before.jsonl or eval/after.jsonl; None is what its version did not write."""

    origin: str  # file:line of the row
    prompt: str
    expected: str
    answer: str
    scores: Mapping[str, float] = field(default_factory=dict)  # by metric, as far as it has one
    was_cut: bool | None = None  # by train.generation_max_new_tokens
    images: Sequence[str] = ()  # of the prompt: paths

    @property
    def rouge_l(self) -> float | None:
        """ROUGE-L, in [0, 1]."""
        return self.scores.get("rougeL")

    @property
    def row(self) -> Row:
        """What tells the row from others in another run, whatever the chat template is."""
        return self.origin, self.expected


@dataclass(frozen=True)
class AnsweredRow:
    """A test row with both of its answers, shortened to be shown."""

    origin: str
    prompt: str
    expected: str
    before: str
    after: str
    rouge_before: float
    rouge_after: float
    was_cut: bool
    images: Sequence[str]  # of the prompt, the last ones: paths

    @property
    def change(self) -> float:
        return self.rouge_after - self.rouge_before


@dataclass(frozen=True)
class RowLossLine:
    """A line of eval/before.losses.jsonl or eval/after.losses.jsonl."""

    origin: str  # file:line of the row
    nats: float  # of all its tokens with loss
    tokens: int  # that have a loss
    source: str | None = None  # its name, if there are several


@dataclass(frozen=True)
class Measured:
    """A score of the test rows at one time."""

    recorded: Estimate | None  # in run.json
    is_mean: bool  # of the rows, as BLEU of a corpus is not
    rows: Sequence[Row]  # those that have a score
    values: Sequence[float]  # by row
    weights: Sequence[float]  # what each row counts for in the mean

    @property
    def estimate(self) -> Estimate | None:
        """The score with its interval: over its rows, or as run.json has it."""
        return bootstrap.estimate(self.values, self.weights) if self.is_mean else self.recorded

    def on(self, rows: Sequence[Row]) -> "Measured":
        """Return the score of some of the rows, which count equally."""
        values = dict(zip(self.rows, self.values, strict=True))
        found = [values[row] for row in rows]
        return replace(self, rows=rows, values=found, weights=[1.0] * len(rows))


@dataclass(frozen=True)
class Evaluation:
    """What the test rows scored before or after training."""

    answers: Sequence[AnswerLine]
    scores: Mapping[str, Measured]  # by title, also those that only rows have

    @classmethod
    def read(cls, folder: RunFolder, report: RunReport, when: str) -> Self:
        """Return what eval/ and run.json have of `before` or `after`; nothing if not evaluated."""
        metrics = report.scores(when)
        samples = metrics.get("rows", report.rows("test").get("samples", 0))
        losses = read_row_losses(folder, when)
        answers = read_answers(folder, when)
        scores = {}
        if "eval_loss" in metrics:
            scores[LOSS] = _measured_loss(Estimate(metrics["eval_loss"], samples), losses)
        for name, mean in logged_losses(metrics).items():
            of_source = [row for row in losses if row.source == name]
            scores[OF_SOURCE + name] = _measured_loss(Estimate(mean, samples), of_source)
        recorded = recorded_scores(metrics, len(answers))
        for name in recorded | {name: None for each in answers for name in each.scores}:
            scores[title_of(name)] = _measured_answers(name, recorded.get(name), answers)
        return cls(answers, scores)

    @property
    def recorded(self) -> dict[str, Measured]:
        """The scores that run.json has."""
        return {title: score for title, score in self.scores.items() if score.recorded}


def read_answers(folder: RunFolder, when: str) -> list[AnswerLine]:
    """Return the answers in eval/ of `before` or `after` training; none if there are none."""
    answers = []
    for line in _lines(folder.evaluation / f"{when}.jsonl"):
        known = {name: line.pop(name) for name in NO_SCORES if name in line}
        answers.append(AnswerLine(**known, scores=line))
    return answers


def read_row_losses(folder: RunFolder, when: str) -> list[RowLossLine]:
    """Return the losses of the test rows `before` or `after` training; none if not evaluated."""
    return [RowLossLine(**line) for line in _lines(folder.evaluation / f"{when}.losses.jsonl")]


def is_loss(title: str) -> bool:
    """Return whether a score is the loss of the test rows, or of those of a source."""
    return title == LOSS or title.startswith(OF_SOURCE)


def title_of(name: str) -> str:
    """Return what a score is called on pages: ROUGE-L, or the name of the metric."""
    return ROUGE_L if name == "rougeL" else name


def changed(title: str, early: Measured | None, late: Measured | None) -> Score:
    """Return how a score changed; its difference is known if both are means of the same rows."""
    before, after = (measured and measured.estimate for measured in (early, late))
    difference = None
    if early and late and early.is_mean and late.is_mean and early.rows == late.rows:
        difference = bootstrap.paired_difference(early.values, late.values, early.weights)
    return Score(title, before, after, difference, higher_is_better=not is_loss(title))


def most_changed(pairs: Sequence[tuple[AnswerLine, AnswerLine]], sign: int) -> list[AnsweredRow]:
    """Return the rows whose score rose most (`sign` 1) or fell most (-1), largest change first."""
    changes = [(sign * (late.rouge_l - early.rouge_l), early, late) for early, late in pairs]
    found = [change for change in changes if change[0] >= LEAST_CHANGE]
    found.sort(key=lambda change: -change[0])
    return [_shown(early, late) for _, early, late in found[:ROWS_SHOWN]]


def _shown(before: AnswerLine, after: AnswerLine) -> AnsweredRow:
    return AnsweredRow(
        origin=make_visible(before.origin),
        prompt=_shorten(before.prompt, from_end=True),  # where the question is
        expected=_shorten(before.expected),
        before=_shorten(before.answer),
        after=_shorten(after.answer),
        rouge_before=before.rouge_l,
        rouge_after=after.rouge_l,
        was_cut=bool(after.was_cut),
        images=after.images[-IMAGES_SHOWN:],
    )


def _shorten(text: str, from_end: bool = False) -> str:
    """Return a text that is not too long to be shown: its start, or its end."""
    left_out = len(text) - TEXT_LENGTH
    if left_out <= 0:
        return make_visible(text)
    if from_end:
        return f"({left_out:,} characters before) … {make_visible(text[-TEXT_LENGTH:])}"
    return f"{make_visible(text[:TEXT_LENGTH])} … ({left_out:,} characters more)"


def _lines(path: Path) -> list[Json]:
    """Return the objects of a file of JSON lines; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _measured_loss(recorded: Estimate, losses: Sequence[RowLossLine]) -> Measured:
    """Return a loss per token, over the rows that have tokens with loss."""
    scored = [row for row in losses if row.tokens]
    rows = [(row.origin, row.tokens) for row in scored]
    values = [row.nats / row.tokens for row in scored]
    return Measured(recorded, bool(scored), rows, values, [row.tokens for row in scored])


def _measured_answers(
    name: str, recorded: Estimate | None, answers: Sequence[AnswerLine]
) -> Measured:
    scored = [answer for answer in answers if name in answer.scores]
    rows = [answer.row for answer in scored]
    values = [answer.scores[name] for answer in scored]
    weights = [1.0] * len(scored)
    if recorded is None:
        return Measured(None, True, rows, values, weights)
    is_mean = 0 < len(answers) == len(values)
    if is_mean and name != "rougeL":  # which need not be exact in folders written by hand
        is_mean = math.isclose(math.fsum(values) / len(values), recorded.mean, abs_tol=ROUNDING)
    return Measured(recorded, is_mean, rows, values, weights)
