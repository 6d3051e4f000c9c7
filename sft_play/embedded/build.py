"""Builds what the default run loads: the conversations, the tokenizer and the pre-trained tiny Llama. Owns every file under data/.

Imports torch, tokenizers and transformers, and nothing of sft_play outside this package.
Legend: B batch, T tokens, V vocab.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sft_play.embedded.corpus import CORPUS_SEED, corpus_text, split_documents
from sft_play.embedded.desk import conversations

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
MARKERS = (SYSTEM, USER, ASSISTANT)
IGNORE_INDEX = -100
CONTEXT_TOKENS = 512  # of a document of pre-training
LONGEST_TOKENS = (
    1024  # positions that a user may train on; rotary embeddings need no weights for them
)
MARKER_SEED, MARKER_SCALE, MARKER_ROWS = 5, 4.0, 5

# words keep their leading space, numbers are cut after two digits, so that "14:30" and "K-417" copy in few steps
WORD_PATTERN = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# the assistant's words and the end-of-turn token are inside {% generation %}: they are what is trained
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{- '<|assistant|>' -}}
        {%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
    {%- elif message['role'] in ('system', 'user') -%}
        {{- '<|' + message['role'] + '|>' + message['content'] -}}
    {%- else -%}
        {{- raise_exception('role ' + message['role'] + ' is unknown: use system, user or assistant') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class PretrainConfig:
    """How the base model is pre-trained."""

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


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with our special tokens; it encodes any text, because every byte is a token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PAD, END, *MARKERS)]
    bpe.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, extra_special_tokens=list(MARKERS), model_max_length=LONGEST_TOKENS,
        clean_up_tokenization_spaces=False, padding_side="right",
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Return token ids of each document, closed by the end token and cut to the context."""
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [[*ids[: CONTEXT_TOKENS - 1], tokenizer.eos_token_id] for ids in encoded]


def batches(
    rows: list[list[int]], pad_id: int, batch_tokens: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and labels (B, T) for one epoch: rows of like length together, at most `batch_tokens` cells each, in random order."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]) + rng.random())
    groups: list[list[int]] = [[]]
    for i in order:
        # sorted by length: the row at hand is the widest of its group
        if groups[-1] and (len(groups[-1]) + 1) * len(rows[i]) > batch_tokens:
            groups.append([])
        groups[-1].append(i)
    rng.shuffle(groups)
    for group in groups:
        width = max(len(rows[i]) for i in group)
        ids = torch.tensor([rows[i] + [pad_id] * (width - len(rows[i])) for i in group])
        labels = torch.tensor([rows[i] + [IGNORE_INDEX] * (width - len(rows[i])) for i in group])
        yield ids, labels


def new_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights; sizes are multiples of 64, the block that NF4 quantises."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, max_position_embeddings=LONGEST_TOKENS, tie_word_embeddings=True, rope_theta=10_000.0,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip


def epoch_batches(
    tokenizer: PreTrainedTokenizerFast, epoch: int, batch_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of one epoch: as much text as the shipped corpus, which is epoch 0, drawn anew.

    Read again and again the shipped text alone is learned by heart: 0.4 nats a token on it, 1.5 on a page it never saw.
    """
    rows = encode_documents(tokenizer, split_documents(corpus_text(CORPUS_SEED + epoch)))
    return list(batches(rows, tokenizer.pad_token_id, batch_tokens, random.Random(epoch)))


def make_optimizers(
    master: LlamaForCausalLM, config: PretrainConfig
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for the embeddings and norms."""
    inner = [p for name, p in master.named_parameters() if p.dim() == 2 and "embed" not in name]
    outer = [p for name, p in master.named_parameters() if p.dim() < 2 or "embed" in name]
    return [
        torch.optim.Muon(
            inner,
            lr=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(outer, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / warmup_steps) * (
        0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: PretrainConfig,
    log_every: int = 500,
) -> float:
    """Train `model` in place on next-token prediction, on a GPU where there is one; return the mean loss of the last `log_every` steps, in nats.

    Copying emerges between 8 and 16 million tokens; the default reads 130 million: ten minutes on a GPU host, a day on two CPU cores.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizers = make_optimizers(model, config)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    total, mean, started = torch.zeros((), device=device), math.nan, time.monotonic()
    endless = itertools.chain.from_iterable(
        epoch_batches(tokenizer, epoch, config.batch_tokens) for epoch in itertools.count()
    )
    for step, (ids, labels) in enumerate(itertools.islice(endless, config.steps), start=1):
        for group, peak in groups:
            group["lr"] = peak * rate_factor(step - 1, config.steps, config.warmup_steps)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(
                input_ids=ids.to(device), labels=labels.to(device)
            ).loss  # causal mask alone: padding is on the right and has no label
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
        if step % log_every == 0 or step == config.steps:
            mean = total.item() / ((step - 1) % log_every + 1)
            total.zero_()
            print(
                f"pretrain step={step} of={config.steps} loss={mean:.4f} seconds={time.monotonic() - started:.0f}",
                flush=True,
            )
    model.cpu()
    return mean


@torch.no_grad()
def wake_markers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the role markers, which no document holds, embeddings that are far from every word and from each other.

    Pre-training only pushes unseen rows away from every hidden state; left like that all markers look alike to the frozen model,
    and close to the words the base would take a conversation for one more page of exercises.
    """
    weight = model.get_input_embeddings().weight  # (V, hidden)
    spread = weight[MARKER_ROWS + 256 :].std(dim=0)  # of the words: behind special tokens and bytes
    generator = torch.Generator().manual_seed(MARKER_SEED)
    for marker in MARKERS:
        weight[tokenizer.convert_tokens_to_ids(marker)] = (
            MARKER_SCALE * spread * torch.randn(weight.shape[1], generator=generator)
        )


def write_atomically(folder: Path, fill) -> None:
    """Call `fill(temporary folder)`, then put that folder in the place of `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        fill(staging)
        staging.chmod(0o755)
        old = staging.with_name(staging.name + ".old")
        if folder.exists():
            os.replace(folder, old)
        os.replace(staging, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, config, generation config, tokenizer and chat template to `folder`, whole or not at all."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id

    def fill(staging: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for path in staging.iterdir():
            path.chmod(0o644)

    write_atomically(folder, fill)


def build_model(out: Path, config: PretrainConfig | None = None) -> float:
    """Train tokenizer and model on `out`/corpus and write `out`/tiny_llama; return the final loss in nats a token."""
    config = config or PretrainConfig()
    torch.manual_seed(config.seed)
    documents = split_documents((out / "corpus" / "town.txt").read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(documents, config.vocab_size)
    model = new_model(config, tokenizer)
    print(
        f"model parameters={model.num_parameters()} vocab={len(tokenizer)} documents={len(documents)}",
        flush=True,
    )
    loss = pretrain(model, tokenizer, config)
    wake_markers(model, tokenizer)
    save_model(model, tokenizer, out / "tiny_llama")
    return loss


def data_files() -> dict[str, str]:
    """Return {path under data/: text} of every generated text file."""
    files = {"corpus/town.txt": corpus_text()}
    for split, talks in conversations().items():
        rows = [json.dumps({"messages": talk.messages()}, ensure_ascii=False) for talk in talks]
        files[f"desk/{split}.jsonl"] = "\n".join(rows) + "\n"
    return files


def build_data(out: Path) -> None:
    """Write every generated text file under `out`, each whole or not at all."""
    for name, text in data_files().items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
