"""The weights of a run, put to use: load them with what they were trained with, score, answer, chat."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from sft_play.config.schema import Config
from sft_play.data.assemble import PreparedData, assemble
from sft_play.data.prepare import from_json, prepare
from sft_play.data.render import render_prompt, stop_ids
from sft_play.data.rows import Message
from sft_play.errors import CheckpointError, DataError
from sft_play.evaluation.evaluator import Evaluator
from sft_play.models.load import Placement, load_base
from sft_play.models.tokenizer import load_tokenizer
from sft_play.plan.resolve import precision
from sft_play.process import DTYPES, Process
from sft_play.runs import stamp
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder


@dataclass(frozen=True)
class Loaded:
    """A trained model, ready to answer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: Config
    process: Process


def load_run(folder: RunFolder, device: str) -> Loaded:
    """Return the trained model of a run on `device` (cpu or cuda). Raises CheckpointError when its weights are not complete."""
    config = folder.read_config()
    weights = folder.weights(config.tuning.mode)
    if not weights.is_dir():
        status = folder.read_report().get("status", "unknown")
        raise CheckpointError(
            f"{folder.path} has no {weights.name}/: the run's status is {status}; choose a finished one with RUN=, make runs lists them"
        )
    stamp.refuse_mismatch(weights, stamp.wanted(config))
    target = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    trained = at(config, weights)
    tokenizer = load_tokenizer(trained)
    placement = Placement(
        target,
        _compute_dtype(config, trained_on=folder.read_plan()["device"], used_on=device),
        zero_stage=0,
    )
    with quiet():
        model = (
            load_base(trained, placement)
            if config.tuning.mode == "full"
            else with_adapter(load_base(config, placement), weights)
        )
    model.eval()
    return Loaded(model, tokenizer, config, Process.alone(target, placement.compute_dtype))


def evaluate_run(folder: RunFolder, device: str) -> list[str]:
    """Score a run's weights on its test rows again, write eval/again.json, and return the lines to print."""
    loaded = load_run(folder, device)
    data = data_of(folder, loaded)
    scores = Evaluator(data.test, loaded.tokenizer, loaded.config.train, loaded.process).score(
        loaded.model
    )
    metrics = scores.as_metrics()
    write_json(folder.evaluation / "again.json", metrics)
    rouge = (
        ""
        if scores.rouge_l is None
        else f" rougeL={scores.rouge_l:.4f} answers={len(scores.answers)}"
    )
    return [f"{folder.name} eval_loss={scores.eval_loss:.4f}{rouge} rows={len(data.test)}"]


def data_of(folder: RunFolder, loaded: Loaded) -> PreparedData:
    """Return what a run was trained on and judged by, from its samples, or from the files where those are gone."""
    try:
        return assemble(loaded.config, from_json(folder.read_data()["sources"]))
    except DataError:
        return prepare(loaded.config, loaded.tokenizer)


def answer(loaded: Loaded, messages: Sequence[Message]) -> str:
    """Return the model's next turn, by the settings of the run's evaluation."""
    ids = torch.tensor(
        [render_prompt(messages, loaded.tokenizer)], device=loaded.process.device
    )  # (1, T)
    train = loaded.config.train
    with torch.no_grad(), loaded.process.autocast():
        generated = loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=train.generation_max_new_tokens,
            num_beams=train.generation_num_beams,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(stop_ids(loaded.tokenizer)),
            pad_token_id=loaded.tokenizer.pad_token_id,
            use_cache=True,
        )
    return loaded.tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True).strip()


def answer_all(folder: RunFolder, device: str, prompts: Iterable[str]) -> Iterator[str]:
    """Yield the answer to each prompt."""
    loaded = load_run(folder, device)
    for prompt in prompts:
        yield answer(loaded, [*_system(loaded), Message("user", prompt)])


def chat_with(folder: RunFolder, device: str) -> None:
    """Talk on the terminal until an empty line or end of input; the whole conversation is the prompt."""
    loaded = load_run(folder, device)
    messages = _system(loaded)
    while question := _asked():
        messages.append(Message("user", question))
        reply = answer(loaded, messages)
        messages.append(Message("assistant", reply))
        print(reply)


def _asked() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep other libraries' bars and warnings out of a conversation while they load; errors are shown."""
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _system(loaded: Loaded) -> list[Message]:
    prompt = loaded.config.data.system_prompt
    return [Message("system", prompt)] if prompt else []


def _compute_dtype(config: Config, trained_on: str, used_on: str) -> torch.dtype:
    """Return the type of matmuls: that of training, or float32 for a GPU's run on a CPU, which is slower in 16 bits."""
    if used_on == "cpu" and trained_on != "cpu":
        return torch.float32
    return DTYPES[precision(config)]


def at(config: Config, weights: Path) -> Config:
    """Return the config of a run with its own folder of weights for the base model, and the chat template that lies there."""
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"name": str(weights), "revision": None, "chat_template": None}
            )
        }
    )


def with_adapter(base: PreTrainedModel, weights: Path) -> PreTrainedModel:
    """Return the base with the adapter that lies in `weights`. Raises CheckpointError when it cannot be read."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, weights)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{weights}: the adapter cannot be loaded ({reason}); its run has the same in checkpoints/"
        ) from error
