"""Rules between settings, as a table of (when, message). Pure: a Config in, sentences out."""

from collections.abc import Callable
from dataclasses import dataclass

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config


@dataclass(frozen=True)
class Rule:
    """A combination of settings that cannot run."""

    names: tuple[str, ...]  # settings that the message shows with value and origin
    when: Callable[[Config], bool]
    advice: str


def _computes_in_float32(config: Config) -> bool:
    return config.train.bf16 is False and config.train.fp16 is False


RULES = (
    Rule(
        ("train.bf16", "train.fp16"),
        lambda c: _computes_in_float32(c) and not backend_of(c).computes_in_float32,
        "Unsloth computes in 16 bits; set one of them to auto",
    ),
    Rule(
        ("train.warmup_steps", "train.max_steps"),
        lambda c: c.train.max_steps is not None and c.train.warmup_steps > c.train.max_steps,
        "the run would end inside its warm-up; lower train.warmup_steps (a value under 1 is a "
        "fraction of the run)",
    ),
    Rule(
        ("train.warmup_steps",),
        lambda c: c.train.warmup_steps > 1 and c.train.warmup_steps != int(c.train.warmup_steps),
        "write whole steps, or a fraction of the run under 1",
    ),
    Rule(
        ("tuning.mode", "train.optim"),
        lambda c: (
            c.tuning.mode == "full"
            and c.train.optim.startswith("paged")
            and not backend_of(c).has_paged_full_optimizers
        ),
        "Unsloth trains every weight without paged optimizers; use adamw_8bit or adamw_torch",
    ),
    Rule(
        ("model.dtype", "tuning.mode"),
        lambda c: c.model.dtype == "float16" and c.tuning.mode == "full",
        "float16 weights cannot be trained (loss scaling needs float32 weights); use float32 or "
        "bfloat16",
    ),
    Rule(
        ("tuning.lora.target_modules",),
        lambda c: c.tuning.mode != "full" and not c.tuning.lora.target_modules,
        "an adapter without targets trains nothing; use all-linear or a list such as "
        "[q_proj, v_proj]",
    ),
    Rule(
        ("model.attn_implementation", "train.bf16", "train.fp16"),
        lambda c: c.model.attn_implementation == "flash_attention_2" and _computes_in_float32(c),
        "FlashAttention computes in 16 bits; set one of them to auto, or model.attn_implementation "
        "to sdpa",
    ),
    Rule(
        ("train.generation_max_new_tokens", "model.max_seq_len"),
        lambda c: (
            c.train.predict_with_generate
            and c.model.max_seq_len != "auto"
            and c.train.generation_max_new_tokens >= c.model.max_seq_len
        ),
        "no room is left for a prompt; lower train.generation_max_new_tokens or raise "
        "model.max_seq_len",
    ),
)


def broken(config: Config, described: Callable[[str], str]) -> list[str]:
    """Return a sentence for every rule that the config breaks.

    `described` shows a setting with its value and origin.
    """
    return [
        f"{', '.join(map(described, rule.names))}: {rule.advice}"
        for rule in RULES
        if rule.when(config)
    ]
