"""The data of a run in one call: find, tokenize, assemble.

The front end calls it once, before any process group, and writes data.json (`data_facts`). Every
rank reads that file and only assembles. torch and transformers, which take seconds, are imported
after the rows are found.
"""

import json
import math
import os
import shutil
from dataclasses import replace
from typing import Any

import numpy as np

from sft_play.config.schema import Config
from sft_play.data.assemble import DataFacts, RunData, assemble
from sft_play.data.cache import TokenizedSplits, read_bad_rows
from sft_play.data.ledger import DataAccount, Ledger, PaddedTokens
from sft_play.data.order import fullest_step, padding
from sft_play.data.processor import without_torch
from sft_play.data.row_facts import record_counts
from sft_play.data.sources import find_sources
from sft_play.data.splits import answer_token_limit
from sft_play.data.templates import ChatTemplate
from sft_play.data.tokenize import tokenize_sources
from sft_play.data.trees import Units
from sft_play.errors import SHARED_MEMORY, ConfigError
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.step import Layout
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder

MOST_LOADERS = 8  # processes per rank that prepare images
IMAGE_BYTES = 16 << 20  # of an image's inputs, in 16 bits: of about 2 million pixels
BATCHES_AHEAD = 3  # per process that prepares images: two wait, as in torch, and one is in progress


def build_run_data(config: Config, tokenizer: Any) -> RunData:
    """Return the data of a resolved config; rows are tokenized now if the cache has none.

    Raises: DataError, OutOfMemory.
    """
    return assemble(config, tokenize_sources(config, find_sources(config), tokenizer))


def prepare_run_data(config: Config, account: DataAccount | None = None) -> RunData:
    """Return the data of a resolved config as the front end does, and record its counts.

    The rows read are recorded in the account. Raises: DataError, OutOfMemory.
    """
    sources = find_sources(config)
    with without_torch(config.model):
        from sft_play.data.tokenizer import load_tokenizer  # transformers takes seconds to import

    tokenizer = load_tokenizer(config)
    data = assemble(config, tokenize_sources(config, sources, tokenizer, account))
    variables = tuple(sorted(ChatTemplate(tokenizer).variables_read))
    data = replace(data, ledger=replace(data.ledger, variables=variables))
    record_counts(config, data)
    return data


def tokenize_run(folder: RunFolder, planned: PlannedRun) -> PlannedRun:
    """Tokenize a run's rows, write data.json, and return the run with the resulting values.

    These are the fullest packed step, and the longest answer to generate.

    Rows that are quarantined are written to quarantine/.
    Raises: DataError for rows that cannot be trained on, before a GPU is used.
    """
    data = prepare_run_data(planned.config)
    refuse_images(planned, data)
    write_quarantine(folder, data.sources)
    reason = why_separate(planned, data)
    if reason and planned.config.train.share_prefixes == "auto" and data.train.shared.any():
        print(f"beginnings that samples share are computed for each: {reason}")
    planned, packed, padded = counted_run(planned, data)
    folder.write_data(DataFacts(data.sources, padded).to_json())
    return with_loaders(with_answer_limit(packed if planned.plan.packing else planned, data), data)


def why_separate(planned: PlannedRun, data: RunData) -> str | None:
    """Return why samples that begin alike are computed separately, None if they need not be."""
    config, plan = planned.config, planned.plan
    reasons = {
        "train.share_prefixes=false": config.train.share_prefixes is False,
        "rows have images": data.train.has_images,
        "GPUs share each row (train.context_parallel)": plan.layout.context_parallel > 1,
        "a sample's noise depends on its length": bool(config.train.neftune_noise_alpha),
        "Unsloth has no attention for them": config.tuning.backend == "unsloth",
        "train.fast_path=false turns off the attention for them": config.train.fast_path is False,
        "ZeRO-3 has not been tried with them": plan.zero_stage == 3,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sharing_run(planned: PlannedRun, data: RunData) -> PlannedRun:
    """Return the run with trees of samples that begin alike, if they can be computed once.

    Raises: ConfigError for train.share_prefixes=true if there cannot be any.
    """
    setting, reason = planned.config.train.share_prefixes, why_separate(planned, data)
    if reason and setting is True:
        raise ConfigError(f"train.share_prefixes=true: {reason}; set TRAIN_SHARE_PREFIXES=auto")
    is_sharing = reason is None and bool(data.train.shared.any())
    if is_sharing:
        planned = planned.with_units(tree_tokens=planned.config.model.max_seq_len)
    return replace(planned, config=planned.config.changed({"train.share_prefixes": is_sharing}))


def packed_run(planned: PlannedRun, data: RunData) -> PlannedRun:
    """Return the run with the packing of these rows, or as if it was packed.

    Trees are first packed into sequences of model.max_seq_len tokens, like samples; then into one
    for each micro-batch, which has room for larger trees.
    """
    train, plan, row_ends = planned.config.train, planned.plan, data.row_ends
    # without packing, the need of one epoch
    epochs = train.passes(len(row_ends)) if plan.packing else 1

    def count(units: Units, layout: Layout) -> int:
        seed = planned.config.epoch_seed
        return fullest_step(units.lengths, layout, seed, epochs, units.row_ends)

    units = data.units(plan.layout.tree_tokens)
    mean_tokens = sum(units.lengths) / len(row_ends)  # per row
    step_tokens = min(plan.layout.rows_per_step, len(row_ends)) * mean_tokens
    apart = planned.with_units(tree_tokens=None)
    packed = apart.packed(count(units, apart.plan.layout), step_tokens)
    if plan.layout.tree_tokens is None:
        return packed
    largest = int(data.units(1_000_000_000).lengths.max())
    tokens = packed.plan.tree_room(largest)
    joined = replace(packed.plan.layout, tree_tokens=tokens)
    return packed.with_units(tree_tokens=tokens, fullest_step=count(data.units(tokens), joined))


def sampled_run(planned: PlannedRun, data: RunData) -> PlannedRun:
    """Return the run with room for the samples or trees of a step if some rows give several."""
    units = data.units(planned.plan.layout.tree_tokens)
    samples, row_ends = len(units.ends), units.row_ends
    if len(row_ends) < samples:
        epochs = planned.config.train.passes(len(row_ends))
        # a sequence for each sample
        one_each = replace(planned.plan.layout, max_seq_len=1, tree_tokens=None)
        most = fullest_step(np.ones(samples), one_each, planned.config.epoch_seed, epochs, row_ends)
        return planned.with_units(most_samples=most)
    return planned


def with_answer_limit(planned: PlannedRun, data: RunData) -> PlannedRun:
    """Return the run with a number for train.generation_max_new_tokens if that is auto."""
    train = planned.config.train
    if train.generation_max_new_tokens != "auto":
        return planned
    scored = [data.test]
    if train.eval_strategy != "no":
        scored.append(data.validation)
    max_seq_len = planned.config.model.max_seq_len
    limit = answer_token_limit(scored, train.generation_max_rows, max_seq_len)
    return PlannedRun(
        planned.config.changed({"train.generation_max_new_tokens": limit}),
        replace(planned.plan, has_auto_answer_limit=True),
    )


def refuse_images(planned: PlannedRun, data: RunData) -> None:
    """Raise ConfigError for rows with images if a run would not train on them, or would hang."""
    tuning = planned.config.tuning
    if tuning.trains_encoders and not data.train.has_images:
        raise ConfigError(
            f"tuning.encoders={tuning.encoders}: no training row has an image; "
            "set TUNING_ENCODERS=frozen"
        )
    if not any(split.has_images for split in (data.train, data.validation, data.test)):
        return
    if tuning.backend == "unsloth":
        raise ConfigError(
            "tuning.backend=unsloth: rows with images are trained by TUNING_BACKEND=bnb"
        )
    if tuning.encoders == "drop":
        raise ConfigError(
            "tuning.encoders=drop: rows have images, which encoders read; "
            "set TUNING_ENCODERS=frozen"
        )
    if planned.plan.zero_stage == 3:
        raise ConfigError(
            "ZeRO-3 gathers the weights of encoders on all ranks at once, and some have no image "
            "in a batch; set TRAIN_STRATEGY=fsdp, or zero2"
        )


def with_loaders(planned: PlannedRun, data: RunData) -> PlannedRun:
    """Return the run with a number for train.dataloader_num_workers if that is auto.

    Images are prepared by as many processes as there are spare cores, and as /dev/shm has space
    for their batches.
    """
    train, layout, ranks = planned.config.train, planned.plan.layout, planned.plan.ranks
    if train.dataloader_num_workers != "auto":
        return planned
    processes = 0
    if data.train.has_images:
        images = data.train.image_counts.sum() / len(data.row_ends)
        batch_bytes = math.ceil(images * layout.rows_per_step / layout.micro_batches) * IMAGE_BYTES
        cores = len(os.sched_getaffinity(0)) // ranks.per_node - 1
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        room = free // (ranks.per_node * BATCHES_AHEAD * batch_bytes)
        processes = max(0, min(MOST_LOADERS, cores, room))
    config = planned.config.changed({"train.dataloader_num_workers": processes})
    return replace(planned, config=config)


def build_ledger(planned: PlannedRun, account: DataAccount | None = None) -> Ledger:
    """Return the ledger of a run's data, its padding included.

    The rows read are recorded in the account.
    """
    data = prepare_run_data(planned.config, account)
    return replace(data.ledger, padding=counted_run(planned, data)[2])


def write_quarantine(folder: RunFolder, sources: TokenizedSplits) -> None:
    """Write quarantined rows to quarantine/, and print a warning for each split."""
    for split, rows in read_bad_rows(sources).items():
        path = folder.quarantine / f"{split}.jsonl"
        facts = [{"origin": row.origin, "reason": row.reason, "row": row.raw} for row in rows]
        lines = [json.dumps(fact, ensure_ascii=False) + "\n" for fact in facts]
        write_text(path, "".join(lines))
        print(f"warning: {len(rows)} {split} rows cannot be used and are in {path}")


def counted_run(planned: PlannedRun, data: RunData) -> tuple[PlannedRun, PlannedRun, PaddedTokens]:
    """Return the run of these rows, not packed and packed, and the tokens that an epoch computes.

    Raises: ConfigError for train.share_prefixes=true if no beginning can be shared.
    """
    planned = sampled_run(sharing_run(planned, data), data)
    packed = packed_run(planned, data)
    unpacked, layout = planned.plan.layout, packed.plan.layout
    units = data.units(layout.tree_tokens)
    padded = padding(units.lengths, unpacked, layout, planned.config.epoch_seed, units.row_ends)
    return planned, packed, padded
