"""`make export FORMAT=gguf`: write files for llama.cpp and its users, open and score them."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from sft_play.data.render import IGNORE_INDEX
from sft_play.data.splits import drawn, question_indices
from sft_play.data.store import Sample, Split
from sft_play.data.templates import ChatTemplate
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.evaluation.scores import rouge
from sft_play.inference.exported import Export, WrittenExport, prompts_of, write_plain_model
from sft_play.inference.gguf_tools import (
    HOW_TO_GET,
    IN_16_BITS,
    LlamaCpp,
    UnknownPreTokenizer,
    bindings,
    open_gguf,
    require_bindings,
)
from sft_play.inference.improvement import Losses, read_scored_rows
from sft_play.inference.modelfile import TurnTexts, modelfile_text, read_turn_texts
from sft_play.models.export import read_stops
from sft_play.reporting.answers import read_answers
from sft_play.runs.exports import LEAST_GAIN
from sft_play.runs.files import Json, read_json, write_json, write_text

REPORT = "export.json"
CHECKED_PROMPTS = 100  # for the Modelfile
MOST_ANSWERS = 32
CHECKED_ROWS = 200  # for comparing their tokens
LEAST_SAME_TOKENS = 0.95  # share of them that must have the same tokens as in training
LEAST_CONTEXT = 512
ROOM = 8  # tokens of the context in addition to the longest row
# Of llama.cpp, the most common first: others split text like one of these, or are rare
PRE_TOKENIZERS = """
gpt-2 llama-bpe qwen2 starcoder qwen35 deepseek-v3 gpt-4o tekken deepseek-llm falcon chatglm-bpe
default
""".split()
PRE_TOKENIZER_KEY = "tokenizer.ggml.pre"


def write_gguf(export: Export, staging: Path, plain: Path) -> WrittenExport:
    """Write gguf files and a Modelfile for each.

    Raises: ConfigError for a run on images; EnvironmentFault without llama.cpp; CheckpointError
    if the converter does not support the model, or if a file differs from the scored model.
    """
    if export.data.test.has_images:
        raise ConfigError(
            f"FORMAT=gguf: {export.run.path} has rows with images, and a gguf file contains only "
            "the language model. FORMAT=safetensors exports the vision encoder, too"
        )
    tools = LlamaCpp.find(export.asked.llama_cpp)
    tools.require(export.asked.quantizations)
    lines, found = write_plain_model(export, plain)
    lines.append(found.line("from"))
    staging.mkdir()
    files, source, converted = write_gguf_files(export, tools, plain, staging)
    lines += [*converted, *write_modelfiles(export, staging, files)]
    scores = score_files(export, staging, files, source)
    return WrittenExport(lines, scores, [f"/{file}" for file in files])


def write_gguf_files(
    export: Export, tools: LlamaCpp, plain: Path, staging: Path
) -> tuple[list[str], Path, list[str]]:
    """Write a file of each requested type.

    Return their names, the 16-bit file that others were quantized from, and the lines to print.
    """
    dtype = read_json(plain / "config.json").get("dtype")
    in_16_bits = "F16" if dtype == "float16" else "BF16"
    wanted = {kind: f"{export.run.name}-{kind}.gguf" for kind in export.asked.quantizations}
    folder = staging if in_16_bits in wanted else plain
    source = folder / f"{export.run.name}-{in_16_bits}.gguf"
    lines = convert_to_gguf(export, tools, plain, source, in_16_bits)
    for kind, name in wanted.items():
        if kind not in IN_16_BITS:
            tools.quantize(source, staging / name, kind)
        elif kind != in_16_bits:
            convert_to_gguf(export, tools, plain, staging / name, kind)
    return list(wanted.values()), source, lines


def convert_to_gguf(
    export: Export, tools: LlamaCpp, plain: Path, target: Path, kind: str
) -> list[str]:
    """Write a 16-bit file; if the converter does not know the tokenizer, test pre-tokenizers.

    Raises: CheckpointError if no pre-tokenizer of llama.cpp splits text as in training.
    """
    try:
        tools.convert(plain, target, kind, export.asked.pre_tokenizer)
        return []
    except UnknownPreTokenizer:
        if bindings() is None:
            raise EnvironmentFault(
                "PRE_TOKENIZER is not set, and llama.cpp's converter does not know this tokenizer. "
                "Write PRE_TOKENIZER=gpt-2 (or llama-bpe, qwen2, ...). With llama-cpp-python, the "
                f"test rows select it: {HOW_TO_GET}"
            ) from None
    tools.convert(plain, target, kind, "gpt-2")
    split, tokenizer = export.data.test, export.tokenizer
    found = {each: same_tokens(target, split, tokenizer, each) for each in PRE_TOKENIZERS}
    name, same = max(found.items(), key=lambda each: each[1].same)
    if same.share < LEAST_SAME_TOKENS:
        raise CheckpointError(
            "llama.cpp's converter does not know this tokenizer, and no pre-tokenizer of llama.cpp "
            f"splits text in the same way. With {name}, the nearest, {same.same} of {same.rows} "
            f"test rows have the tokens of training. PRE_TOKENIZER={name} exports anyway; "
            "FORMAT=safetensors exports for other servers"
        )
    target.unlink()
    tools.convert(plain, target, kind, name)
    return [
        f"pre-tokenizer {name}: llama.cpp does not know this tokenizer; by this one "
        f"{same.same} of {same.rows} test rows have the tokens of training"
    ]


def write_modelfiles(export: Export, staging: Path, files: list[str]) -> list[str]:
    """Write Modelfile for the first file and Modelfile.<type> for others, after checking it."""
    tokenizer, system = export.tokenizer, export.config.data.system_prompt
    texts = turn_texts_of(tokenizer)
    if texts is None:
        return ["no Modelfile: the chat template is more than texts around contents"]
    asked = prompts_of(tokenizer, system, export.data.test, CHECKED_PROMPTS)
    prompts = [(messages, ids) for messages, ids in asked if messages is not None]
    written = [f"{added(tokenizer)}{texts.render(messages)}" for messages, _ in prompts]
    encoded = tokenizer(written, add_special_tokens=False)["input_ids"]
    different = sum(found != ids for found, (_, ids) in zip(encoded, prompts, strict=True))
    if different:
        return [
            f"no Modelfile: for Ollama's template language {different} of {len(prompts)} prompts "
            "would have other tokens than in training"
        ]
    stops = tokenizer.convert_ids_to_tokens(list(read_stops(export.weights)))
    parameters = ollama_parameters(export)
    for number, file in enumerate(files):
        name = "Modelfile" if number == 0 else f"Modelfile.{file.split('-')[-1][:-5]}"
        text = modelfile_text(file, texts, stops, parameters, system)
        if text is None:
            return [f"no Modelfile: it cannot hold one of the stops {' '.join(map(repr, stops))}"]
        write_text(staging / name, text)
    return [f"Modelfile: {len(prompts)} of {len(prompts)} prompts have the tokens of training"]


def ollama_parameters(export: Export) -> dict[str, float]:
    """Return Ollama's context and sampling, from training and from generation_config.json."""
    generation = read_json(export.weights / GENERATION_CONFIG_NAME)
    parameters = {"num_ctx": export.config.model.max_seq_len}
    if not generation.get("do_sample"):
        return {**parameters, "temperature": 0}
    chosen = {name: generation.get(name) for name in ("temperature", "top_p", "top_k")}
    return parameters | {name: value for name, value in chosen.items() if value is not None}


def turn_texts_of(tokenizer: PreTrainedTokenizerBase) -> TurnTexts | None:
    """Return the chat template's texts around contents, without the ones that Ollama adds."""
    template, bos = ChatTemplate(tokenizer), added(tokenizer)
    return read_turn_texts(lambda asked: template.render_prompt(list(asked)).removeprefix(bos))


def added(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the token that a tokenizer adds before every text, "" for none."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token if ids and ids[0] == tokenizer.bos_token_id else ""


def score_files(export: Export, staging: Path, files: list[str], source: Path) -> list[str]:
    """Open each file with llama-cpp-python and compare it with the run; return the lines to print.

    Raises: CheckpointError for a file that loses too much of what was learned.
    """
    if bindings() is None:
        return [
            f"warning: not opened and not scored: llama-cpp-python is not installed; {HOW_TO_GET}"
        ]
    lines: list[str] = []
    report: Json = {}
    for file in files:
        scores = score_gguf(staging / file, export)
        if scores is None:
            return ["warning: not scored: the run wrote no losses of its test rows to eval/"]
        export.refuse(file, scores.faults(), lambda: remedy(export, source))
        lines.append(scores.line(file))
        report[file] = scores.as_json()
    write_json(staging / REPORT, report)
    return lines


def remedy(export: Export, source: Path) -> str:
    """Return what to type instead of a refused type; the 16-bit file is scored for it."""
    in_16_bits = score_gguf(source, export)
    if in_16_bits.faults():
        return "FORMAT=safetensors exports the model for other servers"
    return f"QUANT={source.stem.split('-')[-1]} {in_16_bits.losses.kept()}"


@dataclass(frozen=True)
class SameTokens:
    """How many texts a gguf file tokenizes as in training."""

    same: int
    rows: int

    @property
    def share(self) -> float:
        return self.same / max(1, self.rows)


@dataclass(frozen=True)
class GgufScores:
    """Scores of a gguf file, and the run's scores of the same rows."""

    losses: Losses
    tokens: SameTokens
    rouge_l: float | None = None  # None if no answers were generated
    run_rouge_l: float | None = None
    answers: int = 0
    ended: int = 0  # answers that end with a stop token
    run_ended: int = 0

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        text = (
            f"{name} {self.losses.line()} (at least {LEAST_GAIN}) "
            f"tokens={self.tokens.same}/{self.tokens.rows}"
        )
        if self.rouge_l is None:
            return text
        return (
            f"{text} rougeL={self.rouge_l:.3f} (run {self.run_rouge_l:.3f}) "
            f"ended={self.ended}/{self.answers} (run {self.run_ended})"
        )

    def faults(self) -> list[str]:
        """Return the differences from the run."""
        found = self.losses.faults(LEAST_GAIN)
        if self.run_ended - self.ended > max(1, self.answers // 10):
            lost = self.run_ended - self.ended
            found.append(f"{lost} of {self.answers} answers continue after the trained stop")
        if self.tokens.share < LEAST_SAME_TOKENS:
            other = self.tokens.rows - self.tokens.same
            found.append(f"llama.cpp gives other tokens in {other} of {self.tokens.rows} rows")
        return found

    def as_json(self) -> Json:
        """Return the facts for export.json."""
        kept = self.losses.gain_kept
        facts = asdict(self)
        facts |= facts.pop("losses")
        return facts | {"gain_kept": None if math.isnan(kept) else kept, "faults": self.faults()}


def same_tokens(
    path: Path, split: Split, tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str | None = None
) -> SameTokens:
    """Return how many rows a gguf file tokenizes as in training, with another pre-tokenizer.

    Rows whose text the original tokenizer does not encode to their ids are left out.
    """
    overrides = {PRE_TOKENIZER_KEY: pre_tokenizer} if pre_tokenizer else None
    pairs: list[tuple[str, list[int]]] = []
    for index in range(min(len(split), CHECKED_ROWS)):
        ids = split[index].ids.tolist()
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] == ids:
            pairs.append((text, ids))
    with closing(open_gguf(path, vocab_only=True, kv_overrides=overrides)) as model:
        same = sum(
            model.tokenize(text.encode(), add_bos=False, special=True) == ids for text, ids in pairs
        )
    return SameTokens(same, len(pairs))


def score_gguf(path: Path, export: Export) -> GgufScores | None:
    """Return a gguf file's scores on a run's test rows; None if the run wrote no losses."""
    found = read_scored_rows(export.run, export.data.test)
    if found is None:
        return None
    samples, written = found
    tokens = same_tokens(path, export.data.test, export.tokenizer)
    context = max(LEAST_CONTEXT, ROOM + max(len(sample.ids) for sample in samples))
    # on a GPU if llama-cpp-python was built for GPUs
    with closing(open_gguf(path, n_ctx=context, n_gpu_layers=-1, logits_all=True)) as model:
        nats = [nats_of(model, sample) for sample in samples]
        losses = Losses.of_table(np.column_stack([written, nats]))
        return with_answers(GgufScores(losses, tokens), model, export)


def nats_of(model: Any, sample: Sample) -> float:
    """Return the negative log-likelihood of a row's labels in nats."""
    model.reset()
    model.eval(sample.ids.tolist())
    positions = np.flatnonzero(sample.labels != IGNORE_INDEX)
    positions = positions[positions > 0]
    logits = torch.tensor(model.scores[positions - 1], dtype=torch.float64)  # (labels, vocabulary)
    labels = torch.tensor(sample.labels[positions], dtype=torch.int64)
    return cross_entropy(logits, labels, reduction="sum").item()


def with_answers(scores: GgufScores, model: Any, export: Export) -> GgufScores:
    """Return scores with ROUGE-L and stops of the file's answers and the run's, if it has any."""
    written = read_answers(export.run, "after")
    if not written:
        return scores
    split, answers = export.data.test, []
    asked = question_indices(split, export.config.train.generation_max_rows)
    asked = drawn(asked, len(written))[:MOST_ANSWERS]
    written = written[:MOST_ANSWERS]
    limit = int(export.run.read_report().scores("after")["max_new_tokens"])
    ended = 0
    for index in asked:
        ids, has_ended = answer_of(model, split[int(index)].prompt, limit)
        answers.append(export.tokenizer.decode(ids, skip_special_tokens=True).strip())
        ended += has_ended
    expected = [row.expected for row in written]
    return replace(
        scores,
        rouge_l=rouge("rougeL", answers, expected).estimate.mean,
        run_rouge_l=rouge("rougeL", [row.answer for row in written], expected).estimate.mean,
        answers=len(written),
        ended=ended,
        run_ended=sum(not row.was_cut for row in written),
    )


def answer_of(model: Any, prompt: Sequence[int], limit: int) -> tuple[list[int], bool]:
    """Return the greedy answer to a prompt, and whether llama.cpp ended it."""
    library = require_bindings()
    found: list[int] = []
    limit = min(limit, model.n_ctx() - len(prompt) - 1)
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        if library.llama_vocab_is_eog(model._model.vocab, token):
            return found, True
        found.append(int(token))
        if len(found) >= limit:
            break
    return found, False
