"""ROUGE-L of answers against references, by the `evaluate` library and our local metric."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LOCAL_METRIC = Path(__file__).parent / "rouge_l"  # local, so that no network is needed


class RougeL(NamedTuple):
    """ROUGE-L F-measures in [0, 1]."""

    mean: float
    of_answers: tuple[float, ...]


def rouge_l(
    answers: Sequence[str], references: Sequence[str], batch_rows: int | None = None
) -> RougeL:
    """Return ROUGE-L of each answer, and the mean.

    With `batch_rows` the metric gets the answers in batches of that size; the result is the same.
    """
    import evaluate

    # a unique id: otherwise two evaluations at the same time would share a cache file
    experiment_id = uuid.uuid4().hex
    metric = evaluate.load(str(LOCAL_METRIC), experiment_id=experiment_id, keep_in_memory=True)
    step = batch_rows or len(answers)
    for start in range(0, len(answers), step):
        metric.add_batch(
            predictions=list(answers[start : start + step]),
            references=list(references[start : start + step]),
        )
    computed = metric.compute()
    return RougeL(float(computed["rougeL"]), tuple(computed["scores"]))
