"""Choose micro-batch, accumulation and checkpointing, and the longest row. Pure."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from sft_play.config.sections.base import MOST_ROWS
from sft_play.errors import ConfigError
from sft_play.plan import memory
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.speed import OVERHEAD_TOKENS, RECOMPUTED, Speed
from sft_play.plan.step import Layout, StepSpec

# Above this number of tokens per micro-batch an H200 gains less than 3 % in speed.
SATURATED_TOKENS, SATURATED_LOSS = 8192, 0.03
# A host may need this many times longer for a micro-batch than planned: its cores are slow or
# busy with other work. If memory allows, a GPU then has enough work.
HOST_MARGIN = 2.0

PeakBytes = Callable[[Layout], int]
SpeedOf = Callable[[StepSpec, Layout], Speed | None]


@dataclass(frozen=True)
class BatchRequest:
    """The user's settings of batch and checkpointing, and the limits of the choice."""

    batch_size: int | Literal["auto"]
    grad_accum: int | Literal["auto"]
    effective_batch: int
    is_effective_set: bool  # by the user; otherwise it is a default that may change
    gradient_checkpointing: bool | Literal["auto"]
    row: Layout  # one row in one micro-batch: what all layouts have in common
    layers: int  # of the model
    recomputes_by_layer: bool = True  # otherwise all layers are checkpointed or none
    overhead_tokens: float = OVERHEAD_TOKENS  # cost of a micro-batch in addition to its tokens
    host_tokens: float = 0.0  # tokens that a GPU computes while its host launches one micro-batch
    step_tokens: float | None = None  # of a usual packed step, if micro-batches may grow by it

    @cached_property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step that batch, accumulation and world size can make.

        Raises: ConfigError when the user's numbers contradict each other.
        """
        unit = self.row.replicas
        if self.batch_size != "auto":
            unit *= self.batch_size
        if self.grad_accum != "auto":
            unit *= self.grad_accum
        is_explicit = "auto" not in (self.batch_size, self.grad_accum)
        if unit > MOST_ROWS:
            raise ConfigError(
                f"{self._arithmetic()} = {unit} rows per step; write numbers whose product is at "
                f"most {MOST_ROWS}"
            )
        if self.effective_batch == unit or (is_explicit and not self.is_effective_set):
            return unit
        if is_explicit:
            raise ConfigError(
                f"{self._arithmetic()} = {unit}, but train.effective_batch_size="
                f"{self.effective_batch}; set one of the three to auto"
            )
        below = self.effective_batch // unit * unit
        if below == self.effective_batch:
            return below
        if self.is_effective_set:
            options = [
                f"TRAIN_EFFECTIVE_BATCH_SIZE={rows}" for rows in (below, below + unit) if rows
            ]
            raise ConfigError(
                f"train.effective_batch_size={self.effective_batch} is no multiple of "
                f"{self._arithmetic()}; set {' or '.join(options)}"
            )
        return below + unit

    def layout(self, batch_size: int, checkpointed_layers: int) -> Layout:
        """Return the layout with this micro-batch."""
        grad_accum = self.grad_accum
        if grad_accum == "auto":
            grad_accum = self.rows_per_step // (batch_size * self.row.replicas)
        return replace(
            self.row,
            batch_size=batch_size,
            grad_accum=grad_accum,
            checkpointed_layers=checkpointed_layers,
        )

    def _arithmetic(self) -> str:
        factors = []
        if self.batch_size != "auto":
            factors.append(f"train.batch_size={self.batch_size}")
        if self.row.replicas > 1:
            noun = "ranks" if self.row.context_parallel == 1 else "groups of ranks"
            factors.append(f"{self.row.replicas} {noun}")
        if self.grad_accum != "auto":
            factors.append(f"train.grad_accum={self.grad_accum}")
        return " x ".join(factors)


def choose_layout(request: BatchRequest, peak_bytes: PeakBytes, budget_bytes: int) -> Layout | None:
    """Return the fastest layout that fits in `budget_bytes`, None if none does.

    For each micro-batch, the fewest checkpointed layers with which it fits are tried, and `_cost`
    selects the best. An explicit micro-batch is always used: the estimate may be off, and the plan
    warns. If an explicit accumulation cannot reach the default effective batch, that changes.

    Raises: ConfigError if the user's numbers contradict each other.
    """
    for sizes in _batch_sizes(request):
        fitting = []
        for size in sizes:
            layout = _fewest_layers(request, size, peak_bytes, budget_bytes)
            if layout is not None:
                fitting.append(layout)
        if fitting:
            chosen = min(fitting, key=partial(_cost, request))
            return merged_layout(request, chosen, peak_bytes, budget_bytes)
    return smallest(request) if request.batch_size != "auto" else None


def merged_layout(
    request: BatchRequest, layout: Layout, peak_bytes: PeakBytes, budget_bytes: int
) -> Layout:
    """Return a packed layout whose micro-batches have enough of a usual step's tokens to be fast.

    `_batch_sizes` counts full sequences, and as many micro-batches as the fullest step has. Usual
    steps contain less: 6,300 tokens instead of 8,192 in a run of an 8B, which trained 2.5 % faster
    in one micro-batch. A micro-batch grows as far as memory allows, with the same layers
    recomputed. It is unchanged if `step_tokens` is None.
    """
    step_tokens = request.step_tokens
    if step_tokens is None:
        return layout
    rows_of_rank = layout.rows_per_step // layout.replicas
    found = layout
    for size in range(layout.batch_size, rows_of_rank + 1):
        if step_tokens >= SATURATED_TOKENS * found.micro_batches * layout.replicas:
            break
        if rows_of_rank % size:
            continue
        larger = replace(layout, batch_size=size, grad_accum=rows_of_rank // size)
        if larger.micro_batches < found.micro_batches:
            if peak_bytes(larger) > budget_bytes:
                break
            found = larger
    return found


def smallest(request: BatchRequest) -> Layout:
    """Return the layout that needs the least memory of all that `request` allows."""
    return request.layout(_batch_sizes(request)[-1][-1], _layer_counts(request)[-1])


def _fewest_layers(
    request: BatchRequest, batch_size: int, peak_bytes: PeakBytes, budget_bytes: int
) -> Layout | None:
    """Return the layout with the fewest checkpointed layers that fits."""
    counts = _layer_counts(request)

    def fits(count: int) -> bool:
        return peak_bytes(request.layout(batch_size, count)) <= budget_bytes

    first = bisect_left(counts, True, key=fits)
    return request.layout(batch_size, counts[first]) if first < len(counts) else None


def _layer_counts(request: BatchRequest) -> list[int]:
    """Numbers of checkpointed layers to try, fewest first. True means all, as in transformers."""
    if request.gradient_checkpointing != "auto":
        return [request.layers if request.gradient_checkpointing else 0]
    if request.recomputes_by_layer:
        return list(range(request.layers + 1))
    return [0, request.layers]


def _cost(request: BatchRequest, layout: Layout) -> float:
    """Return seconds per row, relative to no recomputation in the large-batch limit.

    GPU and host work in parallel, and the slower one sets the pace. A checkpointed layer has a
    third pass.
    """
    recomputed = layout.checkpointed_layers / request.layers
    gpu = (1 + RECOMPUTED * recomputed) * (1 + request.overhead_tokens / layout.mean_tokens)
    host = (1 + recomputed / 2) * request.host_tokens / layout.mean_tokens
    return max(gpu, host)


def _batch_sizes(request: BatchRequest) -> list[list[int]]:
    """Return groups of micro-batches to try in turn, largest first within each.

    The first group keeps the effective batch; the other groups reduce it, row by row.
    Raises: ConfigError when the user's numbers contradict each other.
    """
    rows_of_rank = request.rows_per_step // request.row.replicas
    if request.batch_size != "auto":
        return [[request.batch_size]]
    if request.grad_accum != "auto":
        largest = rows_of_rank // request.grad_accum
        least = largest if request.is_effective_set else 1
        return [[size] for size in range(largest, least - 1, -1)]
    divisors = [size for size in range(1, rows_of_rank + 1) if rows_of_rank % size == 0]
    tokens = {size: request.layout(size, 0).mean_tokens for size in divisors}
    most = max(tokens.values())
    # SATURATED_TOKENS or, if a step has few tokens, the number within 3 % of computing its `most`
    # tokens at once: 1 + OVERHEAD / t <= (1 + loss) (1 + OVERHEAD / most), solved for t
    overhead = request.overhead_tokens
    close = overhead / (SATURATED_LOSS + (1 + SATURATED_LOSS) * overhead / most)
    saturating = min(SATURATED_TOKENS, close)
    enough = max(saturating, min(HOST_MARGIN * request.host_tokens, most))
    start = next(size for size in divisors if tokens[size] >= enough)
    return [[size for size in reversed(divisors) if size <= start]]


STEP_TOKENS = 1024
MOST_TOKENS = 2**21


@dataclass(frozen=True)
class LongestRow:
    """Tokens of the longest row that fits, and its host memory."""

    tokens: int  # a multiple of STEP_TOKENS; 0 if not even that fits
    host_bytes: int = 0  # of offloaded activations, per rank
    tokens_per_second: float | None = None  # None: the device's speed is not known

    def describe(self) -> str:
        """Return the tokens, with the speed if it is known."""
        rate = self.tokens_per_second
        speed = "" if rate is None else f" at {rate:,.0f} tokens/s"
        return f"{self.tokens:,} tokens{speed}"


@dataclass(frozen=True)
class LongestRows:
    """The longest row whose activations stay on the GPU, and the one with activation offloading."""

    kept: LongestRow
    offloaded: LongestRow | None  # None if offloading does not make a longer row fit
    has_weights_on_host: bool = False  # of all layers

    def describe(self) -> str:
        """Return both in words, for the report."""
        rows = [self.kept.describe()] if self.kept.tokens else []
        if self.offloaded is not None:
            host = f"{self.offloaded.host_bytes / memory.GIB:.1f} GiB of host memory for each GPU"
            rows.append(f"{self.offloaded.describe()} with activations offloaded to {host}")
        if not rows:
            return f"not even {STEP_TOKENS:,} tokens fit"
        if self.has_weights_on_host:
            rows[0] += " with all frozen weights in host memory"
        return "; ".join(rows)


def longest_rows(
    step: StepSpec, request: BatchRequest, budget_bytes: int, speed_of: SpeedOf = lambda *_: None
) -> LongestRows:
    """Return the longest rows for micro-batches of one row, with all layers recomputed if allowed.

    If the weights of some layers are in host memory, all layers' weights are. The budget is that of
    a rank's device; host memory is not limited. `speed_of` returns the tokens per second of a step.
    """
    has_weights_on_host = step.offloaded_weight_layers > 0
    layers = 0 if request.gradient_checkpointing is False else step.model.layers
    row = replace(
        request.row,
        grad_accum=2,  # gradients of other rows are in memory
        checkpointed_layers=layers,
        fullest_step=None,
    )

    def longest(offloads: bool) -> LongestRow:
        """Return the longest row that fits, with or without offloaded activations."""
        each = replace(
            step,
            keeps_attention=False,
            host_layers=None,
            offload_activations=offloads,
            offloaded_weight_layers=step.model.layers if has_weights_on_host else 0,
        )

        def is_too_long(tokens: int) -> bool:
            return memory.peak_bytes(each, replace(row, max_seq_len=tokens)) > budget_bytes

        lengths = range(STEP_TOKENS, MOST_TOKENS + 1, STEP_TOKENS)
        tokens = STEP_TOKENS * bisect_left(lengths, True, key=is_too_long)
        if not tokens:
            return LongestRow(0)
        layout = replace(row, max_seq_len=tokens)
        speed = speed_of(each, layout)
        rate = speed and speed.tokens_per_second
        return LongestRow(tokens, offloaded_bytes(each, layout), rate)

    kept = longest(offloads=False)
    can_offload = step.is_gpu and request.recomputes_by_layer and layers > 0
    offloaded = longest(offloads=True) if can_offload else kept
    longer = offloaded if offloaded.tokens > kept.tokens else None
    return LongestRows(kept, longer, has_weights_on_host)
