"""The end of a run: what was saved is opened by plain transformers and scored again."""

import logging
from pathlib import Path

import torch

from sft_play.errors import CheckpointError
from sft_play.evaluation.reference import Reference, make_reference
from sft_play.evaluation.reopened import Folder, reopen
from sft_play.models import bnb
from sft_play.models.base_config import plain_reading
from sft_play.models.load import weight_dtype
from sft_play.models.packed import dtype_name
from sft_play.models.parameters import count_parameters
from sft_play.runs.files import read_json
from sft_play.training.context import RunContext
from sft_play.training.held_out import HeldOutEvaluation
from sft_play.training.recorder import RunRecorder
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

# auto opens what takes seconds: a GPU reads some GB a second, a CPU computes the rows slowly
MOST_BYTES = {"cuda": 40e9, "cpu": 0.5e9}
ROOM = 1.3  # times the weights, on the GPU beside the trained model


def note_reference(context: RunContext, held_out: HeldOutEvaluation) -> None:
    """Write what the trained model says of a few test rows. Every rank must call it."""
    trainer = held_out.trainer
    evaluator = held_out.evaluator
    with trainer.speed.evaluating(trainer.model):
        reference = make_reference(
            trainer.model,
            evaluator.split,
            evaluator.tokenizer,
            context.process,
            context.config.data.system_prompt,
        )
    if reference is not None and context.process.is_main:
        reference.write(context.folder.evaluation)


def reopen_saved(
    weights: Path, context: RunContext, trainer: SftTrainer, recorder: RunRecorder
) -> None:
    """Open saved weights in a fresh process, and hold them to the trained model.

    Raises: CheckpointError where they say something else.
    """
    reference = Reference.read(context.folder.evaluation)
    if reference is None:
        return  # the run was stopped before its last scores
    name = context.folder.weights(context.config.tuning.mode).name
    reason = why_not(weights, context, trainer)
    if reason is not None:
        logger.info("%s was not opened again by plain transformers: %s", name, reason)
        return
    with recorder.check("plain transformers opens the saved weights and says the same"):
        found = reopen(saved_folder(weights, context), reference)
        logger.info("%s", found.line(name))
        faults = found.faults()
        # the bound of 16 bits is that of small models: larger ones have not been measured on a GPU
        is_rounding = faults == found.differences() and not found.is_another_model
        if faults and is_rounding and context.process.device.type == "cuda":
            logger.warning("warning: %s, opened by plain transformers: %s", name, "; ".join(faults))
        elif faults:
            raise CheckpointError(
                f"{weights}: opened by plain transformers it is not what was evaluated: "
                f"{'; '.join(faults)}; set TRAIN_REOPEN_SAVED=false to save it all the same"
            )


def why_not(weights: Path, context: RunContext, trainer: SftTrainer) -> str | None:
    """Return why saved weights are not opened again, None where they are."""
    config = context.config
    asked = config.train.reopen_saved
    if asked is False:
        return "train.reopen_saved=false"
    if config.tuning.backend == "unsloth":
        return "backend unsloth keeps a base of its own"
    if config.tuning.mode == "qlora" and _adapts_parameters(weights):
        return "plain PEFT loads no adapters of experts over 4 bits; make merge checks them"
    if asked is True:
        return None
    device = context.process.device
    size = count_parameters(trainer.model).total * _dtype(context).itemsize
    if size > MOST_BYTES[device.type]:
        return f"{size / 1e9:.1f} GB; TRAIN_REOPEN_SAVED=true opens it all the same"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if free < ROOM * size:
            return f"{size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {device} are free"
    return None


def saved_folder(weights: Path, context: RunContext) -> Folder:
    """Return how a stranger loads the saved weights on this rank's device."""
    config = context.config
    return Folder(
        weights,
        dtype_name(_dtype(context)),
        {"": str(context.process.device)},
        bnb.plain_quantization(config, context.process.compute_dtype),
        config.model.revision,
        config.model.trust_remote_code,
        stored=plain_reading(config),
    )


def _dtype(context: RunContext) -> torch.dtype:
    return weight_dtype(context.config, context.process.compute_dtype)


def _adapts_parameters(weights: Path) -> bool:
    return bool(read_json(weights / "adapter_config.json").get("target_parameters"))
