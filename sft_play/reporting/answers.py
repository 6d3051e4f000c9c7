"""Answers to the test rows and losses of them, before and after training, with their scores.

Reads eval/; loads no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sft_play.data.rows import make_visible
from sft_play.reporting import bootstrap
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.verdict import Score
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RecordedScore, RunReport, recorded_scores

ROWS_SHOWN = 8  # of the most improved, and of the most worsened
IMAGES_SHOWN = 4  # of a row
TEXT_LENGTH = 600  # characters of a text that are shown
TEXTS = ("origin", "prompt", "expected", "answer", "was_cut")  # keys of a line, but for scores
LEAST_CHANGE = 0.005  # of ROUGE-L that counts as a change, half of the last digit shown

ROUGE_L = "ROUGE-L"
TITLES = {"rougeL": ROUGE_L}
ROUNDING = 1e-4  # of the scores of single answers in eval/*.jsonl


@dataclass(frozen=True)
class Answer:
    """A line of eval/before.jsonl or eval/after.jsonl; None is what its version did not write."""

    origin: str  # file:line of the row
    prompt: str
    expected: str
    answer: str
    scores: Mapping[str, float] = field(default_factory=dict)  # by metric, as far as it has one
    was_cut: bool | None = None  # by train.generation_max_new_tokens
    images: tuple[str, ...] = ()  # of the prompt: paths

    @property
    def rouge_l(self) -> float | None:
        """ROUGE-L, in [0, 1]."""
        return self.scores.get("rougeL")

    @property
    def row(self) -> tuple[str, str]:
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
    images: tuple[str, ...]  # of the prompt, the last ones: paths

    @property
    def change(self) -> float:
        return self.rouge_after - self.rouge_before


def read_answers(folder: RunFolder, when: str) -> list[Answer]:
    """Return the answers of eval/<when>.jsonl in order; none where there is no such file."""
    path = folder.evaluation / f"{when}.jsonl"
    if not path.exists():
        return []
    return [_answer(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def same_rows(before: Sequence[Answer], after: Sequence[Answer]) -> bool:
    """Return whether both lists answer the same rows in the same order."""
    return [answer.row for answer in before] == [answer.row for answer in after]


def scored_pairs(before: Sequence[Answer], after: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Return the rows that are scored in both; none where the two lists differ in their rows."""
    if not same_rows(before, after):
        return []
    pairs = zip(before, after, strict=True)
    return [
        (early, late)
        for early, late in pairs
        if early.rouge_l is not None and late.rouge_l is not None
    ]


def most_changed(pairs: Sequence[tuple[Answer, Answer]], sign: int) -> list[AnsweredRow]:
    """Return the rows whose score rose most (`sign` 1) or fell most (-1), largest change first."""
    changes = [(sign * (late.rouge_l - early.rouge_l), early, late) for early, late in pairs]
    found = [change for change in changes if change[0] >= LEAST_CHANGE]
    found.sort(key=lambda change: -change[0])
    return [_shown(early, late) for _, early, late in found[:ROWS_SHOWN]]


def _shown(before: Answer, after: Answer) -> AnsweredRow:
    return AnsweredRow(
        origin=make_visible(before.origin),
        prompt=_shorten_start(before.prompt),
        expected=_shorten(before.expected),
        before=_shorten(before.answer),
        after=_shorten(after.answer),
        rouge_before=before.rouge_l,
        rouge_after=after.rouge_l,
        was_cut=bool(after.was_cut),
        images=after.images[-IMAGES_SHOWN:],
    )


def _shorten(text: str) -> str:
    if len(text) <= TEXT_LENGTH:
        return make_visible(text)
    return f"{make_visible(text[:TEXT_LENGTH])} … ({len(text) - TEXT_LENGTH:,} characters more)"


def _shorten_start(text: str) -> str:
    """Return the end of a prompt, where the question is."""
    if len(text) <= TEXT_LENGTH:
        return make_visible(text)
    return f"({len(text) - TEXT_LENGTH:,} characters before) … {make_visible(text[-TEXT_LENGTH:])}"


def _answer(line: str) -> Answer:
    values = json.loads(line)
    return Answer(
        origin=values["origin"],
        prompt=values["prompt"],
        expected=values["expected"],
        answer=values["answer"],
        scores={
            name: value
            for name, value in values.items()
            if name not in TEXTS and isinstance(value, int | float)
        },
        was_cut=values.get("was_cut"),
        images=tuple(values.get("images", ())),
    )


@dataclass(frozen=True)
class RowLoss:
    """A line of eval/before.losses.jsonl or eval/after.losses.jsonl."""

    origin: str  # file:line of the row
    nats: float  # of all its tokens with loss
    tokens: int  # that have a loss
    source: str | None = None  # its name, where there are several


def read_losses(folder: RunFolder, when: str) -> list[RowLoss]:
    """Return eval/<when>.losses.jsonl in order; nothing where there is no such file."""
    path = folder.evaluation / f"{when}.losses.jsonl"
    if not path.exists():
        return []
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [RowLoss(**row) for row in values]


def loss_estimate(rows: Sequence[RowLoss]) -> Estimate:
    """Return the loss per token of rows, with its interval over the rows."""
    scored = [row for row in rows if row.tokens]
    losses = [row.nats / row.tokens for row in scored]
    return bootstrap.estimate(losses, [row.tokens for row in scored])


def loss_difference(before: Sequence[RowLoss], after: Sequence[RowLoss]) -> Estimate | None:
    """Return how much the loss per token rose, None where the rows are not the same."""
    rows = [(row.origin, row.tokens) for row in before]
    if not rows or rows != [(row.origin, row.tokens) for row in after]:
        return None
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].tokens]
    early = [row.nats / row.tokens for row, _ in pairs]
    late = [row.nats / row.tokens for _, row in pairs]
    return bootstrap.paired_difference(early, late, [row.tokens for row, _ in pairs])


def title_of(name: str) -> str:
    """Return what a score is called on pages: ROUGE-L, or the name of the metric."""
    return TITLES.get(name, name)


def answer_scores(report: RunReport, before: list[Answer], after: list[Answer]) -> list[Score]:
    """Return every score of the answers that run.json has, with intervals where there are some."""
    early = {score.name: score for score in recorded_scores(report.scores("before"))}
    late = {score.name: score for score in recorded_scores(report.scores("after"))}
    found = []
    for name in dict.fromkeys([*late, *early]):
        first = estimate_of(early.get(name), before)
        second = estimate_of(late.get(name), after)
        difference = None
        if _is_mean(late.get(name), after) and _is_mean(early.get(name), before):
            difference = _difference(name, before, after)
        found.append(Score(title_of(name), first, second, difference, higher_is_better=True))
    return found


def estimate_of(score: RecordedScore | None, answers: Sequence[Answer]) -> Estimate | None:
    """Return a score with its interval: over its rows, or as run.json has it."""
    if score is None:
        return None
    if _is_mean(score, answers):
        return bootstrap.estimate(of_rows(score.name, answers))
    return Estimate(score.mean, len(answers), score.low, score.high)


def of_rows(name: str, answers: Sequence[Answer]) -> list[float]:
    """Return a score of each answer that has it."""
    return [answer.scores[name] for answer in answers if name in answer.scores]


def is_mean_of_rows(report: RunReport, name: str, answers: Sequence[Answer]) -> bool:
    """Return whether a score after training is the mean over its answers."""
    scores = recorded_scores(report.scores("after"))
    found = next((score for score in scores if score.name == name), None)
    return found is None or _is_mean(found, answers)


def _is_mean(score: RecordedScore | None, answers: Sequence[Answer]) -> bool:
    """Return whether a score is the mean over its answers, as BLEU of a corpus is not."""
    if score is None or not answers:
        return False
    values = of_rows(score.name, answers)
    if len(values) < len(answers):
        return False
    # ROUGE-L of folders that were written by hand or by other versions need not be exact
    is_rouge_l = score.name == "rougeL"
    mean = math.fsum(values) / len(values)
    return is_rouge_l or math.isclose(mean, score.mean, abs_tol=ROUNDING)


def _difference(name: str, before: list[Answer], after: list[Answer]) -> Estimate | None:
    """Return after - before over the rows of both, None where the rows differ."""
    if not same_rows(before, after):
        return None
    return bootstrap.paired_difference(of_rows(name, before), of_rows(name, after))
