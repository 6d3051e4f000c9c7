"""The tiny base model: its tokenizer with the chat template, and its pre-training on the corpus.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.embedded.corpus import CORPUS_SEED, corpus_text, split_documents

PAD = "<|pad|>"
END = "<|end|>"
ROLE_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, END, *ROLE_MARKERS)
BYTE_TOKENS = 256  # they follow the special tokens
PRETRAIN_TOKENS = 512  # longest document of pre-training
MAX_TOKENS = 1024  # positions that a user may train on; rotary embeddings need no weights for them
# Words keep their leading space. Numbers are cut after two digits, so that "14:30" and "K-417"
# are few tokens to copy.
WORD_PATTERN = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# {% generation %} holds the assistant's words and the end token: they are what fine-tuning trains.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text("utf-8")
IGNORE_INDEX = -100
MARKER_SEED = 5
MARKER_SCALE = 4.0
LOG_EVERY = 500  # steps


@dataclass(frozen=True)
class PretrainConfig:
    """Size of the base model and how it is pre-trained: multiples of NF4's block of 64."""

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


def build_model(out: Path, config: PretrainConfig | None = None) -> float:
    """Train tokenizer and model on `out`/corpus and write `out`/tiny_llama.

    Return the final loss in nats a token.
    """
    config = config or PretrainConfig()
    torch.manual_seed(config.seed)
    documents = split_documents((out / "corpus" / "town.txt").read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(documents, config.vocab_size)
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
    model = LlamaForCausalLM(llama)
    print(f"model parameters={model.num_parameters()} vocab={len(tokenizer)}", flush=True)
    loss = pretrain(model, tokenizer, config)
    initialize_markers(model, tokenizer)
    save_model(model, tokenizer, out / "tiny_llama")
    return loss


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with our special tokens; it encodes any text."""
    bpe = Tokenizer(models.BPE())
    split_words = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split_words, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLE_MARKERS),
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Return token ids of each document, closed by the end token and cut to PRETRAIN_TOKENS."""
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [[*ids[: PRETRAIN_TOKENS - 1], tokenizer.eos_token_id] for ids in encoded]


def make_batches(tokenizer: PreTrainedTokenizerFast, batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield token ids (B, T) without end: rows of similar length, up to `batch_tokens` cells each.

    Each epoch has as much text as the shipped corpus (epoch 0), drawn anew. A model that reads only
    the shipped text memorises it: 0.4 nats a token on it, 1.5 on unseen text.
    """
    for epoch in itertools.count():
        rng = random.Random(epoch)
        rows = encode_documents(tokenizer, split_documents(corpus_text(CORPUS_SEED + epoch)))
        groups: list[list[torch.Tensor]] = [[]]
        for row in sorted(rows, key=lambda row: len(row) + rng.random()):
            # sorted by length: this row is the widest of its group
            if groups[-1] and (len(groups[-1]) + 1) * len(row) > batch_tokens:
                groups.append([])
            groups[-1].append(torch.tensor(row))
        rng.shuffle(groups)
        for group in groups:
            yield pad_sequence(group, batch_first=True, padding_value=tokenizer.pad_token_id)


def make_optimizers(model: LlamaForCausalLM, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(
        matrices,
        lr=config.matrix_learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, config: PretrainConfig
) -> float:
    """Train `model` in place on next-token prediction, on a GPU where there is one.

    Return the mean loss of the last LOG_EVERY steps, in nats. Copying emerges between 8 and 16
    million tokens; the default reads 130 million: ten minutes on a GPU host, a day on two CPU
    cores.
    """

    def rate(step: int) -> float:  # linear warm-up, then a cosine down to 2 %
        cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        return min(1.0, (step + 1) / config.warmup_steps) * (0.02 + 0.98 * cosine)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizers = make_optimizers(model, config)
    schedulers = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    started = time.monotonic()
    losses: list[torch.Tensor] = []
    batches = itertools.islice(make_batches(tokenizer, config.batch_tokens), config.steps)
    for step, ids in enumerate(batches, start=1):
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, IGNORE_INDEX)
        with torch.autocast(device.type, torch.bfloat16):
            # no attention mask: padding is on the right and has no label
            loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedulers):
            each.step()
        model.zero_grad()
        losses = [*losses[1 - LOG_EVERY :], loss.detach()]
        if step % LOG_EVERY == 0 or step == config.steps:
            mean = torch.stack(losses).mean().item()
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
    spread = weight[len(SPECIAL_TOKENS) + BYTE_TOKENS :].std(dim=0)  # of words
    generator = torch.Generator().manual_seed(MARKER_SEED)
    for marker in ROLE_MARKERS:
        noise = torch.randn(weight.shape[1], generator=generator)
        weight[tokenizer.convert_tokens_to_ids(marker)] = MARKER_SCALE * spread * noise


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configs, tokenizer and chat template to `folder`, or nothing."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        staging = Path(temporary) / folder.name
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for path in staging.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
