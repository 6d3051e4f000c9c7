"""What a DeepSpeed JSON says: its type, its keys by path, and the values that the plan needs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

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


DEFAULT_AHEAD = 50_000_000  # DeepSpeed's
DEFAULT_REUSE = 1_000_000_000
DEFAULT_LIVE = 1_000_000_000


class Fetching(NamedTuple):
    """How many weights ZeRO-3 may hold whole beside those of the layer that computes."""

    ahead: int  # fetched before they are needed
    reuse: int  # kept where they are needed again within as many others
    live: int = DEFAULT_LIVE  # whole at once, above which nothing is fetched ahead


DEFAULT_FETCHING = Fetching(DEFAULT_AHEAD, DEFAULT_REUSE)


class Offloads(NamedTuple):
    """What leaves the GPU for the host's memory or a disk."""

    optimizer: bool
    parameters: bool


def zero_stage(raw: DeepSpeedJson) -> int:
    """Return the ZeRO stage, 0 where there is none."""
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
    """Return transformers' stage3_prefetch_bucket_size where it is "auto"."""
    return int(0.9 * hidden_size * hidden_size)


def precision(raw: DeepSpeedJson) -> str | None:
    """Return the precision that the JSON itself sets, "bf16" or "fp16"; None where it sets none."""
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
    """Return the value at a dotted path, None where there is none."""
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
