"""The answers to the test rows, before and after training. Reads eval/; loads no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sft_play.data.rows import make_visible
from sft_play.runs.folder import RunFolder

ROWS_SHOWN = 8  # of the most improved, and of the most worsened
TEXT_LENGTH = 600  # characters of a text that are shown
TEXTS = ("origin", "prompt", "expected", "answer", "was_cut")  # keys of a line, but for scores
LEAST_CHANGE = 0.005  # of ROUGE-L that counts as a change, half of the last digit shown


@dataclass(frozen=True)
class Answer:
    """A line of eval/before.jsonl or eval/after.jsonl; None is what its version did not write."""

    origin: str  # file:line of the row
    prompt: str
    expected: str
    answer: str
    scores: Mapping[str, float] = field(default_factory=dict)  # by metric, as far as it has one
    was_cut: bool | None = None  # by train.generation_max_new_tokens

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


def most_improved(pairs: Sequence[tuple[Answer, Answer]]) -> list[AnsweredRow]:
    """Return the rows whose score rose most, the largest rise first."""
    risen = [pair for pair in pairs if change_of(*pair) >= LEAST_CHANGE]
    risen.sort(key=lambda pair: -change_of(*pair))
    return [_shown(*pair) for pair in risen[:ROWS_SHOWN]]


def most_worsened(pairs: Sequence[tuple[Answer, Answer]]) -> list[AnsweredRow]:
    """Return the rows whose score fell most, the largest fall first."""
    fallen = [pair for pair in pairs if change_of(*pair) <= -LEAST_CHANGE]
    fallen.sort(key=lambda pair: change_of(*pair))
    return [_shown(*pair) for pair in fallen[:ROWS_SHOWN]]


def change_of(before: Answer, after: Answer) -> float:
    """Return how much a row's score rose; both answers have one."""
    return after.rouge_l - before.rouge_l


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
    )
