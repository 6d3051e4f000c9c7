"""`make export FORMAT=gguf`: files for llama.cpp and what is built on it, opened and scored."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from sft_play.data.templates import ChatTemplate
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.inference.exported import Export, Written, prompts_of, write_plain_model
from sft_play.inference.gguf_score import LEAST_SAME_TOKENS, best_pre_tokenizer, score_gguf
from sft_play.inference.gguf_tools import (
    HOW_TO_GET,
    IN_16_BITS,
    LlamaCpp,
    UnknownPreTokenizer,
    bindings,
)
from sft_play.inference.modelfile import TurnTexts, modelfile_text, read_turn_texts
from sft_play.models.export import read_stops
from sft_play.runs.files import Json, read_json, write_json, write_text

REPORT = "export.json"
CHECKED_PROMPTS = 100  # for the Modelfile


def write_gguf(export: Export, staging: Path, plain: Path) -> Written:
    """Write gguf files and a Modelfile for each.

    Raises: ConfigError for a run on images; EnvironmentFault without llama.cpp; CheckpointError
    if the converter does not take the model, or a file is not what was scored.
    """
    if export.data.test.has_images:
        raise ConfigError(
            f"FORMAT=gguf: {export.run.path} has rows with images, and a gguf file holds the "
            "language model alone; FORMAT=safetensors exports it with what reads images"
        )
    tools = LlamaCpp.find(export.asked.llama_cpp)
    tools.require(export.asked.quantizations)
    lines, found = write_plain_model(export, plain)
    lines.append(found.line("from"))
    staging.mkdir()
    files, source, converted = write_files(export, tools, plain, staging)
    lines += [*converted, *write_modelfiles(export, staging, files)]
    scores = score_files(export, staging, files, source)
    return Written(lines, scores, [f"/{file}" for file in files])


def write_files(
    export: Export, tools: LlamaCpp, plain: Path, staging: Path
) -> tuple[list[str], Path, list[str]]:
    """Write a file of each asked type.

    Return their names, the file of 16 bits that others were quantized from, and the lines to print.
    """
    dtype = read_json(plain / "config.json").get("dtype")
    in_16_bits = "F16" if dtype == "float16" else "BF16"
    wanted = {kind: f"{export.run.name}-{kind}.gguf" for kind in export.asked.quantizations}
    folder = staging if in_16_bits in wanted else plain
    source = folder / f"{export.run.name}-{in_16_bits}.gguf"
    lines = convert(export, tools, plain, source, in_16_bits)
    for kind, name in wanted.items():
        if kind not in IN_16_BITS:
            tools.quantize(source, staging / name, kind)
        elif kind != in_16_bits:
            convert(export, tools, plain, staging / name, kind)
    return list(wanted.values()), source, lines


def convert(export: Export, tools: LlamaCpp, plain: Path, target: Path, kind: str) -> list[str]:
    """Write a file of 16 bits; a tokenizer that the converter does not know is measured.

    Raises: CheckpointError if no pre-tokenizer of llama.cpp splits text as training did.
    """
    try:
        tools.convert(plain, target, kind, export.asked.pre_tokenizer)
        return []
    except UnknownPreTokenizer:
        if bindings() is None:
            raise EnvironmentFault(
                "llama.cpp's converter does not know this tokenizer, and without llama-cpp-python "
                "its pre-tokenizers cannot be tried on the test rows: PRE_TOKENIZER=gpt-2 (or "
                f"llama-bpe, qwen2, ...) names the right one; {HOW_TO_GET}"
            ) from None
    tools.convert(plain, target, kind, "gpt-2")
    name, same = best_pre_tokenizer(target, export.data.test, export.tokenizer)
    if same.share < LEAST_SAME_TOKENS:
        raise CheckpointError(
            "llama.cpp's converter does not know this tokenizer, and none of its pre-tokenizers "
            f"splits text as it does: by {name}, the nearest, {same.same} of {same.rows} test rows "
            f"have the tokens of training; PRE_TOKENIZER={name} exports with it anyway, "
            "FORMAT=safetensors exports for other servers"
        )
    target.unlink()
    tools.convert(plain, target, kind, name)
    return [
        f"pre-tokenizer {name}: llama.cpp does not know this tokenizer; by this one "
        f"{same.same} of {same.rows} test rows have the tokens of training"
    ]


def write_modelfiles(export: Export, staging: Path, files: list[str]) -> list[str]:
    """Write Modelfile for the first file and Modelfile.<type> for others, once it is checked."""
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
    parameters = parameters_of(export)
    for number, file in enumerate(files):
        name = "Modelfile" if number == 0 else f"Modelfile.{file.split('-')[-1][:-5]}"
        text = modelfile_text(file, texts, stops, parameters, system)
        if text is None:
            return [f"no Modelfile: it cannot hold one of the stops {' '.join(map(repr, stops))}"]
        write_text(staging / name, text)
    return [f"Modelfile: {len(prompts)} of {len(prompts)} prompts have the tokens of training"]


def parameters_of(export: Export) -> dict[str, float]:
    """Return Ollama's context and sampling: those of training and of generation_config.json."""
    generation = read_json(export.weights / GENERATION_CONFIG_NAME)
    parameters = {"num_ctx": export.config.model.max_seq_len}
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


def score_files(export: Export, staging: Path, files: list[str], source: Path) -> list[str]:
    """Open each file with llama-cpp-python and compare it with the run; return the lines to print.

    Raises: CheckpointError for a file that keeps too little of what was learned.
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
        if scores.faults():
            remedy = "FORMAT=safetensors exports the model for other servers"
            in_16_bits = score_gguf(source, export)
            if not in_16_bits.faults():
                kept = f"keeps {in_16_bits.gain_kept:.3f} of the improvement"
                remedy = f"QUANT={source.stem.split('-')[-1]} {kept}"
            export.refuse(file, scores.faults(), f"; {remedy}")
        lines.append(scores.line(file))
        report[file] = scores.as_json()
    write_json(staging / REPORT, report)
    return lines
