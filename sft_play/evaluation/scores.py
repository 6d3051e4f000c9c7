"""What an evaluation returns, and how its scores and answers are written. Pure."""

import contextlib
import importlib.util
import inspect
import json
import math
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.config.metrics import FUNCTION, OF_SACREBLEU, SCHEMA, score_name
from sft_play.data.store import Split
from sft_play.errors import ConfigError, first_line
from sft_play.evaluation.generate import GeneratedAnswer
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate, estimate, resampled
from sft_play.runs.files import json_line

CORPUS_RESAMPLES = 200  # each scores all answers again


class Answered(NamedTuple):
    """A generated answer, and what it should say."""

    prompt: str
    answer: str
    expected: str


@dataclass(frozen=True)
class MetricScore:
    """A score of all answers, with its interval, and the score of each."""

    name: str
    estimate: Estimate
    of_answers: tuple[float, ...]


def score_answers(
    metrics: Sequence[str], rows: Sequence[Answered], batch_rows: int | None = None
) -> tuple[MetricScore, ...]:
    """Return the scores of metrics by their names in `train.metrics`.

    ROUGE gets `batch_rows` answers at a time; None: all.

    Raises: ConfigError if a function of the user's fails, or returns no number.
    """
    return tuple(_score(metric, rows, batch_rows) for metric in metrics)


def _score(metric: str, rows: Sequence[Answered], batch_rows: int | None) -> MetricScore:
    if metric in OF_SACREBLEU:
        return _sacrebleu(metric, rows)
    answers = [row.answer for row in rows]
    if metric.startswith("rouge"):
        return rouge(metric, answers, [row.expected for row in rows], batch_rows)
    if metric == "exact_match":
        found = [float(_plain(row.answer) == _plain(row.expected)) for row in rows]
    elif metric == "json_valid":
        found = [float(_parsed(answer) is not None) for answer in answers]
    elif metric.startswith(SCHEMA):
        found = _fits_schema(Path(metric.removeprefix(SCHEMA)), answers)
    else:
        found = _by_function(metric, rows)
    return MetricScore(score_name(metric), estimate(found), tuple(found))


def rouge(
    kind: str, answers: Sequence[str], references: Sequence[str], batch_rows: int | None = None
) -> MetricScore:
    """Return the F-measures in [0, 1] of common words, pairs of words or subsequences.

    rouge1, rouge2 or rougeL (Lin, 2004: ROUGE, a package for automatic evaluation of summaries).
    With `batch_rows` the metric gets the answers in batches of that size; the result is the same.
    """
    from sft_play.evaluation.rouge import Rouge  # imports evaluate, which takes seconds

    metric = Rouge(config_name=kind, experiment_id=uuid.uuid4().hex, keep_in_memory=True)
    for start in range(0, len(answers), batch_rows or len(answers)):
        batch = slice(start, start + (batch_rows or len(answers)))
        metric.add_batch(predictions=list(answers[batch]), references=list(references[batch]))
    found = metric.compute()["scores"]
    return MetricScore(kind, estimate(found), tuple(found))


def _plain(text: str) -> str:
    """Return a text without space around it, its characters composed."""
    return unicodedata.normalize("NFC", text.strip())


def _parsed(text: str) -> tuple[Any] | None:
    """Return the value of a JSON text, None if it is none; NaN is no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return (json.loads(text, parse_constant=refuse),)
    except (ValueError, RecursionError):
        return None


def _fits_schema(path: Path, answers: Sequence[str]) -> list[float]:
    from jsonschema.validators import validator_for

    schema = json.loads(path.read_text(encoding="utf-8"))
    validator = validator_for(schema)(schema)
    parsed = [_parsed(answer) for answer in answers]
    return [float(value is not None and validator.is_valid(value[0])) for value in parsed]


def _sacrebleu(name: str, rows: Sequence[Answered]) -> MetricScore:
    """Return a score of the whole corpus, and that of each answer by itself."""
    from sacrebleu.metrics import BLEU, CHRF

    metric = BLEU() if name == "bleu" else CHRF()
    of_one = BLEU(effective_order=True) if name == "bleu" else metric

    def of_corpus(chosen: Sequence[int]) -> float:
        drawn = [rows[index] for index in chosen]
        expected = [row.expected for row in drawn]
        return metric.corpus_score([row.answer for row in drawn], [expected]).score

    every = range(len(rows))
    whole = Estimate(of_corpus(every), len(rows))
    if len(rows) >= MIN_ROWS:
        whole = resampled(whole.mean, len(rows), of_corpus, CORPUS_RESAMPLES)
    found = [of_one.sentence_score(row.answer, [row.expected]).score for row in rows]
    return MetricScore(name, whole, tuple(found))


def _by_function(metric: str, rows: Sequence[Answered]) -> list[float]:
    """Return what the user's function says of each answer.

    It is given the answer and what it should say, and the prompt if it takes three.
    """
    function = load_function(metric)
    takes_prompt = len(inspect.signature(function).parameters) >= 3
    found = []
    for row in rows:
        given = [row.answer, row.expected]
        if takes_prompt:
            given.append(row.prompt)
        answer = f"the answer {row.answer[:80]!r}"
        with _as_config_error(f"train.metrics={metric} fails for {answer}"):
            value = float(function(*given))
        if not math.isfinite(value):
            raise ConfigError(
                f"train.metrics={metric} returned {value} for {answer}; return a finite number"
            )
        found.append(value)
    return found


def load_function(metric: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:NAME` names. Raises ConfigError."""
    found = FUNCTION.fullmatch(metric)
    assert found, "the config takes no other metric"
    path = Path(found["file"])
    spec = importlib.util.spec_from_file_location(f"metric_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "the config checks that it is Python"
    module = importlib.util.module_from_spec(spec)
    with _as_config_error(f"train.metrics={metric} cannot be loaded"):
        spec.loader.exec_module(module)
        return getattr(module, found["name"])


@contextlib.contextmanager
def _as_config_error(what: str) -> Iterator[None]:
    """Raise ConfigError for whatever the user's code raises."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {first_line(error)}") from error


@dataclass(frozen=True)
class Question:
    """A row whose answer the model generates."""

    origin: str  # file:line
    prompt: str  # as the model reads it
    plain_prompt: str  # without special tokens
    expected: str  # the answer in the row
    images: tuple[str, ...] = ()  # by their paths


@dataclass(frozen=True)
class RowLoss:
    """The loss of one row."""

    nats: float  # of all its labeled tokens
    tokens: int  # that are labeled


@dataclass(frozen=True)
class GenerationScores:
    """The generated answers to the first rows of the set, in order, and their scores."""

    scores: tuple[MetricScore, ...]  # ROUGE-L, and those of train.metrics
    answers: tuple[GeneratedAnswer, ...]
    max_new_tokens: int
    seconds: float

    @property
    def cut_answers(self) -> int:
        """How many answers reached the limit before a stop token."""
        return sum(answer.was_cut for answer in self.answers)

    def as_metrics(self) -> dict[str, float]:
        """Return the scalars under the names of run.json."""
        values: dict[str, float] = {}
        for score in self.scores:
            values |= score.estimate.values(score.name)
        return {
            **values,
            "answers": len(self.answers),
            "cut_answers": self.cut_answers,
            "max_new_tokens": self.max_new_tokens,
            "generation_seconds": self.seconds,
        }

    def as_text(self) -> str:
        """Return the scores as they stand in the log."""
        scores = " ".join(f"{score.name}={score.estimate}" for score in self.scores)
        cut = f"cut={self.cut_answers} at {self.max_new_tokens} tokens"
        return f"{scores} answers={len(self.answers)} {cut}"


@dataclass(frozen=True)
class Scores:
    """The result of one evaluation."""

    eval_loss: float  # nats per labeled token
    loss_seconds: float
    generation: GenerationScores | None = None  # None if no answers were generated
    row_losses: tuple[RowLoss, ...] = ()  # of all rows of the set, in order
    source_losses: Mapping[str, float] = field(default_factory=dict)  # by name; {} if it is one

    def losses_as(self, rows: str) -> dict[str, float]:
        """Return the loss, and that of each source, under the names that trackers have for `rows`.

        Such as eval_loss and eval_maths_loss, which trackers show as eval/maths_loss.
        """
        of_sources = {f"{rows}_{name}_loss": loss for name, loss in self.source_losses.items()}
        return {f"{rows}_loss": self.eval_loss, **of_sources}

    def as_metrics(self) -> dict[str, float]:
        """Return the scalars under the names of run.json."""
        metrics = {**self.losses_as("eval"), "eval_loss_seconds": self.loss_seconds}
        if self.generation is not None:
            metrics |= self.generation.as_metrics()
        return metrics

    def as_test_metrics(self) -> dict[str, float]:
        """Return the scores under the names that trackers show as test/loss and test/rougeL."""
        metrics = self.losses_as("test")
        if self.generation is not None:
            for score in self.generation.scores:
                metrics[f"test_{score.name}"] = score.estimate.mean
        return metrics

    def as_text(self) -> str:
        """Return the scores as they stand in the log."""
        loss = " ".join(f"{name}={loss:.4f}" for name, loss in self.losses_as("eval").items())
        return f"{loss} {self.generation.as_text()}" if self.generation else loss


def answers_jsonl(questions: Sequence[Question], scores: Scores) -> str:
    """Return a JSON line for each answer; an empty text if nothing was generated."""
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
        if question.images:
            values["images"] = question.images
        lines.append(json_line(values))
    return "".join(lines)


def losses_jsonl(split: Split, scores: Scores) -> str:
    """Return a JSON line for the loss of each row, with its source if there are several."""
    lines = []
    for index, row in enumerate(scores.row_losses):
        values = {"origin": split.origin(index), "nats": round(row.nats, 6), "tokens": row.tokens}
        source = split.source(index)
        lines.append(json_line({**values, "source": source} if source else values))
    return "".join(lines)
