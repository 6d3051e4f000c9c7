"""Inputs of a benchmark without a network: a model of a real shape with random weights, rows of a fixed length, rows like Alpaca's.

python benchmarks/inputs.py --shape meta-llama/Llama-3.1-8B-Instruct --out /tmp/8b --tokens 2048 --rows 700
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.plan.shapes import KNOWN

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"
CORPUS = TINY.parent / "corpus" / "town.txt"
# (median, sigma of its logarithm, most) words of each field, as in Alpaca: two rows of five have an input, outputs have a long tail
ALPACA_WORDS = {"instruction": (11, 0.4, 60), "input": (12, 0.9, 150), "output": (45, 0.9, 450)}
ALPACA_INPUTS = 0.4


def random_model(shape: str, folder: Path) -> None:
    """Save a Llama of a known model's shape in bfloat16, weights drawn on the GPU where there is one, with the tiny model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{name: value for name, value in json.loads(KNOWN.read_text())[shape].items() if name != "model_type"},
        max_position_embeddings=8192,
        rope_theta=500000.0,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def fixed_rows(path: Path, tokens: int, rows: int) -> None:
    """Write question/answer rows of `tokens` tokens each, a fifth of them in the answer, give or take the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = [word for word in CORPUS.read_text(encoding="utf-8").split() if word.isalpha()]
    draw = random.Random(0)
    per_word = len(tokenizer(" ".join(words[:2000]))["input_ids"]) / 2000
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            text = [draw.choice(words) for _ in range(int(tokens / per_word * 1.3))]
            ids = tokenizer(" ".join(text))["input_ids"][: tokens - 24]  # room for the template
            cut = len(ids) * 4 // 5
            file.write(json.dumps({"question": tokenizer.decode(ids[:cut]).strip(), "answer": tokenizer.decode(ids[cut:]).strip()}) + "\n")


def alpaca_rows(alpaca: Path, messages: Path, rows: int, seed: int = 0) -> None:
    """Write rows with the lengths of Alpaca's, cut from the corpus that ships, twice: as instruction, input and output, and as messages."""
    words, draw = CORPUS.read_text(encoding="utf-8").split(" "), random.Random(seed)  # line breaks stay

    def cut(field: str) -> str:
        median, sigma, most = ALPACA_WORDS[field]
        length = min(most, max(1, round(draw.lognormvariate(math.log(median), sigma))))
        start = draw.randrange(len(words) - most)
        return " ".join(words[start : start + length]).strip()

    with alpaca.open("w", encoding="utf-8") as instructions, messages.open("w", encoding="utf-8") as conversations:
        for _ in range(rows):
            row = {"instruction": cut("instruction"), "input": cut("input") if draw.random() < ALPACA_INPUTS else "", "output": cut("output")}
            question = f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
            instructions.write(json.dumps(row, ensure_ascii=False) + "\n")
            conversations.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and rows.jsonl")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=700)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    random_model(args.shape, args.out / "model")
    fixed_rows(args.out / "rows.jsonl", args.tokens, args.rows)
    print(f"wrote {args.out}/model ({args.shape}) and {args.out}/rows.jsonl ({args.rows} rows of about {args.tokens} tokens)")
