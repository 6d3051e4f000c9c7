"""Inputs of a benchmark without a network: a model of a real shape with random weights, and rows of a fixed length.

python benchmarks/inputs.py --shape meta-llama/Llama-3.1-8B-Instruct --out /tmp/8b --tokens 2048 --rows 700
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.plan.shapes import KNOWN

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"


def random_model(shape: str, folder: Path) -> None:
    """Save a Llama of a known model's shape in bfloat16, weights drawn on the GPU where there is one, with the tiny model's tokenizer."""
    config = LlamaConfig(
        **{name: value for name, value in json.loads(KNOWN.read_text())[shape].items() if name != "model_type"}, max_position_embeddings=8192, rope_theta=500000.0, pad_token_id=0, eos_token_id=1, bos_token_id=None
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
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = [word for word in (TINY.parent / "corpus" / "town.txt").read_text(encoding="utf-8").split() if word.isalpha()]
    draw = random.Random(0)
    per_word = len(tokenizer(" ".join(words[:2000]))["input_ids"]) / 2000
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            text = [draw.choice(words) for _ in range(int(tokens / per_word * 1.3))]
            ids = tokenizer(" ".join(text))["input_ids"][: tokens - 24]  # room for the template
            cut = len(ids) * 4 // 5
            file.write(json.dumps({"question": tokenizer.decode(ids[:cut]).strip(), "answer": tokenizer.decode(ids[cut:]).strip()}) + "\n")


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
