"""What others see of a run while it goes on: metrics.jsonl, trackers, and the load of its GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from transformers import TrainerCallback

from sft_play.training.context import RunContext
from sft_play.training.gpu_sampler import GpuSampler
from sft_play.training.kernel_profile import StepProfile
from sft_play.training.metrics_file import MetricsFile
from sft_play.training.trackers import Trackers
from sft_play.training.trainer import SftTrainer


class Observers:
    """The context in which a run is trained: inside it, threads sample GPUs and write metrics."""

    def __init__(self, context: RunContext, opened: Sequence[TrainerCallback]):
        """`opened` are the trackers; every rank must call it, with none on other ranks than 0."""
        self.gpus = GpuSampler.of_machine(context.process)
        self.trackers = Trackers(opened)
        path = context.folder.metrics if context.process.is_main else None
        self.metrics_file = MetricsFile(path, self.gpus.latest)
        steps = context.config.train.profile_steps
        self.profile = StepProfile(context.folder.profile, steps, context.process)

    def attach(self, trainer: SftTrainer) -> None:
        """Show what the trainer logs. Call it before any callback that scores."""
        trainer.note_answers += [self.metrics_file.note_answers, self.trackers.note_answers]
        trainer.add_callback(self.metrics_file)
        trainer.add_callback(self.profile)
        self.metrics_file.gpus_of_log = lambda: trainer.step_log.gpus
        self.trackers.more_values = lambda: trainer.step_log.by_rank

    def __enter__(self) -> Self:
        self.gpus.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.end()
        self.profile.close()
        self.metrics_file.end()

    def close(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Show the settings beside the last scores, and end the trackers."""
        if scores:
            self.trackers.note_scores(settings, scores)
        self.trackers.close()
