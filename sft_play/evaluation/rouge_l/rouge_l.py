"""ROUGE-L as a local module of the `evaluate` library, so that scoring needs no network.

It imports nothing from sft_play, because `evaluate` copies this file.
"""

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

_DESCRIPTION = (
    "Mean F-measure of the longest common subsequence of words between answers and references "
    "(Lin, 2004)."
)


class RougeL(evaluate.Metric):
    """Scores in [0, 1]. Words are lower-cased runs of letters and digits, as in rouge-score."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="Chin-Yew Lin. 2004. ROUGE: A Package for Automatic Evaluation of Summaries.",
            inputs_description="predictions: answers; references: what they should say.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorer = RougeScorer(["rougeL"], use_stemmer=False)
        scores = [
            scorer.score(reference, answer)["rougeL"].fmeasure
            for answer, reference in zip(predictions, references, strict=True)
        ]
        return {"rougeL": sum(scores) / len(scores)}
