"""Inputs of a benchmark without a network: a model of a real shape with random weights, rows of one length, of ragged lengths, and like Alpaca's.

python benchmarks/inputs.py --shape meta-llama/Llama-3.1-8B-Instruct --out /tmp/8b --tokens 2048
--rows 700
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.plan.model_shape import known_models

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"
CORPUS = TINY.parent / "corpus" / "town.txt"
# (median, sigma of its logarithm, most) words of each field, as in Alpaca: two rows of five have an input, outputs have a long tail
ALPACA_WORDS = {"instruction": (11, 0.4, 60), "input": (12, 0.9, 150), "output": (45, 0.9, 450)}
ALPACA_INPUTS = 0.4
MOST_TRIES = 1000  # of words for a row of an exact length; a few suffice


def random_model(shape: str, folder: Path) -> None:
    """Save a model of a known model's architecture and shape in bfloat16, weights drawn on the GPU where there is one, with the tiny model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(
        **known_models()[shape],
        max_position_embeddings=8192,
        rope_theta=500000.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def fixed_rows(path: Path, tokens: int, rows: int) -> None:
    """Write question/answer rows of exactly `tokens` tokens each, template included, a fifth of them in the answer."""
    _write_rows(path, [tokens] * rows, answer_share=0.2)


def ragged_rows(
    path: Path, rows: int, median: int = 300, sigma: float = 0.8, least: int = 32, most: int = 2048
) -> None:
    """Write question/answer rows whose lengths are log-normal with a median of `median` tokens, three fifths of them in the answer."""
    draw = random.Random(1)
    lengths = [
        min(most, max(least, round(draw.lognormvariate(math.log(median), sigma))))
        for _ in range(rows)
    ]
    _write_rows(path, lengths, answer_share=0.6)


def _write_rows(path: Path, lengths: Sequence[int], answer_share: float) -> None:
    """Write a row for each length, drawn word by word; the first rows are the same however many follow."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = [word for word in CORPUS.read_text(encoding="utf-8").split() if word.isalpha()]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            question, answer = _row(tokenizer, words, length, answer_share, draw)
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


def _row(
    tokenizer: Any, words: Sequence[str], tokens: int, answer_share: float, draw: random.Random
) -> tuple[str, str]:
    """Return question and answer that the template renders to exactly `tokens` tokens; a token may span words, so words are tried until it does."""
    text: list[str] = draw.choices(words, k=max(2, tokens // 2))
    for _ in range(MOST_TRIES):
        cut = max(1, round(len(text) * (1 - answer_share)))
        question, answer = " ".join(text[:cut]), " ".join(text[cut:])
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        excess = (
            len(
                tokenizer(
                    tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False
                )["input_ids"]
            )
            - tokens
        )
        if excess == 0:
            return question, answer
        if excess < 0:
            text += draw.choices(words, k=max(1, -excess * 3 // 4))
        else:
            for _ in range(min(max(1, excess * 3 // 4), len(text) - 2)):
                text.pop(draw.randrange(len(text)))
    raise AssertionError(f"no row of {tokens} tokens in {MOST_TRIES} tries")


def alpaca_rows(alpaca: Path, messages: Path, rows: int, seed: int = 0) -> None:
    """Write rows with the lengths of Alpaca's, cut from the corpus that ships, twice: as instruction, input and output, and as messages."""
    words, draw = (
        CORPUS.read_text(encoding="utf-8").split(" "),
        random.Random(seed),
    )  # line breaks stay

    def cut(field: str) -> str:
        median, sigma, most = ALPACA_WORDS[field]
        length = min(most, max(1, round(draw.lognormvariate(math.log(median), sigma))))
        start = draw.randrange(len(words) - most)
        return " ".join(words[start : start + length]).strip()

    with (
        alpaca.open("w", encoding="utf-8") as instructions,
        messages.open("w", encoding="utf-8") as conversations,
    ):
        for _ in range(rows):
            row = {
                "instruction": cut("instruction"),
                "input": cut("input") if draw.random() < ALPACA_INPUTS else "",
                "output": cut("output"),
            }
            question = (
                f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
            )
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]},
            ]
            instructions.write(json.dumps(row, ensure_ascii=False) + "\n")
            conversations.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and rows.jsonl")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=700)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    random_model(args.shape, args.out / "model")
    fixed_rows(args.out / "rows.jsonl", args.tokens, args.rows)
    print(
        f"wrote {args.out}/model ({args.shape}) and {args.out}/rows.jsonl ({args.rows} rows of {args.tokens} tokens)"
    )
