"""Held-out evaluation: the scores of a run on its test rows, before and after training."""

import json
import logging
from dataclasses import dataclass, field

from sft_play.evaluation.evaluator import Evaluator, Question, Scores
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.training.recorder import RunRecorder
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


@dataclass
class HeldOutEvaluation:
    """Scores the test rows; writes scores to run.json and answers to eval/<when>.jsonl."""

    trainer: SftTrainer
    evaluator: Evaluator
    folder: RunFolder
    recorder: RunRecorder
    scores: dict[str, Scores] = field(default_factory=dict)  # keys: "before", "after"

    def score(self, when: str) -> None:
        """Score the model as it is now; `when` is "before" or "after". Every rank must call it."""
        scores = self.trainer.score(self.evaluator)
        self.scores[when] = scores
        self.recorder.update(
            metrics={**self.recorder.report.metrics, when: scores.as_metrics()},
            global_step=self.trainer.state.global_step,
        )
        if self.recorder.rank != 0:
            return
        write_text(self.folder.evaluation / f"{when}.jsonl", self._answers_jsonl(scores))
        rouge = ""
        if scores.rouge_l is not None:
            rouge = f" rougeL={scores.rouge_l:.3f} answers={len(scores.answers)}"
        rows = len(self.evaluator.split)
        logger.info("%s eval_loss=%.4f%s rows=%d", when, scores.eval_loss, rouge, rows)

    def _answers_jsonl(self, scores: Scores) -> str:
        """Return a JSON line for each answer; an empty text where nothing was generated."""
        pairs = zip(self.evaluator.questions, scores.answers, strict=False)
        return "".join(_answer_line(question, answer) for question, answer in pairs)


def _answer_line(question: Question, answer: str) -> str:
    values = {
        "origin": question.origin,
        "prompt": question.prompt,
        "expected": question.expected,
        "answer": answer,
    }
    return json.dumps(values, ensure_ascii=False) + "\n"
