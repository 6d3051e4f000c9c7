"""Adapters as further columns and rows of the frozen weights that they belong to.

    [x | x A^T] [W | s B]^T = x W^T + s (x A^T) B^T
    [dy | dU] [W ; A] = dy W + dU A

A sum over r more columns costs less than another product over all outputs: such a product reads and
writes as much as a GPU needs a tenth of the large product's time for. Weights of 16 bits lie in
buffers that have the adapter beside them; of 4 bits they are unpacked into such a buffer. Written
anew before each forward pass, by one kernel for all adapters.

Legend: N tokens, `in` and `out` features, r rank, R the sum of the ranks of all linears that share
an input: B lies in the columns of its own A, and zeros lie in the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from bitsandbytes.nn import Params4bit
from torch import Tensor

from sft_play.models.fast.linears.four_bit import unpack
from sft_play.plan.columns import room_for

COLUMNS = "adapter_columns"  # of the attribute of a base layer


class Adapter(NamedTuple):
    """What is added to a frozen weight: s B A."""

    a: Tensor  # (r, in), the parameter
    b: Tensor  # (out, r), the parameter
    scale: float  # s


class AdapterColumns(NamedTuple):
    """What lies beside a frozen weight (out, in)."""

    adapter: Adapter  # that is written here
    outputs: Tensor  # (out, R): s B in the adapter's columns
    inputs: Tensor  # (r, in): A
    start: int  # the adapter's first column
    whole: Tensor | None  # (out + r, in + room) with the weight; None if that is packed

    def are_of(self, weight: Tensor, adapter: Adapter) -> bool:
        """Return whether they lie beside this weight, and hold this adapter.

        A merge that is undone gives a weight new numbers elsewhere; scales and the active adapter
        may change.
        """
        is_beside = self.whole is None or self.whole.data_ptr() == weight.data_ptr()
        own = self.adapter
        is_own = adapter.a is own.a and adapter.b is own.b and adapter.scale == own.scale
        return is_beside and is_own

    def fit(self, part: slice, ranks: int, dtype: torch.dtype) -> bool:
        """Return whether they are those of x A^T (N, ranks), a part of it the adapter's."""
        return (
            self.start == part.start
            and self.outputs.shape[1] == ranks
            and self.outputs.dtype == dtype
        )

    def for_outputs(self, weight: Tensor) -> Tensor:
        """Return [W | s B] (out, in + R)."""
        out, ranks = self.outputs.shape
        features = self.inputs.shape[1]
        if self.whole is not None:
            return self.whole[:out, : features + ranks]
        wide = self.outputs.new_empty(out, features + room_for(features, ranks))
        columns = wide[:, features : features + ranks]
        unpack(weight, wide[:, :features], beside=(self.outputs, columns))
        return wide[:, : features + ranks]

    def for_inputs(self, weight: Tensor) -> Tensor:
        """Return [W ; A] (out + r, in)."""
        rank, features = self.inputs.shape
        if self.whole is not None:
            return self.whole[:, :features]
        out = len(self.outputs)
        wide = self.outputs.new_empty(out + rank, features)
        unpack(weight, wide[:out], beside=(self.inputs, wide[out:]))
        return wide


def columns_of(weight: Tensor, adapter: Adapter, start: int, ranks: int) -> AdapterColumns:
    """Return zeros beside a weight, which moves into a buffer that has them beside it."""
    rank = len(adapter.a)
    if isinstance(weight, Params4bit):
        state = weight.quant_state
        out, features = state.shape
        outputs = torch.zeros(out, ranks, dtype=state.dtype, device=weight.device)
        inputs = outputs.new_zeros(rank, features)
        return AdapterColumns(adapter, outputs, inputs, start, None)
    out, features = weight.shape
    whole = weight.new_zeros(out + rank, features + room_for(features, ranks))
    whole[:out, :features].copy_(weight)
    weight.data = whole[:out, :features]
    outputs = whole[:out, features : features + ranks]
    return AdapterColumns(adapter, outputs, whole[out:, :features], start, whole)


class Beside(NamedTuple):
    """Where a trained adapter lies beside a weight."""

    adapter: Tensor  # A (r, in) or B (out, r), the parameter
    target: Tensor  # of its shape, in the dtype of the weight
    scale: float  # that it is multiplied by there


class ColumnWriter:
    """Writes matrices, multiplied by scales, to their places beside weights: all at once."""

    def __init__(self, sources: Sequence[Tensor], places: Sequence[Beside]):
        self.sources = sources
        self.places = places
        self._table: tuple[Tensor, ...] | None = None

    def write(self) -> None:
        """Write the sources, in the order of the places, as they are now."""
        if not self.sources[0].is_cuda:
            for source, place in zip(self.sources, self.places, strict=True):
                place.target.copy_(source * place.scale)
            return
        from sft_play.models.fast.linears import columns_kernels  # Triton needs a GPU

        if self._table is None:
            targets = [place.target for place in self.places]
            scales = [place.scale for place in self.places]
            self._table = columns_kernels.table_of(self.sources, targets, scales)
        columns_kernels.write(self._table, self.sources[0])
