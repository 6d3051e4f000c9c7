"""The folder of the trained weights at the end of a run: saved, read back, described, sealed."""

import dataclasses
from pathlib import Path

from sft_play.training.checks import check_saved_adapter, check_saved_model
from sft_play.training.context import RunContext
from sft_play.training.describe import describe_weights
from sft_play.training.recorder import RunRecorder
from sft_play.training.reopen import reopen_saved
from sft_play.training.sealed_save import published
from sft_play.training.trainer import SftTrainer


def save_weights(
    context: RunContext, trainer: SftTrainer, recorder: RunRecorder, is_complete: bool
) -> Path:
    """Save adapter/ or model/, read it back, stamp and seal it, and return the folder.

    Every rank must call it. Raises: CheckpointError, DivergedError.
    """
    weights = context.folder.weights(context.config.tuning.mode)
    step = trainer.state.global_step
    facts = {**trainer.stamp, "global_step": step}
    sealing = published(weights, context.process, facts, keeps_refused=True)
    with context.memory.phase("save"), sealing as staged:
        trainer.save_model(str(staged))  # a collective under ZeRO-3; one rank writes
        if context.process.is_main:
            check_and_describe(context, trainer, recorder, staged, is_complete)
    return weights


def check_and_describe(
    context: RunContext,
    trainer: SftTrainer,
    recorder: RunRecorder,
    staged: Path,
    is_complete: bool,
) -> None:
    """Read the saved weights back, and write what others need to know of them beside them."""
    mode = context.config.tuning.mode
    zero_stage = context.plan.zero_stage
    with recorder.check(*saved_weights_check(zero_stage)):
        if mode == "full":
            check_saved_model(staged, trainer.model, zero_stage)
        else:
            check_saved_adapter(staged, trainer.model, zero_stage, is_complete)
    status = "done" if is_complete else "stopped"
    step = trainer.state.global_step
    report = dataclasses.replace(recorder.report, status=status, global_step=step)
    weights = context.folder.weights(mode)
    describe_weights(staged, weights, context.config, trainer, report)
    reopen_saved(staged, context, trainer, recorder)


def saved_weights_check(zero_stage: int) -> tuple[str, str | None]:
    """Return the name of the check of the saved weights, and what it leaves out."""
    if zero_stage == 3:
        return "the saved weights are finite", "ZeRO-3: not compared with those in memory"
    return "the saved weights are finite and equal those in memory", None
