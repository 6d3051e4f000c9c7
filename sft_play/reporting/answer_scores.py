"""Scores of the answers before and after training, or of two runs, with intervals. No torch."""

import math
from collections.abc import Sequence

from sft_play.reporting import bootstrap
from sft_play.reporting.answers import Answer, same_rows
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.verdict import Score
from sft_play.runs.report import RecordedScore, RunReport, recorded_scores

ROUGE_L = "ROUGE-L"
TITLES = {"rougeL": ROUGE_L}
ROUNDING = 1e-4  # of the scores of single answers in eval/*.jsonl


def title_of(name: str) -> str:
    """Return what a score is called on pages: ROUGE-L, or the name of the metric."""
    return TITLES.get(name, name)


def answer_scores(report: RunReport, before: list[Answer], after: list[Answer]) -> list[Score]:
    """Return every score of the answers that run.json has, with intervals where there are some."""
    metrics = report.metrics or {}
    early = {score.name: score for score in recorded_scores(metrics.get("before", {}))}
    late = {score.name: score for score in recorded_scores(metrics.get("after", {}))}
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
    scores = recorded_scores((report.metrics or {}).get("after", {}))
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
