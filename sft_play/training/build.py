"""Build a run's loop, collator and evaluator from its config and plan."""

import functools
from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from sft_kernels.install import fused_kernels_of
from sft_kernels.loss.head import is_loss_fused
from sft_play.data.assemble import RunData
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.order import StepSampler
from sft_play.data.store import Split
from sft_play.data.trees import Units
from sft_play.errors import ConfigError
from sft_play.evaluation.evaluator import Evaluator
from sft_play.models.context import ContextGroup, context_group
from sft_play.models.embedding_noise import EmbeddingNoise
from sft_play.models.export import stops_of, trained_stops
from sft_play.models.images import image_inputs_of
from sft_play.plan.needs import needs_boundaries
from sft_play.plan.run_plan import RunPlan
from sft_play.plan.speed import step_flops
from sft_play.runs.metrics import GpuSample
from sft_play.runs.stamp import Stamp
from sft_play.training.batches import StepLoss
from sft_play.training.best import EarlyStopping, LossWatch, best_step, metric_of, refuse_divided
from sft_play.training.callbacks import EvalSpeedCallback
from sft_play.training.context import RunContext
from sft_play.training.engine import Engine
from sft_play.training.events import Events
from sft_play.training.experts import router_loss_of
from sft_play.training.guards import GradientWatch, StepGuard
from sft_play.training.loop import TrainingLoop
from sft_play.training.step_log import StepLog


def build_loop(
    context: RunContext,
    arguments: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: RunData,
    model: nn.Module,
    run_stamp: Stamp,
    mean_gpus: Callable[[], Sequence[GpuSample]] = tuple,
) -> TrainingLoop:
    """Return the training loop of a run. The order of its rows does not depend on the world size.

    StepLog calls `mean_gpus` to get the load of the GPUs.
    """
    config = context.config
    layout = context.plan.layout
    context.checkpoint_layers(model, layout.checkpointed_layers)
    if config.train.neftune_noise_alpha is not None:
        EmbeddingNoise(config.train.neftune_noise_alpha).attach(model)
    refuse_divided(config.train, model)
    process = context.process
    set_seed(config.train.seed)
    speed = EvalSpeedCallback(process)
    flops = peak_flops(context.plan)
    flops_of = None  # FLOPs predict no speed
    if flops is not None:
        step = context.plan.step
        flops_of = functools.partial(step_flops, step.model, step.active_adapter_weights)
    step_log = StepLog(speed, context.memory, flops_of, flops, mean_gpus)
    units = data.units(layout.tree_tokens)
    order = StepSampler(units.lengths, layout, config.epoch_seed, units.row_ends)
    engine = Engine(model, arguments, process, config, tokenizer)
    events = Events(engine, order)
    events.add(speed)
    metric = metric_of(config.train)
    if config.train.early_stopping_patience is not None:
        events.add(EarlyStopping(metric, config.train.early_stopping_patience))
    loop = TrainingLoop(
        engine=engine,
        loss=StepLoss(model, sharing_ranks(context, data, model), router_loss_of(model, config)),
        rows=TrainRows(data.train, units),
        collator=build_collator(context, tokenizer, model, data.train.has_images),
        order=order,
        evaluator=build_evaluator(context, data, data.validation, tokenizer, model),
        step_log=step_log,
        guard=step_guard(context, order, data, units),
        gradients=GradientWatch(process, config.train.on_untrained),
        loss_watch=LossWatch(model.config.get_text_config().vocab_size, config.train.learning_rate),
        events=events,
        stamp=run_stamp,
        best_metric=metric,
    )
    if config.train.load_best_model_at_end:
        # if a run diverges after a scored checkpoint, it ends with the best of them
        loop.loss_watch.best_step = lambda: best_step(loop.state.log_history, metric)
    return loop


def sharing_ranks(context: RunContext, data: RunData, model: nn.Module) -> ContextGroup | None:
    """Return the ranks that share rows with this one. Every rank must call it.

    Raises: ConfigError for rows with images, and for layers that need the preceding tokens.
    """
    shared = context.plan.layout.context_parallel
    reason = None
    if data.train.has_images:
        reason = "GPUs share no rows with images"
    elif "mixers" in fused_kernels_of(model).on:  # as in Llama 4: queries depend on position
        reason = "layers of this model need the tokens before theirs, or their place in the row"
    if shared > 1 and reason is not None:
        raise ConfigError(
            f"train.context_parallel={shared}: {reason}; set TRAIN_CONTEXT_PARALLEL=1"
        )
    return context_group(context.process, shared)


def step_guard(context: RunContext, order: StepSampler, data: RunData, units: Units) -> StepGuard:
    """Return the guard that finds steps with NaN or infinity, and names their rows."""
    train = context.config.train

    def rows_of(step: int, micro_batch: int) -> list[str]:
        found = order.find_samples(step, micro_batch, context.process.rank)
        return [data.train.origin(units.samples(unit).start) for unit in found]

    return StepGuard(context.process, train.on_nonfinite, train.max_skipped_steps, rows_of)


def peak_flops(plan: RunPlan) -> float | None:
    """Return the FLOPS of the planned card's data sheet, None if not known."""
    is_known = plan.card is not None and plan.step.is_gpu and plan.step.is_half
    return plan.card.flops if is_known else None


def build_collator(
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    has_images: bool = False,
) -> PackCollator | PadCollator:
    """Return the collator: packed sequences of several documents, or one padded row each."""
    config = context.config
    kernels = fused_kernels_of(model)
    is_packed = context.plan.packing or context.plan.layout.tree_tokens is not None
    varlen = is_packed and needs_boundaries(
        config.model.attn_implementation, kernels.reads_boundaries
    )
    images = None
    if has_images:
        images = image_inputs_of(model, config, tokenizer, context.plan.packing, varlen)
        # loaded here, once, for the processes that prepare images
        assert images is not None and images.processor.reads_images, "it has written these rows"
    if not is_packed:
        return PadCollator(tokenizer.pad_token_id, config.model.max_seq_len, images)
    return PackCollator(
        tokenizer.pad_token_id,
        context.plan.layout.capacity,
        varlen,
        in_one_row=context.plan.layout.in_one_row and kernels.in_one_row,
        images=images,
    )


def build_evaluator(
    context: RunContext,
    data: RunData,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
) -> Evaluator:
    """Return the evaluator of a split of `data`, whose rows are shared among the ranks.

    Generated answers end where those of the saved model will: at the end token of the training
    rows' answers, and at the stop tokens of the base model's generation config.
    """
    plan = context.plan
    is_divided = plan.zero_stage == 3 or plan.is_fsdp or plan.is_expert_parallel
    train = context.config.train
    images = image_inputs_of(model, context.config, tokenizer) if split.has_images else None
    shared = plan.layout.context_parallel if is_loss_fused(model) else 1
    return Evaluator(
        split,
        tokenizer,
        train,
        context.process,
        images,
        synced_gpus=is_divided,
        saved_stops=tuple(trained_stops(data.train, tokenizer, stops_of(model))),
        memory_limit=lambda: context.plan.memory.predicted_peak,  # a probe changes the plan
        context=context_group(context.process, shared),
    )
