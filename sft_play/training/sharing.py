"""Whether a model computes shared beginnings once; if not, its samples are trained separately."""

import logging
import math
from dataclasses import replace

from sft_play.data.assemble import RunData
from sft_play.data.collate import PackCollator, TrainRows
from sft_play.data.order import StepSampler
from sft_play.data.pipeline import SEPARATE, packed_run, sampled_run
from sft_play.errors import ConfigError
from sft_play.models.fast.install import fused_kernels_of
from sft_play.training.build import build_collator, step_guard
from sft_play.training.context import RunContext
from sft_play.training.isolation import measure_branches
from sft_play.training.loop import TrainingLoop
from sft_play.training.probe import split_steps

logger = logging.getLogger(__name__)


def share_or_separate(context: RunContext, loop: TrainingLoop, data: RunData) -> None:
    """Train samples separately if the model cannot keep branches apart, and log why.

    Every rank must call it, before the first step.

    Raises: ConfigError under DeepSpeed, whose micro-batches cannot be changed any more.
    """
    reason = _why_separate(context, loop)
    if reason is None:
        return
    if loop.engine.is_deepspeed:
        raise ConfigError(f"train.share_prefixes: {reason}; set TRAIN_SHARE_PREFIXES=false")
    if context.process.is_main:
        logger.info("beginnings that samples share %s: %s", SEPARATE, reason)
    planned = context.planned.with_units(tree_tokens=None, fullest_step=None, most_samples=None)
    planned = sampled_run(planned, data)
    if planned.plan.packing:
        planned = packed_run(planned, data)
    config = planned.config.changed({"train.share_prefixes": False})
    context.planned = replace(planned, config=config)
    layout, units = planned.plan.layout, data.units(None)
    loop.rows = TrainRows(data.train, units)
    loop.order = StepSampler(units.lengths, layout, config.epoch_seed, units.row_ends)
    split_steps(loop, layout)
    loop.collator = build_collator(context, loop.engine.tokenizer, loop.engine.model)
    loop.guard.rows_of = step_guard(context, loop.order, data, units).rows_of
    loop.loader = loop.create_loader()


def _why_separate(context: RunContext, loop: TrainingLoop) -> str | None:
    kernels = fused_kernels_of(loop.engine.model)
    name = type(loop.engine.model).__name__
    states = {type(each): vars(each).get("mixer_state") for each in loop.engine.model.modules()}
    for kind, state in states.items():
        if state is not None and not state.takes_trees:
            return f"the state of {kind.__name__} cannot branch"
    if "attention" not in kernels.on:
        return f"no fused attention ({kernels.off.get('attention', 'nothing is fused')})"
    assert isinstance(loop.collator, PackCollator), "it collates trees"
    vocabulary = loop.engine.text_config.vocab_size
    device = context.process.device
    found = measure_branches(loop.engine.wrapped, loop.collator, vocabulary, device)
    # a model that computes NaN is reported by the first evaluation
    if context.process.min(int(found.holds or math.isnan(found.joined))):
        return None
    return (
        f"logits of {name} change by {found.seen:.2g} with the tokens of another branch, and "
        f"differ by {found.apart:.2g} from those of the sample alone "
        f"({found.joined:.2g} if it follows the other)"
    )
