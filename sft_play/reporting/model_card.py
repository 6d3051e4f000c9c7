"""The README.md of saved weights: what they are, how to use them, what was measured. Pure.

Its text is templates/model_card.md.j2; this module names what is known of the run.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.data.images import image_limits
from sft_play.reporting.bootstrap import Estimate
from sft_play.reporting.card_facts import CardFacts
from sft_play.reporting.page import GIB, code, render
from sft_play.runs.exports import COMPRESSED, SavedStops
from sft_play.runs.report import RunReport

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TITLES = {"loss": "loss (nats a token)"}
PLACES = ("model.name", "data.train_path", "data.val_path", "data.test_path")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
ROUNDED_FORMATS = {"gguf", *COMPRESSED}  # whose scores are a little other than the run's

Row = tuple[str, ...]


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

    Its `kind` is adapter, model, merged or a format of exports; None is the folder's name.
    `reopened` are lines of what these very files said when they were opened again.
    """
    kind = kind or weights.name
    data = report.data or {}
    delivered = config.train.deliver_as
    has_these_scores = kind not in ROUNDED_FORMATS if delivered is None else kind == delivered
    image_samples = data.get("train", {}).get("image_samples", 0)
    reader = "processor" if image_samples else "tokenizer"
    imports, options = _imports_and_options(config, facts, kind == "adapter", reader)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
    if image_samples:
        words = {"type": "text", "text": "What is this?"}
        messages[0]["content"] = [{"type": "image", "path": "picture.jpg"}, words]
    if config.data.system_prompt:
        messages.insert(0, {"role": "system", "content": config.data.system_prompt})
    card = render(
        "model_card.md.j2",
        config=config,
        report=report,
        stops=stops,
        weights=str(weights),
        facts=facts,
        kind=kind,
        reopened=reopened,
        is_on_hub=HUB_ID.fullmatch(config.model.name),
        imports=imports,
        options=options,
        reader=reader,
        image_samples=image_samples,
        image_limits=image_limits(config),
        messages=messages,
        vllm_rank=next((rank for rank in VLLM_RANKS if rank >= config.tuning.lora.r), None),
        scores=_score_rows(report, facts),
        has_these_scores=has_these_scores,
        after=report.scores("after"),
        ledger=data,
        splits=_split_rows(data),
        measured=_measured_rows(report, facts),
        settings=_setting_rows(config, report),
        chosen=_chosen_rows(facts),
        tested_rows=data.get("test", {}).get("rows_used"),
    )
    return card.rstrip() + "\n"


def _imports_and_options(
    config: Config, facts: CardFacts, is_adapter: bool, reader: str
) -> tuple[list[str], str]:
    """Return what the code that loads the weights imports, and the words of from_pretrained."""
    model = config.model
    imports = sorted((facts.model_class, f"Auto{reader.title()}"))
    options = ""
    if model.revision:
        options += f", revision={model.revision!r}"
    if model.trust_remote_code:
        options += ", trust_remote_code=True"
    if facts.has_soft_caps:  # transformers' sdpa leaves them out
        options += ", attn_implementation='eager'"
    if is_adapter:
        imports.append("GenerationConfig")
        if facts.dequantised_by is not None:
            imports.append(facts.dequantised_by)
            options += f", quantization_config={facts.dequantised_by}(dequantize=True)"
        if model.rope_scaling.rope_type:  # stretched
            imports.append("AutoConfig")
            options += ", config=AutoConfig.from_pretrained(folder)"
    return imports, options


def _score_rows(report: RunReport, facts: CardFacts) -> list[Row]:
    """Return the scores, with intervals where there are enough rows."""
    rows = []
    for score in facts.scores:
        cells = (_estimate(each) for each in (score.before, score.after, score.difference))
        rows.append((TITLES.get(score.name, score.name), *cells))
    cut = [_number(report.scores(when).get("cut_answers")) for when in ("before", "after")]
    if rows and any(cut):
        rows.append(("cut answers", *cut, ""))
    return rows


def _split_rows(ledger: dict) -> list[Row]:
    """Return the rows and tokens of each split; files by name, as folders may be private."""
    rows = []
    for split, facts in ledger.items():
        sources = ", ".join(code(_public_name(each["name"])) for each in facts.get("sources", ()))
        counts = [f"{facts[name]:,}" for name in ("rows_used", "tokens", "trained_tokens")]
        rows.append((split, sources or "held out of train", *counts))
    return rows


def _measured_rows(report: RunReport, facts: CardFacts) -> list[Row]:
    """Return hardware, hours and energy, those that were measured."""
    seconds = report.total_seconds or (report.seconds or {}).get("train")
    peak = report.peak_bytes.measured if report.peak_bytes else None
    speed = report.tokens_per_second
    rows = [
        ("hardware", facts.hardware),
        ("hours", f"{seconds / 3600:.3g}" if seconds else None),
        ("tokens/s in training", f"{speed:,.0f}" if speed else None),
        ("peak memory of a device", f"{peak / GIB:.1f} GiB" if peak else None),
    ]
    if facts.energy is not None:
        rows.append(("energy", f"{facts.energy.kwh:.3g} kWh by {facts.energy.gpus} GPUs (NVML)"))
    return [(name, value) for name, value in rows if value is not None]


def _chosen_rows(facts: CardFacts) -> list[Row]:
    """Return the settings that were chosen, each with its origin; folders may be private."""
    rows = []
    for setting in facts.chosen:
        value = _public_name(setting.value) if setting.name in PLACES else setting.value
        first, *others = setting.origin.split(" ")
        origin = " ".join([_public_name(first), *others])
        rows.append((code(setting.name), code(value), code(origin)))
    return rows


def _setting_rows(config: Config, report: RunReport) -> list[Row]:
    tuning, train = config.tuning, config.train
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
        ("compute type", "bfloat16" if train.bf16 else "float16" if train.fp16 else "float32"),
        ("seed", train.seed),
    ]
    rows += sorted((report.versions or {}).items())
    return [(name, str(value)) for name, value in rows]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return _number(estimate.mean)
    return f"{_number(estimate.mean)} [{_number(estimate.low)}, {_number(estimate.high)}]"


def _public_name(source: str) -> str:
    """Return a path without its folders, and any other text as it is."""
    first = Path(source)
    return first.name if first.is_absolute() else source
