"""The trained weights at the end of a run: save, read back, describe and seal them.

Plain transformers opens them in a process that knows nothing of the run, and scores them again.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sft_play.errors import CheckpointError, DivergedError
from sft_play.evaluation.reference import Reference, make_reference
from sft_play.evaluation.reopened import folder_of_run, reopen
from sft_play.models.adapter_state import published_state
from sft_play.models.base_files import copy_processors, restore_untrained, write_config
from sft_play.models.delivered import as_trained
from sft_play.models.export import saved_stops, stops_of, trained_stops, write_stops
from sft_play.models.load import weight_dtype
from sft_play.models.parameters import count_parameters
from sft_play.models.positions import write_rope_beside_adapter
from sft_play.models.sharding import local_shard
from sft_play.plan.devices import host_memory
from sft_play.progress import Stage, watched_stage
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.files import read_json, write_text
from sft_play.runs.report import Check, RunReport
from sft_play.training.checkpoints import published, write_weights
from sft_play.training.context import RunContext
from sft_play.training.held_out import HeldOutEvaluation
from sft_play.training.loop import TrainingLoop
from sft_play.training.recorder import RunRecorder

logger = logging.getLogger(__name__)

# auto opens so many bytes in seconds, and more within a share of the time of training
QUICK_BYTES = {"cuda": 40e9, "cpu": 0.5e9}
SHARE_OF_TRAINING = 0.1
ROOM = 1.3  # times the weights, in addition to the trained model
REOPENED = "plain transformers opens the saved weights and says the same"


def save_weights(
    context: RunContext, loop: TrainingLoop, recorder: RunRecorder, is_complete: bool
) -> Path:
    """Save adapter/ or model/, read it back, stamp and seal it, and return the folder.

    Every rank must call it. Raises: CheckpointError, DivergedError.
    """
    weights = context.folder.weights(context.config.tuning.mode)
    step = loop.state.global_step
    facts = dataclasses.replace(loop.stamp, global_step=step)
    sealing = published(weights, context.process, facts, keeps_refused=True)
    with context.memory.phase("save"), sealing as staged:
        write_weights(loop.engine, staged)  # a collective under ZeRO-3; one rank writes
        trained = trained_tensors(loop.engine.model, context.plan.zero_stage)
        if context.process.is_main:
            check_and_describe(context, loop, recorder, staged, trained, is_complete)
    return weights


def check_and_describe(
    context: RunContext,
    loop: TrainingLoop,
    recorder: RunRecorder,
    staged: Path,
    trained: Mapping[str, Tensor] | None,
    is_complete: bool,
) -> None:
    """Read the saved weights back, and write files that describe them."""
    mode = context.config.tuning.mode
    name, left_out = "the saved weights are finite and equal those in memory", None
    if trained is None:
        name = "the saved weights are finite"
        left_out = "ZeRO-3: not compared with those in memory"
    with recorder.check(name, left_out):
        if mode == "full":
            check_saved_model(staged, trained)
        else:
            check_saved_adapter(staged, trained, is_complete)
    status = "done" if is_complete else "stopped"
    step = loop.state.global_step
    report = dataclasses.replace(recorder.report, status=status, global_step=step)
    describe_weights(context, loop, staged, report)
    reopen_saved(staged, context, loop, recorder)


def describe_weights(
    context: RunContext, loop: TrainingLoop, staged: Path, report: RunReport
) -> None:
    """Write descriptions of the weights in `staged`, for programs and people."""
    config, tokenizer = context.config, loop.engine.tokenizer
    stops = trained_stops(loop.rows.samples, tokenizer, stops_of(loop.engine.model))
    if config.tuning.mode == "full":
        dtype = weight_dtype(config, loop.process.compute_dtype)
        write_config(config, loop.engine.model, staged, dtype, unties=False)
        restore_untrained(config, loop.engine.model, staged)
    copy_processors(config, staged)
    write_stops(staged, stops, tokenizer, loop.engine.model)
    write_rope_beside_adapter(config, loop.engine.model.config, staged)
    facts = RunFacts.read(context.folder, report)
    weights = context.folder.weights(config.tuning.mode)
    card = card_text(facts, config, saved_stops(stops, tokenizer), weights)
    write_text(staged / "README.md", card)


def note_reference(context: RunContext, held_out: HeldOutEvaluation) -> None:
    """Write the trained model's outputs for a few test rows. Every rank must call it."""
    loop = held_out.loop
    evaluator = held_out.evaluator
    with loop.speed.evaluating(loop.engine.model), as_trained(loop.engine.model):
        reference = make_reference(
            loop.engine.model,
            evaluator.split,
            evaluator.tokenizer,
            context.process,
            context.config.data.system_prompt,
            evaluator.images,
        )
    if reference is not None and context.process.is_main:
        reference.write(context.folder.evaluation)


def reopen_saved(
    weights: Path, context: RunContext, loop: TrainingLoop, recorder: RunRecorder
) -> None:
    """Open saved weights in a fresh process, and compare them with the trained model.

    Raises: CheckpointError if their outputs differ.
    """
    reference = Reference.read(context.folder.evaluation)
    if reference is None or not recorder.report.scores("after"):
        return  # the run was stopped before its last scores
    name = context.folder.weights(context.config.tuning.mode).name
    rows = len(reference.rows["ends"]) + len(reference.stops)
    reason = why_not(weights, context, loop, seconds_to_reopen(recorder.report, rows))
    if reason is not None:
        logger.info("not reopened: %s: %s", name, reason)
        recorder.note_check(Check(REOPENED, passed=None, found=f"not reopened: {reason}"))
        return
    with recorder.check(REOPENED):
        with watched_stage(Stage("opening the saved weights with plain transformers")):
            process = context.process
            saved = folder_of_run(weights, context.config, process.compute_dtype, process.device)
            found = reopen(saved, reference)
        logger.info("%s", found.line(name))
        faults = found.faults()
        # the bound of 16 bits is that of small models: larger ones have not been measured on a GPU
        is_rounding = faults == found.differences() and not found.is_another_model
        if faults and is_rounding and context.process.is_gpu:
            logger.warning("warning: %s, opened by plain transformers: %s", name, "; ".join(faults))
        elif faults:
            raise CheckpointError(
                f"{weights}: opened by plain transformers it is not what was evaluated: "
                f"{'; '.join(faults)}; set TRAIN_REOPEN_SAVED=false to save it anyway"
            )


def seconds_to_reopen(report: RunReport, rows: int) -> float:
    """Return how long one process needs to load the weights and to score `rows`, as measured.

    The run loaded as many bytes, and its ranks shared the rows that they scored.
    """
    after = report.scores("after")
    row_seconds = after["eval_loss_seconds"] * report.world_size / after["rows"]
    return report.seconds["load"] + rows * row_seconds


def why_not(weights: Path, context: RunContext, loop: TrainingLoop, seconds: float) -> str | None:
    """Return why saved weights are not opened again, which needs `seconds`, None if they are."""
    config = context.config
    asked = config.train.reopen_saved
    if asked is False:
        return "train.reopen_saved=false"
    if config.tuning.backend == "unsloth":
        return "backend unsloth keeps its own base"
    is_qlora = config.tuning.mode == "qlora"
    if is_qlora and read_json(weights / "adapter_config.json").get("target_parameters"):
        return "plain PEFT loads no adapters of experts over 4 bits; make merge checks them"
    if asked is True:
        return None
    device = context.process.device
    dtype = weight_dtype(config, context.process.compute_dtype)
    size = count_parameters(loop.engine.model).total * dtype.itemsize
    anyway = "; TRAIN_REOPEN_SAVED=true opens it anyway"
    trained = loop.step_log.train_seconds
    if size > QUICK_BYTES[device.type] and seconds > SHARE_OF_TRAINING * trained:
        return (
            f"{size / 1e9:.1f} GB need about {seconds:.1f} s, more than a tenth of the "
            f"{trained:.1f} s of training{anyway}"
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = host_memory().available_bytes
    if free < ROOM * size:
        return f"{size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {device} are free{anyway}"
    return None


def trained_tensors(model: nn.Module, zero_stage: int) -> Mapping[str, Tensor] | None:
    """Return the tensors to save as they are in memory; None under ZeRO-3, which has shards.

    Every rank must call it.
    """
    if zero_stage == 3:
        return None
    return published_state(model) if isinstance(model, PeftModel) else model.state_dict()


def check_saved_adapter(
    folder: Path, trained: Mapping[str, Tensor] | None, is_complete: bool = True
) -> None:
    """Read the saved adapter back: it must be finite, trained, and equal to the weights in memory.

    Without `trained` the comparison is skipped. A run that was stopped (not `is_complete`) may
    have learned nothing yet.

    Raises: CheckpointError if the file differs from the trained weights; DivergedError if it has
    NaN or was never updated.
    """
    seen = check_saved_model(folder, trained)
    if trained is not None and seen != trained.keys():
        raise CheckpointError(
            f"{folder}: {len(seen)} tensors were saved and {len(trained)} were trained; check the "
            "disk"
        )
    if is_complete and not any(tensor.any() for name, tensor in _saved(folder) if "lora_B" in name):
        raise DivergedError(
            f"{folder}: the adapter still has its initial values, so nothing was learned; raise "
            "TRAIN_LEARNING_RATE or the number of steps"
        )


def check_saved_model(folder: Path, trained: Mapping[str, Tensor] | None) -> set[str]:
    """Read saved weights back: finite, and equal to the weights in memory. Return their names.

    Without `trained` they are only checked for NaN and infinity. The same applies to tensors that
    the architecture saves under a different name than in memory.

    Raises: CheckpointError if a file differs from the trained weights; DivergedError if it has NaN.
    """
    differing: list[str] = []
    broken: list[str] = []
    seen: set[str] = set()
    try:
        for name, tensor in _saved(folder):
            seen.add(name)
            expected = trained.get(name) if trained else None
            if not torch.isfinite(tensor).all():
                broken.append(name)
            elif expected is not None and not _is_equal(tensor, expected):
                differing.append(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: what was saved cannot be read back ({error}); check the disk"
        ) from None
    if not seen:
        raise CheckpointError(f"{folder}: has no weights; check the disk")
    if broken:
        raise DivergedError(
            f"{folder}: {len(broken)} tensors contain NaN or infinity, {broken[0]} first; lower "
            "TRAIN_LEARNING_RATE"
        )
    if differing:
        raise CheckpointError(
            f"{folder}: {len(differing)} tensors on disk are not those that were trained, "
            f"{differing[0]} first; check the disk"
        )
    return seen


def _is_equal(saved: Tensor, trained: Tensor) -> bool:
    """Compare a saved tensor with the trained one; if it is sharded, the main rank's rows."""
    own = local_shard(trained.detach()).cpu()
    if isinstance(trained, DTensor):
        saved = saved[: len(own)]
    return torch.equal(own, saved.to(trained.dtype))


def _saved(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a folder's safetensors files, one at a time to save memory."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
