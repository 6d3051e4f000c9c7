"""Inputs of a benchmark without a network: a model of a real shape with random weights, and rows.

Rows have one length, ragged lengths, or lengths like Alpaca's.

python benchmarks/inputs.py --out /tmp/8b --tokens 2048 --rows 700
python benchmarks/inputs.py --out /tmp/moe --shape Qwen/Qwen3-30B-A3B --layers 12
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.plan.model_shape import known_models

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"
ARCHITECTURES = Path(__file__).with_name("architectures.json")  # transformers configs by name
CORPUS = TINY.parent / "corpus" / "town.txt"
ALPACA_INPUTS = 0.4  # share of Alpaca's rows that have an input
LAYER = re.compile(r"\.layers\.(\d+)\.")  # in the name of a weight
MXFP4_BLOCK = 32  # weights that share an exponent
MXFP4_EXPONENTS = (118, 122)  # of two from -127: random codes then deviate by 0.026
MAX_TRIES = 1000  # to make a row of an exact length; a few are enough


class WordCount(NamedTuple):
    """A log-normal distribution of words."""

    median: int
    sigma: float  # of the logarithm
    most: int

    def draw(self, rng: random.Random) -> int:
        """Return a number of words."""
        words = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(self.most, max(1, words))


# as in Alpaca, whose outputs have a long tail
ALPACA_WORDS = {
    "instruction": WordCount(11, 0.4, 60),
    "input": WordCount(12, 0.9, 150),
    "output": WordCount(45, 0.9, 450),
}


def model_settings(
    shape: str, layers: int | None = None, as_published: bool = False
) -> dict[str, object]:
    """Return the transformers config of an architecture, cut to its first `layers` layers.

    Of a model with towers it is that of the language model, unless it is to be `as_published`.
    """
    architectures = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    is_known = shape not in architectures
    settings = dict(known_models()[shape].config if is_known else architectures[shape])
    settings.pop("quantization_config", None)  # weights are drawn in full
    text = settings.get("text_config", settings)
    if is_known:
        text |= {"max_position_embeddings": 262144, "rope_theta": 500000.0}
    if layers is not None:
        text["num_hidden_layers"] = layers
    if as_published or text is settings:
        return settings
    return {"tie_word_embeddings": settings["tie_word_embeddings"], **text}


def random_model(
    shape: str,
    folder: Path,
    layers: int | None = None,
    as_published: bool = False,
    in_mxfp4: bool = False,
) -> None:
    """Save an architecture with random bfloat16 weights and the tiny model's tokenizer.

    Layers are drawn, on the GPU where there is one, until their kinds recur; later ones have the
    same weights. Beside towers all are drawn. With `in_mxfp4` experts are written as gpt-oss
    publishes them.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from sft_play.models.architecture import auto_class_of

    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}

    def make_config(layers: int | None) -> PreTrainedConfig:
        settings = model_settings(shape, layers, as_published)
        settings.get("text_config", settings).update(tokens)
        return AutoConfig.for_model(**settings)

    config = make_config(layers)
    text = config.get_text_config()
    drawn = text.num_hidden_layers if as_published else _layers_until_kinds_recur(text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        drawn_config = make_config(drawn)
        model = auto_class_of(config).from_config(drawn_config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1000GB")
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    if in_mxfp4:
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.save_pretrained(folder)
    _write_by_layer(folder, drawn, text.num_hidden_layers, in_mxfp4)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)


def _write_by_layer(folder: Path, drawn: int, layers: int, in_mxfp4: bool) -> None:
    """Cut the file of a model into those of its layers, and repeat the `drawn` first ones."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in load_file(whole).items():
        found = LAYER.search(name)
        file = "rest.safetensors" if found is None else _file_of_layer(int(found[1]))
        files.setdefault(file, {})[name] = weight
    whole.unlink()
    weight_map = {}
    for file, weights in files.items():
        if in_mxfp4:
            weights = experts_in_mxfp4(weights)
        save_file(weights, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
    for name in list(weight_map):
        found = LAYER.search(name)
        if found is not None:
            for layer in range(int(found[1]) + drawn, layers, drawn):
                weight_map[_of_layer(name, layer)] = _file_of_layer(layer)
    with ThreadPoolExecutor() as threads:
        copies = range(drawn, layers)
        list(threads.map(lambda layer: _repeat_layer(folder, layer % drawn, layer), copies))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layers_until_kinds_recur(text: PreTrainedConfig) -> int:
    """Return how many layers make the first of each kind, such as 4 where each fourth differs."""
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    lengths = range(1, len(kinds) + 1)
    return next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


def _file_of_layer(layer: int) -> str:
    return f"layer-{layer}.safetensors"


def _of_layer(names: str, layer: int) -> str:
    """Return names of weights with the number of another layer."""
    return LAYER.sub(f".layers.{layer}.", names)


def _repeat_layer(folder: Path, first: int, layer: int) -> None:
    """Write the weights of a layer once more, under the names of another one."""
    with (folder / _file_of_layer(first)).open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = _of_layer(source.read(size).decode(), layer).strip()
        header += " " * (-len(header) % 8)
        with (folder / _file_of_layer(layer)).open("wb") as copy:
            copy.write(len(header).to_bytes(8, "little") + header.encode())
            shutil.copyfileobj(source, copy, 1 << 24)


def experts_in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with random codes of 4 bits in place of experts (E, inputs, outputs)."""
    import torch

    found = {}
    for name, weight in weights.items():
        if weight.ndim != 3 or not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = experts, outputs, inputs // MXFP4_BLOCK
        codes = torch.randint(0, 256, (*blocks, MXFP4_BLOCK // 2), dtype=torch.uint8)
        found[f"{name}_blocks"] = codes
        found[f"{name}_scales"] = torch.randint(*MXFP4_EXPONENTS, blocks, dtype=torch.uint8)
    return found


def fixed_rows(path: Path, tokens: int, rows: int, seed: int = 0) -> None:
    """Write question/answer rows of exactly `tokens` tokens each, template included.

    A fifth of the words is in the answer. Another seed draws other rows.
    """
    _write_rows(path, [tokens] * rows, answer_share=0.2, seed=seed)


def ragged_rows(
    path: Path, rows: int, median: int = 300, sigma: float = 0.8, least: int = 32, most: int = 2048
) -> None:
    """Write question/answer rows whose tokens are log-normal with a median of `median`.

    Three fifths of the words are in the answer.
    """
    rng = random.Random(1)
    lengths = []
    for _ in range(rows):
        tokens = round(rng.lognormvariate(math.log(median), sigma))
        lengths.append(min(most, max(least, tokens)))
    _write_rows(path, lengths, answer_share=0.6)


def _write_rows(path: Path, lengths: Sequence[int], answer_share: float, seed: int = 0) -> None:
    """Write a row for each length; the first rows do not depend on how many follow."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = [word for word in CORPUS.read_text(encoding="utf-8").split() if word.isalpha()]
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for tokens in lengths:
            row = _make_row(tokenizer, words, tokens, answer_share, rng)
            file.write(json.dumps(row) + "\n")


def _make_row(
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[str],
    tokens: int,
    answer_share: float,
    rng: random.Random,
) -> dict[str, str]:
    """Return a question and an answer that the template renders to exactly `tokens` tokens.

    A token may span words, so words are added and removed until the length is right.
    """
    text: list[str] = rng.choices(words, k=max(2, tokens // 2))
    for _ in range(MAX_TRIES):
        cut = max(1, round(len(text) * (1 - answer_share)))
        row = {"question": " ".join(text[:cut]), "answer": " ".join(text[cut:])}
        excess = _count_tokens(tokenizer, row) - tokens
        if excess == 0:
            return row
        if excess < 0:
            text += rng.choices(words, k=max(1, -excess * 3 // 4))
        else:
            for _ in range(min(max(1, excess * 3 // 4), len(text) - 2)):
                text.pop(rng.randrange(len(text)))
    raise AssertionError(f"no row of {tokens} tokens in {MAX_TRIES} tries")


def _count_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, str]) -> int:
    messages = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def alpaca_rows(alpaca: Path, messages: Path, rows: int, seed: int = 0) -> None:
    """Write rows with the lengths of Alpaca's, cut from the corpus that ships.

    Each is written twice: as instruction, input and output, and as messages.
    """
    rng = random.Random(seed)
    words = CORPUS.read_text(encoding="utf-8").split(" ")  # line breaks stay

    def draw_text(field: str) -> str:
        count = ALPACA_WORDS[field]
        length = count.draw(rng)
        start = rng.randrange(len(words) - count.most)
        return " ".join(words[start : start + length]).strip()

    with (
        alpaca.open("w", encoding="utf-8") as instructions,
        messages.open("w", encoding="utf-8") as conversations,
    ):
        for _ in range(rows):
            row = {
                "instruction": draw_text("instruction"),
                "input": draw_text("input") if rng.random() < ALPACA_INPUTS else "",
                "output": draw_text("output"),
            }
            question = row["instruction"]
            if row["input"]:
                question += f"\n\n{row['input']}"
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": row["output"]},
            ]
            instructions.write(json.dumps(row, ensure_ascii=False) + "\n")
            conversations.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def main() -> None:
    """Write a model and rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and rows.jsonl")
    parser.add_argument("--layers", type=int, help="how many of the architecture's; default all")
    parser.add_argument("--as-published", action="store_true", help="with the model's towers")
    parser.add_argument(
        "--mxfp4", action="store_true", help="experts in 4 bits, as gpt-oss has them"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=700)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    random_model(args.shape, model, args.layers, args.as_published, args.mxfp4)
    fixed_rows(args.out / "rows.jsonl", args.tokens, args.rows)
    print(
        f"wrote {args.out}/model ({args.shape}) and {args.out}/rows.jsonl "
        f"({args.rows} rows of {args.tokens} tokens)"
    )


if __name__ == "__main__":
    main()
