"""What is wrong with a DeepSpeed JSON: by itself, and against the run that it is used for. Pure."""

import difflib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from sft_play.config.deepspeed_json import (
    AUTO,
    CLIPPING,
    GATHER,
    GRAD_ACCUM,
    MICRO_BATCH,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    OLD_GATHER_NAME,
    STAGE,
    TOTAL_BATCH,
    ZERO,
    DeepSpeedJson,
    leaves,
    precision,
    value_at,
    zero_stage,
)
from sft_play.config.deepspeed_keys import (
    NULLABLE,
    OWN_AUTO,
    REFUSED,
    REMOVED,
    SECTIONS,
    SWITCHES,
    WHOLE_NUMBERS,
)
from sft_play.config.messages import word
from sft_play.config.schema import env_name

STAGES = (0, 1, 2, 3)
PRECISIONS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
# keys whose "auto" a run resolves
RESOLVED = {
    MICRO_BATCH,
    GRAD_ACCUM,
    TOTAL_BATCH,
    CLIPPING,
    *PRECISIONS,
    GATHER,
    f"{ZERO}.reduce_bucket_size",
    f"{ZERO}.stage3_prefetch_bucket_size",
    f"{ZERO}.stage3_param_persistence_threshold",
}
EXAMPLES = {
    ZERO: '{"stage": 2}',
    OFFLOAD_OPTIMIZER: '{"device": "cpu"}',
    OFFLOAD_PARAM: '{"device": "cpu"}',
    "data_types": '{"grad_accum_dtype": "fp32"}',
}
# key of the JSON: the key of the run's numbers, the setting that decides it
SAME_AS_SETTING = {
    CLIPPING: (CLIPPING, "train.max_grad_norm"),
    "bf16.enabled": ("bf16.enabled", "train.bf16"),
    "bfloat16.enabled": ("bf16.enabled", "train.bf16"),
    "fp16.enabled": ("fp16.enabled", "train.fp16"),
}


class Problem(NamedTuple):
    """A key and what is wrong with it: ("zero_optimization.stage", "=4 is not valid; ...")."""

    key: str
    sentence: str


def find_problems(raw: DeepSpeedJson) -> list[Problem]:
    """Return what is wrong in any run: the keys, or the values where all keys are right."""
    problems: list[Problem] = []
    for section, known in SECTIONS.items():
        members = value_at(raw, section) if section else raw
        if isinstance(members, dict):
            problems += _key_problems(section, members, known)
        elif members is not None:
            example = EXAMPLES.get(section, '{"enabled": "auto"}')
            sentence = f"={word(members)} is not valid; write an object, such as {example}"
            problems.append(Problem(section, sentence))
    if problems:
        return problems
    found = (_value_problems, _type_problems, _zero_problems, _stray_autos)
    return list(itertools.chain.from_iterable(find(raw) for find in found))


def find_contradictions(
    raw: DeepSpeedJson, run: DeepSpeedJson, world_size: int
) -> Iterator[Problem]:
    """Yield where the JSON contradicts the run; `run` is DeepSpeedRun.by_key()."""
    yield from _batch_contradictions(raw, run, world_size)
    for key, (name, setting) in SAME_AS_SETTING.items():
        value = value_at(raw, key)
        if value not in (None, AUTO) and value != run[name]:
            yield Problem(
                key,
                f"={word(value)}, but {setting}={word(run[name])} in this run; "
                f'write "auto", or {env_name(setting)}={word(value)}',
            )


def _key_problems(section: str, members: DeepSpeedJson, known: frozenset[str]) -> Iterator[Problem]:
    for key in members:
        path = f"{section}.{key}" if section else key
        if path in REMOVED:
            yield Problem(path, ": DeepSpeed 0.19 has removed it; delete it")
        elif path in REFUSED:
            yield Problem(path, f": {REFUSED[path]}")
        elif key not in known:
            yield Problem(path, f": DeepSpeed has no such key; {_key_hint(key, known)}")


def _key_hint(key: str, known: frozenset[str]) -> str:
    for section, keys in SECTIONS.items():
        if key in keys:
            return f"it belongs into {section}" if section else "it belongs to the top level"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else "delete it"


def _value_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    for key in (MICRO_BATCH, GRAD_ACCUM, TOTAL_BATCH):
        value = raw.get(key, AUTO)
        if value != AUTO and not (_is_whole(value) and value >= 1):
            yield Problem(
                key,
                f'={word(value)} is not valid; write a whole number of at least 1, or "auto"',
            )
    clipping = raw.get(CLIPPING, AUTO)
    if clipping != AUTO and not (_is_number(clipping) and clipping >= 0):
        yield Problem(
            CLIPPING, f'={word(clipping)} is not valid; write a number of at least 0, or "auto"'
        )
    for key in PRECISIONS:
        value = value_at(raw, key)
        if value not in (None, AUTO) and not isinstance(value, bool):
            yield Problem(key, f'={word(value)} is not valid; write true, false or "auto"')
    if value_at(raw, "fp16.enabled") is True and precision(raw) == "bf16":
        yield Problem("fp16.enabled", "=true beside bf16.enabled=true; keep one of them")


def _type_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    """Yield switches and numbers that are something else; "auto" is `_stray_autos`' matter."""
    for key, value in leaves(raw):
        if value == AUTO or (value is None and key in NULLABLE):
            continue
        if key in SWITCHES and not isinstance(value, bool):
            yield Problem(key, f"={word(value)} is not valid; write true or false")
        least = WHOLE_NUMBERS.get(key)
        if least is not None and not _is_whole_from(least, value):
            or_auto = ', or "auto"' if key in RESOLVED else ""
            sentence = f"={word(value)} is not valid; write a whole number of at least {least}"
            yield Problem(key, sentence + or_auto)


def _zero_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    stage = value_at(raw, STAGE)
    if stage is not None and not (_is_whole(stage) and stage in STAGES):
        yield Problem(STAGE, f"={word(stage)} is not valid; write 0, 1, 2 or 3")
        return
    for key in (GATHER, f"{ZERO}.{OLD_GATHER_NAME}"):
        if stage == 3 and value_at(raw, key) is False:
            yield Problem(
                key,
                "=false would save one process's part of the weights; write true, or delete it",
            )
    yield from _old_switch_problems(raw)
    yield from _offload_problems(raw, OFFLOAD_OPTIMIZER, lowest_stage=1)
    yield from _offload_problems(raw, OFFLOAD_PARAM, lowest_stage=3)


def _offload_problems(raw: DeepSpeedJson, section: str, lowest_stage: int) -> Iterator[Problem]:
    key = f"{section}.device"
    device = value_at(raw, key)
    stage = zero_stage(raw)
    if device in (None, "none"):
        return
    if device not in ("cpu", "nvme"):
        yield Problem(key, f"={word(device)} is not valid; write none, cpu or nvme")
    elif stage < lowest_stage:
        yield Problem(
            key,
            f"={device} needs ZeRO stage {lowest_stage} or more, and this is stage {stage}; "
            "raise it, or write none",
        )
    elif device == "nvme" and not value_at(raw, f"{section}.nvme_path"):
        yield Problem(key, '=nvme needs a folder; write "nvme_path" beside it')


def _old_switch_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    """Yield old offload switches that are no switch, repeat their successor, or do nothing."""
    stage = zero_stage(raw)
    for name, successor, lowest_stage in (
        ("cpu_offload", OFFLOAD_OPTIMIZER, 1),
        ("cpu_offload_param", OFFLOAD_PARAM, 3),
    ):
        key = f"{ZERO}.{name}"
        value = value_at(raw, key)
        if not isinstance(value, bool | None):
            yield Problem(key, f"={word(value)} is not valid; write true or false")
        elif value and value_at(raw, successor) is not None:
            yield Problem(key, f"=true beside {successor}; keep {successor.rpartition('.')[2]}")
        elif value and stage < lowest_stage:
            yield Problem(
                key,
                f"=true needs ZeRO stage {lowest_stage} or more, and this is stage {stage}; "
                f"raise it, or delete {name}",
            )


def _stray_autos(raw: DeepSpeedJson) -> Iterator[Problem]:
    for key, value in leaves(raw):
        if value == AUTO and key not in RESOLVED and key not in OWN_AUTO:
            yield Problem(key, '="auto" has nothing to be taken from; write a value, or delete it')


def _batch_contradictions(
    raw: DeepSpeedJson, run: DeepSpeedJson, world_size: int
) -> Iterator[Problem]:
    for key, setting in ((MICRO_BATCH, "train.batch_size"), (GRAD_ACCUM, "train.grad_accum")):
        if raw.get(key, AUTO) not in (AUTO, run[key]):
            yield Problem(
                key,
                f"={raw[key]}, but {setting}={run[key]} in this run; "
                f'write "auto", or {env_name(setting)}={raw[key]}',
            )
    asked = raw.get(TOTAL_BATCH, AUTO)
    total = run[TOTAL_BATCH]
    if asked in (AUTO, total):
        return
    rows = _count(run[MICRO_BATCH], "row")
    steps = _count(run[GRAD_ACCUM], "accumulation step")
    processes = _count(world_size, "process")
    fitting, rest = divmod(asked, run[MICRO_BATCH] * world_size)
    other = f", or TRAIN_GRAD_ACCUM={fitting}" if rest == 0 and fitting else ""
    yield Problem(
        TOTAL_BATCH,
        f'={asked}, but {rows} x {steps} x {processes} = {total}; write "auto" or {total}{other}',
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole_from(least: int, value: Any) -> bool:
    """Return whether a value is a whole number of at least `least`; 5e8 is one."""
    return _is_number(value) and float(value).is_integer() and value >= least


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
