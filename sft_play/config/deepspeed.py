"""The DeepSpeed JSON: read with line numbers, checked by name, and resolved to numbers. Loads neither DeepSpeed nor torch.

micro batch x accumulation x processes = train_batch_size: the plan chooses these three numbers, and the JSON either says
"auto" or the same. What the YAML already says (precision, clipping, optimizer) the JSON may repeat but not change.
"""

import copy
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_play.config import jsonc
from sft_play.config.deepspeed_keys import OWN_AUTO, REFUSED, REMOVED, SECTIONS
from sft_play.config.messages import refuse, word
from sft_play.errors import ConfigError

AUTO = "auto"
STAGES = (0, 1, 2, 3)
VARIABLE = "DEEPSPEED_CONFIG"
MICRO, ACCUM, TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
ZERO = "zero_optimization"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
OFFLOAD_OPTIMIZER, OFFLOAD_PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
LEGACY_GATHER = f"{ZERO}.stage3_gather_fp16_weights_on_model_save"
# key, DeepSpeed's default, and transformers' formula for hidden size h (integrations/deepspeed.py)
SIZED = (
    (f"{ZERO}.reduce_bucket_size", 500_000_000, lambda h: h * h),
    (f"{ZERO}.stage3_prefetch_bucket_size", 50_000_000, lambda h: int(0.9 * h * h)),
    (f"{ZERO}.stage3_param_persistence_threshold", 100_000, lambda h: 10 * h),
)
RESOLVED = {
    MICRO,
    ACCUM,
    TOTAL,
    "gradient_clipping",
    "bf16.enabled",
    "bfloat16.enabled",
    "fp16.enabled",
    GATHER,
    *(key for key, _, _ in SIZED),
}

Problem = tuple[str, str]  # ("zero_optimization.stage", "is not valid; write 0, 1, 2 or 3")


def read(path: str | Path) -> dict[str, Any]:
    """Return the JSON of a file as plain values, "auto" still in it.

    Raises: ConfigError with file:line:column for syntax, unknown and refused keys, and values that no run could use.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{VARIABLE}={path}: no such file; {_file_hint(Path(path))}")
    document = jsonc.read(Path(path))
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{path}:1: a DeepSpeed config is an object in braces, not {word(document.value)}"
        )
    refuse(
        [f"{document.origin[key]}: {key}{sentence}" for key, sentence in _problems(document.value)]
    )
    return document.value


def zero_stage(raw: dict[str, Any]) -> int:
    """Return the ZeRO stage, 0 where there is none."""
    return _get(raw, f"{ZERO}.stage") or 0


def offloads(raw: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether optimizer state and whether parameters leave the GPU, by today's keys or the old ones."""
    zero = _with_todays_offload(raw.get(ZERO, {}))
    optimizer, parameters = (
        zero.get(name, {}).get("device", "none") != "none"
        for name in ("offload_optimizer", "offload_param")
    )
    return optimizer, parameters


def precision(raw: dict[str, Any]) -> str | None:
    """Return the precision that the JSON itself asks for, "bf16" or "fp16", None where it leaves it open."""
    asked = {
        "bf16": _get(raw, "bf16.enabled") or _get(raw, "bfloat16.enabled"),
        "fp16": _get(raw, "fp16.enabled"),
    }
    return next((name for name, value in asked.items() if value is True), None)


def resolve(
    raw: dict[str, Any],
    *,
    micro_batch: int,
    grad_accum: int,
    world_size: int,
    bf16: bool,
    fp16: bool,
    max_grad_norm: float,
    offload_allowed: bool = True,
    hidden_size: int | None = None,
    source: str = VARIABLE,
) -> dict[str, Any]:
    """Return the config that DeepSpeed gets: every "auto" a number, nothing that contradicts the run. Pure.

    `micro_batch` rows a process, `world_size` processes; `hidden_size` sizes the communication buffers that are
    "auto" (None: DeepSpeed's defaults); `source` names the JSON in messages.

    Raises: ConfigError that lists every contradiction with both values.
    """
    assert not (bf16 and fp16), "the plan resolves one precision"
    run = {MICRO: micro_batch, ACCUM: grad_accum, TOTAL: micro_batch * grad_accum * world_size}
    run |= {"gradient_clipping": float(max_grad_norm), "bf16.enabled": bf16, "fp16.enabled": fp16}
    problems = _problems(raw) or [
        *_batch_problems(raw, run, world_size),
        *_contradictions(raw, run),
        *([] if offload_allowed else _offload_problems(raw)),
    ]
    refuse([f"{source}: {key}{sentence}" for key, sentence in problems])
    return _resolved(raw, run, hidden_size)


def _resolved(raw: dict[str, Any], run: dict[str, Any], hidden_size: int | None) -> dict[str, Any]:
    resolved = copy.deepcopy(raw)
    resolved["bf16"] = {**resolved.pop("bfloat16", {}), **resolved.get("bf16", {})}
    resolved.setdefault("fp16", {})
    zero = resolved[ZERO] = {"stage": 0, **_with_todays_offload(resolved.get(ZERO, {}))}
    zero.pop("stage3_gather_fp16_weights_on_model_save", None)
    for key, value in run.items():
        section, _, name = key.rpartition(".")
        (resolved[section] if section else resolved)[name] = value
    for key, default, formula in SIZED:
        name = key.rpartition(".")[-1]
        if zero.get(name) == AUTO:
            zero[name] = default if hidden_size is None else formula(hidden_size)
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = (
            True  # a save would hold one rank's shards only
        )
    elif zero.get("stage3_gather_16bit_weights_on_model_save") == AUTO:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    left = [key for key, value in _leaves(resolved) if value == AUTO and key not in OWN_AUTO]
    assert not left, f"unresolved: {left}"
    return resolved


def _with_todays_offload(zero: dict[str, Any]) -> dict[str, Any]:
    """The old switches as DeepSpeed spells them today: cpu_offload takes optimizer state and, at stage 3, parameters."""
    zero = dict(zero)
    both, parameters = zero.pop("cpu_offload", False), zero.pop("cpu_offload_param", False)
    target = {"device": "cpu", "pin_memory": zero.pop("cpu_offload_use_pin_memory", True)}
    if both:
        zero["offload_optimizer"] = dict(target)
    if parameters or (both and zero.get("stage") == 3 and "offload_param" not in zero):
        zero["offload_param"] = dict(target)
    return zero


def _problems(raw: dict[str, Any]) -> list[Problem]:
    """What is wrong with the JSON whatever the run: keys first, values where the keys are right."""
    problems: list[Problem] = []
    for section, known in SECTIONS.items():
        members = _get(raw, section) if section else raw
        if members is None:
            continue
        if not isinstance(members, dict):
            problems.append(
                (
                    section,
                    f"={word(members)} is not valid; write an object, such as {_example(section)}",
                )
            )
            continue
        problems += _key_problems(section, members, known)
    return problems or [*_value_problems(raw), *_zero_problems(raw), *_stray_autos(raw)]


def _example(section: str) -> str:
    examples = {
        ZERO: '{"stage": 2}',
        OFFLOAD_OPTIMIZER: '{"device": "cpu"}',
        OFFLOAD_PARAM: '{"device": "cpu"}',
    }
    return examples.get(
        section,
        '{"grad_accum_dtype": "fp32"}' if section == "data_types" else '{"enabled": "auto"}',
    )


def _key_problems(
    section: str, members: dict[str, Any], known: frozenset[str]
) -> Iterator[Problem]:
    for key in members:
        path = f"{section}.{key}" if section else key
        if path in REMOVED:
            yield path, ": DeepSpeed 0.19 has removed it; delete it"
        elif path in REFUSED:
            yield path, f": {REFUSED[path]}"
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            elsewhere = [other for other, keys in SECTIONS.items() if key in keys]
            hint = f"did you mean {near[0]}?" if near else "delete it"
            if elsewhere:
                hint = (
                    f"it belongs into {elsewhere[0]}"
                    if elsewhere[0]
                    else "it belongs to the top level"
                )
            yield path, f": DeepSpeed has no such key; {hint}"


def _value_problems(raw: dict[str, Any]) -> Iterator[Problem]:
    for key in (MICRO, ACCUM, TOTAL):
        value = raw.get(key, AUTO)
        if value != AUTO and not (_is_whole(value) and value >= 1):
            yield key, f'={word(value)} is not valid; write a whole number of at least 1, or "auto"'
    clipping = raw.get("gradient_clipping", AUTO)
    if clipping != AUTO and (
        isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping < 0
    ):
        yield (
            "gradient_clipping",
            f'={word(clipping)} is not valid; write a number of at least 0, or "auto"',
        )
    for key in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled"):
        value = _get(raw, key)
        if value not in (None, AUTO) and not isinstance(value, bool):
            yield key, f'={word(value)} is not valid; write true, false or "auto"'
    if _get(raw, "fp16.enabled") is True and precision(raw) == "bf16":
        yield "fp16.enabled", "=true beside bf16.enabled=true; keep one of them"


def _zero_problems(raw: dict[str, Any]) -> Iterator[Problem]:
    stage = _get(raw, f"{ZERO}.stage")
    if stage is not None and not (_is_whole(stage) and stage in STAGES):
        yield f"{ZERO}.stage", f"={word(stage)} is not valid; write 0, 1, 2 or 3"
        return
    for key in (GATHER, LEGACY_GATHER):
        if stage == 3 and _get(raw, key) is False:
            yield (
                key,
                "=false would save one process's part of the weights; write true, or delete it",
            )
    yield from _legacy_problems(raw)
    for key, lowest in ((OFFLOAD_OPTIMIZER, 1), (OFFLOAD_PARAM, 3)):
        device = _get(raw, f"{key}.device")
        if device not in (None, "none", "cpu", "nvme"):
            yield f"{key}.device", f"={word(device)} is not valid; write none, cpu or nvme"
        elif device not in (None, "none") and (stage or 0) < lowest:
            yield (
                f"{key}.device",
                f"={device} needs ZeRO stage {lowest} or more, and this is stage {stage or 0}; raise it, or write none",
            )
        elif device == "nvme" and not _get(raw, f"{key}.nvme_path"):
            yield f"{key}.device", '=nvme needs a folder; write "nvme_path" beside it'


def _legacy_problems(raw: dict[str, Any]) -> Iterator[Problem]:
    """The old switches: switches only, not beside their successor, and not at a stage where they do nothing."""
    stage = zero_stage(raw)
    for name, successor, lowest in (
        ("cpu_offload", OFFLOAD_OPTIMIZER, 1),
        ("cpu_offload_param", OFFLOAD_PARAM, 3),
    ):
        key = f"{ZERO}.{name}"
        value = _get(raw, key)
        if not isinstance(value, bool | None):
            yield key, f"={word(value)} is not valid; write true or false"
        elif value and _get(raw, successor) is not None:
            yield key, f"=true beside {successor}; keep {successor.rpartition('.')[-1]}"
        elif value and stage < lowest:
            yield (
                key,
                f"=true needs ZeRO stage {lowest} or more, and this is stage {stage}; raise it, or delete {name}",
            )


def _stray_autos(raw: dict[str, Any]) -> Iterator[Problem]:
    for key, value in _leaves(raw):
        if value == AUTO and key not in RESOLVED and key not in OWN_AUTO:
            yield key, '="auto" has nothing to be taken from; write a value, or delete it'


def _batch_problems(raw: dict[str, Any], run: dict[str, Any], world_size: int) -> Iterator[Problem]:
    micro, accum, total = run[MICRO], run[ACCUM], run[TOTAL]
    for key, setting, variable in (
        (MICRO, "train.batch_size", "TRAIN_BATCH_SIZE"),
        (ACCUM, "train.grad_accum", "TRAIN_GRAD_ACCUM"),
    ):
        if raw.get(key, AUTO) not in (AUTO, run[key]):
            yield (
                key,
                f'={raw[key]}, but {setting}={run[key]} in this run; write "auto", or {variable}={raw[key]}',
            )
    if raw.get(TOTAL, AUTO) in (AUTO, total):
        return
    arithmetic = f"{_count(micro, 'row')} x {_count(accum, 'accumulation step')} x {_count(world_size, 'process')} = {total}"
    fitting, rest = divmod(raw[TOTAL], micro * world_size)
    other = f", or TRAIN_GRAD_ACCUM={fitting}" if rest == 0 and fitting else ""
    yield TOTAL, f'={raw[TOTAL]}, but {arithmetic}; write "auto" or {total}{other}'


def _contradictions(raw: dict[str, Any], run: dict[str, Any]) -> Iterator[Problem]:
    settings = (
        ("gradient_clipping", "gradient_clipping", "train.max_grad_norm"),
        ("bf16.enabled", "bf16.enabled", "train.bf16"),
        ("bfloat16.enabled", "bf16.enabled", "train.bf16"),
        ("fp16.enabled", "fp16.enabled", "train.fp16"),
    )
    for key, resolved, setting in settings:
        value = _get(raw, key)
        if value not in (None, AUTO) and value != run[resolved]:
            variable = setting.replace(".", "_").upper()
            yield (
                key,
                f'={word(value)}, but {setting}={word(run[resolved])} in this run; write "auto", or {variable}={word(value)}',
            )


def _offload_problems(raw: dict[str, Any]) -> Iterator[Problem]:
    keys = (
        f"{ZERO}.cpu_offload",
        f"{ZERO}.cpu_offload_param",
        f"{OFFLOAD_OPTIMIZER}.device",
        f"{OFFLOAD_PARAM}.device",
    )
    for key in keys:
        if _get(raw, key) not in (None, False, "none"):
            yield key, f"={word(_get(raw, key))}, but this run cannot offload; delete it"


def _get(raw: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    node: Any = raw
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(number: int, noun: str) -> str:
    return (
        f"{number} {noun}"
        if number == 1
        else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
    )


def _file_hint(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    near = difflib.get_close_matches(path.name, [file.name for file in folder.glob("*.json")], n=1)
    return (
        f"did you mean {folder / near[0]}?"
        if near
        else "write configs/deepspeed_zero2.json, or another JSON file"
    )
