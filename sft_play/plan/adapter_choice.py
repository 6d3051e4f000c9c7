"""Which adapters a plan trains: names of layers, and the largest on experts that fit. No torch."""

import difflib
from collections.abc import Callable, Iterator

from sft_play.config.layers import Layer
from sft_play.config.loader import CHOSEN, LoadedConfig, is_default
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError
from sft_play.plan.memory import GIB, base_weight_bytes
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.step import StepSpec


def with_largest_adapters(
    loaded: LoadedConfig, plan_for: Callable[[LoadedConfig], PlannedRun]
) -> PlannedRun:
    """Return the plan with the largest adapters on experts that fit, if the config leaves it open.

    Experts that are published in 4 bits also stay so, unless the user set a mode.
    """
    first = plan_for(loaded)
    if not first.plan.fits:
        for settings in _smaller_adapters(loaded, first.plan):
            smaller = plan_for(loaded.with_values(settings))
            if smaller.plan.fits:
                return smaller
    return first


def _smaller_adapters(loaded: LoadedConfig, plan: RunPlan) -> Iterator[Layer]:
    """Yield settings that need less memory than a plan's, the largest adapters first."""
    config, step = loaded.config, plan.step
    lora = config.tuning.lora
    is_given = config.model.adapter or config.train.resume_from or config.tuning.backend != "bnb"
    if is_given or lora.experts != "auto" or not step.has_adapted_experts:
        return
    needed = f"needs {plan.memory.predicted_peak / GIB:.0f} GiB on each GPU"
    weight_bytes = base_weight_bytes(step, step.weight_bytes)
    fewer = [
        {},
        {"tuning.lora.experts": Located("shared", f"{CHOSEN}one for each expert does not fit")},
    ]
    if lora.target_modules == "all-linear":
        none = Located("none", f"{CHOSEN}adapters on experts do not fit")
        fewer.append({"tuning.lora.experts": none})
    if weight_bytes < plan.budget_bytes * plan.ranks.world_size:
        yield from fewer[1:]
    is_open = is_default(loaded.origin["tuning.mode"]) and config.tuning.mode == "lora"
    if is_open and step.model.in_mxfp4:
        reason = f"{CHOSEN}lora {needed}; experts stay in MXFP4, as published, others become NF4"
        mode = Located("qlora", reason)
        yield from ({"tuning.mode": mode} | settings for settings in fewer)


def refuse_misspelt_targets(step: StepSpec) -> None:
    """Raise ConfigError for a layer to adapt whose name is nearly that of one that the model has.

    Other unknown names are left to the model itself, which has more than the plan knows.
    """
    targets = step.adapters.targets
    if step.is_full or isinstance(targets, str):
        return
    known = {kind.name.rpartition(".")[2] for kind in step.model.matrices}
    for name in targets:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near and name not in known:
            raise ConfigError(
                f"tuning.lora.target_modules: the model has no linear layer {name}; did you mean "
                f"{near[0]}? It has {', '.join(sorted(known))}"
            )
