"""`make export FORMAT=gguf`: files for llama.cpp and what is built on it, opened and scored."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from sft_play.data.render import RenderError
from sft_play.data.store import Split
from sft_play.data.templates import ChatTemplate
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.evaluation.reopened import checked_prompts
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.exported import (
    Exported,
    complete,
    messages_of,
    reopened_model,
    staged,
    write_plain_model,
)
from sft_play.inference.gguf_score import best_pre_tokenizer, score_gguf
from sft_play.inference.gguf_tools import (
    HOW_TO_GET,
    IN_16_BITS,
    LlamaCpp,
    UnknownPreTokenizer,
    bindings,
)
from sft_play.inference.modelfile import Messages, TurnTexts, modelfile_text, read_turn_texts
from sft_play.models.export import read_stops
from sft_play.runs.exports import ExportAsked
from sft_play.runs.files import read_json, write_json, write_text

REPORT = "export.json"
LEAST_SAME_TOKENS = 0.95  # share of the rows that must have the tokens of training
CHECKED_PROMPTS = 100  # for the Modelfile


def export_gguf(run: Exported, target: Path, asked: ExportAsked) -> list[str]:
    """Write gguf files and a Modelfile for each; return the lines to print.

    Raises: ConfigError for a run on images; EnvironmentFault without llama.cpp; CheckpointError
    where the converter does not take the model, or a file is not what was scored.
    """
    tokenizer = AutoTokenizer.from_pretrained(run.weights)
    split = prepared_data(run.folder, run.config, tokenizer).test
    if split.has_images:
        raise ConfigError(
            f"FORMAT=gguf: {run.folder.path} has rows with images, and a gguf file holds the "
            "language model alone; FORMAT=safetensors exports it with what reads images"
        )
    tools = LlamaCpp.find(asked.llama_cpp)
    tools.require(asked.quantizations)
    with (
        staged(target) as staging,
        tempfile.TemporaryDirectory(prefix=".gguf-from-", dir=target.parent) as temporary,
    ):
        plain = Path(temporary) / "model"
        lines = write_plain_model(run, plain, asked.dtype)
        lines.append(reopened_model(run, plain).line("from"))
        staging.mkdir()
        files, converted = write_files(run, tools, asked, plain, staging, split)
        lines += converted
        lines += write_modelfiles(run, staging, files, tokenizer, split)
        scored = score_files(run, staging, files, tokenizer, split)
        lines += scored
        complete(run, staging, target, "gguf", scored)
    return [*lines, *(f"exported {target / file}" for file in files)]


def write_files(
    run: Exported, tools: LlamaCpp, asked: ExportAsked, plain: Path, staging: Path, split: Split
) -> tuple[list[str], list[str]]:
    """Write a file of each asked type; return their names and the lines to print."""
    dtype = read_json(plain / "config.json").get("dtype")
    in_16_bits = "F16" if dtype == "float16" else "BF16"
    wanted = {kind: f"{run.folder.name}-{kind}.gguf" for kind in asked.quantizations}
    first = next((kind for kind in asked.quantizations if kind in IN_16_BITS), in_16_bits)
    source = staging / wanted.get(first, f"{run.folder.name}-{first}.gguf")
    lines = convert(tools, asked, plain, source, first, split)
    for kind, name in wanted.items():
        if (staging / name) == source:
            continue
        if kind in IN_16_BITS:
            convert(tools, asked, plain, staging / name, kind, split)
        else:
            tools.quantize(source, staging / name, kind)
    if first not in wanted:
        source.unlink()
    return list(wanted.values()), lines


def convert(
    tools: LlamaCpp, asked: ExportAsked, plain: Path, target: Path, kind: str, split: Split
) -> list[str]:
    """Write a file of 16 bits; a tokenizer that the converter does not know is measured.

    Raises: CheckpointError where no pre-tokenizer of llama.cpp splits text as training did.
    """
    try:
        tools.convert(plain, target, kind, asked.pre_tokenizer)
        return []
    except UnknownPreTokenizer:
        if bindings() is None:
            raise EnvironmentFault(
                "llama.cpp's converter does not know this tokenizer, and without llama-cpp-python "
                "its pre-tokenizers cannot be tried on the test rows: PRE_TOKENIZER=gpt-2 (or "
                f"llama-bpe, qwen2, ...) names the right one; {HOW_TO_GET}"
            ) from None
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tools.convert(plain, target, kind, "gpt-2")
    name, same = best_pre_tokenizer(target, split, tokenizer)
    if same.share < LEAST_SAME_TOKENS:
        raise CheckpointError(
            "llama.cpp's converter does not know this tokenizer, and none of its pre-tokenizers "
            f"splits text as it does: by {name}, the nearest, {same.same} of {same.rows} test rows "
            f"have the tokens of training; PRE_TOKENIZER={name} exports with it all the same, "
            "FORMAT=safetensors exports for other servers"
        )
    target.unlink()
    tools.convert(plain, target, kind, name)
    return [
        f"pre-tokenizer {name}: llama.cpp does not know this tokenizer; by this one "
        f"{same.same} of {same.rows} test rows have the tokens of training"
    ]


def write_modelfiles(
    run: Exported,
    staging: Path,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
) -> list[str]:
    """Write Modelfile for the first file and Modelfile.<type> for others, once it is checked."""
    texts = turn_texts_of(tokenizer)
    prompts = prompts_of(run, tokenizer, split)
    if texts is None:
        return ["no Modelfile: the chat template is more than texts around contents"]
    different = sum(encoded(tokenizer, texts, messages) != ids for messages, ids in prompts)
    if different:
        return [
            f"no Modelfile: for Ollama's template language {different} of {len(prompts)} prompts "
            "would have other tokens than in training"
        ]
    stops = tokenizer.convert_ids_to_tokens(list(read_stops(run.weights)))
    parameters = parameters_of(run)
    for number, file in enumerate(files):
        name = "Modelfile" if number == 0 else f"Modelfile.{file.split('-')[-1][:-5]}"
        text = modelfile_text(file, texts, stops, parameters, run.config.data.system_prompt)
        if text is None:
            return [f"no Modelfile: it cannot hold one of the stops {' '.join(map(repr, stops))}"]
        write_text(staging / name, text)
    return [f"Modelfile: {len(prompts)} of {len(prompts)} prompts have the tokens of training"]


def parameters_of(run: Exported) -> dict[str, float]:
    """Return Ollama's context and sampling: those of training and of generation_config.json."""
    generation = read_json(run.weights / GENERATION_CONFIG_NAME)
    parameters = {"num_ctx": run.config.model.max_seq_len}
    if not generation.get("do_sample"):
        return {**parameters, "temperature": 0}
    chosen = {name: generation.get(name) for name in ("temperature", "top_p", "top_k")}
    return parameters | {name: value for name, value in chosen.items() if value is not None}


def turn_texts_of(tokenizer: PreTrainedTokenizerBase) -> TurnTexts | None:
    """Return what the chat template writes around contents, without what Ollama adds itself."""
    template = ChatTemplate(tokenizer)
    return read_turn_texts(
        lambda messages: template.render_prompt(list(messages)), added(tokenizer)
    )


def added(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the token that a tokenizer puts before every text, "" for none."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token if ids and ids[0] == tokenizer.bos_token_id else ""


def encoded(tokenizer: PreTrainedTokenizerBase, texts: TurnTexts, messages: Messages) -> list[int]:
    """Return the ids of a prompt by the Modelfile's template."""
    text = added(tokenizer) + texts.render(messages)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompts_of(
    run: Exported, tokenizer: PreTrainedTokenizerBase, split: Split
) -> list[tuple[Messages, list[int]]]:
    """Return prompts of test rows and of several turns, with the ids of training."""
    system = run.config.data.system_prompt
    prompts: list[tuple[Messages, list[int]]] = list(checked_prompts(tokenizer, system))
    for index in range(min(len(split), CHECKED_PROMPTS)):
        ids = split[index].prompt
        try:
            messages = messages_of(ids, tokenizer, system) if ids else None
        except RenderError:
            messages = None
        if messages is not None:
            prompts.append((messages, ids))
    return prompts


def score_files(
    run: Exported,
    staging: Path,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
) -> list[str]:
    """Open each file with llama-cpp-python and hold it to the run; return the lines to print.

    Raises: CheckpointError for a file that keeps too little of what was learned.
    """
    if bindings() is None:
        return [
            f"warning: not opened and not scored: llama-cpp-python is not installed; {HOW_TO_GET}"
        ]
    lines: list[str] = []
    report: dict[str, Any] = {}
    for file in files:
        scores = score_gguf(staging / file, run.folder, split, tokenizer)
        if scores is None:
            return ["warning: not scored: the run wrote no losses of its test rows to eval/"]
        faults = scores.faults()
        tokens = scores.tokens
        if tokens.share < LEAST_SAME_TOKENS:
            faults.append(
                f"llama.cpp gives other tokens in {tokens.rows - tokens.same} of {tokens.rows} rows"
            )
        if faults:
            raise CheckpointError(
                f"{file} is not what was scored: {'; '.join(faults)}; nothing was published; "
                "QUANT=Q8_0 or QUANT=BF16 keeps more"
            )
        lines.append(scores.line(file))
        report[file] = scores.as_json()
    write_json(staging / REPORT, report)
    return lines
