"""What a DeepSpeed JSON says: its type, its keys by path, and the values that the plan needs.

And what is wrong with it: by itself, and against the run that it is used for. Pure.
"""

import difflib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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

DeepSpeedJson = dict[str, Any]  # DeepSpeed's own format, with "auto" in it or resolved

AUTO = "auto"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
GRAD_ACCUM = "gradient_accumulation_steps"
TOTAL_BATCH = "train_batch_size"
CLIPPING = "gradient_clipping"
ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
GATHER_NAME = "stage3_gather_16bit_weights_on_model_save"
GATHER = f"{ZERO}.{GATHER_NAME}"
OLD_GATHER_NAME = "stage3_gather_fp16_weights_on_model_save"
OFFLOAD_OPTIMIZER = f"{ZERO}.offload_optimizer"
OFFLOAD_PARAM = f"{ZERO}.offload_param"
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
    MICRO_BATCH: (MICRO_BATCH, "train.batch_size"),
    GRAD_ACCUM: (GRAD_ACCUM, "train.grad_accum"),
    CLIPPING: (CLIPPING, "train.max_grad_norm"),
    "bf16.enabled": ("bf16.enabled", "train.bf16"),
    "bfloat16.enabled": ("bf16.enabled", "train.bf16"),
    "fp16.enabled": ("fp16.enabled", "train.fp16"),
}
DEFAULT_AHEAD = 50_000_000  # DeepSpeed's
DEFAULT_REUSE = 1_000_000_000
DEFAULT_LIVE = 1_000_000_000


class Fetching(NamedTuple):
    """How many weights ZeRO-3 may gather in addition to those of the current layer."""

    ahead: int  # fetched before they are needed
    reuse: int  # kept where they are needed again within as many others
    live: int = DEFAULT_LIVE  # whole at once, above which nothing is fetched ahead


DEFAULT_FETCHING = Fetching(DEFAULT_AHEAD, DEFAULT_REUSE)


class Offloads(NamedTuple):
    """What leaves the GPU for the host's memory or a disk."""

    optimizer: bool
    parameters: bool


def zero_stage(raw: DeepSpeedJson) -> int:
    """Return the ZeRO stage, 0 if there is none."""
    return value_at(raw, STAGE) or 0


def offloads(raw: DeepSpeedJson) -> Offloads:
    """Return what is offloaded, by the current keys or the old ones."""
    zero = with_current_offload_keys(raw.get(ZERO, {}))
    optimizer = zero.get("offload_optimizer", {}).get("device", "none")
    parameters = zero.get("offload_param", {}).get("device", "none")
    return Offloads(optimizer != "none", parameters != "none")


def fetching(raw: DeepSpeedJson, hidden_size: int) -> Fetching:
    """Return what ZeRO-3 fetches and keeps; "auto" is transformers' formula."""
    zero = raw.get(ZERO, {})

    def number(name: str, default: int) -> Any:
        return zero.get(f"stage3_{name}", zero.get(name, default))

    ahead = number("prefetch_bucket_size", DEFAULT_AHEAD)
    if ahead == AUTO:
        ahead = prefetched_by_auto(hidden_size)
    reuse = number("max_reuse_distance", DEFAULT_REUSE)
    live = number("max_live_parameters", DEFAULT_LIVE)
    return Fetching(int(ahead), int(reuse), int(live))


def prefetched_by_auto(hidden_size: int) -> int:
    """Return transformers' stage3_prefetch_bucket_size if it is "auto"."""
    return int(0.9 * hidden_size * hidden_size)


def json_precision(raw: DeepSpeedJson) -> str | None:
    """Return the precision that the JSON itself sets, "bf16" or "fp16"; None if it sets none."""
    if (value_at(raw, "bf16.enabled") or value_at(raw, "bfloat16.enabled")) is True:
        return "bf16"
    return "fp16" if value_at(raw, "fp16.enabled") is True else None


def with_current_offload_keys(zero: DeepSpeedJson) -> DeepSpeedJson:
    """Return the zero_optimization object with its old offload switches replaced by current keys.

    cpu_offload is the optimizer state and, at stage 3, the parameters too.
    """
    zero = dict(zero)
    all_state = zero.pop("cpu_offload", False)
    parameters = zero.pop("cpu_offload_param", False)
    target = {"device": "cpu", "pin_memory": zero.pop("cpu_offload_use_pin_memory", True)}
    if all_state:
        zero["offload_optimizer"] = dict(target)
    if parameters or (all_state and zero.get("stage") == 3 and "offload_param" not in zero):
        zero["offload_param"] = dict(target)
    return zero


def value_at(raw: DeepSpeedJson, path: str) -> Any:
    """Return the value at a dotted path, None if there is none."""
    node: Any = raw
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def leaves(node: DeepSpeedJson, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is no object, with its dotted path."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Problem(NamedTuple):
    """A key and what is wrong with it: ("zero_optimization.stage", "=4 is not valid; ...")."""

    key: str
    sentence: str


def find_json_problems(raw: DeepSpeedJson) -> list[Problem]:
    """Return what is wrong in any run: the keys, or the values if all keys are right."""
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
    found = (_value_problems, _type_problems, _zero_problems)
    return list(itertools.chain.from_iterable(find(raw) for find in found))


def find_contradictions(
    raw: DeepSpeedJson, run: DeepSpeedJson, world_size: int
) -> Iterator[Problem]:
    """Yield if the JSON contradicts the run; `run` is DeepSpeedRun.by_key()."""
    for key, (name, setting) in SAME_AS_SETTING.items():
        value = value_at(raw, key)
        if value not in (None, AUTO) and value != run[name]:
            yield Problem(
                key,
                f"={word(value)}, but {setting}={word(run[name])} in this run; "
                f'write "auto", or {env_name(setting)}={word(value)}',
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
    clipping = raw.get(CLIPPING, AUTO)
    if clipping != AUTO and not (_is_number(clipping) and clipping >= 0):
        yield Problem(
            CLIPPING, f'={word(clipping)} is not valid; write a number of at least 0, or "auto"'
        )
    for key in PRECISIONS:
        value = value_at(raw, key)
        if value not in (None, AUTO) and not isinstance(value, bool):
            yield Problem(key, f'={word(value)} is not valid; write true, false or "auto"')
    if value_at(raw, "fp16.enabled") is True and json_precision(raw) == "bf16":
        yield Problem("fp16.enabled", "=true together with bf16.enabled=true; keep one of them")


def _type_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    """Yield switches and numbers that are something else, and "auto" if nothing resolves it."""
    for key, value in leaves(raw):
        if value == AUTO and key not in RESOLVED | OWN_AUTO:
            sentence = '="auto" has nothing to be taken from; write a value, or delete it'
            yield Problem(key, sentence)
        if value == AUTO or (value is None and key in NULLABLE):
            continue
        if key in SWITCHES and not isinstance(value, bool):
            yield Problem(key, f"={word(value)} is not valid; write true or false")
        least = WHOLE_NUMBERS.get(key)
        is_whole = _is_number(value) and float(value).is_integer()  # 5e8 is whole
        if least is not None and not (is_whole and value >= least):
            or_auto = ', or "auto"' if key in RESOLVED else ""
            sentence = f"={word(value)} is not valid; write a whole number of at least {least}"
            yield Problem(key, sentence + or_auto)


def _zero_problems(raw: DeepSpeedJson) -> Iterator[Problem]:
    stage = value_at(raw, STAGE)
    if stage is not None and not (type(stage) is int and stage in STAGES):
        yield Problem(STAGE, f"={word(stage)} is not valid; write 0, 1, 2 or 3")
        return
    for key in (GATHER, f"{ZERO}.{OLD_GATHER_NAME}"):
        if stage == 3 and value_at(raw, key) is False:
            yield Problem(
                key, "=false would save one process's part of the weights; write true, or delete it"
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
        yield Problem(key, '=nvme needs a folder; write "nvme_path" too')


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
            yield Problem(
                key, f"=true together with {successor}; keep {successor.rpartition('.')[2]}"
            )
        elif value and stage < lowest_stage:
            yield Problem(
                key,
                f"=true needs ZeRO stage {lowest_stage} or more, and this is stage {stage}; "
                f"raise it, or delete {name}",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
