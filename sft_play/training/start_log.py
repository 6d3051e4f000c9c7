"""Log a run's rows, weights and model before the first step."""

import logging
from pathlib import Path

import psutil
import torch

from sft_kernels.process import Process
from sft_play.data.assemble import RunData
from sft_play.models.parameters import count_parameters
from sft_play.plan.devices import GIB
from sft_play.training.context import RunContext

logger = logging.getLogger(__name__)

LARGE_WEIGHTS_BYTES = 1e9  # takes some seconds to read from a disk


def log_data(data: RunData) -> None:
    """Log a line for each split: rows, dropped rows by reason, tokens."""
    for name, split in data.ledger.splits.items():
        dropped = [f"{reason}={count}" for reason, count in split.tally.dropped.items()]
        logger.info(
            "data %s rows=%d used=%d %s tokens=%d trained=%d",
            name,
            split.tally.rows_in,
            split.tally.rows_used,
            " ".join(dropped) or "dropped=0",
            split.tally.tokens,
            split.tally.trained_tokens,
        )
    for note in data.ledger.notes:
        logger.info("data %s", note)


def log_large_weights(context: RunContext) -> None:
    """Log what is read and where it is stored, for weights that take a while to read."""
    model = context.config.model
    files = sorted(Path(model.name).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    if files and size < LARGE_WEIGHTS_BYTES:
        return
    found = "from the hub or its cache"
    if files:
        found = f"{size / 1e9:.1f} GB in {len(files)} files"
    quantized = ", quantized to 4 bits" if context.config.tuning.mode == "qlora" else ""
    if context.config.tuning.has_float8_base:
        quantized = ", quantized to float8"
    logger.info("loading %s: %s to %s%s", model.name, found, context.process.device, quantized)


def held_memory(process: Process) -> str:
    """Return the memory that this process uses, as text."""
    if process.is_gpu:
        held = sum(map(torch.cuda.memory_allocated, process.devices))
        return f"{held / GIB:.1f} GiB on {', '.join(map(str, process.devices))}"
    return f"{psutil.Process().memory_info().rss / GIB:.1f} GiB of host memory"


def log_model(model: torch.nn.Module, context: RunContext) -> None:
    """Log the model with its parameters, and the ranks with their device."""
    config = context.config
    process = context.process
    trainable, total = count_parameters(model)
    tuning = config.tuning
    uses_backend = tuning.mode == "qlora" or tuning.backend != "bnb"
    logger.info(
        "model %s mode=%s%s parameters=%.2fM trainable=%.2fM (%.2f%%)",
        config.model.name,
        tuning.mode,
        f" backend={tuning.backend}" if uses_backend else "",
        total / 1e6,
        trainable / 1e6,
        100 * trainable / total,
    )
    logger.info(
        "ranks world=%d strategy=%s device=%s compute=%s",
        process.world_size,
        context.plan.ranks.strategy,
        process.device.type,
        str(process.compute_dtype).removeprefix("torch."),
    )
