"""Pre-training of the tiny Llama on the corpus.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.embedded.corpus import CORPUS_SEED, corpus_text, split_documents
from tools.embedded.tokenizer import (
    BYTE_TOKENS,
    MAX_TOKENS,
    ROLE_MARKERS,
    SPECIAL_TOKENS,
    encode_documents,
)

IGNORE_INDEX = -100
MARKER_SEED = 5
MARKER_SCALE = 4.0


@dataclass(frozen=True)
class PretrainConfig:
    """Size of the base model and how it is pre-trained."""

    vocab_size: int = 2304
    hidden_size: int = 192
    intermediate_size: int = 384
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    steps: int = 4200
    batch_tokens: int = 32768
    learning_rate: float = 3e-3
    matrix_learning_rate: float = 5e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    seed: int = 11


class Batch(NamedTuple):
    """Token ids and labels, both (B, T)."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def make_batches(
    rows: list[list[int]], pad_id: int, batch_tokens: int, rng: random.Random
) -> Iterator[Batch]:
    """Yield one epoch in random order: rows of similar length, up to `batch_tokens` cells each."""
    groups: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=lambda row: len(row) + rng.random()):
        # sorted by length: this row is the widest of its group
        if groups[-1] and (len(groups[-1]) + 1) * len(row) > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    for group in groups:
        width = max(len(row) for row in group)
        ids = [row + [pad_id] * (width - len(row)) for row in group]
        labels = [row + [IGNORE_INDEX] * (width - len(row)) for row in group]
        yield Batch(torch.tensor(ids), torch.tensor(labels))


def epoch_batches(tokenizer: PreTrainedTokenizerFast, epoch: int, batch_tokens: int) -> list[Batch]:
    """Return the batches of one epoch: as much text as the shipped corpus (epoch 0), drawn anew.

    A model that reads only the shipped text memorises it: 0.4 nats a token on it, 1.5 on unseen
    text.
    """
    rows = encode_documents(tokenizer, split_documents(corpus_text(CORPUS_SEED + epoch)))
    return list(make_batches(rows, tokenizer.pad_token_id, batch_tokens, random.Random(epoch)))


def endless_batches(tokenizer: PreTrainedTokenizerFast, batch_tokens: int) -> Iterator[Batch]:
    """Yield the batches of epoch 0, 1, 2 and so on, without end."""
    for epoch in itertools.count():
        yield from epoch_batches(tokenizer, epoch, batch_tokens)


def new_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights; sizes are multiples of 64, the block size of NF4."""
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(llama)


def make_optimizers(model: LlamaForCausalLM, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the embeddings and norms."""
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed" not in name
        if is_matrix:
            matrices.append(parameter)
        else:
            others.append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=config.matrix_learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine down to 2 %."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return warmup * (0.02 + 0.98 * cosine)


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainConfig,
    log_every: int = 500,
) -> float:
    """Train `model` in place on next-token prediction, on a GPU where there is one.

    Return the mean loss of the last `log_every` steps, in nats. Copying emerges between 8 and 16
    million tokens; the default reads 130 million: ten minutes on a GPU host, a day on two CPU
    cores.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizers = make_optimizers(model, config)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peak_rates = [group["lr"] for group in groups]
    started = time.monotonic()
    loss_sum = torch.zeros((), device=device)
    mean = math.nan
    batches = itertools.islice(endless_batches(tokenizer, config.batch_tokens), config.steps)
    for step, (ids, labels) in enumerate(batches, start=1):
        factor = rate_factor(step - 1, config.steps, config.warmup_steps)
        for group, peak_rate in zip(groups, peak_rates, strict=True):
            group["lr"] = peak_rate * factor
        with torch.autocast(device.type, torch.bfloat16):
            # no attention mask: padding is on the right and has no label
            loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss_sum += loss.detach()
        if step % log_every == 0 or step == config.steps:
            mean = loss_sum.item() / ((step - 1) % log_every + 1)
            loss_sum.zero_()
            seconds = time.monotonic() - started
            print(
                f"pretrain step={step} of={config.steps} loss={mean:.4f} seconds={seconds:.0f}",
                flush=True,
            )
    model.cpu()
    return mean


@torch.no_grad()
def initialize_markers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the role markers embeddings that are far from every word and from each other.

    No document holds a marker. Pre-training pushes the rows of unseen tokens away from every hidden
    state, so all markers would look alike to the frozen model. Close to the words, the base model
    would continue a conversation like one more page of exercises.
    """
    weight = model.get_input_embeddings().weight  # (V, hidden)
    first_word = len(SPECIAL_TOKENS) + BYTE_TOKENS
    spread = weight[first_word:].std(dim=0)
    generator = torch.Generator().manual_seed(MARKER_SEED)
    for marker in ROLE_MARKERS:
        noise = torch.randn(weight.shape[1], generator=generator)
        weight[tokenizer.convert_tokens_to_ids(marker)] = MARKER_SCALE * spread * noise
