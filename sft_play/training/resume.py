"""The checkpoint to resume from, and the run stamp that decides whether a run may."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sft_play.data.assemble import RunData
from sft_play.data.templates import DEFAULT_TEMPLATE, template_of
from sft_play.errors import CheckpointError
from sft_play.runs import stamp
from sft_play.training.context import RunContext

logger = logging.getLogger(__name__)


def make_stamp(
    context: RunContext, data: RunData, tokenizer: PreTrainedTokenizerBase
) -> stamp.Stamp:
    """Return the stamp of this run's checkpoints and weights."""
    config = context.config
    plan = context.plan
    template = template_of(tokenizer)
    template_name = config.model.chat_template or "the tokenizer's own"
    if template == DEFAULT_TEMPLATE:
        template_name = "built-in"
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        **stamp.wanted(config),
        "tokenizer_digest": stamp.digest_of_text(vocabulary),
        "template_digest": stamp.digest_of_text(template),
        "template": template_name,
        "data_digest": stamp.digest_of_text(*data.digests),
        "world_size": plan.ranks.world_size,
        "strategy": plan.ranks.strategy,
        "effective_batch": plan.layout.rows_per_step,
        "versions": stamp.versions(),
    }


def checkpoint_to_resume(context: RunContext, run_stamp: stamp.Stamp) -> Path | None:
    """Return the checkpoint folder to resume from, None for a new run.

    Raises: CheckpointError when it does not fit this run or is incomplete.
    """
    train = context.config.train
    ranks = context.plan.ranks
    if train.resume_from is None:
        return None
    checkpoint = stamp.latest_checkpoint(Path(train.resume_from))
    saved = stamp.refuse_mismatch(checkpoint, run_stamp, train.allow_backend_change)
    check_resumable(checkpoint, saved, ranks.strategy, ranks.world_size)
    for name in ("data_digest", "effective_batch"):
        if saved.get(name) != run_stamp[name]:
            logger.warning(
                "resume: %s was %s and is %s: the rows of the steps to come are not those that "
                "were left",
                name,
                saved.get(name),
                run_stamp[name],
            )
    logger.info("resume from=%s", checkpoint)
    return checkpoint


def check_resumable(
    checkpoint: Path, saved: Mapping[str, Any], strategy: str, world_size: int
) -> None:
    """Raise CheckpointError unless this run can load the checkpoint's optimizer.

    Trainer would silently start a new one. `saved` is the checkpoint's stamp. DeepSpeed saves a
    shard of the optimizer for each rank, so the world size must be the same.
    """
    is_deepspeed = strategy == "deepspeed"
    was_deepspeed = saved.get("strategy") == "deepspeed"
    has_other_world_size = saved.get("world_size") != world_size
    if was_deepspeed != is_deepspeed or (is_deepspeed and has_other_world_size):
        saved_by = f"strategy={saved.get('strategy')} world={saved.get('world_size')}"
        command = "make train or make train-distributed"
        if was_deepspeed:
            command = f"make train-deepspeed NUM_GPUS={saved.get('world_size')}"
        raise CheckpointError(
            f"{checkpoint}: its optimizer was saved by {saved_by}, and this run is "
            f"strategy={strategy} world={world_size}; go on with {command}"
        )
    needed = ("latest",) if is_deepspeed else ("optimizer.pt", "scheduler.pt")
    missing = [name for name in needed if not (checkpoint / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: has no {', '.join(missing)}, so the run would start its optimizer "
            "anew; choose another checkpoint"
        )
