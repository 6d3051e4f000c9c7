"""Chat templates of model families, written for the tests, and small tokenizers for them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "What is red? A rose is red.",
    "user: What is blue?\nassistant: The sea is blue, 12 miles.\n\n",
    "It is a rose.  Two   blanks, naïve 🙂",
] * 5


@dataclass(frozen=True)
class Family:
    """The tokens of a family: `marks` are special, besides eos and, if it has one, bos."""

    marks: tuple[str, ...] = ()
    eos: str = "</s>"
    bos: str | None = None
    system: bool = True  # its template takes a system message
    reasoning: bool = False  # its template writes an answer's reasoning


FAMILIES = {
    "chatml": Family(("<|im_start|>", "<|im_end|>"), "<|endoftext|>"),
    "llama2": Family((), "</s>", "<s>"),
    "llama3": Family(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|end_of_text|>",
        "<|begin_of_text|>",
    ),
    "qwen3": Family(("<|im_start|>", "<|im_end|>"), "<|endoftext|>", reasoning=True),
    "gemma": Family(("<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", system=False),
    "mistral": Family(("[INST]", "[/INST]"), "</s>", "<s>"),
    "phi3": Family(("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "<|endoftext|>"),
    "deepseek_r1": Family(
        ("<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        reasoning=True,
    ),
    "zephyr": Family((), "</s>", "<s>"),
    "alpaca": Family((), "</s>", "<s>"),
    "vicuna": Family((), "</s>", "<s>"),
    "command_r": Family(
        (
            *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        ),
        "<EOS_TOKEN>",
        "<BOS_TOKEN>",
    ),
    "harmony": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|endoftext|>",
        reasoning=True,
    ),
    "default": Family((), "</s>", "<s>"),
}


def template(name: str, marked: bool = False) -> str | None:
    """Return a family's template, with or without its `{% generation %}` marks.

    None stands for the default template.
    """
    if name == "default":
        return None
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return text if marked else re.sub(r"\{%-? *(end)?generation *-?%\}", "", text)


@cache
def family(name: str, marked: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 320 tokens with a family's tokens and template."""
    known = FAMILIES[name]
    return tokenizer(template(name, marked), known.marks, known.eos, known.bos, LLAMA3_WORDS)


@cache
def tokenizer(
    chat_template: str | None,
    marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    eos: str = "<eos>",
    bos: str | None = None,
    words: str | None = None,
    trim_offsets: bool = False,
    strip: bool = False,
    drops_blanks: bool = False,
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that splits as GPT-2's, or by the pattern `words`.

    With `strip` its special tokens absorb the spaces after them.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words:
        parts = pre_tokenizers.Split(Regex(words), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    bpe.decoder = decoders.ByteLevel()
    if drops_blanks:
        bpe.normalizer = normalizers.Replace(" ", "")
    bpe.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    special = [
        AddedToken(text, special=True, normalized=False, rstrip=strip)
        for text in (eos, "<pad>", *([bos] if bos else []), *marks)
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=eos,
        pad_token="<pad>",
        **({"bos_token": bos} if bos else {}),
    )
    made.chat_template = chat_template
    return made
