"""The run, told top to bottom: `run` is the same for one process, DDP and DeepSpeed.

Reads the run folder and nothing else; what this process is among others comes from training.runtime.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedTokenizerBase, PrinterCallback
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging as hf_logging

from sft_play.config.schema import Config
from sft_play.data.collate import PadCollator, StepSampler, TrainRows
from sft_play.data.prepare import PreparedData, Split, prepare
from sft_play.data.render import template_of
from sft_play.errors import ExitClass
from sft_play.evaluation.evaluator import Evaluator, Ranks, Scores
from sft_play.models.load import Placement, load_model, load_tokenizer
from sft_play.models.lora import trainable_parameters
from sft_play.runs import stamp
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder
from sft_play.training import runtime
from sft_play.training.arguments import training_arguments
from sft_play.training.callbacks import BeforeFirstStep, EvalSpeedCallback, Progress, StopOnSignal, Throughput
from sft_play.training.check import check_engine, check_saved_adapter
from sft_play.training.report import Report, peak_bytes
from sft_play.training.runtime import Process
from sft_play.training.summary import summary_lines
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


def run(config: Config, plan: dict[str, Any], folder: RunFolder, process: Process, report: Report) -> None:
    """Train, evaluate before and after, save and check; what happened is in `report`."""
    clock = Clock(report)
    hf_logging.disable_default_handler()  # transformers' records go where ours go
    hf_logging.enable_propagation()
    hf_logging.disable_progress_bar()
    runtime.seed_everything(config.train.seed)
    stop = StopOnSignal(process)

    tokenizer = load_tokenizer(config)
    data = prepare(config, tokenizer)
    report.update(data={name: ledger.as_json() for name, ledger in data.ledger.items()})
    _log_data(data)
    clock.lap("data")

    # Before the weights: under ZeRO-3 they are partitioned over the group while they load, as the arguments say.
    runtime.join_group(plan, config.train.ddp_timeout)
    arguments = training_arguments(config, plan, folder)
    made_of = make_stamp(config, plan, data, tokenizer)
    checkpoint = checkpoint_to_resume(config, made_of)
    model = load_model(config, Placement(process.device, compute_dtype(config), plan["zero_stage"]))
    _log_model(model, config, process, plan)
    clock.lap("load")

    speed = EvalSpeedCallback()
    throughput = Throughput(process, speed)
    trainer = SftTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=TrainRows(data.train),
        data_collator=PadCollator(tokenizer.pad_token_id),
        order=step_order(config, plan, data),
        evaluator=evaluator_of(data.validation, tokenizer, config, plan, process),
        speed=speed,
        throughput=throughput,
        stamp=made_of,
    )
    judge = evaluator_of(data.test, tokenizer, config, plan, process)
    wrapped = BeforeFirstStep(lambda: check_engine(trainer.model_wrapped, plan["strategy"]))
    before = BeforeFirstStep(lambda: _judged(trainer, judge, "before", folder, data, report))
    trainer.remove_callback(PrinterCallback)
    for callback in (speed, wrapped, before, throughput, stop, Progress(process), *tensorboard(folder, process)):
        trainer.add_callback(callback)

    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    clock.lap("training")
    after = _judged(trainer, judge, "after", folder, data, report)
    weights = folder.weights(config.tuning.mode)
    trainer.save_model(str(weights))
    if process.is_main:
        if config.tuning.mode != "full":
            check_saved_adapter(weights, trainer.model, zero_stage=plan["zero_stage"])
        stamp.write(weights, {**made_of, "global_step": trainer.state.global_step})
    clock.lap("save")

    report.facts["seconds"] |= {
        "train": round(throughput.train_seconds, 3),
        "first_step": round(throughput.first_step_seconds, 3),
        "evaluate": round(speed.seconds, 3),
    }
    report.update(
        global_step=trainer.state.global_step,
        engine=type(trainer.model_wrapped).__name__,
        tokens_per_second=throughput.tokens_per_second(),
        peak_bytes={**report.facts["peak_bytes"], "measured": _largest_peak(process)},
        loss=[{"step": entry["step"], "loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry],
    )
    if stop.stopped:
        report.finish("stopped", ExitClass.STOPPED, f"stopped at step {trainer.state.global_step}; go on with TRAIN_RESUME_FROM={folder.path}")
    else:
        report.finish("done", ExitClass.DONE)
    if process.is_main:
        for line in summary_lines(report.facts, data.test.rows, before.result, after, folder, weights):
            logger.info("%s", line)
    if torch.distributed.is_initialized():
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


def compute_dtype(config: Config) -> torch.dtype:
    """Return the type of matmuls: what bf16 and fp16 of a resolved config say."""
    return torch.bfloat16 if config.train.bf16 else torch.float16 if config.train.fp16 else torch.float32


def step_order(config: Config, plan: dict[str, Any], data: PreparedData) -> StepSampler:
    """Return the order of training rows, equal for every number of ranks."""
    train = config.train
    seed = train.seed if train.data_seed is None else train.data_seed
    return StepSampler(len(data.train), train.batch_size, plan["effective_batch"], seed)


def evaluator_of(split: Split, tokenizer: PreTrainedTokenizerBase, config: Config, plan: dict[str, Any], process: Process) -> Evaluator:
    """Return an evaluator whose work is shared by all ranks."""
    ranks = Ranks(process.rank, process.world_size, process.device)
    return Evaluator(split, tokenizer, config.train, ranks, synced_gpus=plan["zero_stage"] == 3)


def make_stamp(config: Config, plan: dict[str, Any], data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the stamp of this run's checkpoints and weights."""
    return {
        **stamp.wanted(config),
        "tokenizer_digest": stamp.digest_of_text(json.dumps(tokenizer.get_vocab(), sort_keys=True)),
        "template_digest": stamp.digest_of_text(template_of(tokenizer)),
        "data_digest": stamp.digest_of_files(*data.files),
        "world_size": plan["world_size"],
        "strategy": plan["strategy"],
        "effective_batch": plan["effective_batch"],
        "versions": stamp.versions(),
    }


def checkpoint_to_resume(config: Config, made_of: dict[str, Any]) -> Path | None:
    """Return the checkpoint folder to go on from. Raises CheckpointError when its stamp does not fit this run."""
    if config.train.resume_from is None:
        return None
    checkpoint = stamp.latest_checkpoint(Path(config.train.resume_from))
    stamp.refuse_mismatch(checkpoint, made_of, config.train.allow_backend_change)
    logger.info("resume from=%s", checkpoint)
    return checkpoint


def tensorboard(folder: RunFolder, process: Process) -> list[TensorBoardCallback]:
    """Return the callback that writes scalars to tb/, on the main rank alone."""
    return [TensorBoardCallback(SummaryWriter(log_dir=str(folder.tensorboard)))] if process.is_main else []


def _judged(trainer: SftTrainer, judge: Evaluator, when: str, folder: RunFolder, data: PreparedData, report: Report) -> Scores:
    """Score the test rows, write the answers to eval/<when>.jsonl, and log one line."""
    scores = trainer.scores(judge)
    rows = data.test.rows[: len(scores.answers)]
    lines = [
        json.dumps({"origin": row.origin, "prompt": [vars(turn) for turn in row.prompt], "expected": row.answer, "answer": answer}, ensure_ascii=False)
        for row, answer in zip(rows, scores.answers, strict=True)
    ]
    if report.rank == 0:
        write_text(folder.evaluation / f"{when}.jsonl", "\n".join(lines) + "\n" if lines else "")
    report.facts["metrics"][when] = scores.as_metrics()
    report.update(global_step=trainer.state.global_step)
    rouge = "" if scores.rouge_l is None else f" rougeL={scores.rouge_l:.3f} answers={len(scores.answers)}"
    if report.rank == 0:
        logger.info("%s eval_loss=%.4f%s rows=%d", when, scores.eval_loss, rouge, len(data.test))
    return scores


def _largest_peak(process: Process) -> int:
    peak = torch.tensor(peak_bytes(process.device), dtype=torch.int64, device=process.device)
    if process.world_size > 1:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    return int(peak)


def _log_data(data: PreparedData) -> None:
    if runtime.rank() == 0:
        for name, ledger in data.ledger.items():
            facts = " ".join(f"{reason}={count}" for reason, count in ledger.dropped.items()) or "dropped=0"
            logger.info("data %s rows=%d used=%d %s tokens=%d trained=%d", name, ledger.rows_in, ledger.rows_used, facts, ledger.tokens, ledger.trained_tokens)


def _log_model(model: torch.nn.Module, config: Config, process: Process, plan: dict[str, Any]) -> None:
    trainable, total = trainable_parameters(model)
    if process.is_main:
        logger.info(
            "model %s mode=%s backend=%s parameters=%.2fM trainable=%.2fM (%.2f%%)",
            config.model.name, config.tuning.mode, config.tuning.backend, total / 1e6, trainable / 1e6, 100 * trainable / total,
        )  # fmt: skip
        logger.info("ranks world=%d strategy=%s device=%s compute=%s", process.world_size, plan["strategy"], process.device.type, str(compute_dtype(config)).removeprefix("torch."))
