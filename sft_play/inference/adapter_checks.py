"""Checks that a saved adapter is the one that its run trained, before it is merged or exported."""

from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.runs.files import read_json


def refuse_other_adapter(weights: Path, config: Config) -> None:
    """Hold adapter_config.json to the run's settings.

    Raises: CheckpointError for another rank, scale or kind of adapter.
    """
    saved = read_json(weights / "adapter_config.json")
    lora = config.tuning.lora
    expected: dict[str, Any] = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for name, value in expected.items():
        found = saved.get(name) or type(value)()
        if found != value:
            raise CheckpointError(
                f"{weights / 'adapter_config.json'}: {name}={found}, and the run trained with "
                f"{value}; put back the file that the run saved"
            )


def what_vllm_does_not_serve(weights: Path) -> list[str]:
    """Return the parts of an adapter that vLLM refuses to load."""
    saved = read_json(weights / "adapter_config.json")
    names = ("use_dora", "modules_to_save", "trainable_token_indices")
    problems = [name for name in names if saved.get(name)]
    if saved.get("bias", "none") != "none":
        problems.append(f"bias={saved['bias']}")
    if saved.get("rank_pattern") or saved.get("alpha_pattern"):
        problems.append("several ranks")
    return problems
