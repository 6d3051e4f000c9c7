"""Answers against references.

ROUGE-L through the `evaluate` library and a metric of our own, without a network.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path

LOCAL_METRIC = Path(__file__).parent / "rouge_l"


def rouge_l(
    answers: Sequence[str], references: Sequence[str], batch_rows: int | None = None
) -> float:
    """Return the mean ROUGE-L F-measure, in [0, 1].

    `batch_rows` hands the answers over in batches, with an equal result.
    """
    import evaluate

    # an id of its own: two evaluations at once would share a cache file otherwise
    metric = evaluate.load(str(LOCAL_METRIC), experiment_id=uuid.uuid4().hex, keep_in_memory=True)
    step = batch_rows or len(answers)
    for start in range(0, len(answers), step):
        metric.add_batch(
            predictions=list(answers[start : start + step]),
            references=list(references[start : start + step]),
        )
    return float(metric.compute()["rougeL"])
