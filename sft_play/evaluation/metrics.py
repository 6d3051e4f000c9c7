"""Scores of answers against references: ROUGE by the `evaluate` library, and others by name.

None needs a network. BLEU and chrF are sacrebleu's, in its percent; all others are in [0, 1], but
for functions of the user's.
"""

import importlib.util
import inspect
import json
import math
import unicodedata
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sft_play.config.metrics import FUNCTION, OF_SACREBLEU, SCHEMA, key_of
from sft_play.errors import ConfigError, first_line
from sft_play.reporting.bootstrap import MIN_ROWS, Estimate, estimate, resampled

LOCAL_METRIC = Path(__file__).parent / "rouge_l"  # local, so that no network is needed
CORPUS_RESAMPLES = 200  # each scores all answers anew


class RougeL(NamedTuple):
    """ROUGE-L F-measures in [0, 1]."""

    mean: float
    of_answers: tuple[float, ...]


class Answered(NamedTuple):
    """A generated answer beside what it should say."""

    prompt: str
    answer: str
    expected: str


@dataclass(frozen=True)
class MetricScore:
    """A score of all answers, with its interval, and the score of each."""

    name: str
    estimate: Estimate
    of_answers: tuple[float, ...]


def rouge_l(
    answers: Sequence[str], references: Sequence[str], batch_rows: int | None = None
) -> RougeL:
    """Return ROUGE-L of each answer, and the mean.

    With `batch_rows` the metric gets the answers in batches of that size; the result is the same.
    """
    return RougeL(*_rouge("rougeL", answers, references, batch_rows))


def score_answers(metrics: Sequence[str], rows: Sequence[Answered]) -> tuple[MetricScore, ...]:
    """Return the scores of `train.metrics`.

    Raises: ConfigError where a function of the user's fails, or returns no number.
    """
    return tuple(_score(metric, rows) for metric in metrics)


def _score(metric: str, rows: Sequence[Answered]) -> MetricScore:
    if metric in OF_SACREBLEU:
        return _sacrebleu(metric, rows)
    answers = [row.answer for row in rows]
    references = [row.expected for row in rows]
    if metric.startswith("rouge"):
        found = _rouge(metric, answers, references)[1]
    elif metric == "exact_match":
        found = [float(_plain(row.answer) == _plain(row.expected)) for row in rows]
    elif metric == "json_valid":
        found = [float(_parsed(answer) is not None) for answer in answers]
    elif metric.startswith(SCHEMA):
        found = _fits_schema(Path(metric.removeprefix(SCHEMA)), answers)
    else:
        found = _by_function(metric, rows)
    return MetricScore(key_of(metric), estimate(found), tuple(found))


def _rouge(
    name: str, answers: Sequence[str], references: Sequence[str], batch_rows: int | None = None
) -> tuple[float, tuple[float, ...]]:
    """Return the mean of a kind of ROUGE, and that of each answer."""
    import evaluate

    # a unique id: otherwise two evaluations at the same time would share a cache file
    experiment_id = uuid.uuid4().hex
    metric = evaluate.load(
        str(LOCAL_METRIC), config_name=name, experiment_id=experiment_id, keep_in_memory=True
    )
    step = batch_rows or len(answers)
    for start in range(0, len(answers), step):
        metric.add_batch(
            predictions=list(answers[start : start + step]),
            references=list(references[start : start + step]),
        )
    computed = metric.compute()
    return float(computed[name]), tuple(computed["scores"])


def _plain(text: str) -> str:
    """Return a text without space around it, its characters composed."""
    return unicodedata.normalize("NFC", text.strip())


def _parsed(text: str) -> tuple[Any] | None:
    """Return the value of a JSON text, None where it is none; NaN is no JSON."""

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

    It is given the answer and what it should say, and the prompt where it takes three.
    """
    function = load_function(metric)
    takes_prompt = len(inspect.signature(function).parameters) >= 3
    found = []
    for row in rows:
        given = (row.answer, row.expected, row.prompt) if takes_prompt else row[1:]
        try:
            value = float(function(*given))
        except Exception as error:
            raise ConfigError(
                f"train.metrics={metric} fails: {type(error).__name__}: {first_line(error)}, "
                f"for the answer {row.answer[:80]!r}"
            ) from error
        if not math.isfinite(value):
            raise ConfigError(
                f"train.metrics={metric} says {value} for the answer {row.answer[:80]!r}"
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
    try:
        spec.loader.exec_module(module)
        return getattr(module, found["name"])
    except Exception as error:
        raise ConfigError(
            f"train.metrics={metric} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from error
