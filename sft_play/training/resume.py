"""Find the checkpoint to resume from, and make the run stamp that decides whether it fits."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from sft_play.data.assemble import RunData
from sft_play.data.templates import DEFAULT_TEMPLATE, template_text
from sft_play.errors import CheckpointError
from sft_play.plan.ranks import config_precision
from sft_play.runs import checkpoints, stamp
from sft_play.runs.resumed import Resumed, check_resumable, refuse_other_steps, resumed_run
from sft_play.training.checkpoints import dtypes_of
from sft_play.training.context import RunContext

logger = logging.getLogger(__name__)

# Settings of train with which answers have other scores
OF_ANSWERS = """
predict_with_generate generation_max_new_tokens generation_num_beams generation_max_rows metrics
""".split()


def make_stamp(
    context: RunContext, data: RunData, tokenizer: PreTrainedTokenizerBase
) -> stamp.Stamp:
    """Return the stamp of this run's checkpoints and weights."""
    config = context.config
    plan = context.plan
    template = template_text(tokenizer)
    template_name = config.model.chat_template or "the tokenizer's"
    if template == DEFAULT_TEMPLATE:
        template_name = "built-in"
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    binding = replace(
        stamp.wanted_stamp(config),
        precision=config_precision(config),
        tokenizer_digest=stamp.digest_of_text(vocabulary),
        template_digest=stamp.digest_of_text(template),
    )
    return stamp.Stamp(
        **vars(binding),
        run=context.folder.path.name,
        run_id=context.folder.read_report().run_id,
        config=config.model_dump(mode="json"),
        dtypes={},  # known once the model is loaded
        seed=config.train.seed,
        data_seed=config.train.data_seed,
        data_digest=stamp.digest_of_text(*data.digests),
        deepspeed_digest=plan.deepspeed.source_digest if plan.deepspeed else None,
        effective_batch=plan.layout.rows_per_step,
        global_step=0,
        strategy=plan.ranks.strategy,
        template=template_name,
        versions={"sft-play": stamp.own_version(), **stamp.versions()},
        world_size=plan.ranks.world_size,
        batch_unit="sample" if len(data.row_ends) == len(data.train) else "row",
    )


def checkpoint_to_resume(context: RunContext, run_stamp: stamp.Stamp) -> Path | None:
    """Return the checkpoint folder to resume from, None for a new run. Every rank must call it.

    Incomplete files of an earlier launch in this folder are removed. The main rank reads all
    files of the checkpoint before anything is loaded. Raises: CheckpointError if there is no
    complete checkpoint, or if it does not fit this run.
    """
    train = context.config.train
    ranks = context.plan.ranks
    process = context.process
    if process.local_rank == 0:
        for parent in (context.folder.checkpoints, context.folder.path):
            checkpoints.remove_leftovers(parent, logger.warning)
    if train.resume_from is None:
        return None
    chosen = None
    if process.is_main:
        chosen = checkpoints.choose_checkpoint(Path(train.resume_from), logger.warning)
    checkpoint = process.broadcast(chosen)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"rank {process.rank}: {checkpoint}, which rank 0 resumes, is not on this machine; "
            "copy the run's folder here, or use a disk that all machines share"
        )
    saved = stamp.refuse_mismatch(checkpoint, run_stamp, train.allow_backend_change)
    Resumed(checkpoint, saved).refuse_changes(context.config)
    check_resumable(checkpoint, saved, ranks.strategy, ranks.world_size, train.elastic)
    refuse_other_steps(
        checkpoint, saved, run_stamp.data_digest, run_stamp.effective_batch, run_stamp.batch_unit
    )
    if process.is_main:
        logger.info("resume from=%s", checkpoint)
        for name, version in run_stamp.versions.items():
            then = saved.versions.get(name, "not recorded")
            if then != version:
                logger.warning(
                    "%s is %s, and was %s when the checkpoint was saved: sums may round otherwise",
                    name,
                    version,
                    then,
                )
    return checkpoint


def take_over_before(context: RunContext) -> dict[str, float | int]:
    """Return the scores of a resumed run's base, and copy their rows into the new run's folder.

    Return {} if there are none, or if answers are scored with other settings now. Every rank must
    call it.
    """
    run = resumed_run(context.config.train.resume_from)
    before: dict[str, float | int] = {}
    if context.process.is_main and run is not None:
        now, then = context.config.train, run.read_config().train
        if all(getattr(now, name) == getattr(then, name) for name in OF_ANSWERS):
            before = run.read_report().scores("before")
            for path in run.evaluation.glob("before.*jsonl") if before else ():
                context.folder.evaluation.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, context.folder.evaluation)
    return context.process.broadcast(before)


def refuse_other_dtypes(checkpoint: Path, model: torch.nn.Module) -> None:
    """Raise CheckpointError unless a loaded model has the types that the checkpoint was saved with.

    Otherwise its weights would be rounded silently.
    """
    then, now = stamp.read_stamp(checkpoint).dtypes, dtypes_of(model)
    if then != now:
        raise CheckpointError(
            f"{checkpoint}: its weights are {_words(then)}, and this run loaded {_words(now)}; "
            "resume it with the versions and the DeepSpeed JSON that it was trained with"
        )


def _words(dtypes: dict[str, list[str]]) -> str:
    return ", ".join(f"{kind} {' and '.join(names) or 'none'}" for kind, names in dtypes.items())
