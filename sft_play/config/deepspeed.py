"""The DeepSpeed JSON: read, checked, and resolved to numbers. Loads neither DeepSpeed nor torch.

micro-batch x accumulation x processes = train_batch_size. The plan chooses these three numbers, and
the JSON either says "auto" or the same. What the YAML already says (precision, clipping, optimizer)
the JSON may repeat but not change.
"""

import copy
import os
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.deepspeed_json import (
    AUTO,
    CLIPPING,
    GATHER_NAME,
    GRAD_ACCUM,
    MICRO_BATCH,
    OLD_GATHER_NAME,
    TOTAL_BATCH,
    ZERO,
    DeepSpeedJson,
    Fetching,
    fetching,
    find_contradictions,
    find_json_problems,
    json_precision,
    leaves,
    offloads,
    prefetched_by_auto,
    with_current_offload_keys,
    zero_stage,
)
from sft_play.config.deepspeed_keys import OWN_AUTO
from sft_play.config.layers import nearest_path
from sft_play.config.messages import refuse, word
from sft_play.config.yaml_source import read_commented_json
from sft_play.errors import ConfigError

__all__ = [
    "DeepSpeedJson",
    "DeepSpeedRun",
    "Fetching",
    "fetching",
    "json_precision",
    "offloads",
    "read_deepspeed_json",
    "resolve_deepspeed",
    "zero_stage",
]

VARIABLE = "DEEPSPEED_CONFIG"


@dataclass(frozen=True)
class DeepSpeedRun:
    """What the plan has decided and the JSON must agree with."""

    micro_batch: int  # rows of one process
    grad_accum: int
    world_size: int
    bf16: bool
    fp16: bool
    max_grad_norm: float
    hidden_size: int | None = None  # sizes the buffers that are "auto"; None: DeepSpeed's defaults

    def by_key(self) -> DeepSpeedJson:
        """Return the run's values by the dotted path of DeepSpeed's keys."""
        assert not (self.bf16 and self.fp16), "the plan resolves one precision"
        return {
            MICRO_BATCH: self.micro_batch,
            GRAD_ACCUM: self.grad_accum,
            TOTAL_BATCH: self.micro_batch * self.grad_accum * self.world_size,
            CLIPPING: float(self.max_grad_norm),
            "bf16.enabled": self.bf16,
            "fp16.enabled": self.fp16,
        }

    def buffer_sizes(self) -> dict[str, int]:
        """Return the sizes of ZeRO's buffers, in elements.

        The formulas are transformers' (integrations/deepspeed.py).
        """
        hidden = self.hidden_size
        if hidden is None:
            return {
                "reduce_bucket_size": 500_000_000,
                "stage3_prefetch_bucket_size": 50_000_000,
                "stage3_param_persistence_threshold": 100_000,
            }
        return {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": prefetched_by_auto(hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }


def read_deepspeed_json(path: str | Path) -> DeepSpeedJson:
    """Return the JSON of a file as plain values, "auto" still in it.

    Raises: ConfigError with file:line:column for syntax errors, unknown and refused keys, and
    values that no run could use.
    """
    if not os.path.isfile(path):
        near = nearest_path(path)
        hint = f"did you mean {near}?" if near else "write configs/deepspeed_zero2.json"
        raise ConfigError(f"{VARIABLE}={path}: no such file; {hint}")
    raw, origins = read_commented_json(Path(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}:1: a DeepSpeed config is an object in braces, not {word(raw)}")
    problems = find_json_problems(raw)
    # YAML, which knows the places, takes some keys of JSON for others
    refuse([f"{origins.get(key, path)}: {key}{sentence}" for key, sentence in problems])
    return raw


def resolve_deepspeed(
    raw: DeepSpeedJson, run: DeepSpeedRun, source: str = VARIABLE
) -> DeepSpeedJson:
    """Return the config that DeepSpeed gets: every "auto" a value, and no contradiction to the run.

    `source` names the JSON in messages.

    Raises: ConfigError that lists every contradiction with both values.
    """
    values = run.by_key()
    problems = find_json_problems(raw) or find_contradictions(raw, values, run.world_size)
    refuse([f"{source}: {key}{sentence}" for key, sentence in problems])
    resolved = copy.deepcopy(raw)
    resolved["bf16"] = {**resolved.pop("bfloat16", {}), **resolved.get("bf16", {})}
    resolved.setdefault("fp16", {})
    resolved[ZERO] = _resolve_zero(resolved.get(ZERO, {}), run)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        members = resolved[section] if section else resolved
        members[name] = value
    left = [key for key, value in leaves(resolved) if value == AUTO and key not in OWN_AUTO]
    assert not left, f"unresolved: {left}"
    return resolved


def _resolve_zero(raw: DeepSpeedJson, run: DeepSpeedRun) -> DeepSpeedJson:
    zero = {"stage": 0, **with_current_offload_keys(raw)}
    zero.pop(OLD_GATHER_NAME, None)
    for name, size in run.buffer_sizes().items():
        if zero.get(name) == AUTO:
            zero[name] = size
    if zero["stage"] == 3:
        zero[GATHER_NAME] = True  # without it a save contains only the shards of one rank
    elif zero.get(GATHER_NAME) == AUTO:
        zero[GATHER_NAME] = False
    return zero
