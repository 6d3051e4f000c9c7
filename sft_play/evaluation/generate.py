"""Generate answers: the only module that calls `model.generate`, for evaluation and inference.

Legend: B prompts of a batch, T tokens of the longest one, N generated tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from sft_play.config.schema import TrainSection
from sft_play.data.render import stop_ids
from sft_play.process import Process


@dataclass(frozen=True)
class Generator:
    """Greedy or beam search with the settings of a run's evaluation, in its compute dtype."""

    tokenizer: PreTrainedTokenizerBase
    train: TrainSection
    process: Process
    synced_gpus: bool = False  # ZeRO-3: every rank must take part in every forward pass

    @torch.no_grad()
    def generate(self, model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the generated ids (B, N) after each prompt, on the device.

        The model must be in evaluation mode. Autocast is entered here, because accelerate wraps
        a model's forward in autocast but not PEFT's generate.
        """
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        device = self.process.device
        with self.process.autocast():
            ids = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                max_new_tokens=self.train.generation_max_new_tokens,
                num_beams=self.train.generation_num_beams,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                use_cache=True,
                eos_token_id=sorted(stop_ids(self.tokenizer)),
                pad_token_id=self.tokenizer.pad_token_id,
                synced_gpus=self.synced_gpus,
            )
        return ids[:, input_ids.shape[1] :]

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Return the texts of generated ids (B, N), without special tokens.

        Synchronizes with the GPU.
        """
        texts = self.tokenizer.batch_decode(ids.cpu(), skip_special_tokens=True)
        return [text.strip() for text in texts]


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
