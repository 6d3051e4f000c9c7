"""What every part of a rank's run needs to know."""

from dataclasses import dataclass

from sft_play.config.schema import Config
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.process import Process
from sft_play.runs.folder import RunFolder
from sft_play.training.memory import MemoryMeter


@dataclass
class RunContext:
    """A run as this rank sees it. The probe may replace `planned` before the first step."""

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
