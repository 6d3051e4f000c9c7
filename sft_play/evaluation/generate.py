"""Generate answers: the only module that calls `model.generate`, for evaluation and inference.

Legend: B prompts of a batch, T tokens of the longest one, N generated tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from sft_play.config.schema import TrainSection
from sft_play.data.render import stop_ids
from sft_play.process import Process


class Answer(NamedTuple):
    """A generated answer."""

    text: str  # without special tokens
    was_cut: bool  # it reached the limit before a stop token


@dataclass(frozen=True)
class Generator:
    """Greedy or beam search with the settings of a run's evaluation, in its compute dtype."""

    tokenizer: PreTrainedTokenizerBase
    train: TrainSection
    process: Process
    synced_gpus: bool = False  # divided weights: every rank takes part in every forward pass
    saved_stops: tuple[int, ...] = ()  # ids that end an answer; () is the tokenizer's `stop_ids`

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
    ) -> torch.Tensor:
        """Return the generated ids (B, N) after each prompt, on the device.

        The model must be in evaluation mode. Autocast is entered here, because accelerate wraps
        a model's forward in autocast but not PEFT's generate. A `streamer` takes the ids of one
        prompt as they come.
        """
        limit = self.train.generation_max_new_tokens
        assert limit != "auto", "the rows or the command resolve generation_max_new_tokens"
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        device = self.process.device
        with self.process.autocast():
            ids = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                max_new_tokens=limit,
                num_beams=self.train.generation_num_beams,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                use_cache=True,
                eos_token_id=self.stops,
                pad_token_id=self.tokenizer.pad_token_id,
                synced_gpus=self.synced_gpus,
                streamer=streamer,
                stopping_criteria=stopping,
            )
        return ids[:, input_ids.shape[1] :]

    def decode(self, ids: torch.Tensor) -> list[Answer]:
        """Return the answers of generated ids (B, N). Synchronizes with the GPU."""
        ids = ids.cpu()
        has_ended = torch.isin(ids, torch.tensor(self.stops)).any(dim=1).tolist()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            Answer(text.strip(), was_cut=not ended)
            for text, ended in zip(texts, has_ended, strict=True)
        ]


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
