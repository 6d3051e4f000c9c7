"""Tokens a second of a training step, in closed form. Pure: no torch, no I/O.

Fitted to runs on one H200 (docs/speed-h200.md) and a few on two. Other cards are given the same shares of their data sheets: nobody
has measured them here, and cards without flash attention in their kernels (capability under 8.0) will be slower.
"""

from dataclasses import asdict, dataclass, replace

from sft_play.plan import memory
from sft_play.plan.cards import Card
from sft_play.plan.flops import step_flops
from sft_play.plan.memory import StepShape
from sft_play.plan.model_shape import ModelShape, adapted_linears

# What a step costs against one that computes nothing twice, in a micro-batch without end. An 8B model on an H200: all layers checkpointed
# take 1.46 times as long; a micro-batch costs 140 tokens on top of its own under lora, and qlora dequantises every weight for each.
RECOMPUTED, OVERHEAD_TOKENS = 0.46, 300
# Seconds of a token = operations / (PRODUCTS x reached) + layers x (hidden + intermediate) x 2 bytes x PASSES / bandwidth. Fitted to
# 8B and 1B: the first term is the matrix products, the second all that goes over the activations between them, adapters included.
PRODUCTS = 0.88
PASSES = {
    True: {"lora": 42, "qlora": 46, "full": 36},
    False: {"lora": 185, "qlora": 190, "full": 106},
}  # by fused or not; qlora unfused: not measured
LABELLED = 0.5  # of a chat's tokens, where nobody has counted
# The host sets the pace of small models: 1B lora unfused took it 0.14 ms a module and pass. Fused, the block's own modules alone are
# called; that they take as long is assumed. Under ZeRO-3 it works through the hooks of every module and each gradient, too.
MODULE_SECONDS, HOOK_SECONDS = 0.14e-3, 0.43e-3
MODULES, MODULES_OF_ADAPTER = (
    13,
    4,
)  # of a block; beside each adapted layer: its wrapper, the two matrices, the dropout
# Several GPUs. Two H200s, 1B unfused, all checkpointed: DDP reached 0.95 of twice one, and a step of ZeRO-3 took 400 ms (full) and
# 964 (lora); 8B lora without checkpointing 1,354.
TOGETHER = 0.95  # ranks wait for the slowest, and collectives take a part of each GPU
LINK_SHARE = 0.6  # of a link's data sheet that collectives reach; assumed
NODE_LINK_BYTES = 12.5e9  # a second and GPU between machines: 100 Gbit/s; assumed
# Offload: gradients to the host and weights back, and Adam in its memory; for ZeRO-3's weights, each rank's share in every pass. Assumed.
HOST_LINK_BYTES, HOST_MEMORY_BYTES = 25e9, 200e9


@dataclass(frozen=True)
class StepWork:
    """What one rank trains in an optimizer step."""

    rows: float
    row_tokens: float  # on average, without padding
    micro_batches: int
    labelled: float = LABELLED  # share of the tokens that have loss
    padding: float = 1.0  # tokens computed for each real one


@dataclass(frozen=True)
class Speed:
    """How fast a run trains: the seconds of an optimizer step and what follows from them."""

    tokens_per_second: float  # of all ranks, padding not counted
    step_seconds: float
    compute_seconds: float  # of a step: forward and backward passes
    optimizer_seconds: float
    collective_seconds: float  # that no computing hides
    mfu: float  # operations that the work cannot do without, of the data sheet's
    flops_per_token: float

    def as_json(self) -> dict[str, float]:
        """Return seconds, tokens and operations as plain numbers."""
        return asdict(self)


def full_rows(step: StepShape, micro_batches: int) -> StepWork:
    """Return the work of a step whose rows are all as long as may be."""
    return StepWork(step.batch_size * micro_batches, step.seq_len, micro_batches)


def predict(
    shape: ModelShape, step: StepShape, work: StepWork, card: Card | None, nodes: int = 1
) -> Speed | None:
    """Return the speed of a step; None for a card that is not known, a CPU, or float32, of which nothing is known."""
    if card is None or not step.is_gpu or step.compute_bytes != 2:
        return None
    passes = _passes_seconds(shape, step, work, card)
    optimizer = _optimizer_seconds(shape, step, card)
    compute, collective = (
        (passes, 0.0)
        if step.world_size == 1
        else _together(shape, step, work, passes, _link_bytes(card, nodes))
    )
    tokens, flops = work.rows * work.row_tokens, _flops(shape, step, work, work.labelled)
    seconds = compute + optimizer + collective
    return Speed(
        tokens * step.world_size / seconds,
        seconds,
        compute,
        optimizer,
        collective,
        flops / seconds / card.flops,
        flops / tokens,
    )


def _flops(shape: ModelShape, step: StepShape, work: StepWork, labelled: float) -> float:
    adapters = (
        None if step.mode == "full" else shape.lora_parameters(step.lora_rank, step.lora_targets)
    )
    length = max(1, round(work.row_tokens))
    return work.rows * step_flops(shape, adapters, [length], round(labelled * length))


def _passes_seconds(shape: ModelShape, step: StepShape, work: StepWork, card: Card) -> float:
    """Forward and backward passes of one GPU alone; unfused, the head works on every token."""
    flops = work.padding * _flops(shape, step, work, work.labelled if step.is_fast else 1.0)
    tokens = work.padding * work.rows * work.row_tokens
    feature_bytes = (
        2 * shape.layers * (shape.hidden + shape.intermediate) * PASSES[step.is_fast][step.mode]
    )
    seconds = flops / (PRODUCTS * card.reached_flops) + tokens * feature_bytes / card.bandwidth
    again = RECOMPUTED * (
        4 / 6 if step.mode == "full" else 1
    )  # a forward pass is 2 of its 6 operations a weight, and 2 of lora's 4
    of_gpu = (
        seconds
        * (1 + OVERHEAD_TOKENS * work.micro_batches / tokens)
        * (1 + again * step.checkpointed_layers / shape.layers)
    )
    return max(of_gpu, work.micro_batches * _host_seconds(shape, step))


def _trained(shape: ModelShape, step: StepShape) -> tuple[int, int]:
    """Return how many weights are trained, and the bytes of each, its gradient's too; DeepSpeed turns both to the type of the products."""
    trained, size = (
        (shape.parameters, step.weight_bytes)
        if step.mode == "full"
        else (shape.lora_parameters(step.lora_rank, step.lora_targets), 4)
    )
    return trained, step.compute_bytes if step.zero_stage else size


def _optimizer_seconds(shape: ModelShape, step: StepShape, card: Card) -> float:
    """Clipping reads a gradient, reads and writes it; the step reads it once more, and reads and writes weight and state."""
    trained, size = _trained(shape, step)
    state = (
        2 * size
        if step.optim in memory.TORCH_ADAM and not step.zero_stage
        else memory.ADAM_BYTES[step.optim]
    )
    master = 4 if step.zero_stage else 0
    share = trained / (step.world_size if step.zero_stage else 1)
    if step.offload:
        return (
            share * 2 * size / HOST_LINK_BYTES
            + trained * (6 * size + 2 * state) / HOST_MEMORY_BYTES
        )
    return share * (6 * size + 2 * state + 2 * master) / card.bandwidth


def _link_bytes(card: Card, nodes: int) -> float:
    within = LINK_SHARE * card.link_bytes
    return min(within, NODE_LINK_BYTES) if nodes > 1 else within


def _together(
    shape: ModelShape, step: StepShape, work: StepWork, passes: float, link_bytes: float
) -> tuple[float, float]:
    """Return the seconds of a step's passes among several ranks, and of the collectives that they do not hide.

    A ring moves (N - 1) / N of the bytes for a gather or a scatter, and twice that to sum gradients (Patarasuk and Yuan 2009). DDP
    sums during the last micro-batch's backward pass, half of its time; DeepSpeed does little of it meanwhile.
    """
    trained, size = _trained(shape, step)
    ring = (step.world_size - 1) / step.world_size / link_bytes
    gradients = trained * size * ring
    if step.zero_stage == 3:
        gathers = 2 + step.checkpointed_layers / shape.layers
        weights = memory.base_weight_bytes(shape, replace(step, weight_bytes=step.compute_bytes))
        fetched = weights / step.world_size / HOST_LINK_BYTES if step.offload_weights else 0.0
        return passes / TOGETHER, work.micro_batches * (
            gathers * (weights * ring + fetched) + gradients
        )
    if step.zero_stage:
        scattered = work.micro_batches if step.zero_stage == 2 else 1
        return passes / TOGETHER, gradients * (scattered + 1)
    return passes / TOGETHER, max(0.0, 2 * gradients - passes / work.micro_batches / 2)


def _host_seconds(shape: ModelShape, step: StepShape) -> float:
    """What a micro-batch takes of the host: each module of the blocks in each pass, and under ZeRO-3 each gradient once."""
    adapted = 0 if step.mode == "full" else len(adapted_linears(step.lora_targets))
    passes = 2 + step.checkpointed_layers / shape.layers
    calls = (MODULES + (0 if step.is_fast else MODULES_OF_ADAPTER * adapted)) * passes
    if step.zero_stage != 3:
        return MODULE_SECONDS * shape.layers * calls
    return (
        HOOK_SECONDS * shape.layers * (calls + (2 * adapted or 9))
    )  # the adapters' matrices, else seven of the block and two norms
