"""Floating-point operations that a training step cannot do without. Pure: no torch, no I/O.

What is recomputed, padded or masked does not count: two programs that train the same rows have done
the same work.
"""

from collections.abc import Sequence

from sft_play.plan.model_shape import ModelShape


def step_flops(
    model: ModelShape, adapters: int | None, lengths: Sequence[int], labelled: int
) -> float:
    """Return the operations of forward and backward passes over documents of `lengths` tokens.

    `labelled` of the tokens have loss. `adapters` is the number of LoRA weights over a frozen base,
    None where every weight is trained. A weight costs a token 2 operations forward, 2 for the
    gradient of its input and, where it is trained, 2 for its own: 6, and 4 for a frozen one (Kaplan
    et al. 2020, section 2.1). The head is computed where there is a label. Attention is 2 products
    forward (QK', PV) and 4 backward (dV, dP, dQ, dK), 2 operations for each feature of all heads
    and each pair of tokens, of which causality leaves T (T + 1) / 2 in a document.

    Where the structure of a model was counted, only the experts that a token is sent to count, and
    only the pairs within a layer's window. A recurrence between tokens is not counted: its matrices
    are. For architectures like Llama windows are not considered.

    >>> one = ModelShape(
    ...     vocab=10, hidden=4, intermediate=8, layers=1,
    ...     heads=2, kv_heads=2, head_dim=2, is_tied=True,
    ... )
    >>> step_flops(one, None, [1], labelled=0)  # 6 * 160 weights, 12 * 4 features * 1 pair
    1008.0
    """
    tokens = sum(lengths)
    flops_per_weight = 6 if adapters is None else 4
    weights = model.active_block_weights * tokens + model.vocab * model.hidden * labelled
    attention = 12 * sum(_attended_features(model, length) for length in lengths)
    return flops_per_weight * weights + 6 * (adapters or 0) * tokens + attention


def pair_cost(model: ModelShape, adapters: int | None) -> float:
    """Return what attention between two tokens of a document costs, in what else a token costs.

    A document of T tokens costs T (1 + pair_cost T) tokens: half of its T^2 pairs are seen. The
    head and layers with a window count as linear in T, and are left out.
    """
    flops_per_weight = 6 if adapters is None else 4
    linear = flops_per_weight * model.active_block_weights + 6 * (adapters or 0)
    features = model.layers * model.heads * model.head_dim
    if model.structure is not None:
        everywhere = [kind for kind in model.structure.layers if kind.window is None]
        features = sum(kind.count * kind.query_features for kind in everywhere)
    return 6 * features / linear


def _attended_features(model: ModelShape, length: int) -> float:
    """Return the features of all heads and layers, each times the pairs of tokens that it sees."""
    if model.structure is None:
        features = model.layers * model.heads * model.head_dim
        return features * length * (length + 1) / 2
    total = 0.0
    for kind in model.structure.layers:
        total += kind.count * kind.query_features * _pairs(length, kind.window)
    return total


def _pairs(length: int, window: int | None) -> float:
    """Return the pairs of a token and one that it sees in a document of `length` tokens.

    >>> _pairs(4, None), _pairs(4, 2)  # 1 + 2 + 3 + 4 and 1 + 2 + 2 + 2
    (10.0, 7.0)
    """
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) / 2 + float((length - seen) * seen)
