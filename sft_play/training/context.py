"""What the parts of a rank's run share: its plan, folder, process and memory meter."""

from dataclasses import dataclass

from torch import nn

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.runs.folder import RunFolder
from sft_play.training.memory import MemoryMeter


@dataclass
class RunContext:
    """One rank's view of a run. The probe may replace `planned` before the first step."""

    planned: PlannedRun
    folder: RunFolder
    process: Process
    memory: MemoryMeter

    @property
    def config(self) -> Config:
        return self.planned.config

    @property
    def plan(self) -> RunPlan:
        return self.planned.plan

    def checkpoint_layers(self, model: nn.Module, layers: int) -> None:
        """Checkpoint the activations of the first `layers` layers of the model."""
        if self.plan.request.recomputes_by_layer:  # other backends set it up when they load
            step = self.plan.step
            checkpoint_layers(model, layers, step.offloaded(layers), step.keeps_attention)
