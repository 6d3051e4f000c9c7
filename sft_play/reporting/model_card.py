"""The README.md of saved weights: what they are, how to use them, what was measured. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.card_facts import CardFacts
from sft_play.runs.exports import SavedStops
from sft_play.runs.report import RunReport

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TITLES = {"loss": "loss (nats a token)"}
GIB = 2**30
PLACES = ("model.name", "data.train_path", "data.val_path", "data.test_path")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes


def card_text(
    config: Config,
    report: RunReport,
    stops: SavedStops,
    weights: Path,
    facts: CardFacts,
    kind: str | None = None,
    reopened: Sequence[str] = (),
) -> str:
    """Return the text of README.md for the folder `weights`.

    Its `kind` is adapter, model, merged, safetensors or gguf; None is the folder's name.
    `reopened` are lines of what these very files said when they were opened again.
    """
    kind = kind or weights.name
    is_adapter = kind == "adapter"
    sections = [
        *_metadata(config, is_adapter),
        f"# {report.run}",
        "",
        _what_it_is(config, report, kind),
        "",
        _base_line(config, facts),
        "",
        "## Use",
        "",
        *_use_lines(config, weights, kind, facts),
        "",
        *_stop_lines(stops, kind),
        "",
        *_score_lines(report, facts),
        *_reopened_lines(reopened),
        *_data_lines(config, report.data or {}),
        "## Training",
        "",
        *_training_lines(report, facts),
        *_table(("setting", "value"), _settings(config, report)),
        *_chosen_lines(facts),
        *_limit_lines(config, report),
    ]
    return "\n".join(sections).rstrip() + "\n"


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
    what = "A LoRA adapter merged into"
    if kind == "adapter":
        what = "A LoRA adapter of"
    elif config.tuning.mode == "full":
        what = "All weights of"
    end = "" if report.status != "stopped" else " The run was stopped before its end."
    return (
        f"{what} `{config.model.name}`, fine-tuned with SFT-Play for {report.global_step} steps "
        f"(run `{report.run}`, mode {config.tuning.mode}).{end}"
    )


def _base_line(config: Config, facts: CardFacts) -> str:
    revision = f" at revision `{config.model.revision}`" if config.model.revision else ""
    if facts.licence is None:
        licence = "its folder does not say under which licence; look before you publish this"
    else:
        licence = f"licence: {facts.licence}"
    return f"Base: `{config.model.name}`{revision}; {licence}."


def _use_lines(config: Config, weights: Path, kind: str, facts: CardFacts) -> list[str]:
    """Return how the weights are used, by kind."""
    if kind == "gguf":
        return [
            "```bash",
            "ollama create name -f Modelfile    # where there is a Modelfile",
            "llama-server -m file.gguf --jinja",
            "```",
        ]
    lines = ["```python", *_code(config, weights, kind == "adapter", facts), "```"]
    if kind == "safetensors":
        lines += ["", "```bash", f"vllm serve {weights}", "```"]
    if kind == "adapter" and config.tuning.lora.r <= VLLM_RANKS[-1]:
        rank = next(rank for rank in VLLM_RANKS if rank >= config.tuning.lora.r)
        lines += [
            "",
            "```bash",
            f"vllm serve {config.model.name} --enable-lora --max-lora-rank {rank} \\",
            f"  --lora-modules name={weights} --generation-config {weights} \\",
            f"  --chat-template {weights}/chat_template.jinja",
            "```",
        ]
    return lines


def _code(config: Config, weights: Path, is_adapter: bool, facts: CardFacts) -> list[str]:
    """Return the lines of Python that load the weights and answer a question."""
    model = config.model
    options = ""
    if model.revision:
        options += f", revision={model.revision!r}"
    if model.trust_remote_code:
        options += ", trust_remote_code=True"
    if facts.has_soft_caps:  # transformers' sdpa leaves them out
        options += ", attn_implementation='eager'"
    model_class = facts.model_class
    classes = ", ".join(sorted((model_class, "AutoTokenizer")))
    imports = [f"from transformers import {classes}"]
    load = [f"model = {model_class}.from_pretrained(folder{options}).eval()"]
    if is_adapter:
        imports = [
            "from peft import PeftModel",
            f"from transformers import {classes}, GenerationConfig",
        ]
        if facts.dequantised_by is not None:
            imports[1] += f", {facts.dequantised_by}"
            options += f", quantization_config={facts.dequantised_by}(dequantize=True)"
        if model.rope_scaling.rope_type:
            imports[1] += ", AutoConfig"
            options += ", config=AutoConfig.from_pretrained(folder)"  # with the stretched rope
        load = [
            f"base = {model.name!r}",
            "stops = GenerationConfig.from_pretrained(folder)  # else answers run on",
            f"model = {model_class}.from_pretrained(base, generation_config=stops{options})",
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


def _stop_lines(stops: SavedStops, kind: str) -> list[str]:
    others = ", ".join(f"`{token}`" for token in stops.tokens[1:])
    line = f"Answers end with `{stops.tokens[0]}`"
    if others:
        line += f"; generation stops at {others} too"
    if kind == "gguf":
        return [f"{line}. The files and their Modelfile say so."]
    lines = [
        f"{line}. `generation_config.json` and the tokenizer in this folder say so, and the "
        "tokenizer has the chat template of the training."
    ]
    if kind == "adapter":
        lines += [
            "",
            "Programs that load an adapter read the base's generation config. Give them this "
            f"folder's as above, or `eos_token_id={list(stops.ids)}`.",
        ]
    return lines


def _score_lines(report: RunReport, facts: CardFacts) -> list[str]:
    """Return the scores, with intervals where there are enough rows, and how to print them."""
    if not facts.scores:
        return []
    rows = []
    for score in facts.scores:
        cells = (_estimate(each) for each in (score.before, score.after, score.difference))
        rows.append((TITLES.get(score.name, score.name), *cells))
    after = (report.metrics or {}).get("after", {})
    before = (report.metrics or {}).get("before", {})
    cut = [_number(metrics.get("cut_answers")) for metrics in (before, after)]
    if any(cut):
        rows.append(("cut answers", *cut, ""))
    lines = ["## Scores on held-out rows", ""]
    lines += _table(("", "before", "after", "difference"), rows)
    told = "In brackets: 95 % intervals, by bootstrap over the rows."
    if after.get("answers") is not None:
        told += (
            f" Answers: {after['answers']:.0f}, generated greedily, of at most "
            f"{after['max_new_tokens']:.0f} tokens."
        )
    return [*lines, f"{told} `make eval RUN={report.run}` scores them again.", ""]


def _reopened_lines(reopened: Sequence[str]) -> list[str]:
    if not reopened:
        return []
    told = "What these files said of test rows, opened again, beside the evaluated model:"
    return [told, "", "```", *reopened, "```", ""]


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
    for split, facts in ledger.items():
        lost = {**(facts.get("dropped") or {}), **(facts.get("shortened") or {})}
        if lost:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in lost.items())
            lines += [f"{split}: of {facts['rows_in']:,} rows read: {reasons}.", ""]
    if config.data.system_prompt:
        lines += [f"System prompt: {config.data.system_prompt!r}", ""]
    return lines


def _training_lines(report: RunReport, facts: CardFacts) -> list[str]:
    """Return hardware, hours and energy, those that were measured."""
    seconds = (report.seconds or {}).get("total") or (report.seconds or {}).get("train")
    peak = report.peak_bytes.measured if report.peak_bytes else None
    speed = report.tokens_per_second
    rows = [
        ("hardware", facts.hardware),
        ("hours", f"{seconds / 3600:.3g}" if seconds else None),
        ("tokens/s in training", f"{speed:,.0f}" if speed else None),
        ("peak memory of a device", f"{peak / GIB:.1f} GiB" if peak else None),
    ]
    if facts.energy is not None:
        value = f"{facts.energy.kwh:.3g} kWh by {facts.energy.gpus} GPUs (NVML)"
        rows.append(("energy", value))
    known = [(name, value) for name, value in rows if value is not None]
    return _table(("measured", ""), known) if known else []


def _chosen_lines(facts: CardFacts) -> list[str]:
    """Return the settings that were chosen, each with its origin; all others are defaults."""
    if not facts.chosen:
        return []
    rows = []
    for setting in facts.chosen:
        value = setting.value.replace("|", "\\|")
        if setting.name in PLACES:  # folders may be private
            value = _public_name(value)
        rows.append((f"`{setting.name}`", value, _public_origin(setting.origin)))
    head = ("chosen setting", "value", "written in")
    return [*_table(head, rows), "Every other setting is the default, or follows from these.", ""]


def _limit_lines(config: Config, report: RunReport) -> list[str]:
    """Return what these weights were not shown to do."""
    test = (report.data or {}).get("test", {})
    after = (report.metrics or {}).get("after", {})
    lines = ["## Limits", ""]
    if test.get("rows_used"):
        measures = "their loss"
        if "rougeL" in after:
            measures += ", and by the words that answers share with the expected ones"
        lines.append(
            f"- Scored on {test['rows_used']:,} held-out rows alone, by {measures}. Whether "
            "answers are true, safe or free of bias was not measured."
        )
    else:
        lines.append("- Nothing was scored.")
    lines.append(
        f"- Trained on rows of at most {config.model.max_seq_len:,} tokens; longer conversations "
        "were not tried."
    )
    if after.get("cut_answers"):
        lines.append(
            f"- {after['cut_answers']:.0f} of {after['answers']:.0f} answers did not end within "
            f"{after['max_new_tokens']:.0f} tokens."
        )
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


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return _number(estimate.mean)
    return f"{_number(estimate.mean)} [{_number(estimate.low)}, {_number(estimate.high)}]"


def _public_origin(origin: str) -> str:
    """Return where a setting was written, without folders."""
    first, *others = origin.split(" ")
    return " ".join([_public_name(first), *others])


def _public_name(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() else source
