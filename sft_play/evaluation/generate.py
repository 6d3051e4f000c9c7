"""Generate answers: the only module that calls `model.generate`, for evaluation and inference.

Legend: B prompts of a batch, T tokens of the longest one, N generated tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.helpers import disable_input_dtype_casting
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from sft_play.config.schema import TrainSection
from sft_play.data.render import stop_ids
from sft_play.evaluation.decoding import shared_keys
from sft_play.models.positions import room_for_answer
from sft_play.process import Process

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A generated answer."""

    text: str  # without special tokens
    was_cut: bool  # it reached the limit before a stop token


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None leaves the filter out."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def words(self) -> str:
        """Return `temperature=0.7 top_p=0.8`."""
        return " ".join(f"{name}={value:g}" for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Generator:
    """Greedy or beam search with the settings of a run's evaluation, in its compute dtype.

    With `sampling` tokens are drawn, from torch's own generator.
    """

    tokenizer: PreTrainedTokenizerBase
    train: TrainSection
    process: Process
    synced_gpus: bool = False  # divided weights: every rank takes part in every forward pass
    saved_stops: tuple[int, ...] = ()  # ids that end an answer; () is the tokenizer's `stop_ids`
    sampling: Sampling | None = None  # None: the most likely token, or the best of the beams

    @property
    def stops(self) -> list[int]:
        """The ids that end an answer, sorted."""
        return sorted(self.saved_stops or stop_ids(self.tokenizer))

    @torch.no_grad()
    def generate(
        self,
        model: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        streamer: BaseStreamer | None = None,
        stopping: StoppingCriteriaList | None = None,
        scored: LogitsProcessor | None = None,
    ) -> torch.Tensor:
        """Return the generated ids (B, N) after each prompt, on the device.

        The model must be in evaluation mode. Autocast is entered here, because accelerate wraps
        a model's forward in autocast but not PEFT's generate. A `streamer` takes the ids of one
        prompt as they come, and `scored` the scores (B, V) of each token, behind the penalties of
        the base's generation_config.json. Raises: DataError where no position is left behind a
        prompt.
        """
        limit = self.train.generation_max_new_tokens
        assert limit != "auto", "the rows or the command resolve generation_max_new_tokens"
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        limit = room_for_answer(model, input_ids.shape[1], limit)
        device = self.process.device
        # else PEFT casts the input of each adapter to float32, and autocast casts it back
        is_half = self.process.compute_dtype != torch.float32
        casting = disable_input_dtype_casting(model, active=is_half)
        with self.process.autocast(), casting, shared_keys():
            ids = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                max_new_tokens=limit,
                num_beams=self.train.generation_num_beams,
                do_sample=self.sampling is not None,
                **vars(self.sampling or NO_SAMPLING),
                use_cache=True,
                eos_token_id=self.stops,
                pad_token_id=self.tokenizer.pad_token_id,
                synced_gpus=self.synced_gpus,
                streamer=streamer,
                stopping_criteria=stopping,
                logits_processor=None if scored is None else LogitsProcessorList([scored]),
            )
        return ids[:, input_ids.shape[1] :]

    def generate_or_halve(
        self,
        model: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        stopping: StoppingCriteriaList | None = None,
    ) -> list[tuple[slice, torch.Tensor]]:
        """Return the generated ids of parts of the prompts: of all at once where memory allows.

        Otherwise the prompts are halved, with a warning.

        Raises: torch.OutOfMemoryError for one prompt, and where every rank must take part.
        """
        try:
            ids = self.generate(model, prompts, stopping=stopping)
            return [(slice(0, len(prompts)), ids)]
        except torch.OutOfMemoryError:
            if len(prompts) == 1 or self.synced_gpus:
                raise
        torch.cuda.empty_cache()
        half = len(prompts) // 2
        logger.warning(
            "generation of %d answers at once is out of memory: %d at once; "
            "TRAIN_GENERATION_BATCH_SIZE=%d begins with fewer",
            *(len(prompts), len(prompts) - half, half),
        )
        first = self.generate_or_halve(model, prompts[:half], stopping)
        second = self.generate_or_halve(model, prompts[half:], stopping)
        later = [(slice(part.start + half, part.stop + half), ids) for part, ids in second]
        return [*first, *later]

    def decode(self, ids: torch.Tensor) -> list[Answer]:
        """Return the answers of generated ids (B, N). Synchronizes with the GPU."""
        ids = ids.cpu()
        has_ended = torch.isin(ids, torch.tensor(self.stops)).any(dim=1).tolist()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            Answer(text.strip(), was_cut=not ended)
            for text, ended in zip(texts, has_ended, strict=True)
        ]


class StopWhen(StoppingCriteria):
    """Ends all answers of a batch once `is_stopping` is true."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        return torch.full((len(input_ids),), self._is_stopping(), device=input_ids.device)


NO_SAMPLING = Sampling(temperature=None)  # what transformers warns of where nothing is drawn


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids and attention_mask (B, T), padded on the left: generation appends."""
    width = max(len(ids) for ids in prompts)
    input_ids = []
    mask = []
    for ids in prompts:
        padding = width - len(ids)
        input_ids.append([pad_id] * padding + list(ids))
        mask.append([0] * padding + [1] * len(ids))
    return torch.tensor(input_ids), torch.tensor(mask)
