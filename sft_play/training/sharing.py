"""Whether a model computes shared beginnings once; if not, its samples are trained separately."""

import logging
import math
from dataclasses import replace

from torch import nn

from sft_kernels.install import fused_kernels_of, why_no_trees
from sft_play.data.assemble import RunData
from sft_play.data.collate import PackCollator
from sft_play.data.pipeline import counted_run
from sft_play.errors import ConfigError
from sft_play.models.experts import BALANCE
from sft_play.training.context import RunContext
from sft_play.training.isolation import LENGTHS, measure_cross_document
from sft_play.training.recorder import RunRecorder

logger = logging.getLogger(__name__)


def share_or_separate(
    context: RunContext, model: nn.Module, data: RunData, recorder: RunRecorder
) -> None:
    """Plan separate samples if the model cannot keep branches apart, and log why.

    Every rank must call it, before the loop is built.

    Raises: ConfigError under DeepSpeed, whose micro-batches are fixed when the model is loaded.
    """
    reason = _why_separate(context, model)
    if reason is None:
        return
    if context.plan.deepspeed is not None:
        raise ConfigError(f"train.share_prefixes: {reason}; set TRAIN_SHARE_PREFIXES=false")
    if context.process.is_main:
        logger.info("beginnings that samples share are computed for each: %s", reason)
    planned = context.planned.with_units(tree_tokens=None, fullest_step=None, most_samples=None)
    planned = replace(planned, config=planned.config.changed({"train.share_prefixes": False}))
    planned, packed, padding = counted_run(planned, data)
    context.planned = packed if planned.plan.packing else planned
    recorder.update(padding=vars(padding))


def _why_separate(context: RunContext, model: nn.Module) -> str | None:
    kernels, text_config = fused_kernels_of(model), model.config.get_text_config()
    balance = context.config.train.router_aux_loss_coef
    if balance and (balance != "auto" or getattr(text_config, BALANCE, False)):
        return "the load-balancing loss counts the tokens of each sample"
    if (reason := why_no_trees(model, kernels)) is not None:
        return reason
    collator = PackCollator(0, context.plan.layout.capacity, varlen=True)
    vocabulary, device = text_config.vocab_size, context.process.device
    with context.process.autocast():
        found = measure_cross_document(model, collator, vocabulary, device, LENGTHS[1])
    # a model that computes NaN is reported by the first evaluation
    if context.process.min(int(found.holds or math.isnan(found.joined))):
        return None
    return (
        f"logits of a branch change by {found.seen:.2g} with the tokens of another, and differ by "
        f"{found.apart:.2g} from those of the sample alone ({found.joined:.2g} without branches)"
    )
