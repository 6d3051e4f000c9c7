"""The tokenizer and the chat template of the tiny base model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
