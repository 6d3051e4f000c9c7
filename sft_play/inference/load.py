"""Load the weights of a run or of another folder, and create their generator."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as hf_logging

from sft_kernels.process import DTYPES, Process
from sft_play.config.invocation import SamplingRequest
from sft_play.config.schema import Config
from sft_play.data.collate import ImageInputs
from sft_play.data.render import images_of, render_prompt
from sft_play.data.rows import InvalidRowError, Json, Message, PromptIds, Row
from sft_play.data.template_sources import templates_in
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import CheckpointError, DataError, is_out_of_memory
from sft_play.evaluation.generate import Generator, Sampling
from sft_play.models import expert_adapters
from sft_play.models.adapter_state import why_not_fitting
from sft_play.models.base_files import refuse_other_processors
from sft_play.models.delivered import deliver, deliver_adapters
from sft_play.models.export import read_stops, stops_of
from sft_play.models.images import image_inputs_of
from sft_play.models.load import load_base
from sft_play.plan.config_json import positions_of
from sft_play.plan.launch import allocator_defaults
from sft_play.plan.ranks import config_precision
from sft_play.plan.run_plan import read_plan
from sft_play.progress import OWN_LOGGERS
from sft_play.runs import seal, stamp
from sft_play.runs.answer_file import FanOutPlace
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder

logger = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 2048  # of an answer if generation_max_new_tokens is auto


@dataclass(frozen=True)
class TrainedModel:
    """The trained model of a run, in evaluation mode, and what is needed to use it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: Config
    process: Process
    stops: tuple[int, ...]  # ids that end an answer; () for runs of older versions
    sampling: Sampling | None = None  # None: use the most likely token

    def generator(self, max_new_tokens: int) -> Generator:
        """Return the generator of answers with at most `max_new_tokens` tokens."""
        config = self.config.changed({"train.generation_max_new_tokens": max_new_tokens})
        # transformers does not sample with several beams
        sampling = self.sampling if config.train.generation_num_beams == 1 else None
        return Generator(
            self.tokenizer,
            config.train,
            self.process,
            saved_stops=self.stops,
            sampling=sampling,
            images=self.images,
        )

    def sampled(self, request: SamplingRequest) -> Self:
        """Return the model with the requested sampling, and set its seed."""
        torch.manual_seed(request.seed)
        return replace(self, sampling=sampling_of(self.model.generation_config, request))

    @cached_property
    def images(self) -> ImageInputs | None:
        """The factory of image inputs, None for a text model."""
        return image_inputs_of(self.model, self.config, self.tokenizer)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Json] = (), variables: Json | None = None
    ) -> PromptIds:
        """Return the ids of a prompt, with its images.

        Raises: DataError for messages that the template or images that the model does not accept;
        EnvironmentFault if its processor cannot be loaded.
        """
        messages = self.with_images(messages)
        in_text = self.config.data.special_tokens_in_text
        return render_prompt(messages, self.tokenizer, tools, in_text, variables)

    def with_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose images have their text. Raises: as `prompt_ids`."""
        if not images_of(messages):
            return messages
        if self.images is None:
            raise DataError(f"{self.config.model.name} reads no images; RUN= chooses another model")
        try:
            return self.images.processor.write(Row(tuple(messages), "the prompt")).messages
        except InvalidRowError as error:
            raise DataError(str(error)) from error

    def answer_limit(self, prompt_tokens: int) -> int:
        """Return the longest answer to a prompt: as asked, if that is auto what fits behind it.

        Raises: DataError for a prompt that leaves no room.
        """
        asked = self.config.train.generation_max_new_tokens
        return self.auto_limit(prompt_tokens) if asked == "auto" else asked

    def auto_limit(self, prompt_tokens: int, asked: int | None = None) -> int:
        """Return the `asked` tokens of an answer, or those that fit, up to MAX_ANSWER_TOKENS.

        Raises: DataError if prompt and answer do not fit.
        """
        positions = positions_of(self.model.config.to_dict())
        if positions is None:
            return asked or MAX_ANSWER_TOKENS
        if prompt_tokens + (asked or 1) > positions:
            raise DataError(
                f"the prompt has {prompt_tokens} tokens, and the model takes {positions} with an "
                f"answer of {asked or 1}; write less, in a chat /reset"
            )
        return asked or min(MAX_ANSWER_TOKENS, positions - prompt_tokens)


def without_rounding(config: Config) -> Config:
    """Return a run's config for its saved weights, in 16 bits."""
    return config.changed({"train.deliver_as": None})


def load_run(folder: RunFolder, device: str, config: Config | None = None) -> TrainedModel:
    """Return the trained model of a run on `device` (cpu or cuda).

    `config` is the run's config with other settings of evaluation or generation; None is the run's.
    Raises: CheckpointError if its weights are incomplete.
    """
    config = config or folder.read_config()
    weights = checked_weights(folder, config)
    process = _process(folder, config, device)
    config = with_attention_here(config, process)
    tokenizer = tokenizer_of(folder, config)
    with quiet_libraries():
        is_full = config.tuning.mode == "full"  # the saved model is itself the base
        model = load_base(config_of_weights(config, weights) if is_full else config, process)
        deliver(model, config)
        if not is_full:
            model = load_with_adapter(model, folder, weights)
            deliver_adapters(model)
    model.eval()
    if process.compute_dtype != torch.float32:
        # autocast caches copies of parameters with requires_grad: float32 weights, e.g. adapters,
        # are then cast once per context and not at every use. No gradient is computed here.
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.requires_grad_(True)
    stops = read_stops(weights)
    if isinstance(folder, ModelFolder) and not stops:
        stops = stops_of(model)
    return TrainedModel(model, tokenizer, config, process, stops)


def with_attention_here(config: Config, process: Process) -> Config:
    """Return a run's config for this process, which may lack the attention used in training.

    FlashAttention 2 needs a GPU, its package and 16 bits; all attentions compute the same answers.
    """
    asked = config.model.attn_implementation
    if asked != "flash_attention_2":
        return config
    is_half = process.compute_dtype != torch.float32
    if process.device.type == "cuda" and is_half and is_flash_attn_2_available():
        return config
    logger.warning(
        "model.attn_implementation=%s of the run needs a GPU, the package flash-attn and 16 bits, "
        "which are missing here: auto is used",
        asked,
    )
    return config.changed({"model.attn_implementation": "auto"})


def tokenizer_of(folder: RunFolder, config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with the weights, otherwise that of the base.

    Raises: CheckpointError as `checked_weights`; EnvironmentFault if there is none.
    """
    saved = config_of_weights(config, checked_weights(folder, config))
    if not isinstance(folder, ModelFolder) or folder.base is None:
        return load_tokenizer(saved)
    adapter = {"model.adapter": str(folder.path)}  # its chat template comes first
    name, revision = folder.tokenizer_source
    own = load_tokenizer(saved.changed({"model.name": name, "model.revision": revision, **adapter}))
    if name != folder.base and not templates_in(folder.path):
        base = {"model.name": folder.base, "model.revision": folder.revision}
        own.chat_template = load_tokenizer(saved.changed(base)).chat_template
    return own


def load_and_join(trained: TrainedModel, place: FanOutPlace | None) -> TrainedModel:
    """Return the model in one of several processes that share rows; they join here."""
    if place is None:
        return trained
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{place.port}", rank=place.number, world_size=place.of
    )
    process = replace(
        trained.process, rank=place.number, local_rank=place.number, world_size=place.of
    )
    return replace(trained, process=process)


def base_of(
    trained: TrainedModel,
) -> tuple[TrainedModel, Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the base of a run, and the context in which it answers.

    An adapter is switched off in it; if every weight was trained, the base is loaded, too. The
    base stops at the run's stop tokens, which include its own.
    """
    if trained.config.tuning.mode != "full":
        return trained, trained.model.disable_adapter
    with quiet_libraries():
        model = load_base(trained.config, trained.process)
    return replace(trained, model=model.eval()), contextlib.nullcontext


def checked_weights(folder: RunFolder, config: Config) -> Path:
    """Return the folder of a run's trained weights.

    Raises: CheckpointError if they are incomplete, or belong to another base.
    """
    weights = folder.weights(config.tuning.mode)
    if isinstance(folder, ModelFolder):
        folder.refuse_damage()
        return weights
    if not weights.is_dir():
        status = folder.read_report().status
        raise CheckpointError(
            f"{folder.path} has no {weights.name}/: the run's status is {status}; choose a "
            "finished one with RUN=, make runs lists them"
        )
    damage = seal.find_damage(weights, allows_more=True)
    if damage is not None:
        raise CheckpointError(
            f"{weights}: {damage}; the run's checkpoints/ have its weights, too, or train it again"
        )
    stamp.stamp_of_base(weights, stamp.wanted_stamp(config))
    refuse_other_processors(config, weights)
    return weights


def _process(folder: RunFolder, config: Config, device: str) -> Process:
    """Return this process on `device`, with the compute dtype of the run's training.

    A run that was trained on a GPU uses float32 on a CPU, which is slower in 16 bits.
    """
    trained_dtype = DTYPES[config_precision(config)]
    if device == "cuda":
        os.environ.update(allocator_defaults(os.environ))  # a cache grows with each token
        gpus = 1 if config.model.device_map is None else torch.cuda.device_count()
        return replace(Process.alone(torch.device("cuda", 0), trained_dtype), gpus=gpus)
    is_of_cpu = isinstance(folder, ModelFolder) or read_plan(folder).ranks.device == "cpu"
    return Process.alone(torch.device("cpu"), trained_dtype if is_of_cpu else torch.float32)


def config_of_weights(config: Config, weights: Path) -> Config:
    """Return a run's config with the folder of its weights as base model.

    The chat template is then the one saved in that folder.
    """
    values = {"name": str(weights), "template_kwargs": {}}
    values |= dict.fromkeys(("revision", "chat_template", "adapter"))
    return config.changed({f"model.{name}": value for name, value in values.items()})


def load_with_adapter(base: PreTrainedModel, folder: RunFolder, weights: Path) -> PreTrainedModel:
    """Return the base with the adapter in `weights`, of a run or from elsewhere.

    Raises: CheckpointError if it cannot be read, or does not fit the base.
    """
    is_other = isinstance(folder, ModelFolder)
    over, advice = "", "its run has the same in checkpoints/"
    if is_other:
        _refuse_other_rope(weights, base)
        over, advice = f" over {folder.base}", "is that the base it was trained on?"
    try:
        return expert_adapters.load_frozen_adapter(base, weights)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        if is_out_of_memory(error):  # this is not the adapter's fault
            raise
        raise CheckpointError(
            f"{weights}: the adapter cannot be loaded{over} ({why_not_fitting(error)}); {advice}"
        ) from error


def _refuse_other_rope(weights: Path, base: PreTrainedModel) -> None:
    """Refuse an adapter whose config.json has another rope than its base: it was trained with it.

    Raises: CheckpointError.
    """
    if not (weights / "config.json").is_file():
        return
    trained = AutoConfig.from_pretrained(weights).get_text_config()
    rope = getattr(trained, "rope_parameters", None)
    if rope != getattr(base.config.get_text_config(), "rope_parameters", None):
        raise CheckpointError(
            f"{weights}: the adapter was trained with RoPE scaling that the base does not have. "
            "Score its run (RUN=name), or merge the run and score that folder"
        )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide other libraries' progress bars and warnings while they load; errors are shown.

    transformers' later warnings, during generation, would be printed between answers.
    """
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    logging.lastResort.addFilter(_is_own)  # the handler of these commands
    try:
        yield
    finally:
        logging.lastResort.removeFilter(_is_own)


def _is_own(record: logging.LogRecord) -> bool:
    return record.name.startswith(OWN_LOGGERS) or record.levelno >= logging.ERROR


def sampling_of(generation: GenerationConfig, request: SamplingRequest) -> Sampling | None:
    """Return the sampling, None for the most likely token.

    If the base model samples by default, so does this; the call's settings take precedence.
    """
    base_samples = bool(generation.do_sample)
    if request.is_greedy or (request.asks_nothing and not base_samples):
        return None
    own = Sampling()
    if base_samples:
        own = Sampling(
            generation.temperature or 1.0,
            generation.top_p,
            generation.top_k or None,  # 0 means none
            generation.min_p,
        )
    names = ("temperature", "top_p", "top_k")
    asked = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    return replace(own, **asked)
