"""The worker: `run_training` trains from start to end, in one process, under DDP or DeepSpeed.

It reads only the run folder; rank and device come from training.runtime.
"""

import contextlib
import dataclasses
import logging
import time
from pathlib import Path

from transformers import PreTrainedModel, set_seed
from transformers.utils import logging as hf_logging

from sft_kernels.install import fused_kernels_of
from sft_kernels.linears.lora import copy_adapters_at_once
from sft_kernels.process import Process
from sft_play.data.assemble import DataFacts, RunData, assemble
from sft_play.data.splits import length_histogram
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ExitClass
from sft_play.evaluation.evaluator import EvaluationStopped, Evaluator
from sft_play.models.load import WeightPlaces, load_model
from sft_play.models.vocabulary import check_vocabulary
from sft_play.plan.next_command import resume_command
from sft_play.plan.run_plan import PlannedRun
from sft_play.progress import Stage, watched_stage
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import LoggedLoss
from sft_play.stops import StopSignals
from sft_play.training import runtime
from sft_play.training.arguments import training_arguments
from sft_play.training.best import warning_of
from sft_play.training.build import build_evaluator, build_loop
from sft_play.training.callbacks import Progress
from sft_play.training.checkpoints import take_best
from sft_play.training.checks import (
    check_causality,
    check_engine,
    check_equal_ranks,
    has_equal_copies,
)
from sft_play.training.context import RunContext
from sft_play.training.experts import ExpertUse, experts_report, log_experts
from sft_play.training.held_out import HeldOutEvaluation, summary_lines
from sft_play.training.isolation import check_context, check_cross_document
from sft_play.training.loop import TrainingLoop
from sft_play.training.memory import MemoryMeter
from sft_play.training.memory_lines import lines_before_training
from sft_play.training.observers import Observers
from sft_play.training.out_of_memory import OutOfMemoryExplainer
from sft_play.training.preflight import preflight
from sft_play.training.probe import Probe, apply_probe
from sft_play.training.ranks import RankGroup
from sft_play.training.recorder import RunRecorder
from sft_play.training.resume import (
    checkpoint_to_resume,
    make_stamp,
    refuse_other_dtypes,
    take_over_before,
)
from sft_play.training.saved_weights import note_reference, save_weights
from sft_play.training.sharing import share_or_separate
from sft_play.training.start_log import held_memory, log_data, log_large_weights, log_model
from sft_play.training.stop import StopOnSignal
from sft_play.training.trackers import open_trackers

logger = logging.getLogger(__name__)


def run_training(
    planned: PlannedRun,
    folder: RunFolder,
    process: Process,
    recorder: RunRecorder,
    signals: StopSignals,
) -> None:
    """Train, evaluate before and after, save and check; record all of it in `recorder`."""
    # transformers' log uses our handlers (logs/rank-K.log), and its progress bars are hidden
    hf_logging.disable_default_handler()
    hf_logging.enable_propagation()
    hf_logging.disable_progress_bar()
    memory = MemoryMeter(process, planned.plan.used_before(process.local_rank))
    context = RunContext(planned, folder, process, memory)
    with StopOnSignal(process, signals, recorder, context.config.train.stops_after) as stop:
        train_steps(context, recorder, stop)


def train_steps(context: RunContext, recorder: RunRecorder, stop: StopOnSignal) -> None:
    """Run the steps of `run_training`, and handle signals."""
    planned, folder, process = context.planned, context.folder, context.process
    config = context.config
    recorder.lap_began = time.time()  # excludes imports
    set_seed(config.train.seed)  # the same on all ranks: adapters start from the same weights
    explainer = OutOfMemoryExplainer(context)
    recorder.explain_out_of_memory = explainer

    tokenizer = load_tokenizer(config)
    data = load_data(context, recorder)
    recorder.lap("data")
    # Before the weights: under ZeRO-3 the arguments cause them to be partitioned over the process
    # group while they load.
    group = RankGroup.join(context, recorder)
    arguments = training_arguments(planned, folder)
    run_stamp = make_stamp(context, data, tokenizer)
    checkpoint = checkpoint_to_resume(context, run_stamp)
    preflight(context, run_stamp, checkpoint, len(data.row_ends), recorder)
    recorder.lap("preflight")
    with recorder.check("the base model knows every token of the rows"):
        check_vocabulary(config, tokenizer, data.used_tokens())
    observers = Observers(context, open_trackers(context))
    model = load_for_training(context, recorder, checkpoint)
    recorder.lap("load")
    if context.plan.layout.tree_tokens is not None:
        with recorder.check("a beginning is shared only if branches do not see each other"):
            share_or_separate(context, model, data, recorder)

    loop = build_loop(
        context, arguments, tokenizer, data, model, run_stamp, observers.gpus.mean_since_log
    )
    explainer.loop = loop
    evaluator = build_evaluator(context, data, data.test, tokenizer, model)
    held_out = HeldOutEvaluation(loop, evaluator, folder, recorder)
    stop.follow(loop.evaluator, evaluator)
    loop.report_saved = recorder.note_checkpoint
    loop.events.add(observers.metrics_file, observers.trace, loop.step_log, stop)
    progress = Progress(process)
    loop.events.add(progress, observers.trackers)
    loop.events.add(group.watch)

    with observers, contextlib.closing(progress):
        loop.start(checkpoint)
        recorder.state = loop.state
        observers.metrics_file.start(loop.state)
        before_first_step(context, loop, held_out, recorder)
        loop.train()
        recorder.lap("training")
        score_after(context, loop, held_out, stop, is_last=not stop.is_paused)
    observers.close(arguments.settings, held_out.last_scores())
    is_complete = stop.reason is None
    check_weights(context, loop, recorder, is_complete)
    weights = save_weights(context, loop, recorder, is_complete)
    recorder.lap("save")
    finish(context, recorder, loop, stop.reason)
    if process.is_main:
        logger.info("%s", "\n".join(summary_lines(recorder.report, held_out, folder, weights)))
    group.leave()


def load_data(context: RunContext, recorder: RunRecorder) -> RunData:
    """Return the tokenized rows that the front end prepared, and record their ledger."""
    facts = DataFacts.from_json(context.folder.read_data())
    data = assemble(context.config, facts.sources)
    recorder.update(
        data=data.ledger.splits_as_json(),
        padding=vars(facts.padding),
        lengths={
            "train": length_histogram(data.train.lengths),
            "test": length_histogram(data.test.lengths),
        },
    )
    if context.process.is_main:
        log_data(data)
    return data


def load_for_training(
    context: RunContext, recorder: RunRecorder, checkpoint: Path | None
) -> PreTrainedModel:
    """Return the model on this rank's device, and record which fused kernels it has.

    Trained weights that FSDP shards are read from the checkpoint that the run resumes.
    """
    config, plan = context.config, context.plan
    if checkpoint is not None and plan.step.divides_training:
        config = config.changed({"model.name": str(checkpoint), "model.revision": None})
    runtime.allow_tf32(context.process)
    if context.process.is_main:
        log_large_weights(context)
    stage = Stage(
        f"loading {context.config.model.name}", measure=lambda: held_memory(context.process)
    )
    with context.memory.phase("load"), watched_stage(stage, context.process.is_main):
        places = WeightPlaces(
            zero_stage=plan.zero_stage,
            is_fsdp=plan.is_fsdp,
            is_expert_parallel=plan.is_expert_parallel,
            most_layers=plan.step.most_layers,
            offloaded_layers=plan.step.offloaded_weight_layers,
        )
        model = load_model(config, context.process, places, runtime.proofs_of(config))
    context.memory.note_before_training()
    if checkpoint is not None:
        refuse_other_dtypes(checkpoint, model)
        recorder.note(resumed_from=str(checkpoint), global_step=step_of(checkpoint))
    if context.process.is_main:
        log_model(model, context)
    recorder.update(fast_path=dataclasses.asdict(fused_kernels_of(model)))
    return model


def before_first_step(
    context: RunContext, loop: TrainingLoop, held_out: HeldOutEvaluation, recorder: RunRecorder
) -> None:
    """Check the model, and score the test rows."""
    by_rank = context.memory.of_ranks()
    recorder.note(memory_by_rank=by_rank)
    if context.process.is_main and context.process.is_gpu:
        logger.info("%s", "\n".join(lines_before_training(by_rank)))
    with watched_stage(Stage("checking the model before the first step"), context.process.is_main):
        check_before_first_step(context, loop, held_out.evaluator, recorder)
    held_out.limit_evaluations()
    before = recorder.report.scores("before") or take_over_before(context)
    if "rows" in before:  # of the run that is resumed
        recorder.update(metrics={"before": before})
        held_out.evaluator.limit(before["rows"], before.get("answers", 0))
    else:  # weights that are already trained are not the base
        before = held_out.score("resumed" if loop.state.global_step else "before")
    warning = loop.loss_watch.start(before["eval_loss"])
    if warning is not None and recorder.rank == 0:
        logger.warning("warning: %s", warning)
    if not context.plan.layout.checkpointed_layers:  # a recomputed layer frees its copies
        copy_adapters_at_once(loop.engine.model, context.process.compute_dtype)
    # last: a probe's steps do not count
    loop.expert_use = ExpertUse(loop.engine.model)
    loop.step_log.reset(loop.state.global_step)


def check_before_first_step(
    context: RunContext, loop: TrainingLoop, of_test: Evaluator, recorder: RunRecorder
) -> None:
    """Check the wrapped model, and probe the planned step."""
    strategy = context.plan.ranks.strategy
    with recorder.check("the model is wrapped as the strategy demands", f"strategy={strategy}"):
        check_engine(loop.engine.wrapped, strategy)
    context.memory.watch_optimizer(loop.engine.optimizer)
    if context.config.train.probe:  # first: it may choose another batch
        apply_probe(Probe(context, loop), [loop.evaluator, of_test], recorder)
    vocabulary, device = loop.engine.text_config.vocab_size, context.process.device
    with recorder.check("no prediction depends on later tokens"):
        check_causality(loop.engine.wrapped, vocabulary, device)
    if loop.loss.context is not None:
        with recorder.check("ranks that share rows compute what one computes"):
            check_context(loop.engine.wrapped, loop.loss.context, vocabulary, context.process)
    if context.plan.packing:
        with recorder.check("packed documents do not see each other"):
            check_cross_document(loop.engine.wrapped, loop.collator, vocabulary, device)


def score_after(
    context: RunContext,
    loop: TrainingLoop,
    held_out: HeldOutEvaluation,
    stop: StopOnSignal,
    is_last: bool,
) -> None:
    """Score the test rows; if stopped meanwhile, save a checkpoint from which scoring resumes.

    If `is_last`, the run does not continue, and the best weights are used if requested.
    """
    try:
        if not stop.stopped:
            if is_last:
                takes_best = context.config.train.load_best_model_at_end
                if takes_best and loop.loss_watch.diverged is None:
                    loop.save_now()  # resume from it, while the model has these weights
                held_out.recorder.note(
                    best=take_best(loop.engine, loop.state, context.config.train)
                )
            held_out.score("after")
            note_reference(context, held_out)
    except EvaluationStopped:
        stop.stopped = True
        loop.save_now()
    stop.is_ending = True


def check_weights(
    context: RunContext, loop: TrainingLoop, recorder: RunRecorder, is_complete: bool
) -> None:
    """Check the trained weights, and record the results, before they are saved."""
    recorder.note(skipped_steps=loop.guard.skipped or None)
    if is_complete:
        best = recorder.report.best
        with recorder.check("the loss is below that of a uniform guess"):
            after = recorder.report.metrics.get("after", {}).get("eval_loss", float("nan"))
            step = loop.state.global_step
            loop.loss_watch.finalize(step, after, is_best=best is not None)
        recorder.note(warning=warning_of(loop.loss_watch, best))
    if loop.expert_use is not None:  # at least one step was trained
        report = experts_report(loop.expert_use, loop.engine.model, context.process)
        recorder.note(experts=report)
        if report is not None and context.process.is_main:
            log_experts(report)
    process = context.process
    step = loop.state.global_step
    # only if each rank has all weights
    if process.world_size > 1 and has_equal_copies(loop.engine.model, process):
        with recorder.check("the trained weights are equal on all ranks", f"at step {step}"):
            check_equal_ranks(loop.engine.model, process, step)


def finish(
    context: RunContext, recorder: RunRecorder, loop: TrainingLoop, stopped: str | None
) -> None:
    """Complete run.json with times, speed, peak memory, losses, and how the run ended.

    `stopped` is why the run stopped early, None if it did not. Every rank must call it.
    """
    steps = loop.step_log
    step = loop.state.global_step
    report = recorder.report
    tokens, distinct = steps.tokens_per_second() or (None, None)
    peaks = loop.memory.peaks_over_ranks(report.memory.predicted)
    recorder.note_seconds(
        {
            "train": steps.train_seconds,
            "first_step": steps.first_step_seconds,
            "evaluate": loop.speed.seconds,
        }
    )
    recorder.update(
        global_step=step,
        engine=type(loop.engine.wrapped).__name__,
        tokens_per_second=tokens,
        distinct_tokens_per_second=distinct if distinct != tokens else None,
        peak_bytes=dataclasses.replace(
            report.peak_bytes, measured=peaks.measured, reserved=peaks.reserved
        ),
        memory=dataclasses.replace(report.memory, measured=peaks.phases),
        memory_by_rank=loop.memory.of_ranks(),
        loss=[
            LoggedLoss(entry["step"], entry["loss"])
            for entry in loop.state.log_history
            if "loss" in entry
        ],
    )
    if stopped is not None:
        way = "on the first machine"
        if recorder.rank == 0:
            way = f"with {resume_command(context.plan, context.folder.path)}"
        cause = f"stopped {stopped} at step {step}; continue {way}"
        recorder.finish("stopped", ExitClass.STOPPED, cause)
    else:
        recorder.finish("done", ExitClass.DONE)
