"""The scores of a run before and after training, on rows that it never trains on."""

import json
import logging
from collections.abc import Sequence

from sft_play.evaluation.evaluator import Evaluator, Question, Scores
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.training.report import Report
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


class HeldOutEvaluation:
    """Scores the test rows and keeps what it found: in run.json, and answer by answer in eval/<when>.jsonl."""

    def __init__(
        self, trainer: SftTrainer, evaluator: Evaluator, folder: RunFolder, report: Report
    ):
        self.trainer, self.evaluator, self.folder, self.report = trainer, evaluator, folder, report
        self.found: dict[str, Scores] = {}

    def score(self, when: str) -> Scores:
        """Score the model as it is now under the name `when`. Every rank must call it."""
        scores = self.found[when] = self.trainer.scores(self.evaluator)
        self.report.facts["metrics"][when] = scores.as_metrics()
        self.report.update(global_step=self.trainer.state.global_step)
        if self.report.rank == 0:
            write_text(
                self.folder.evaluation / f"{when}.jsonl",
                "".join(_records(self.evaluator.questions, scores.answers)),
            )
            rouge = (
                ""
                if scores.rouge_l is None
                else f" rougeL={scores.rouge_l:.3f} answers={len(scores.answers)}"
            )
            logger.info(
                "%s eval_loss=%.4f%s rows=%d",
                when,
                scores.eval_loss,
                rouge,
                len(self.evaluator.split),
            )
        return scores


def _records(questions: Sequence[Question], answers: Sequence[str]) -> list[str]:
    """Return a JSON line for each question that was answered; none where nothing was generated."""
    return [
        json.dumps(
            {
                "origin": question.origin,
                "prompt": question.prompt,
                "expected": question.expected,
                "answer": answer,
            },
            ensure_ascii=False,
        )
        + "\n"
        for question, answer in zip(questions, answers, strict=False)
    ]
