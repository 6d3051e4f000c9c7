"""Bytes that a run writes to its folder. Pure: no torch, no I/O."""

import math

from sft_play.config.sections.train import TrainSection
from sft_play.plan.memory import ADAM_BYTES, TORCH_ADAM
from sft_play.plan.step import StepSpec

SMALL_FILES_BYTES = 50 << 20  # tokenizer, logs, answers, curves; without weights


def checkpoint_bytes(step: StepSpec) -> int:
    """Return the bytes of a checkpoint of all ranks: trained weights and the optimizer's state."""
    state = ADAM_BYTES[step.optim]
    if step.zero_stage:
        state += 4  # DeepSpeed's float32 copy of what it trains
    elif step.optim in TORCH_ADAM:
        state = 2 * step.trained_bytes
    return step.trained_weights * (step.trained_bytes + state)


def run_bytes(step: StepSpec, train: TrainSection, samples: int) -> int:
    """Return the most that a run of `samples` training rows has on disk at one time.

    That is the checkpoints that are kept, one more until it is complete, and the trained weights.
    """
    weights = step.trained_weights * step.trained_bytes
    checkpoints = _checkpoints(train, samples)
    return SMALL_FILES_BYTES + weights + checkpoints * checkpoint_bytes(step)


def _checkpoints(train: TrainSection, samples: int) -> int:
    """Return how many checkpoints are on disk at most. A run that is stopped leaves one."""
    steps_per_epoch = math.ceil(samples / train.effective_batch_size)
    steps = train.max_steps or math.ceil(train.epochs * steps_per_epoch)
    saved = 0
    if train.save_strategy == "steps":
        saved = steps // train.save_steps
    elif train.save_strategy == "epoch":
        saved = math.ceil(steps / steps_per_epoch)
    kept = saved if train.save_total_limit is None else min(saved, train.save_total_limit + 1)
    return max(1, kept)
