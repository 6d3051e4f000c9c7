"""Where adapters lie beside the weights that they belong to, and what that takes. Pure: no torch.

`models.fast.linears.columns` has the formulas. Weights of 16 bits move to buffers with room for
them; weights of 4 bits are unpacked into such buffers, one at a time.
"""

from collections.abc import Collection

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import StepSpec

ALIGNMENT = 64  # numbers: rows of products begin at multiples of 128 bytes
LARGEST_SHARE = 16  # of an input, that adapters may add: one column for so many
MOST_SHARING = 3  # linears that share an input: those of queries, keys and values


def room_for(features: int, columns: int) -> int:
    """Return the room that rows of `features` need for more columns; 0 for none."""
    if not columns:
        return 0
    whole = -(-(features + columns) // ALIGNMENT) * ALIGNMENT
    return whole - features


def widens_weights(config: Config, ranks: Ranks, fused: Collection[str] | None) -> bool:
    """Return whether weights are moved to buffers with room; `fused` are the parts, if known."""
    tuning = config.tuning
    if tuning.mode != "lora" or tuning.has_float8_base or backend_of(config).has_own_kernels:
        return False
    if ranks.device != "cuda" or ranks.strategy not in ("single", "ddp") or fused is None:
        return False
    return "norms" in fused and not {"linears", "mlp"}.isdisjoint(fused)


def column_bytes(step: StepSpec) -> int:
    """Return the bytes of the room beside all weights, and of the adapters below them."""
    if not step.widens_weights or not step.is_half or step.layers_by_gpu:
        return 0
    numbers = 0
    for kind in step.adapter_options.adapted(step.model, step.lora_targets):
        columns = MOST_SHARING * step.lora_rank
        if kind.is_stacked or kind.experts > 1 or columns * LARGEST_SHARE > kind.inputs:
            continue
        width = kind.inputs + room_for(kind.inputs, columns)
        whole = (kind.outputs + step.lora_rank) * width
        numbers += kind.count * (whole - kind.outputs * kind.inputs)
    return step.weight_bytes * numbers
