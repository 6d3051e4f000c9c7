"""docs/models.md: what goes with what, by the rules that every command follows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sft_play.config import invocation, loader
from sft_play.errors import SftPlayError
from sft_play.plan import cards
from sft_play.plan.resolve import resolve_plan
from sft_play.runs.adapter_options import (
    OF_OTHER_MODELS,
    OF_PEFT,
    OF_SETTINGS,
    PLAIN_INITS,
    REPEATED_INITS,
)

MODEL = "meta-llama/Llama-3.1-8B"
BASES: Mapping[str, Mapping[str, str]] = {
    "lora": {"tuning.mode": "lora"},
    "lora over float8": {"tuning.mode": "lora", "tuning.base_dtype": "float8"},
    "qlora": {"tuning.mode": "qlora"},
    "full": {"tuning.mode": "full"},
}
STRATEGIES: Mapping[str, Mapping[str, str]] = {
    "one GPU": {},
    "DDP": {"train.strategy": "ddp"},
    "FSDP": {"train.strategy": "fsdp"},
    "ZeRO-2": {"train.strategy": "zero2"},
    "ZeRO-3": {"train.strategy": "zero3"},
}
FEATURES: Mapping[str, Mapping[str, str]] = {
    "packed rows": {"train.packing": "true"},
    "rows of 32,768 tokens": {"model.max_seq_len": "32768"},
    "activation checkpointing": {"train.gradient_checkpointing": "true"},
    "activations in host memory": {"train.activation_offloading": "true"},
    "8-bit optimizer": {"train.optim": "adamw_8bit"},
    "paged optimizer": {"train.optim": "paged_adamw_8bit"},
    "Muon": {"train.optim": "muon"},
    "Adafactor": {"train.optim": "adafactor"},
    "Lion": {"train.optim": "lion"},
    "DoRA": {"tuning.lora.use_dora": "true"},
    "LoRA+": {"tuning.lora.loraplus_lr_ratio": "16"},
    "embeddings and head trained": {"tuning.lora.modules_to_save": "[embed_tokens, lm_head]"},
    "tokens added": {"model.add_tokens": '["<tool>"]'},
    "new tokens trained": {"tuning.lora.trainable_tokens": "['<|im_end|>']"},
    "NEFTune": {"train.neftune_noise_alpha": "5"},
    "encoders trained": {"tuning.encoders": "lora"},
    "float16": {"train.fp16": "true", "train.bf16": "false"},
    "best checkpoint at the end": {
        "train.load_best_model_at_end": "true",
        "train.eval_strategy": "epoch",
        "train.save_strategy": "epoch",
    },
}
USUAL = {
    "model.name": MODEL,
    "model.max_seq_len": "2048",
    "train.learning_rate": "1e-4",
    "train.epochs": "1",
}


def why_not(settings: Mapping[str, str], is_shared: bool) -> str | None:
    """Return what refuses settings on H200s, None where they are planned."""
    words = [f"{name}={value}" for name, value in {**USUAL, **settings}.items()]
    environ = {"CONFIG": "base"}
    try:
        loaded = loader.load_merged("base", environ, words)
        hardware = cards.parse_hardware("2xH200" if is_shared else "1xH200")
        resolve_plan(
            loaded, invocation.read_invocation(environ), hardware, environ, is_shared, False
        )
    except SftPlayError as error:
        reason = str(error).partition(";")[0]
        return re.sub(r" \(--set [^)]*\)", "", reason)
    return None


def markdown() -> str:
    """Return the table, and below it the reasons."""
    reasons: dict[str, int] = {}
    lines = ["| | " + " | ".join(STRATEGIES) + " |", "| --- " * (1 + len(STRATEGIES)) + "|"]
    for feature, settings in {"by itself": {}, **FEATURES}.items():
        cells = []
        for strategy in STRATEGIES.values():
            refused = {
                base: why_not({**of_base, **strategy, **settings}, bool(strategy))
                for base, of_base in BASES.items()
            }
            cells.append(_cell(refused, reasons))
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes, "", *_adapter_options()])


def _adapter_options() -> list[str]:
    """Return the table of PEFT's options in adapters from elsewhere."""
    lines = ["## Adapters from elsewhere", "", "| option of PEFT | eval, infer, chat | train |"]
    lines.append("| --- | --- | --- |")
    lines += [f"| `{name}` | yes | yes |" for name in OF_SETTINGS]
    lines += [f"| `{name}` | yes | refused |" for name in OF_PEFT]
    lines += [f"| `{name}` | refused | refused |" for name in OF_OTHER_MODELS]
    plain = ", ".join(map(str, PLAIN_INITS[:2] + PLAIN_INITS[3:]))
    lines.append(f"| `init_lora_weights`: {plain} | yes | yes |")
    lines.append(f"| `init_lora_weights`: {', '.join(REPEATED_INITS)} | yes | refused |")
    return [*lines, "| `init_lora_weights`: any other | refused | refused |"]


def _cell(refused: Mapping[str, str | None], reasons: dict[str, int]) -> str:
    """Return what works, and the numbers of the reasons why others do not."""
    working = [base for base, reason in refused.items() if reason is None]
    found = dict.fromkeys(reason for reason in refused.values() if reason is not None)
    numbers = sorted(reasons.setdefault(reason, len(reasons) + 1) for reason in found)
    text = "all" if len(working) == len(refused) else ", ".join(working) or "no"
    return f"{text} ({', '.join(map(str, numbers))})" if numbers else text
