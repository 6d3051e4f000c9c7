"""The checkpoint to resume from, and the run stamp that decides whether a run may."""

import json
import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sft_play.data.assemble import RunData
from sft_play.data.templates import DEFAULT_TEMPLATE, template_of
from sft_play.plan.precision import precision
from sft_play.runs import stamp
from sft_play.runs.resumed import check_resumable, refuse_other_steps
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
        "run": context.folder.path.name,
        "precision": precision(config),
        "tokenizer_digest": stamp.digest_of_text(vocabulary),
        "template_digest": stamp.digest_of_text(template),
        "template": template_name,
        "data_digest": stamp.digest_of_text(*data.digests),
        "world_size": plan.ranks.world_size,
        "strategy": plan.ranks.strategy,
        "deepspeed_digest": plan.deepspeed.source_digest if plan.deepspeed else None,
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
    refuse_other_steps(checkpoint, saved, run_stamp)
    logger.info("resume from=%s", checkpoint)
    return checkpoint
