"""FLOPs and tokens per second of a training step, in closed form. Pure: no torch, no I/O.

Fitted to runs on one H200 (docs/evidence/speed-h200.md) and a few on two. Other cards are assumed
to reach the same share of their data sheets; only H100s were measured of them
(docs/evidence/scaling-h100.md). Cards without flash attention (capability below 8.0) are slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sft_play.plan import memory
from sft_play.plan.cards import Card
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.step import LONG_ROW, Layout, StepSpec


def step_flops(
    model: ModelShape, adapters: int | None, lengths: Sequence[int], labelled: int
) -> float:
    """Return the FLOPs of forward and backward passes over documents of `lengths` tokens.

    `labelled` of the tokens have loss. `adapters` is the number of LoRA weights over a frozen base,
    None if every weight is trained. Per token, a weight costs 2 operations forward, 2 for the
    gradient of its input and, if trained, 2 for its gradient: 6, and 4 for a frozen one (Kaplan
    et al. 2020, section 2.1). The head is computed if there is a label. Attention has 2 GEMMs
    forward (QK', PV) and 4 backward (dV, dP, dQ, dK). Each has 2 FLOPs per feature of all heads
    and per pair of tokens; with the causal mask, a document has T (T + 1) / 2 pairs.

    If the structure of a model was counted, only the experts that a token is routed to count, and
    only the pairs within a layer's window. A recurrence between tokens is not counted, but its
    matrices are. For architectures like Llama windows are not considered.

    >>> one = ModelShape(
    ...     vocab=10, hidden=4, intermediate=8, layers=1,
    ...     heads=2, kv_heads=2, head_dim=2, is_tied=True,
    ... )
    >>> step_flops(one, None, [1], labelled=0)  # 6 * 160 weights, 12 * 4 features * 1 pair
    1008.0
    """
    tokens = sum(lengths)
    flops_per_weight = 6 if adapters is None else 4
    weights = model.counts.active_product_weights * tokens + model.vocab * model.hidden * labelled
    attention = _attention_flops(model, lengths)
    return flops_per_weight * weights + 6 * (adapters or 0) * tokens + attention


def _attention_flops(model: ModelShape, lengths: Sequence[int]) -> float:
    """Return the FLOPs of attention: a GEMM of queries and keys, and one with values."""
    total = 0.0
    for kind in model.counts.layers:
        pairs = sum(_pairs(length, kind.window) for length in lengths)
        total += 12 * kind.count * kind.query_features * pairs
    return total


def pair_cost(model: ModelShape, adapters: int | None) -> float:
    """Return the cost of attention between two tokens of a document, relative to other costs.

    A document of T tokens costs T (1 + pair_cost T) tokens: half of its T^2 pairs are seen. The
    head and layers with a window are linear in T, and are left out.
    """
    flops_per_weight = 6 if adapters is None else 4
    linear = flops_per_weight * model.counts.active_product_weights + 6 * (adapters or 0)
    everywhere = [kind for kind in model.counts.layers if kind.window is None]
    features = sum(kind.count * kind.query_features for kind in everywhere)
    return 6 * features / linear


def _pairs(length: int, window: int | None) -> float:
    """Return the number of (token, visible token) pairs in a document of `length` tokens.

    >>> _pairs(4, None), _pairs(4, 2)  # 1 + 2 + 3 + 4 and 1 + 2 + 2 + 2
    (10.0, 7.0)
    """
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) / 2 + float((length - seen) * seen)


# The cost of a step relative to no recomputation in the large-batch limit. 8B on an H200: with all
# layers checkpointed it takes 1.46 times as long; a micro-batch costs 140 tokens in addition to its
# tokens under lora, and qlora dequantizes every weight for each micro-batch.
RECOMPUTED = 0.46
OVERHEAD_TOKENS = 300
# Seconds per token = operations / (PRODUCTS x reached)
#                      + layers x (hidden + intermediate) x 2 bytes x PASSES / bandwidth
#                      + inputs and outputs of its experts x 2 bytes x EXPERT_PASSES / bandwidth
#                      + recurrent layers x hidden x 2 bytes x RECURRENT_PASSES / bandwidth.
# The first term is the GEMMs, the second all passes over the activations between them,
# adapters included. Fitted to 8B and 1B; qlora unfused was not measured. The third is that of fused
# experts: sorting, and many small GEMMs. The weights of all experts are read in each
# pass of a micro-batch; for 4-bit weights, UNPACKED_BYTES per weight are read and written.
# Fitted to eleven runs with recorded layers on an H200, of Qwen3-30B-A3B, gpt-oss-20b and -120b in
# micro-batches of 2,048 to 8,192 tokens: at most 12 % off. The last is that of a gated
# delta rule and its convolution in kernels of flash-linear-attention. Fitted to Qwen3.5 4B, whose
# recurrent layers mix 4.8 features for each hidden one.
PRODUCTS = 0.88
EXPERT_PASSES = 13
UNPACKED_BYTES = 7
RECURRENT_PASSES = 500
FUSED_PASSES = {"lora": 42, "qlora": 46, "full": 36}
UNFUSED_PASSES = {"lora": 185, "qlora": 190, "full": 106}
# Attention computes scores again in its backward pass, and its kernels reach less than GEMMs
# do: for 131,072 tokens of 8B on an H200, 560 TFLOP/s forward and 537 backward.
ATTENTION = 0.45  # beyond the counted FLOPs; for short rows the other terms contain it
LABELLED = 0.5  # of a chat's tokens, if they were not counted
# For a float8 base: the GEMMs of the linears of an 8B layer took 10.1 ms in bfloat16 and 5.2 in
# float8 (H200, 8,192 tokens). The passes that quantize inputs and gradients and add results were
# counted, and so were the bytes of a weight that is transposed for each micro-batch. 8B ran at
# 24.7k tokens/s; this predicts 25.4k.
FLOAT8_PRODUCTS = 10.1 / 5.2
FLOAT8_PASSES = 10
TRANSPOSED_BYTES = 2
# The host sets the pace of small models. 1B lora unfused needed 0.14 ms per module and pass. With
# fused kernels only the block's modules are called; they are assumed to take as long. Under ZeRO-3
# the host also runs the hooks of every module and each gradient.
MODULE_SECONDS = 0.14e-3
HOOK_SECONDS = 0.43e-3
MODULES = 13  # of a block
FETCHING_MODULES = 3  # of a fused block under ZeRO-3: the layer prefetches for attention and MLP
MODULES_OF_EXPERTS = 7  # more of a block with experts: sorting, gathering, and their gradients
MODULES_OF_ADAPTER = 4  # of an adapted layer: its wrapper, the two matrices, the dropout
# Several GPUs. Two H200s (docs/evidence/scaling-h200.md): 8B lora reached 0.98 of twice one under
# DDP and 0.89 under FSDP, full 0.89, and 0.75 under ZeRO-3; 1B unfused, checkpointed, 0.95 under
# DDP, and a step of ZeRO-3 took 400 ms (full) and 964 (lora).
SCALING = 0.97  # ranks wait for the slowest, and collectives take a part of each GPU
GATHERING_SCALING = 0.9  # a larger part if each layer's weights are gathered
# Four H100s, Qwen3-30B-A3B lora (docs/evidence/scaling-h100.md): 54,501 tokens/s with ep, whose
# ranks wait for the busiest experts, and 40,500 with FSDP, which hides no gather of experts.
EXPERT_SCALING = 0.75
LINK_SHARE = 0.6  # of a link's data sheet that collectives reach; assumed
NODE_LINK_BYTES = 12.5e9  # per second and GPU between machines: 100 Gbit/s; assumed
# Offloading: gradients to the host and weights back, and Adam in host memory; for ZeRO-3's
# weights, each rank's share in every pass. Bytes per second, assumed.
HOST_LINK_BYTES = 25e9
HOST_MEMORY_BYTES = 200e9


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in an optimizer step."""

    rows: float
    row_tokens: float  # on average, without padding
    micro_batches: int
    labelled: float = LABELLED  # share of the tokens that have loss
    padding: float = 1.0  # computed tokens per real token

    @property
    def tokens(self) -> float:
        return self.rows * self.row_tokens


@dataclass(frozen=True)
class Speed:
    """How fast a run trains: the seconds of an optimizer step and what follows from them."""

    tokens_per_second: float  # of all ranks, excluding padding
    step_seconds: float
    compute_seconds: float  # of a step: forward and backward passes
    optimizer_seconds: float
    collective_seconds: float  # not overlapped with computation
    mfu: float  # FLOPs that the work requires, relative to the data sheet's
    flops_per_token: float


def predict(
    step: StepSpec, layout: Layout, card: Card | None, nodes: int = 1, work: StepWork | None = None
) -> Speed | None:
    """Return the speed of a step; None on a CPU, on an unknown card, and in float32.

    Without `work` all rows are as long as allowed.
    """
    if card is None or not step.is_gpu or not step.is_half:
        return None
    if work is None:
        rows = layout.batch_size * layout.grad_accum
        work = StepWork(rows, layout.max_seq_len, layout.grad_accum)
    of_rank = replace(work, rows=work.rows / layout.context_parallel)
    compute = _compute_seconds(step, layout, of_rank, card)
    collective = 0.0
    if layout.world_size > 1:
        slowest = NODE_LINK_BYTES if nodes > 1 else math.inf
        link_bytes = min(LINK_SHARE * card.link_bytes, slowest)
        collective = _collective_seconds(step, layout, work, compute, link_bytes)
        scaling = SCALING
        if step.expert_ranks > 1:
            scaling = EXPERT_SCALING
        elif step.is_fsdp or (step.zero_stage == 3 and step.is_fast):
            scaling = GATHERING_SCALING
        compute = compute / scaling
    optimizer = _optimizer_seconds(step, layout, card)
    flops = _flops(step, of_rank, work.labelled)
    seconds = compute + optimizer + collective
    return Speed(
        tokens_per_second=work.tokens * layout.replicas / seconds,
        step_seconds=seconds,
        compute_seconds=compute,
        optimizer_seconds=optimizer,
        collective_seconds=collective,
        mfu=flops / seconds / card.flops,
        flops_per_token=flops / of_rank.tokens,
    )


def _flops(step: StepSpec, work: StepWork, labelled: float) -> float:
    length = max(1, round(work.row_tokens))
    labelled_tokens = round(labelled * length)
    adapters = step.active_adapter_weights
    return work.rows * step_flops(step.model, adapters, [length], labelled_tokens)


class FixedTokens(NamedTuple):
    """The costs of each micro-batch in addition to its tokens, in tokens."""

    overhead: float  # of the GPU: all experts are read, however few a token is routed to
    host: float  # that the GPU computes while its host launches it, or sends its weights


def fixed_tokens(step: StepSpec, row_tokens: float, card: Card | None) -> FixedTokens:
    """Return the fixed costs of micro-batches. Those of a host are 0 if the device is not known."""
    if card is None or not step.is_gpu or not step.is_half:
        return FixedTokens(OVERHEAD_TOKENS, 0.0)
    seconds = _gpu_seconds(step, StepWork(1, row_tokens, 1), card)
    waiting = max(_host_seconds(step, 0), _with_copies(step, card, 0.0, 0, 1))
    reading = 2 * _reading_seconds(step, card) * row_tokens / seconds
    return FixedTokens(OVERHEAD_TOKENS + reading, waiting * row_tokens / seconds)


def _gpu_seconds(step: StepSpec, work: StepWork, card: Card) -> float:
    """Return the GPU's seconds for the passes over its tokens, in one batch and none recomputed."""
    # unfused, the head computes every token
    labelled = work.labelled if step.has_fused_loss else 1.0
    flops = work.padding * _flops(step, work, labelled)
    row_tokens = max(1, round(work.row_tokens))
    if row_tokens >= LONG_ROW:
        flops += ATTENTION * work.rows * _attention_flops(step.model, [row_tokens])
    model = step.model
    experts = [kind for kind in model.matrices if kind.experts > 1]
    features = model.layers * model.hidden
    # a layer with experts is assumed to have no other MLP
    features += (model.layers - _expert_layers(model)) * model.intermediate
    of_experts = sum(kind.count * kind.active * (kind.inputs + kind.outputs) for kind in experts)
    passes = (FUSED_PASSES if step.is_fast else UNFUSED_PASSES)[step.mode]
    passes += FLOAT8_PASSES * step.is_float8
    of_recurrences = model.counts.recurrent_layers * model.hidden * RECURRENT_PASSES
    numbers = features * passes + of_experts * EXPERT_PASSES + of_recurrences
    passed_bytes = work.padding * work.tokens * 2 * numbers  # of a token's activations
    seconds = flops / (PRODUCTS * card.reached_flops) + passed_bytes / card.bandwidth
    if not step.is_float8:
        return seconds
    weights = sum(kind.active_weights for kind in step.model.float8_matrices)
    in_float8 = work.padding * work.tokens * 4 * weights
    saved = in_float8 * (1 - 1 / FLOAT8_PRODUCTS) / (PRODUCTS * card.reached_flops)
    transposed = work.micro_batches * TRANSPOSED_BYTES * weights / card.bandwidth
    return seconds - saved + transposed


def _compute_seconds(step: StepSpec, layout: Layout, work: StepWork, card: Card) -> float:
    """Return the seconds of forward and backward passes of a single GPU."""
    seconds = _gpu_seconds(step, work, card)
    # a forward pass is 2 of the 6 operations of a trained weight, and 2 of the 4 of a frozen one
    recomputed = RECOMPUTED * (4 / 6 if step.is_full else 1)
    overhead = 1 + OVERHEAD_TOKENS * work.micro_batches / (work.padding * work.tokens)
    again = layout.checkpointed_layers / step.model.layers
    if step.keeps_attention:
        recomputed /= 1 + layout.pair_cost * work.row_tokens
    gpu_seconds = seconds * overhead * (1 + recomputed * again)
    gpu_seconds += work.micro_batches * (2 + again) * _reading_seconds(step, card)
    gpu_seconds = _with_copies(step, card, gpu_seconds, again, work.micro_batches)
    return max(gpu_seconds, work.micro_batches * _host_seconds(step, again))


def _with_copies(step: StepSpec, card: Card, seconds: float, again: float, passes: int) -> float:
    """Return the seconds of micro-batches whose forward and backward `passes` copy weights.

    Copies run while layers compute. `seconds` is the time without them, and `again` is the share of
    the layers that the backward pass recomputes.
    """
    copies = passes * memory.offloaded_weight_bytes(step) / card.host_link_bytes
    forward = seconds / (2 + again)
    return max(forward, copies) + max(seconds - forward, copies) if copies else seconds


def _reading_seconds(step: StepSpec, card: Card) -> float:
    """Return the seconds of a pass in which the weights of all of a rank's experts are read."""
    experts = [kind for kind in step.of_rank().model.matrices if kind.is_stacked]
    weight_bytes = UNPACKED_BYTES if step.is_quantized else step.compute_bytes
    return weight_bytes * sum(kind.weights for kind in experts) / card.bandwidth


def _expert_layers(model: ModelShape) -> int:
    """Return how many layers of a model have experts."""
    counts = [kind.count for kind in model.matrices if kind.experts > 1]
    return min(model.layers, max(counts, default=0))


def _trained_bytes(step: StepSpec) -> int:
    """Return the bytes of a trained weight and its gradient; DeepSpeed converts both."""
    return step.compute_bytes if step.zero_stage else step.trained_bytes


def _optimizer_seconds(step: StepSpec, layout: Layout, card: Card) -> float:
    """Return the seconds of clipping and stepping.

    Clipping reads a gradient, then reads and writes it. The step reads it once more, and reads and
    writes weight and state.
    """
    size = _trained_bytes(step)
    trained = step.of_rank().trained_weights
    state = step.of_rank().state_bytes / trained
    is_divided = step.zero_stage or step.divides_training
    share = trained / (layout.world_size if is_divided else 1)
    if step.offload or step.offloads_training:
        moved = share * 2 * size / HOST_LINK_BYTES
        return moved + trained * (6 * size + 2 * state) / HOST_MEMORY_BYTES
    return share * (6 * size + 2 * state + 2 * step.master_bytes) / card.bandwidth


def _collective_seconds(
    step: StepSpec, layout: Layout, work: StepWork, compute_seconds: float, link_bytes: float
) -> float:
    """Return the seconds of a step's collectives that do not overlap with `compute_seconds`.

    A ring moves (N - 1) / N of the bytes for a gather or a scatter, and twice that to sum gradients
    (Patarasuk and Yuan 2009). DDP sums during the last micro-batch's backward pass, half of its
    time; DeepSpeed overlaps little. FSDP gathers the weights and shards the gradients of every
    micro-batch while layers compute. Ranks that share experts also move tokens.
    """
    ring = (layout.world_size - 1) / layout.world_size / link_bytes
    gradients = step.without_experts().trained_weights * _trained_bytes(step) * ring
    if step.is_fsdp:
        weights = memory.base_weight_bytes(step, step.compute_bytes)
        gathered = 2 * weights * ring
        if step.offload_weights:  # each rank's part comes from the host
            gathered += 2 * weights / layout.world_size / HOST_LINK_BYTES
        if _expert_layers(step.model):  # their gathers are not hidden: see EXPERT_SCALING
            compute_seconds = 0.0
        if step.is_full:
            return max(0.0, work.micro_batches * (gathered + gradients) - compute_seconds)
        return max(0.0, work.micro_batches * gathered + 2 * gradients - compute_seconds)
    if step.zero_stage == 3:
        gathers = 2 + layout.checkpointed_layers / step.model.layers
        weights = memory.base_weight_bytes(step, step.compute_bytes)
        fetched = weights / layout.world_size / HOST_LINK_BYTES if step.offload_weights else 0.0
        return work.micro_batches * (gathers * (weights * ring + fetched) + gradients)
    if step.zero_stage:
        scatters = work.micro_batches if step.zero_stage == 2 else 1
        return gradients * (scatters + 1)
    unhidden = max(0.0, 2 * gradients - compute_seconds / work.micro_batches / 2)
    return unhidden + _meeting_seconds(step, layout, work, link_bytes)


def _meeting_seconds(step: StepSpec, layout: Layout, work: StepWork, link_bytes: float) -> float:
    """Return the seconds in which ranks that share experts exchange tokens around each layer.

    Hidden states are gathered and outputs scattered, and vice versa in the backward pass.
    Nothing else is computed meanwhile. A recomputed layer gathers again.
    """
    again = layout.checkpointed_layers / step.model.layers
    tokens = work.padding * work.tokens * (step.expert_ranks - 1)
    moved = (4 + again) * tokens * step.model.hidden * step.compute_bytes
    return _expert_layers(step.model) * moved / link_bytes


def _host_seconds(step: StepSpec, again: float) -> float:
    """Return the host's seconds for a micro-batch: each module of the blocks in each pass.

    `again` is the share of the layers with a third pass. Under ZeRO-3 each gradient is added.
    """
    adapted = 0.0
    if not step.is_full:
        adapted = sum(kind.count for kind in step.adapted_matrices) / step.model.layers
    modules = MODULES + MODULES_OF_EXPERTS * _expert_layers(step.model) / step.model.layers
    if not step.is_fast:
        modules += MODULES_OF_ADAPTER * adapted
    calls = modules * (2 + again)
    if step.zero_stage != 3:
        return MODULE_SECONDS * step.model.layers * calls
    if step.is_fast and not step.is_full:
        calls = FETCHING_MODULES * (2 + again)
    gradients = 2 * adapted or 9  # the adapters' matrices, else seven of the block and two norms
    return HOOK_SECONDS * step.model.layers * (calls + gradients)
