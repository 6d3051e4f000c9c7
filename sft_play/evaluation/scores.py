"""What an evaluation returns, and how its scores and answers are written. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sft_play.config.metrics import ALWAYS
from sft_play.evaluation.generate import Answer
from sft_play.evaluation.metrics import MetricScore, RougeL
from sft_play.reporting.bootstrap import estimate


@dataclass(frozen=True)
class Question:
    """A row whose answer the model generates."""

    origin: str  # file:line
    prompt: str  # as the model reads it
    plain_prompt: str  # without special tokens
    expected: str  # the answer in the row


@dataclass(frozen=True)
class RowLoss:
    """The loss of one row."""

    nats: float  # of all its labelled tokens
    tokens: int  # that are labelled


@dataclass(frozen=True)
class GenerationScores:
    """The generated answers to the first rows of the set, in order, and their ROUGE-L."""

    rouge_l: RougeL
    answers: tuple[Answer, ...]
    max_new_tokens: int
    seconds: float
    others: tuple[MetricScore, ...] = ()  # of train.metrics

    @cached_property
    def scores(self) -> tuple[MetricScore, ...]:
        """ROUGE-L and the others, with intervals."""
        of_answers = self.rouge_l.of_answers
        rouge_l = MetricScore(ALWAYS, estimate(of_answers), of_answers)
        return (rouge_l, *(score for score in self.others if score.name != ALWAYS))

    @property
    def cut_answers(self) -> int:
        """How many answers reached the limit before a stop token."""
        return sum(answer.was_cut for answer in self.answers)

    def as_metrics(self) -> dict[str, float]:
        """Return the scalars under the names of run.json."""
        values: dict[str, float] = {}
        for score in self.scores:
            found = score.estimate
            values[score.name] = found.mean
            if found.low is not None and found.high is not None:
                values |= {f"{score.name}_low": found.low, f"{score.name}_high": found.high}
        return {
            **values,
            "answers": len(self.answers),
            "cut_answers": self.cut_answers,
            "max_new_tokens": self.max_new_tokens,
            "generation_seconds": self.seconds,
        }

    def as_text(self) -> str:
        """Return the scores as they stand in the log."""
        scores = " ".join(f"{score.name}={score.estimate.words(3)}" for score in self.scores)
        cut = f"cut={self.cut_answers} at {self.max_new_tokens} tokens"
        return f"{scores} answers={len(self.answers)} {cut}"


@dataclass(frozen=True)
class Scores:
    """The result of one evaluation."""

    eval_loss: float  # nats per labelled token
    loss_seconds: float
    generation: GenerationScores | None = None  # None where no answers were generated
    row_losses: tuple[RowLoss, ...] = ()  # of all rows of the set, in order

    def as_metrics(self) -> dict[str, float]:
        """Return the scalars under the names of run.json."""
        metrics = {"eval_loss": self.eval_loss, "eval_loss_seconds": self.loss_seconds}
        if self.generation is not None:
            metrics |= self.generation.as_metrics()
        return metrics

    def as_test_metrics(self) -> dict[str, float]:
        """Return the scores under the names that trackers show as test/loss and test/rougeL."""
        metrics = {"test_loss": self.eval_loss}
        if self.generation is not None:
            for score in self.generation.scores:
                metrics[f"test_{score.name}"] = score.estimate.mean
        return metrics

    def as_text(self) -> str:
        """Return the scores as they stand in the log."""
        loss = f"eval_loss={self.eval_loss:.4f}"
        return f"{loss} {self.generation.as_text()}" if self.generation else loss


def answers_jsonl(questions: Sequence[Question], scores: Scores) -> str:
    """Return a JSON line for each answer; an empty text where nothing was generated."""
    if scores.generation is None:
        return ""
    answers = scores.generation.answers
    lines = []
    for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        found = {
            score.name: round(score.of_answers[index], 4) for score in scores.generation.scores
        }
        values = {
            "origin": question.origin,
            "prompt": question.prompt,
            "expected": question.expected,
            "answer": answer.text,
            **found,
            "was_cut": answer.was_cut,
        }
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    return "".join(lines)


def losses_jsonl(origins: Sequence[str], scores: Scores) -> str:
    """Return a JSON line for the loss of each row; `origins` are file:line of the rows."""
    lines = []
    for origin, row in zip(origins, scores.row_losses, strict=True):
        values = {"origin": origin, "nats": round(row.nats, 6), "tokens": row.tokens}
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    return "".join(lines)
