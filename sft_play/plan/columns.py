"""Where adapters lie beside the weights that they belong to, and what that takes. Pure: no torch.

`models.fast.linears.columns` has the formulas. Weights of 16 bits move to buffers with room for
them; weights of 4 bits are unpacked into such buffers, one at a time, and their adapters are kept.
"""

from collections import Counter
from collections.abc import Collection

from sft_play.config.backends import backend_of
from sft_play.plan.fast import FastSetup, fuses_residual_adds, why_not_adapters
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import StepSpec
from sft_play.plan.structure import MatrixKind

ALIGNMENT = 64  # numbers: rows of products begin at multiples of 128 bytes
LARGEST_SHARE = 16  # of an input, that adapters may add: one column for so many
MOST_SHARING = 3  # linears that share an input: those of queries, keys and values


def room_for(features: int, columns: int) -> int:
    """Return the room that rows of `features` need for more columns; 0 for none."""
    if not columns:
        return 0
    whole = -(-(features + columns) // ALIGNMENT) * ALIGNMENT
    return whole - features


def widens_weights(setup: FastSetup, ranks: Ranks, fused: Collection[str] | None) -> bool:
    """Return whether weights are made wide for their adapters; `fused` are the parts, if known."""
    tuning = setup.config.tuning
    has_other_products = tuning.has_float8_base or backend_of(setup.config).has_own_kernels
    if tuning.mode == "full" or has_other_products or why_not_adapters(setup) is not None:
        return False
    if ranks.device != "cuda" or ranks.strategy not in ("single", "ddp") or fused is None:
        return False
    # Liger's norms leave no room
    has_room = "norms" in fused and fuses_residual_adds(setup)
    return has_room and not {"linears", "mlp"}.isdisjoint(fused)


def column_bytes(step: StepSpec) -> int:
    """Return the bytes of adapters beside all weights, and of the room that they lie in.

    Which linears share an input is not known here: of a module's linears with as many features, as
    many as there may be. Where their columns are too many, those that are allowed are counted.
    """
    if not step.widens_weights or not step.is_half or step.layers_by_gpu:
        return 0
    kinds = step.adapter_options.adapted(step.model, step.lora_targets)
    alike = Counter(map(_input_of, kinds))
    numbers = 0
    for kind in kinds:
        allowed = kind.inputs // LARGEST_SHARE
        if kind.is_stacked or kind.experts > 1 or step.lora_rank > allowed:
            continue
        sharing = min(MOST_SHARING, alike[_input_of(kind)])
        columns = min(sharing * step.lora_rank, allowed)
        numbers += kind.count * _numbers_of_one(step, kind, columns)
    return step.compute_bytes * numbers


def _input_of(kind: MatrixKind) -> tuple[str, int]:
    """Return the module of a linear and the features that it reads."""
    return kind.name.rpartition(".")[0], kind.inputs


def _numbers_of_one(step: StepSpec, kind: MatrixKind, columns: int) -> int:
    """Return the numbers that one weight takes more, with so many columns beside it."""
    if step.mode == "qlora" and kind.is_quantised:
        return kind.outputs * columns + step.lora_rank * kind.inputs
    if step.weight_bytes != step.compute_bytes:
        return 0
    width = kind.inputs + room_for(kind.inputs, columns)
    return (kind.outputs + step.lora_rank) * width - kind.outputs * kind.inputs
