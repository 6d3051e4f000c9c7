"""Inputs of the benchmarks, made without a network: models with random weights, and rows.

Models have the shape of a real one. Rows have one length, log-normal lengths, lengths like
Alpaca's, or an image.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from benchmarks.machine import ROOT
from benchmarks.workloads import TOY, BaseModel
from sft_play.plan.config_json import known_models

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TINY = ROOT / "data" / "tiny_llama"
ARCHITECTURES = Path(__file__).with_name("architectures.json")  # transformers configs by name
# of each model type with images: its image tokens, what its template writes, its processor's files
PROCESSORS = Path(__file__).with_name("processors.json")
CORPUS = TINY.parent / "corpus" / "town.txt"
ALPACA_INPUTS = 0.4  # share of Alpaca's rows that have an input
LAYER = re.compile(r"\.layers\.(\d+)\.")  # in the name of a weight
REST = -1  # the layer of weights that are outside the layers
MXFP4_BLOCK = 32  # weights that share an exponent
MXFP4_EXPONENTS = (118, 122)  # of two from -127: random codes then deviate by 0.026
MAX_TRIES = 1000  # to make a row of an exact length; a few are enough
IMAGE_PIXELS = 768  # of a side
IMAGE_WORDS = 285  # of a row: about 300 tokens of the tiny tokenizer
QWEN3_TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
IMAGE_TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}{%% if message['role'] == 'assistant' %%}<|end|>{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)


class WordCount(NamedTuple):
    """A log-normal distribution of word counts."""

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
# of a chat; the longest is shorter than 1,024 tokens
CHAT_WORDS = {"question": WordCount(11, 0.4, 60), "answer": WordCount(45, 0.9, 130)}
ANSWERS = (1, 2, 3)


def model_settings(
    shape: str, layers: int | None = None, as_published: bool = False
) -> dict[str, object]:
    """Return the transformers config of an architecture, cut to its first `layers` layers.

    If the model has a vision encoder, only `as_published` includes it.
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


def model_folder(model: BaseModel, folder: Path) -> Path:
    """Return the folder of a model's random weights, whether it exists or not."""
    if model.shape == TOY:
        return TINY
    name = model.shape.rpartition("/")[2]
    if model.layers is not None:
        name += f"-{model.layers}-layers"
    for field in ("in_mxfp4", "as_published", "with_images", "with_reasoning"):
        if getattr(model, field):
            name += f"-{field.replace('_', '-')}"
    return folder / "models" / name


def make_model(model: BaseModel, folder: Path) -> Path:
    """Return the folder of a model with random weights. If it does not exist, make it.

    Another process draws the weights: otherwise this one would keep the GPU's memory.
    """
    made = model_folder(model, folder)
    if not (made / "tokenizer.json").exists():  # written last
        spec = TypeAdapter(BaseModel).dump_json(model.base).decode()
        command = [sys.executable, "-m", "benchmarks.inputs", str(made), spec]
        subprocess.run(command, check=True, cwd=ROOT)
    return made


def random_model(model: BaseModel, folder: Path) -> None:
    """Save a model with random bfloat16 weights and the tiny model's tokenizer.

    Layers are drawn, on the GPU if there is one, until their kinds repeat. Later layers have the
    same weights. If the model has a vision encoder, all layers are drawn. With `in_mxfp4` experts
    are stored as gpt-oss publishes them.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from sft_play.models.architecture import auto_class_of

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model_type = model_settings(model.shape, None, model.has_encoder)["model_type"]
    image_ids = _add_images(tokenizer, model_type) if model.with_images else {}
    if model.with_reasoning:
        from trl.chat_template_utils import qwen3_chat_template

        tokenizer.add_special_tokens({"additional_special_tokens": QWEN3_TOKENS})
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.chat_template = qwen3_chat_template

    def make_config(layers: int | None) -> PreTrainedConfig:
        settings = model_settings(model.shape, layers, model.has_encoder) | image_ids
        text = settings.get("text_config", settings)
        text |= {"pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        return AutoConfig.for_model(**settings)

    config = make_config(model.layers)
    text = config.get_text_config()
    drawn = text.num_hidden_layers if model.has_encoder else _layers_until_kinds_repeat(text)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = auto_class_of(config).from_config(make_config(drawn), dtype=torch.bfloat16)
    module.save_pretrained(folder, max_shard_size="1000GB")
    config.architectures, config.dtype = [type(module).__name__], torch.bfloat16
    if model.in_mxfp4:
        config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.save_pretrained(folder)
    if not model.has_encoder:
        _write_by_layer(folder, drawn, text.num_hidden_layers, model.in_mxfp4)
    if model.with_images:
        for name, values in _processor(model_type)["files"].items():
            (folder / name).write_text(json.dumps(values, indent=2), encoding="utf-8")
    tokenizer.save_pretrained(folder)


def _processor(model_type: str) -> dict[str, Any]:
    """Return the entry of a model type in processors.json."""
    return json.loads(PROCESSORS.read_text(encoding="utf-8"))[model_type]


def _add_images(tokenizer: PreTrainedTokenizerBase, model_type: str) -> dict[str, int]:
    """Let a tokenizer write images; return the fields of the config that name its image tokens."""
    found = _processor(model_type)
    tokens = found["tokens"]
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    tokenizer._set_model_specific_special_tokens(found["named_tokens"])
    tokenizer.chat_template = IMAGE_TEMPLATE % found["image"]
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _write_by_layer(folder: Path, drawn: int, layers: int, in_mxfp4: bool) -> None:
    """Split the file of a model into one per layer, and repeat the `drawn` first layers."""
    from safetensors.torch import load_file, save_file

    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        found = LAYER.search(name)
        parts.setdefault(int(found[1]) if found else REST, {})[name] = weight
    if in_mxfp4:
        parts = {layer: experts_in_mxfp4(weights) for layer, weights in parts.items()}
    weight_map = {}

    def write(layer: int) -> None:
        part = parts[layer if layer == REST else layer % drawn]
        weights = {LAYER.sub(f".layers.{layer}.", name): part[name] for name in part}
        save_file(weights, folder / f"layer-{layer}.safetensors", {"format": "pt"})
        weight_map.update(dict.fromkeys(weights, f"layer-{layer}.safetensors"))

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, (REST, *range(layers))))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layers_until_kinds_repeat(text: PreTrainedConfig) -> int:
    """Return after how many layers their kinds repeat, e.g. 4 if every fourth layer differs."""
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    lengths = range(1, len(kinds) + 1)
    return next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


def experts_in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace experts (E, inputs, outputs) by random 4-bit codes."""
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


def fixed_rows(
    path: Path, tokens: int, rows: int, seed: int = 0, as_messages: bool = False
) -> None:
    """Write question/answer rows of exactly `tokens` tokens each, including the template.

    The answer has a fifth of the words. Another seed draws other rows.
    """
    _write_rows(path, [tokens] * rows, 0.2, seed, as_messages)


def ragged_rows(
    path: Path, rows: int, median: int = 300, sigma: float = 0.8, least: int = 32, most: int = 2048
) -> None:
    """Write question/answer rows with log-normal lengths and a median of `median` tokens.

    The answer has three fifths of the words.
    """
    rng, count = random.Random(1), WordCount(median, sigma, most)
    _write_rows(path, [max(least, count.draw(rng)) for _ in range(rows)], 0.6)


def _write_rows(
    path: Path,
    lengths: Sequence[int],
    answer_share: float,
    seed: int = 0,
    as_messages: bool = False,
) -> None:
    """Write a row for each length. The first rows do not depend on how many follow."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = _corpus_words()
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for tokens in lengths:
            row = _make_row(tokenizer, words, tokens, answer_share, rng)
            written = {"messages": _messages(row)} if as_messages else row
            file.write(json.dumps(written) + "\n")


def _corpus_words() -> list[str]:
    return [word for word in CORPUS.read_text(encoding="utf-8").split() if word.isalpha()]


def _make_row(
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[str],
    tokens: int,
    answer_share: float,
    rng: random.Random,
) -> dict[str, str]:
    """Return a question and an answer that the template renders to exactly `tokens` tokens.

    A token may span words, so words are added and removed until the length matches.
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


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": row["answer"]}
    if "reasoning" in row:
        answer["reasoning_content"] = row["reasoning"]
    return [{"role": "user", "content": row["question"]}, answer]


def _count_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, str]) -> int:
    rendered = tokenizer.apply_chat_template(_messages(row), tokenize=False)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


class _Corpus:
    """Draws texts of so many words from the corpus that ships."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self._words = CORPUS.read_text(encoding="utf-8").split(" ")  # line breaks stay

    def draw(self, count: WordCount) -> str:
        """Return a text."""
        length = count.draw(self.rng)
        start = self.rng.randrange(len(self._words) - count.most)
        return " ".join(self._words[start : start + length]).strip()


def alpaca_rows(path: Path, rows: int, seed: int = 0) -> None:
    """Write rows of messages with lengths like Alpaca's."""
    corpus = _Corpus(seed)

    def chat() -> list[dict[str, Any]]:
        question = corpus.draw(ALPACA_WORDS["instruction"])
        if corpus.rng.random() < ALPACA_INPUTS:
            question = f"{question}\n\n{corpus.draw(ALPACA_WORDS['input'])}".rstrip()
        return _messages({"question": question, "answer": corpus.draw(ALPACA_WORDS["output"])})

    _write_chats(path, (chat() for _ in range(rows)))


def chat_rows(
    path: Path,
    rows: int,
    seed: int = 0,
    answers: Sequence[int] = ANSWERS,
    words: Mapping[str, WordCount] = CHAT_WORDS,
) -> None:
    """Write chats of one of these numbers of answers. `words` may include reasoning."""
    corpus = _Corpus(seed)

    def chat() -> list[dict[str, Any]]:
        turns = []
        for _ in range(corpus.rng.choice(answers)):
            turns += _messages({name: corpus.draw(count) for name, count in words.items()})
        return turns

    _write_chats(path, (chat() for _ in range(rows)))


def _write_chats(path: Path, chats: Iterable[list[dict[str, Any]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for turns in chats:
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def image_rows(folder: Path, rows: int) -> None:
    """Write JPEG files of noise, and rows.jsonl with a question about each of them."""
    import numpy as np
    from PIL import Image

    rng = random.Random(0)
    words = _corpus_words()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(rows):
            pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize((IMAGE_PIXELS, IMAGE_PIXELS))
            picture.save(folder / f"{number}.jpg", quality=90)
            question = " ".join(rng.choices(words, k=IMAGE_WORDS // 3))
            answer = " ".join(rng.choices(words, k=2 * IMAGE_WORDS // 3))
            asked = [
                {"type": "image", "image": f"{number}.jpg"},
                {"type": "text", "text": f"What is in picture {number}? {question}"},
            ]
            turns = _messages({"question": asked, "answer": [{"type": "text", "text": answer}]})
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    spec = TypeAdapter(BaseModel).validate_json(sys.argv[2])
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    random_model(spec, Path(sys.argv[1]))
