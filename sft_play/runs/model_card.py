"""The README.md of saved weights: what they are, how to load them, what they score. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.runs.report import RunReport

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SCORES = {"eval_loss": "loss (nats a token)", "rougeL": "ROUGE-L", "cut_answers": "cut answers"}


@dataclass(frozen=True)
class SavedStops:
    """The tokens that end an answer, the trained one first, and their ids."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]


def card_text(config: Config, report: RunReport, stops: SavedStops, weights: Path) -> str:
    """Return the text of README.md for the folder `weights`: adapter, model or merged."""
    is_adapter = weights.name == "adapter"
    sections = [
        *_metadata(config, is_adapter),
        f"# {report.run}",
        "",
        _what_it_is(config, report, weights.name),
        "",
        "## Use",
        "",
        "```python",
        *_code(config, weights, is_adapter),
        "```",
        "",
        *_stop_lines(stops, is_adapter),
        "",
        *_score_lines(report.metrics or {}),
        *_data_lines(config, report.data or {}),
        "## Training",
        "",
        *_table(("setting", "value"), _settings(config, report)),
    ]
    return "\n".join(sections) + "\n"


def _metadata(config: Config, is_adapter: bool) -> list[str]:
    """Return the head that the hub reads; a local base has no name there."""
    name = config.model.name
    tags = ["sft"] if config.tuning.mode == "full" else ["sft", "lora"]
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if HUB_ID.fullmatch(name):
        lines.append(f"base_model: {name}")
        if is_adapter:
            tags.append(f"base_model:adapter:{name}")
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags)]
    return [*lines, "---", ""]


def _what_it_is(config: Config, report: RunReport, kind: str) -> str:
    what = {
        "adapter": "A LoRA adapter of",
        "merged": "A LoRA adapter merged into",
        "model": "All weights of",
    }[kind]
    end = "" if report.status != "stopped" else " The run was stopped before its end."
    return (
        f"{what} `{config.model.name}`, fine-tuned with SFT-Play for {report.global_step} steps "
        f"(run `{report.run}`, mode {config.tuning.mode}).{end}"
    )


def _code(config: Config, weights: Path, is_adapter: bool) -> list[str]:
    """Return the lines of Python that load the weights and answer a question."""
    model = config.model
    options = ""
    if model.revision:
        options += f", revision={model.revision!r}"
    if model.trust_remote_code:
        options += ", trust_remote_code=True"
    classes = "AutoModelForCausalLM, AutoTokenizer"
    imports = [f"from transformers import {classes}"]
    load = [f"model = AutoModelForCausalLM.from_pretrained(folder{options}).eval()"]
    if is_adapter:
        imports = [
            "from peft import PeftModel",
            f"from transformers import {classes}, GenerationConfig",
        ]
        if model.rope_scaling.rope_type:
            imports[1] = f"from transformers import AutoConfig, {classes}, GenerationConfig"
            options += ", config=AutoConfig.from_pretrained(folder)"  # with the stretched rope
        load = [
            f"base = {model.name!r}",
            "stops = GenerationConfig.from_pretrained(folder)  # else answers run on",
            f"model = AutoModelForCausalLM.from_pretrained(base, generation_config=stops{options})",
            "model = PeftModel.from_pretrained(model, folder).eval()",
        ]
    messages = "[{'role': 'user', 'content': 'Hello!'}]"
    if config.data.system_prompt:
        system = f"{{'role': 'system', 'content': {config.data.system_prompt!r}}}"
        messages = f"[{system}, {messages.removeprefix('[')}"
    return [
        *imports,
        "",
        f"folder = {str(weights)!r}  # where this file is",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        *load,
        f"messages = {messages}",
        "prompt = tokenizer.apply_chat_template(",
        "    messages, add_generation_prompt=True, return_tensors='pt', return_dict=True",
        ")",
        "ids = model.generate(**prompt, max_new_tokens=256)",
        "print(tokenizer.decode(ids[0, prompt['input_ids'].shape[1] :], skip_special_tokens=True))",
    ]


def _stop_lines(stops: SavedStops, is_adapter: bool) -> list[str]:
    others = ", ".join(f"`{token}`" for token in stops.tokens[1:])
    line = f"Answers end with `{stops.tokens[0]}`"
    if others:
        line += f"; generation stops at {others} too"
    lines = [
        f"{line}. `generation_config.json` and the tokenizer in this folder say so, and the "
        "tokenizer has the chat template of the training."
    ]
    if is_adapter:
        lines += [
            "",
            "Programs that load an adapter read the base's generation config. Give them this "
            f"folder's as above, or `eos_token_id={list(stops.ids)}`.",
        ]
    return lines


def _score_lines(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    before = metrics.get("before", {})
    after = metrics.get("after", {})
    rows = []
    for name, title in SCORES.items():
        if name in before or name in after:
            rows.append((title, _number(before.get(name)), _number(after.get(name))))
    if not rows:
        return []
    lines = ["## Scores on held-out rows", "", *_table(("", "before", "after"), rows)]
    answers = after.get("answers")
    if answers is not None:
        lines.append(
            f"ROUGE-L is of {answers:.0f} generated answers of at most "
            f"{after['max_new_tokens']:.0f} tokens."
        )
        lines.append("")
    return lines


def _data_lines(config: Config, ledger: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the rows and tokens of each split; files by name, as folders may be private."""
    if not ledger:
        return []
    rows = []
    for split, facts in ledger.items():
        sources = ", ".join(_public_name(source["name"]) for source in facts.get("sources", ()))
        counts = [f"{facts[name]:,}" for name in ("rows_used", "tokens", "trained_tokens")]
        rows.append((split, sources or "held out of train", *counts))
    head = ("split", "source", "rows", "tokens", "tokens with loss")
    lines = ["## Data", "", *_table(head, rows)]
    if config.data.system_prompt:
        lines += [f"System prompt: {config.data.system_prompt!r}", ""]
    return lines


def _settings(config: Config, report: RunReport) -> list[tuple[str, str]]:
    tuning = config.tuning
    train = config.train
    rows: list[tuple[str, object]] = [("mode", tuning.mode), ("backend", tuning.backend)]
    if tuning.mode != "full":
        targets = tuning.lora.target_modules
        rows += [
            ("LoRA rank", tuning.lora.r),
            ("LoRA alpha", tuning.lora.alpha),
            ("LoRA targets", targets if isinstance(targets, str) else ", ".join(targets)),
        ]
    if report.experts is not None and report.experts.layers:
        reached = report.experts.experts - sum(map(len, report.experts.never_reached.values()))
        rows.append(("experts reached", f"{reached} of {report.experts.experts}"))
    rows += [
        ("steps", report.global_step),
        ("rows of a step", train.effective_batch_size),
        ("learning rate", f"{train.learning_rate:g}, {train.lr_scheduler_type}"),
        ("longest row", f"{config.model.max_seq_len} tokens"),
        ("compute type", _compute_type(config)),
        ("seed", train.seed),
    ]
    rows += sorted((report.versions or {}).items())
    return [(name, str(value)) for name, value in rows]


def _compute_type(config: Config) -> str:
    if config.train.bf16:
        return "bfloat16"
    return "float16" if config.train.fp16 else "float32"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _public_name(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() else source
