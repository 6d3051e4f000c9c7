"""How many decoder layers store their frozen weights in host memory (train.weight_offloading)."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sft_play.config.backends import backend_of
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.plan.cards import Card
from sft_play.plan.devices import GIB
from sft_play.plan.memory import WEIGHT_BUFFERS, offloaded_weight_bytes
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import StepSpec

if TYPE_CHECKING:
    from sft_play.plan.inputs import Draft

STRATEGIES = ("single", "ddp")


def why_not_offloaded(config: Config, ranks: Ranks) -> str | None:
    """Return why frozen weights cannot be in host memory, and what to set; None if they can."""
    reasons = {
        "all weights are trained; set TUNING_MODE=lora": config.tuning.mode == "full",
        "Unsloth loads the weights itself; set TUNING_BACKEND=bnb": (
            not backend_of(config).recomputes_by_layer
        ),
        "model.device_map places the weights; set MODEL_DEVICE_MAP=null": (
            config.model.device_map is not None
        ),
        f"strategy {ranks.strategy} has its own places for weights; set TRAIN_STRATEGY=ddp": (
            ranks.strategy not in STRATEGIES
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def refuse_offloading(loaded: LoadedConfig, ranks: Ranks) -> None:
    """Raise ConfigError if frozen weights should be in host memory and cannot be."""
    why_not = why_not_offloaded(loaded.config, ranks)
    if loaded.config.train.weight_offloading is True and why_not is not None:
        described = loaded.described("train.weight_offloading")
        raise ConfigError(f"{described}: {why_not}, or TRAIN_WEIGHT_OFFLOADING=false")


def resident_first(loaded: LoadedConfig, has_idle_gpus: bool) -> list[LoadedConfig]:
    """Return the config with all weights on the GPU, then unchanged if auto may offload some.

    It may not offload while GPUs are idle: they are faster than host memory.
    """
    if loaded.config.train.weight_offloading != "auto":
        return [loaded]
    resident = replace(loaded, config=loaded.config.changed({"train.weight_offloading": False}))
    return [resident] if has_idle_gpus else [resident, loaded]


def describe_host(step: StepSpec) -> str:
    """Return text in parentheses on the weights that are in host memory, "" if none are."""
    count = step.offloaded_weight_layers
    if not count:
        return ""
    size = f"{offloaded_weight_bytes(step) / GIB:.1f} GiB of host memory"
    return f" ({count} of {step.model.layers} layers in {size})"


def with_copies(step: StepSpec, card: Card, seconds: float, again: float, passes: int) -> float:
    """Return the seconds of micro-batches whose forward and backward `passes` copy weights.

    Copies run while layers compute. `seconds` is the time without them, and `again` is the share of
    the layers that the backward pass recomputes.
    """
    copies = passes * offloaded_weight_bytes(step) / card.host_link_bytes
    forward = seconds / (2 + again)
    return max(forward, copies) + max(seconds - forward, copies) if copies else seconds


def fastest_offloaded(draft_of: Callable[[int], "Draft"], most: int) -> "Draft | None":
    """Return the fastest draft that fits with some layers offloaded, None if none does.

    It tries the fewest layers with which it fits, `most`, and the middle of both: more offloaded
    layers allow larger micro-batches.
    """
    if most <= WEIGHT_BUFFERS or not draft_of(most).fits:
        return None
    too_few, enough = WEIGHT_BUFFERS, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if draft_of(middle).fits:
            enough = middle
        else:
            too_few = middle
    drafts = [draft_of(layers) for layers in (enough, (enough + most) // 2, most)]
    return max(drafts, key=lambda draft: draft.tokens_per_second() or 0.0)
