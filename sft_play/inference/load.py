"""Load the weights of a run with the config, the tokenizer and the compute type of its training."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from sft_play.config.schema import Config
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import CheckpointError
from sft_play.models.load import load_base
from sft_play.plan.precision import precision
from sft_play.plan.run_plan import read_plan
from sft_play.process import DTYPES, Process
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, ready to answer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: Config
    process: Process


def load_run(folder: RunFolder, device: str) -> TrainedModel:
    """Return the trained model of a run on `device` (cpu or cuda).

    Raises CheckpointError when its weights are not complete.
    """
    config = folder.read_config()
    weights = folder.weights(config.tuning.mode)
    if not weights.is_dir():
        status = folder.read_report().status
        raise CheckpointError(
            f"{folder.path} has no {weights.name}/: the run's status is {status}; choose a "
            "finished one with RUN=, make runs lists them"
        )
    stamp.refuse_mismatch(weights, stamp.wanted(config))
    process = _process(folder, config, device)
    tokenizer = load_tokenizer(config_of_weights(config, weights))
    with quiet_libraries():
        if config.tuning.mode == "full":
            model = load_base(config_of_weights(config, weights), process)
        else:
            model = load_adapter(load_base(config, process), weights)
    model.eval()
    return TrainedModel(model, tokenizer, config, process)


def _process(folder: RunFolder, config: Config, device: str) -> Process:
    """Return this process on `device`, with the compute type of the run's training.

    A GPU's run is used in float32 on a CPU, which is slower in 16 bits.
    """
    if device == "cuda":
        return Process.alone(torch.device("cuda", 0), DTYPES[precision(config)])
    if read_plan(folder).ranks.device == "cpu":
        return Process.alone(torch.device("cpu"), DTYPES[precision(config)])
    return Process.alone(torch.device("cpu"), torch.float32)


def config_of_weights(config: Config, weights: Path) -> Config:
    """Return a run's config with the run's weights as its base model, and the chat template that lies there."""
    own = {"name": str(weights), "revision": None, "chat_template": None}
    return config.model_copy(update={"model": config.model.model_copy(update=own)})


def load_adapter(base: PreTrainedModel, weights: Path) -> PreTrainedModel:
    """Return the base with the adapter in `weights`.

    Raises CheckpointError when it cannot be read.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, weights)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{weights}: the adapter cannot be loaded ({reason}); its run has the same in "
            "checkpoints/"
        ) from error


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide other libraries' progress bars and warnings while they load; errors are shown."""
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
