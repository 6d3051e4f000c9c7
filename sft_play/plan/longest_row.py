"""The longest row that a rank trains, one at a time, by its memory. Pure: no torch, no I/O."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from sft_play.plan import memory
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.batch import BatchRequest
from sft_play.plan.layout import Layout
from sft_play.plan.step import StepSpec

STEP_TOKENS = 1024
MOST_TOKENS = 2**21
# Attention kernels index the queries of a batch with 32 bits: `attention.kernels.MAX_ELEMENTS`
MAX_QUERY_ELEMENTS = 2**31


@dataclass(frozen=True)
class LongestRow:
    """Tokens of the longest row that fits, and what it takes on the host."""

    tokens: int  # a multiple of STEP_TOKENS; 0 where not even so many fit
    host_bytes: int = 0  # of offloaded activations, for each rank


@dataclass(frozen=True)
class LongestRows:
    """The longest row whose activations stay on the GPU, and the one with activation offloading."""

    kept: LongestRow
    offloaded: LongestRow | None  # None where offloading makes no longer row fit

    def words(self) -> str:
        """Return both in words, for the report."""
        if not self.kept.tokens and not self.offloaded:
            return f"not one of {STEP_TOKENS:,} tokens fits"
        words = f"{self.kept.tokens:,} tokens fit, one row at a time"
        if self.offloaded is None:
            return words
        host = f"{self.offloaded.host_bytes / memory.GIB:.0f} GiB of host memory for each GPU"
        return f"{words}; {self.offloaded.tokens:,} with activations offloaded to {host}"


def longest_rows(step: StepSpec, request: BatchRequest, budget_bytes: int) -> LongestRows:
    """Return the longest rows for micro-batches of one row, all layers recomputed if that may be.

    The budget is of a rank's device; whether the host has the memory is not asked.
    """
    kept = _longest(replace(step, offload_activations=False), request, budget_bytes)
    if not step.is_gpu or not request.recomputes_by_layer or not _recomputes(request):
        return LongestRows(kept, None)
    offloaded = _longest(replace(step, offload_activations=True), request, budget_bytes)
    return LongestRows(kept, offloaded if offloaded.tokens > kept.tokens else None)


def _longest(step: StepSpec, request: BatchRequest, budget_bytes: int) -> LongestRow:
    features = max(1, step.model.heads * step.model.head_dim)
    most = min(MOST_TOKENS, (MAX_QUERY_ELEMENTS - 1) // features)
    lengths = range(STEP_TOKENS, most + 1, STEP_TOKENS)

    def is_too_long(tokens: int) -> bool:
        layout = _one_row(step, request, tokens)
        return memory.step_bytes(step, layout).predicted_peak > budget_bytes

    tokens = STEP_TOKENS * bisect_left(lengths, True, key=is_too_long)
    if not tokens:
        return LongestRow(0)
    return LongestRow(tokens, offloaded_bytes(step, _one_row(step, request, tokens)))


def _one_row(step: StepSpec, request: BatchRequest, tokens: int) -> Layout:
    return Layout(
        batch_size=1,
        grad_accum=2,  # gradients of other rows are held
        world_size=request.world_size,
        max_seq_len=tokens,
        checkpointed_layers=step.model.layers if _recomputes(request) else 0,
    )


def _recomputes(request: BatchRequest) -> bool:
    return request.gradient_checkpointing is not False
