"""The run, told top to bottom: `run` is the same for one process, DDP and DeepSpeed.

Reads the run folder and nothing else; what this process is among others comes from training.runtime.
"""

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging as hf_logging

from sft_play.config.schema import Config
from sft_play.data.assemble import PreparedData, assemble
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.order import StepSampler
from sft_play.data.prepare import from_json
from sft_play.data.store import Split
from sft_play.data.templates import DEFAULT_TEMPLATE, template_of
from sft_play.errors import ExitClass
from sft_play.evaluation.evaluator import Evaluator
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast.install import fused_kernels_of, uses_varlen_attention
from sft_play.models.load import load_model
from sft_play.models.parameters import count_parameters
from sft_play.models.tokenizer import load_tokenizer
from sft_play.models.vocabulary import check_vocabulary
from sft_play.plan.packing import needs_boundaries
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.process import Process
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.arguments import training_arguments
from sft_play.training.callbacks import (
    BeforeFirstStep,
    EvalSpeedCallback,
    Progress,
    StopOnSignal,
    Throughput,
)
from sft_play.training.check import (
    check_engine,
    check_resumable,
    check_saved_adapter,
    check_saved_model,
)
from sft_play.training.cross_document import check_cross_document
from sft_play.training.failure_broadcast import listen
from sft_play.training.held_out import HeldOutEvaluation
from sft_play.training.memory import MemoryMeter
from sft_play.training.out_of_memory import Explanation
from sft_play.training.probe import Probe, apply_probe
from sft_play.training.report import Report
from sft_play.training.summary import summary_lines
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


def run(planned: PlannedRun, folder: RunFolder, process: Process, report: Report) -> None:
    """Train, evaluate before and after, save and check; what happened is in `report`."""
    config = planned.config
    plan = planned.plan
    clock = Clock(report)
    send_transformers_records_to_our_log()
    runtime.seed_everything(config.train.seed)
    stop = StopOnSignal(process, when_stuck=report.abandon)
    memory = MemoryMeter(process, plan.used_before_bytes[process.local_rank])
    explain = report.explain = Explanation(planned, folder, process, memory)

    tokenizer = load_tokenizer(config)
    facts = folder.read_data()
    data = assemble(config, from_json(facts["sources"]))
    report.update(data=data.ledger, padding=facts["padding"])
    log_data(data, process)
    clock.lap("data")

    # Before the weights: under ZeRO-3 they are partitioned over the group while they load, as the arguments say.
    runtime.join_group(plan, process.timeout)
    report.alarm = listen(process, report.follow)
    arguments = training_arguments(config, plan, folder)
    run_stamp = make_stamp(config, plan, data, tokenizer)
    checkpoint = checkpoint_to_resume(config, plan, run_stamp)
    check_vocabulary(config, tokenizer, data.vocabulary())
    runtime.allow_tf32(process)
    with memory.phase("load"):
        model = load_model(config, process, plan.zero_stage)
    log_model(model, config, process, plan)
    report.update(fast_path=dataclasses.asdict(fused_kernels_of(model)))
    clock.lap("load")

    trainer = explain.trainer = build_trainer(
        config, plan, process, tokenizer, data, model, arguments, run_stamp, memory
    )
    held_out = HeldOutEvaluation(
        trainer, evaluator_of(data.test, tokenizer, config, plan, process), folder, report
    )

    def before_the_first_step() -> None:
        check_engine(trainer.model_wrapped, plan.ranks.strategy)
        memory.watch_optimizer(trainer.optimizer)
        if config.train.probe:  # first: it may choose another batch
            evaluators = (trainer.evaluator, held_out.evaluator)
            explain.planned = apply_probe(
                Probe(trainer, planned, process), evaluators, folder, report
            )
        if plan.packing:
            check_cross_document(
                trainer.model_wrapped,
                trainer.data_collator,
                model.get_input_embeddings().num_embeddings,
                process.device,
            )
        held_out.score("before")

    # the clock of the throughput starts behind the scores
    for callback in (
        BeforeFirstStep(before_the_first_step),
        trainer.throughput,
        stop,
        Progress(process),
        *tensorboard(folder, process),
    ):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    clock.lap("training")
    if not stop.stopped:
        held_out.score("after")
    weights = save_checked(trainer, config, plan, folder, process, is_complete=not stop.stopped)
    clock.lap("save")
    close(report, trainer, process, stop, folder)
    if process.is_main:
        logger.info("%s", "\n".join(summary_lines(report.facts, held_out, folder, weights)))
    leave_group(report)


def leave_group(report: Report) -> None:
    """Wait for the other ranks, where there are any, and part from them."""
    if not torch.distributed.is_initialized():
        return
    torch.distributed.barrier()  # a launcher ends the others when a stopped run's first rank exits with 75
    if report.alarm is not None:
        report.alarm.stop()
    torch.distributed.destroy_process_group()


class Clock:
    """Seconds of each part of a run, for run.json."""

    def __init__(self, report: Report):
        self.report, self.last = report, time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.report.facts["seconds"][name] = round(now - self.last, 3)
        self.last = now


def build_trainer(
    config: Config,
    plan: RunPlan,
    process: Process,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    model: torch.nn.Module,
    arguments: TrainingArguments,
    run_stamp: dict[str, Any],
    memory: MemoryMeter | None = None,
) -> SftTrainer:
    """Return the trainer of a run: rows in an order that no number of ranks changes, evaluated on the validation rows."""
    if config.tuning.backend != "unsloth":  # which has its own
        checkpoint_layers(model, plan.layout.checkpointed_layers)
    speed = EvalSpeedCallback()
    trainer = SftTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=TrainRows(data.train),
        eval_dataset=TrainRows(
            data.validation
        ),  # Trainer asks for one; the evaluator holds what is evaluated
        data_collator=collator(config, plan, tokenizer, model),
        order=StepSampler(data.train.lengths, plan.layout, config.train.order_seed),
        evaluator=evaluator_of(data.validation, tokenizer, config, plan, process),
        speed=speed,
        throughput=Throughput(process, speed),
        stamp=run_stamp,
        memory=memory,
        callbacks=[speed],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def collator(
    config: Config, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module
) -> PackCollator | PadCollator:
    """Return what makes a micro-batch of sequences: several documents in each where the run packs, else one."""
    if plan.packing:
        varlen = needs_boundaries(config.model.attn_implementation, uses_varlen_attention(model))
        return PackCollator(tokenizer.pad_token_id, config.model.max_seq_len, varlen)
    return PadCollator(tokenizer.pad_token_id, config.model.max_seq_len)


def evaluator_of(
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    plan: RunPlan,
    process: Process,
) -> Evaluator:
    """Return an evaluator whose work is shared by all ranks."""
    return Evaluator(split, tokenizer, config.train, process, synced_gpus=plan.zero_stage == 3)


def make_stamp(
    config: Config, plan: RunPlan, data: PreparedData, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the stamp of this run's checkpoints and weights."""
    return {
        **stamp.wanted(config),
        "tokenizer_digest": stamp.digest_of_text(json.dumps(tokenizer.get_vocab(), sort_keys=True)),
        "template_digest": stamp.digest_of_text(template_of(tokenizer)),
        "template": "built-in"
        if template_of(tokenizer) == DEFAULT_TEMPLATE
        else config.model.chat_template or "the tokenizer's own",
        "data_digest": stamp.digest_of_text(*data.digests),
        "world_size": plan.ranks.world_size,
        "strategy": plan.ranks.strategy,
        "effective_batch": plan.layout.rows_per_step,
        "versions": stamp.versions(),
    }


def checkpoint_to_resume(config: Config, plan: RunPlan, run_stamp: dict[str, Any]) -> Path | None:
    """Return the checkpoint folder to go on from. Raises CheckpointError when it does not fit this run or lacks a part."""
    if config.train.resume_from is None:
        return None
    checkpoint = stamp.latest_checkpoint(Path(config.train.resume_from))
    checkpoint_stamp = stamp.refuse_mismatch(
        checkpoint, run_stamp, config.train.allow_backend_change
    )
    check_resumable(checkpoint, checkpoint_stamp, plan.ranks.strategy, plan.ranks.world_size)
    for name in ("data_digest", "effective_batch"):
        if checkpoint_stamp.get(name) != run_stamp[name]:
            logger.warning(
                "resume: %s was %s and is %s: the rows of the steps to come are not those that were left",
                name,
                checkpoint_stamp.get(name),
                run_stamp[name],
            )
    logger.info("resume from=%s", checkpoint)
    return checkpoint


def save_checked(
    trainer: SftTrainer,
    config: Config,
    plan: RunPlan,
    folder: RunFolder,
    process: Process,
    is_complete: bool,
) -> Path:
    """Save adapter/ or model/, read it back, stamp it, and return it. Raises CheckpointError, DivergedError."""
    weights = folder.weights(config.tuning.mode)
    with trainer.memory.phase("save"):
        trainer.save_model(str(weights))  # a collective under ZeRO-3; one rank writes
    if process.is_main:
        if config.tuning.mode == "full":
            check_saved_model(weights, trainer.model, plan.zero_stage)
        else:
            check_saved_adapter(weights, trainer.model, plan.zero_stage, is_complete)
        stamp.write(weights, {**trainer.stamp, "global_step": trainer.state.global_step})
    return weights


def tensorboard(folder: RunFolder, process: Process) -> list[TensorBoardCallback]:
    """Return the callback that writes scalars to tb/, on the main rank alone."""
    return (
        [TensorBoardCallback(SummaryWriter(log_dir=str(folder.tensorboard)))]
        if process.is_main
        else []
    )


def close(
    report: Report, trainer: SftTrainer, process: Process, stop: StopOnSignal, folder: RunFolder
) -> None:
    """Complete run.json: times, speed, peak memory, losses, and how the run ended. Every rank must call it."""
    throughput, step = trainer.throughput, trainer.state.global_step
    report.facts["seconds"] |= {
        "train": round(throughput.train_seconds, 3),
        "first_step": round(throughput.first_step_seconds, 3),
        "evaluate": round(trainer.speed.seconds, 3),
    }
    peaks = trainer.memory.peaks_over_ranks(report.facts["memory"]["predicted"])
    report.facts["peak_bytes"] |= {"measured": peaks.measured, "reserved": peaks.reserved}
    report.facts["memory"]["measured"] = peaks.phases
    report.update(
        global_step=step,
        engine=type(trainer.model_wrapped).__name__,
        tokens_per_second=throughput.tokens_per_second(),
        loss=[
            {"step": entry["step"], "loss": entry["loss"]}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
    )
    if stop.stopped:
        report.finish(
            "stopped",
            ExitClass.STOPPED,
            f"stopped on request at step {step}; go on with TRAIN_RESUME_FROM={folder.path}",
        )
    else:
        report.finish("done", ExitClass.DONE)


def send_transformers_records_to_our_log() -> None:
    """Let transformers log where we log, to logs/rank-K.log, and draw no bars of its own."""
    hf_logging.disable_default_handler()
    hf_logging.enable_propagation()
    hf_logging.disable_progress_bar()


def log_data(data: PreparedData, process: Process) -> None:
    """Log a line a split: rows, what was dropped and why, tokens."""
    for name, facts in data.ledger.items() if process.is_main else ():
        dropped = (
            " ".join(f"{reason}={count}" for reason, count in facts["dropped"].items())
            or "dropped=0"
        )
        counts = f"rows={facts['rows_in']} used={facts['rows_used']} {dropped} tokens={facts['tokens']} trained={facts['trained_tokens']}"
        logger.info("data %s %s", name, counts)


def log_model(model: torch.nn.Module, config: Config, process: Process, plan: RunPlan) -> None:
    """Log what is trained, and once, truthfully, by how many ranks on what."""
    if not process.is_main:
        return
    trainable, total = count_parameters(model)
    share = (
        f"parameters={total / 1e6:.2f}M trainable={trainable / 1e6:.2f}M ({trainable / total:.2%})"
    )
    logger.info(
        "model %s mode=%s backend=%s %s",
        config.model.name,
        config.tuning.mode,
        config.tuning.backend,
        share,
    )
    dtype = str(process.compute_dtype).removeprefix("torch.")
    logger.info(
        "ranks world=%d strategy=%s device=%s compute=%s",
        process.world_size,
        plan.ranks.strategy,
        process.device.type,
        dtype,
    )
