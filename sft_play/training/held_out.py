"""Held-out evaluation: the scores of a run on its test rows, before and after training."""

import logging
from dataclasses import dataclass, field

from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.scores import Scores, answers_jsonl, losses_jsonl
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.training.recorder import RunRecorder
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


@dataclass
class HeldOutEvaluation:
    """Scores the test rows; writes scores to run.json, and rows to eval/.

    Answers go to <when>.jsonl, the loss of each row to <when>.losses.jsonl.
    """

    trainer: SftTrainer
    evaluator: Evaluator
    folder: RunFolder
    recorder: RunRecorder
    scores: dict[str, Scores] = field(default_factory=dict)  # keys: "before", "after"

    def last_scores(self) -> dict[str, float]:
        """Return the scores after training by TensorBoard's names; {} without them."""
        after = self.scores.get("after")
        metrics = after.as_test_metrics() if after else {}
        return {name.replace("_", "/", 1): value for name, value in metrics.items()}

    def score(self, when: str) -> None:
        """Score the model as it is now; `when` is "before" or "after". Every rank must call it."""
        scores = self.trainer.score(self.evaluator, "test")
        self.scores[when] = scores
        self.recorder.update(
            metrics={**self.recorder.report.metrics, when: scores.as_metrics()},
            global_step=self.trainer.state.global_step,
        )
        self.trainer.log(scores.as_test_metrics())
        if self.recorder.rank != 0:
            return
        answers = answers_jsonl(self.evaluator.questions, scores)
        write_text(self.folder.evaluation / f"{when}.jsonl", answers)
        split = self.evaluator.split
        origins = [split.origin(index) for index in range(len(split))]
        losses = losses_jsonl(origins, scores)
        write_text(self.folder.evaluation / f"{when}.losses.jsonl", losses)
        logger.info("%s %s rows=%d", when, scores.as_text(), len(split))
