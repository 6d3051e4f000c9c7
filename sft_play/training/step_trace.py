"""A Chrome trace of some training steps, by torch.profiler: train.profile_steps."""

import logging
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule
from transformers import TrainerCallback, TrainerState

logger = logging.getLogger(__name__)

FIRST_STEP = 6  # kernels are chosen and compiled before


class StepTrace(TrainerCallback):
    """Records `steps` steps of this process from FIRST_STEP on; 0 records nothing."""

    def __init__(self, path: Path, steps: int):
        self.path = path
        self.steps = steps
        cycle = schedule(skip_first=FIRST_STEP - 2, wait=0, warmup=1, active=steps or 1, repeat=1)
        self.profiler = profile(schedule=cycle, on_trace_ready=self._write) if steps else None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the profiler; it records nothing before FIRST_STEP."""
        if self.profiler is not None:
            self.profiler.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step."""
        if self.profiler is not None:
            self.profiler.step()

    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the steps that were recorded, and warn if there are none."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        profiler.stop()
        if profiler.step_num < FIRST_STEP:
            logger.warning(
                "train.profile_steps=%d: nothing was recorded. This process trained %d steps, and "
                "records from its step %d on: type TRAIN_MAX_STEPS=%d.",
                *(self.steps, profiler.step_num, FIRST_STEP),
                state.global_step - profiler.step_num + FIRST_STEP + self.steps - 1,
            )

    def _write(self, profiler: profile) -> None:
        if profiler.step_num < FIRST_STEP:
            return  # training ended while FIRST_STEP was about to start
        self.path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        logger.info("trace of %d training steps: %s", self.steps, self.path)
