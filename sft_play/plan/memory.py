"""Bytes of a run on one device, phase by phase, in closed form. Pure: no torch, no I/O.

Every term is linear in what it names. With fused kernels they follow from what the kernels keep, and one H200 agreed to 2 % at 1B
and 8B; the factors of the plain path were fitted to an 8B Llama there (PEFT: 87 GiB for lora, 69 for qlora, 8192 tokens a
micro-batch, without checkpointing) and are rough elsewhere. Choose with a reserve.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from sft_play.plan.model_shape import ModelShape

NF4_BYTES = 0.516  # half a byte, plus double-quantised constants per block of 64 weights
FP4_PLAIN_BYTES = 0.5625  # half a byte, plus one float32 constant per block of 64
ADAM_BYTES = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "paged_adamw_32bit": 8,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "sgd": 0,
}  # over float32
TORCH_ADAM = ("adamw_torch", "adamw_torch_fused")  # their two moments have the type of the weight
LOGIT_BYTES = (
    12  # a token and word: bf16 logits, float32 log-softmax and gradient, and the bf16 gradient
)
GPU_CONTEXT_BYTES = int(
    0.75 * 2**30
)  # CUDA context and libraries: what an H200 held beside the allocator in three runs
CPU_CONTEXT_BYTES = int(0.8 * 2**30)  # Python with torch and transformers loaded
LOSS_CHUNK_BYTES = int(0.25 * 2**30)  # of logits, in 16 bits: models.fast.loss.CHUNK_BYTES
COLLECTIVE_BYTES = int(0.5 * 2**30)  # NCCL's buffers
PHASES = ("load", "forward", "backward", "optimizer", "evaluation", "save")
HEAD_NORMS = ("qwen3", "gemma3", "gemma3_text")  # over queries and keys, whose inputs are kept, too
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")  # a norm behind attention and MLP, too
OFFLOAD_BUCKET_BYTES = int(1.0 * 2**30)


@dataclass(frozen=True)
class StepShape:
    """What is trained how, and on how many tokens at once."""

    mode: str  # lora, qlora, full
    batch_size: int
    seq_len: int
    compute_bytes: int  # a number: 2 for bfloat16 and float16, 4 for float32
    weight_bytes: int  # a weight of the unquantised base
    lora_rank: int
    lora_targets: str | list[str]
    optim: str
    double_quant: bool
    checkpointed_layers: int  # the first so many are computed again in the backward pass
    is_fast: bool  # fused kernels: see plan.fast
    world_size: int
    zero_stage: int  # 0 without DeepSpeed
    offload: bool  # of the optimizer's state, to the host
    is_gpu: bool
    accumulates: bool = (
        True  # a step has several micro-batches, whose gradients stay through the forward passes
    )
    eval_rows: int | None = (
        None  # of an evaluation at once; None: as many as `evaluation_rows` says
    )
    generates: bool = False  # evaluations answer with a key-value cache
    offload_weights: bool = False  # ZeRO-3's, to the host


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes on one device by component, at the moment of a phase when most are held."""

    weights: int
    adapters: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buckets: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class StepBytes:
    """Bytes on one device in each of PHASES. The peak is the largest of them, and its components are the run's."""

    phases: Mapping[str, PhaseBytes]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> PhaseBytes:
        return self.phases[self.peak_phase]

    @property
    def predicted_peak(self) -> int:
        return self.peak.total

    def as_json(self) -> dict[str, int]:
        """Return the components of the phase that needs most, and their sum."""
        return {**asdict(self.peak), "predicted_peak": self.predicted_peak}

    def phases_json(self) -> dict[str, dict[str, int]]:
        """Return the components of every phase, and their sum."""
        return {name: phase.as_json() for name, phase in self.phases.items()}


def step_bytes(shape: ModelShape, step: StepShape) -> StepBytes:
    """Return the bytes of one rank in each phase; ZeRO divides optimizer, gradients and weights from stages 1, 2 and 3 on."""
    held, at_work = _held(shape, step), _at_work(shape, step)
    kept, _ = _activation_bytes(shape, step)
    loss, _ = _loss_bytes(shape, step)
    passing = (
        max(0, _passing_bytes(shape, step, step.batch_size) - loss)
        if step.checkpointed_layers == shape.layers
        else 0
    )
    rows = step.eval_rows or evaluation_rows(shape, step)
    scored = _evaluation_logit_bytes(shape, step, rows)
    answering = rows * step.seq_len * _cache_bytes_per_token(shape, step) if step.generates else 0
    evaluating = max(answering, _passing_bytes(shape, step, rows) - scored)
    whole = (
        step.weight_bytes * shape.parameters // step.world_size * (step.world_size - 1)
        if step.zero_stage == 3 and step.mode == "full"
        else 0
    )
    phases = {
        "load": _loading(shape, step, held),
        "forward": replace(
            at_work,
            gradients=_gradients_while_forward(step, held),
            activations=kept + passing,
            logits=loss,
        ),
        "backward": max(_backward(shape, step), key=lambda moment: moment.total),
        "optimizer": replace(held, activations=_optimizer_copies(step) * held.gradients),
        "evaluation": replace(held, gradients=0, activations=evaluating, logits=scored),
        "save": replace(held, gradients=0, activations=whole),
    }
    return StepBytes(phases)


def _loading(shape: ModelShape, step: StepShape, held: PhaseBytes) -> PhaseBytes:
    """Weights as they are read; those of ZeRO below stage 3 are read whole, in their own type, before it turns them to another."""
    weights = base_weight_bytes(shape, step) if step.zero_stage < 3 else held.weights
    return PhaseBytes(weights=weights, adapters=held.adapters, context=held.context)


def _optimizer_copies(step: StepShape) -> int:
    """Return how often a step copies the gradients: torch's foreach steps do, fused and 8-bit ones do not; ZeRO, seen on a CPU, flattens and casts them."""
    if step.zero_stage:
        return 1 if step.zero_stage == 3 else 2
    return int(step.optim == "adamw_torch")


def begins_fullest(shape: ModelShape, step: StepShape) -> bool:
    """Return whether the backward pass holds most when it begins, with all activations, rather than when it ends, with all gradients."""
    begin, end = _backward(shape, step)
    return begin.total >= end.total


def _backward(shape: ModelShape, step: StepShape) -> tuple[PhaseBytes, PhaseBytes]:
    """The two moments of the backward pass that may hold most: its begin and its end."""
    held, (kept, transient), (_, loss) = (
        _at_work(shape, step),
        _activation_bytes(shape, step),
        _loss_bytes(shape, step),
    )
    layer = step.batch_size * step.seq_len * layer_bytes_per_token(shape, step)
    begin = replace(
        held,
        gradients=_gradients_while_forward(step, held),
        activations=kept + transient,
        logits=loss,
    )
    return begin, replace(held, activations=transient + layer)


def _at_work(shape: ModelShape, step: StepShape) -> PhaseBytes:
    """What is held while a micro-batch is computed: autocast keeps 16-bit copies of float32 weights for the backward pass."""
    held = _held(shape, step)
    is_cast = (
        step.mode == "full"
        and step.weight_bytes == 4
        and step.compute_bytes == 2
        and not step.zero_stage
    )
    return (
        replace(held, weights=held.weights + step.compute_bytes * shape.block_weights)
        if is_cast
        else held
    )


def _gradients_while_forward(step: StepShape, held: PhaseBytes) -> int:
    """Those of other micro-batches, and those that have buffers of their own; else they come as activations go, in their place."""
    return held.gradients if step.accumulates or step.world_size > 1 or step.zero_stage else 0


def _held(shape: ModelShape, step: StepShape) -> PhaseBytes:
    """What lives from the first step on, between the steps, too; gradients as they are when a step is complete."""
    trainable = (
        shape.parameters
        if step.mode == "full"
        else shape.lora_parameters(step.lora_rank, step.lora_targets)
    )
    by_stage = [step.world_size if step.zero_stage >= stage else 1 for stage in (1, 2, 3)]
    # DeepSpeed turns the weights themselves to 16 bits, and keeps a float32 copy of what it trains, in float32 too
    is_sharded_half = bool(step.zero_stage) and step.compute_bytes == 2
    weight_bytes = step.compute_bytes if is_sharded_half else step.weight_bytes
    master = 4 * trainable if step.zero_stage else 0
    trained_bytes = step.weight_bytes if step.mode == "full" else 4
    state_bytes = (
        2 * trained_bytes
        if step.optim in TORCH_ADAM and not step.zero_stage
        else ADAM_BYTES[step.optim]
    )
    optimizer = (state_bytes * trainable + master) // by_stage[0]
    weights = base_weight_bytes(shape, replace(step, weight_bytes=weight_bytes)) // by_stage[2]
    return PhaseBytes(
        weights=0
        if step.offload_weights and step.is_gpu
        else weights,  # without a GPU they only move within the host's memory
        adapters=0
        if step.mode == "full"
        else (2 if is_sharded_half else 4) * trainable // by_stage[2],
        gradients=trained_bytes * trainable // by_stage[1],
        optimizer=0 if step.offload and step.is_gpu else optimizer,
        buckets=OFFLOAD_BUCKET_BYTES
        if step.zero_stage
        else trained_bytes * trainable
        if step.world_size > 1
        else 0,
        context=(GPU_CONTEXT_BYTES + (COLLECTIVE_BYTES if step.world_size > 1 else 0))
        if step.is_gpu
        else CPU_CONTEXT_BYTES,
    )


def at_batch(step: StepShape, batch_size: int, checkpointed_layers: int) -> StepShape:
    """Return the same step on another micro-batch, with other layers checkpointed."""
    return replace(step, batch_size=batch_size, checkpointed_layers=checkpointed_layers)


def evaluation_rows(shape: ModelShape, step: StepShape) -> int:
    """Return how many rows, no more than of a micro-batch, an evaluation takes at once: their logits fit where a step has its activations."""
    room = sum(_activation_bytes(shape, step)) + _loss_bytes(shape, step)[0]
    return max(
        rows
        for rows in range(1, step.batch_size + 1)
        if rows == 1 or _evaluation_logit_bytes(shape, step, rows) <= room
    )


def _evaluation_logit_bytes(shape: ModelShape, step: StepShape, rows: int) -> int:
    """Fused, a chunk of logits as in training; else all of them, whole."""
    if step.is_fast:
        return _loss_bytes(shape, at_batch(step, rows, step.checkpointed_layers))[0]
    return rows * step.seq_len * shape.vocab * LOGIT_BYTES


def base_weight_bytes(shape: ModelShape, step: StepShape) -> int:
    """Return the bytes of all base weights, quantised under qlora; embeddings, head and norms stay as they are."""
    if step.mode != "qlora":
        return step.weight_bytes * shape.parameters
    four_bit = NF4_BYTES if step.double_quant else FP4_PLAIN_BYTES
    return int(four_bit * shape.block_weights) + step.weight_bytes * shape.other_weights


def layer_bytes_per_token(shape: ModelShape, step: StepShape) -> int:
    """Return what the backward pass of one layer needs of one token.

    Fused, that is each linear layer's input once, queries, keys and values, and the residual stream before each norm; of the
    MLP gate and up, their product being computed again. At 8B: 3.4 MiB over all layers, where PEFT keeps 7.6 (lora) and 6.5 (qlora).
    """
    wide, h, i = step.compute_bytes // 2, shape.hidden, shape.intermediate
    if not step.is_fast:
        adapters = {"lora": 4 * h + 2 * i, "qlora": h + i // 2, "full": 0}[step.mode]
        return wide * (18 * h + 9 * i + adapters)
    heads = (
        2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    )  # queries, output, keys, values
    if shape.model_type in HEAD_NORMS:
        heads += (shape.heads + shape.kv_heads) * shape.head_dim
    norms = 4 if shape.model_type in FOUR_NORMS else 2
    residual = (
        norms * h * step.weight_bytes if step.mode == "full" else 2 * norms * h
    )  # the stream has the type of the embedding
    product = 2 * i if step.mode == "full" else 0  # the gradient of down_proj's weight needs it
    return wide * (4 * h + residual + 2 * heads + 4 * i + product)


def _activation_bytes(shape: ModelShape, step: StepShape) -> tuple[int, int]:
    """Return what is held when the backward pass begins, and what that adds while it works on a layer.

    A checkpointed layer keeps its input. It is computed again when the layers behind it have given theirs back, so that only
    where all are checkpointed does one come on top, and then when the loss is done with.
    """
    tokens, kept = step.batch_size * step.seq_len, shape.layers - step.checkpointed_layers
    layer = tokens * layer_bytes_per_token(shape, step)
    again = 0 if kept else max(0, layer - _loss_bytes(shape, step)[1])
    gradients = (
        tokens * step.compute_bytes * (2 * shape.hidden + 3 * shape.intermediate)
        if step.is_fast
        else 0
    )
    return (
        kept * layer + step.checkpointed_layers * tokens * step.compute_bytes * shape.hidden,
        again + gradients,
    )


def _passing_bytes(shape: ModelShape, step: StepShape, rows: int) -> int:
    """Return what a layer holds while it computes and nothing of it is kept, fitted to 1B, 8B and 14B; unfused, the whole logits are far more."""
    return (
        rows * step.seq_len * step.compute_bytes * (10 * shape.hidden + 3 * shape.intermediate)
        if step.is_fast
        else 0
    )


def _cache_bytes_per_token(shape: ModelShape, step: StepShape) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * step.compute_bytes


def _loss_bytes(shape: ModelShape, step: StepShape) -> tuple[int, int]:
    """Return what the loss holds when the forward pass ends, and when the backward pass begins.

    All logits and what is made of them; fused, a chunk of them, the last hidden states and their gradient, of which the gradient
    remains; and the gradient of a head that is trained, which comes as the loss does.
    """
    tokens = step.batch_size * step.seq_len
    logits = tokens * shape.vocab * LOGIT_BYTES
    if not step.is_fast:
        return logits, logits
    hidden = tokens * step.compute_bytes * shape.hidden
    head = step.compute_bytes * shape.vocab * shape.hidden if step.mode == "full" else 0
    return min(logits, LOSS_CHUNK_BYTES) + 2 * hidden + head, 2 * hidden + head
