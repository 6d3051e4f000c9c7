"""Bytes of a run on one device, phase by phase, in closed form. Pure: no torch, no I/O.

Every term is linear in what it names. With fused kernels the terms follow from what the kernels
keep; one H200 agreed to 2 % at 1B and 8B. The factors without them were fitted to an 8B Llama there
(PEFT, 8192 tokens a micro-batch, no checkpointing: 87 GiB for lora, 69 for qlora) and are rough
elsewhere. Choose with a reserve.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from sft_play.plan.layout import Layout
from sft_play.plan.step import StepSpec
from sft_play.plan.traced import TracedStep

GIB = 2**30
NF4_BYTES = 0.516  # half a byte, plus double-quantised constants per block of 64 weights
FP4_PLAIN_BYTES = 0.5625  # half a byte, plus one float32 constant per block of 64
# Optimizer state for each float32 weight
ADAM_BYTES = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "paged_adamw_32bit": 8,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "sgd": 0,
}
TORCH_ADAM = ("adamw_torch", "adamw_torch_fused")  # their two moments have the type of the weight
# For each token and word: bf16 logits, float32 log-softmax and gradient, and the bf16 gradient
LOGIT_BYTES = 12
GPU_CONTEXT_BYTES = int(0.75 * GIB)  # CUDA context and libraries, beside the allocator: three runs
CPU_CONTEXT_BYTES = int(0.8 * GIB)  # Python with torch and transformers loaded
LOSS_CHUNK_BYTES = int(0.25 * GIB)  # of 16-bit logits: linear_cross_entropy.CHUNK_BYTES
COLLECTIVE_BYTES = int(0.5 * GIB)  # NCCL's buffers
OFFLOADS_IN_FLIGHT = 2  # inputs of layers on the GPU: offloading.IN_FLIGHT
OFFLOAD_BUCKET_BYTES = int(1.0 * GIB)
PHASES = ("load", "forward", "backward", "optimizer", "evaluation", "save")
HEAD_NORMS = ("qwen3", "gemma3", "gemma3_text")  # norms over queries and keys, which keep inputs
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")  # two more norms, behind attention and MLP


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
    measured_beyond: int = 0  # by a probe, beyond the components above

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def components(self) -> dict[str, int]:
        """Return the bytes by component, the last of which a probe alone brings."""
        found = asdict(self)
        if not self.measured_beyond:
            del found["measured_beyond"]
        return found


@dataclass(frozen=True)
class StepBytes:
    """Bytes on one device in each of PHASES; the largest phase is the run's peak."""

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

    def totals(self) -> dict[str, int]:
        """Return the bytes of each phase."""
        return {name: phase.total for name, phase in self.phases.items()}


class _Working(NamedTuple):
    """Bytes of activations and of the loss in forward and backward passes."""

    forward: int  # activations at the peak of the forward pass
    forward_logits: int
    backward: int  # activations at the peak of the backward pass
    backward_logits: int
    last_layer: int  # activations when the backward pass ends


class _Moments(NamedTuple):
    """Bytes of something when the forward pass ends, and when the backward pass begins."""

    forward: int
    backward: int


def step_bytes(step: StepSpec, layout: Layout) -> StepBytes:
    """Return the bytes of one rank in each phase.

    ZeRO divides the optimizer from stage 1 on, gradients from 2 on and weights at 3.
    """
    held = _held(step, layout)
    working = _working(step, layout)
    forward = replace(
        _computing(step, held),
        gradients=_gradients_in_forward(step, layout, held),
        activations=working.forward,
        logits=working.forward_logits,
    )
    gathered = 0
    if step.zero_stage == 3 and step.is_full:  # the whole model, on the rank that saves it
        shard = step.weight_bytes * step.model.parameters // layout.world_size
        gathered = shard * (layout.world_size - 1)
    phases = {
        "load": _loading(step, held),
        "forward": forward,
        "backward": max(_backward(step, layout), key=lambda moment: moment.total),
        "optimizer": replace(held, activations=_gradient_copies(step) * held.gradients),
        "evaluation": _evaluation(step, layout, held),
        "save": replace(held, gradients=0, activations=gathered),
    }
    return StepBytes(phases)


def is_fullest_at_begin(step: StepSpec, layout: Layout) -> bool:
    """Return whether the backward pass holds most when it begins, with all activations.

    Otherwise it does when it ends, with all gradients.
    """
    begin, end = _backward(step, layout)
    return begin.total >= end.total


def evaluation_rows(step: StepSpec, layout: Layout) -> int:
    """Return how many rows an evaluation takes at once.

    That is the user's number, else as many rows of a micro-batch as have logits that fit where a
    training step has its activations.
    """
    if step.eval_batch_size is not None:
        return step.eval_batch_size
    unpacked = layout.unpacked()
    working = _working(step, unpacked)
    free_bytes = working.backward + working.forward_logits
    for rows in range(layout.batch_size, 1, -1):
        if _evaluation_logit_bytes(step, rows * layout.max_seq_len) <= free_bytes:
            return rows
    return 1


def base_weight_bytes(step: StepSpec, weight_bytes: int) -> int:
    """Return the bytes of all base weights, of which the unquantised have `weight_bytes` each.

    Under qlora the linear layers are quantised; embeddings, head, norms and routers are not.
    """
    model = step.model
    if step.mode != "qlora":
        return weight_bytes * model.parameters
    four_bit = NF4_BYTES if step.double_quant else FP4_PLAIN_BYTES
    unquantised = model.parameters - model.quantised_weights
    return int(four_bit * model.quantised_weights) + weight_bytes * unquantised


def layer_bytes_per_token(step: StepSpec) -> int:
    """Return what the backward pass of one layer needs of one token.

    Fused, that is the input of each linear layer once, queries, keys and values, the residual
    stream before each norm, and gate and up of the MLP, whose product is recomputed. At 8B that is
    3.4 MiB over all layers, where PEFT keeps 7.6 (lora) and 6.5 (qlora).
    """
    model = step.model
    hidden, intermediate = model.hidden, model.intermediate
    wide = step.compute_bytes // 2
    kept = 0
    if not step.is_full and not step.is_fast:
        kept = step.adapter_options.kept_bytes_per_token(
            model, step.lora_targets, step.mode == "qlora"
        )
    if not step.is_fast and not step.has_fused_loss:
        adapters = {"lora": 4 * hidden + 2 * intermediate, "qlora": hidden + intermediate // 2}
        return wide * (18 * hidden + 9 * intermediate + adapters.get(step.mode, 0) + kept)
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim  # queries, output, keys, values
    if model.model_type in HEAD_NORMS:
        heads += (model.heads + model.kv_heads) * model.head_dim
    norms = 4 if model.model_type in FOUR_NORMS else 2
    residual = 2 * norms * hidden
    product = 0
    if step.is_full:
        residual = norms * hidden * step.weight_bytes  # the stream has the type of the embedding
        product = 2 * intermediate  # the gradient of down_proj's weight needs it
    return wide * (4 * hidden + residual + 2 * heads + 4 * intermediate + product + kept)


def _loading(step: StepSpec, held: PhaseBytes) -> PhaseBytes:
    """Weights as they are read: below stage 3 ZeRO reads them whole, then converts their type."""
    weights = held.weights
    if step.zero_stage < 3:
        weights = base_weight_bytes(step, step.weight_bytes)
    return PhaseBytes(weights=weights, adapters=held.adapters, context=held.context)


def _gradient_copies(step: StepSpec) -> int:
    """Return how often an optimizer step copies the gradients.

    torch's foreach steps do once, fused and 8-bit ones do not. ZeRO flattens and casts them, as
    seen on a CPU.
    """
    if step.zero_stage:
        return 1 if step.zero_stage == 3 else 2
    return int(step.optim == "adamw_torch")


def _backward(step: StepSpec, layout: Layout) -> tuple[PhaseBytes, ...]:
    """Return the moments of the backward pass that may hold most: its begin and its end."""
    held = _held(step, layout)
    computing = _computing(step, held)
    working = _working(step, layout)
    begin = replace(
        computing,
        gradients=_gradients_in_forward(step, layout, held),
        activations=working.backward,
        logits=working.backward_logits,
    )
    return begin, replace(computing, activations=working.last_layer)


def _working(step: StepSpec, layout: Layout) -> _Working:
    """Return the activations of a step, traced or by the closed form."""
    if step.traced is not None:
        return _traced_working(step, step.traced, layout)
    loss = _loss_bytes(step, layout.tokens)
    kept = _kept_bytes(step, layout)
    transient = _transient_bytes(step, layout)
    in_forward = max(0, _dora_bytes(step) - loss.forward)
    if layout.checkpointed_layers == step.model.layers:
        in_forward = max(0, _working_bytes(step, layout.tokens) - loss.forward)
    return _Working(
        forward=kept + in_forward,
        forward_logits=loss.forward,
        backward=kept + transient,
        backward_logits=loss.backward,
        last_layer=transient + layout.tokens * layer_bytes_per_token(step),
    )


def _traced_working(step: StepSpec, traced: TracedStep, layout: Layout) -> _Working:
    """Return the activations of a traced step.

    A fused loss works in chunks, and so grows by no line: it is the closed form's.
    """
    rows = layout.sequences
    tokens = layout.max_seq_len
    share = layout.checkpointed_layers / step.model.layers
    loss = _Moments(int(traced.logits.at(rows, tokens)), int(traced.logits_kept.at(rows, tokens)))
    beside_loss = int(traced.backward_peak(rows, tokens, share)) - loss.backward
    if step.has_fused_loss:
        loss = _loss_bytes(step, layout.tokens)
    kept = int(traced.kept(rows, tokens, share))
    in_layers = int(traced.layers_peak(rows, tokens, share))
    return _Working(
        forward=max(kept, in_layers - loss.forward),
        forward_logits=loss.forward,
        backward=beside_loss,
        backward_logits=loss.backward,
        last_layer=int(traced.backward_end(rows, tokens)),
    )


def _evaluation(step: StepSpec, layout: Layout, held: PhaseBytes) -> PhaseBytes:
    tokens = evaluation_rows(step, layout) * layout.max_seq_len
    logits = _evaluation_logit_bytes(step, tokens)
    model = step.model
    cache = 0
    if step.generates:
        cache = tokens * 2 * model.kv_features * step.compute_bytes
    in_layers = _working_bytes(step, tokens)
    if step.traced is not None:  # where no layer keeps anything
        rows = evaluation_rows(step, layout)
        in_layers = int(step.traced.layers_peak(rows, layout.max_seq_len, share=1))
    activations = max(cache, in_layers - logits)
    return replace(held, gradients=0, activations=activations, logits=logits)


def _computing(step: StepSpec, held: PhaseBytes) -> PhaseBytes:
    """Add to what is held the 16-bit copies of float32 weights that autocast keeps."""
    is_cast = step.is_full and step.weight_bytes == 4 and step.is_half and not step.zero_stage
    if not is_cast or step.traced is not None:  # a trace has them among the activations
        return held
    return replace(held, weights=held.weights + step.compute_bytes * step.model.block_weights)


def _gradients_in_forward(step: StepSpec, layout: Layout, held: PhaseBytes) -> int:
    """Gradients of earlier micro-batches, or in buffers of their own.

    Others come as activations go, in their place.
    """
    is_held = layout.accumulates or layout.world_size > 1 or step.zero_stage
    return held.gradients if is_held else 0


def _held(step: StepSpec, layout: Layout) -> PhaseBytes:
    """What is held between steps from the first one on, with all gradients."""
    world_size = layout.world_size
    optimizer_shards = world_size if step.zero_stage >= 1 else 1
    gradient_shards = world_size if step.zero_stage >= 2 else 1
    weight_shards = world_size if step.zero_stage >= 3 else 1
    trained = step.trained_weights
    weight_bytes = step.weight_bytes
    adapter_bytes = 4
    if step.zero_stage and step.is_half:  # DeepSpeed converts the weights themselves
        weight_bytes = step.compute_bytes
        adapter_bytes = 2
    state_bytes = ADAM_BYTES[step.optim]
    if step.zero_stage:
        state_bytes += 4  # DeepSpeed's float32 copy of what it trains
    elif step.optim in TORCH_ADAM:
        state_bytes = 2 * step.trained_bytes
    buckets = 0
    if step.zero_stage:
        buckets = OFFLOAD_BUCKET_BYTES
    elif world_size > 1:
        buckets = step.trained_bytes * trained
    # without a GPU, offloaded tensors only move within the host's memory
    weights = base_weight_bytes(step, weight_bytes) // weight_shards
    optimizer = state_bytes * trained // optimizer_shards
    return PhaseBytes(
        weights=0 if step.offload_weights and step.is_gpu else weights,
        adapters=adapter_bytes * step.adapter_weights // weight_shards,
        gradients=step.trained_bytes * trained // gradient_shards,
        optimizer=0 if step.offload and step.is_gpu else optimizer,
        buckets=buckets,
        context=_context_bytes(step, world_size),
    )


def _context_bytes(step: StepSpec, world_size: int) -> int:
    if not step.is_gpu:
        return CPU_CONTEXT_BYTES
    return GPU_CONTEXT_BYTES + (COLLECTIVE_BYTES if world_size > 1 else 0)


def _evaluation_logit_bytes(step: StepSpec, tokens: int) -> int:
    """Return the bytes of logits in an evaluation: fused, a chunk; else all of them."""
    if step.has_fused_loss:
        return _loss_bytes(step, tokens).forward
    return tokens * step.model.vocab * LOGIT_BYTES


def _kept_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the activations that are kept when the backward pass begins.

    A checkpointed layer keeps its input alone. Offloaded, all but two of them are on the host.
    """
    kept_layers = step.model.layers - layout.checkpointed_layers
    kept_inputs = layout.checkpointed_layers
    if step.offload_activations:
        kept_inputs = min(OFFLOADS_IN_FLIGHT, kept_inputs)
    inputs = kept_inputs * step.compute_bytes * step.model.hidden
    return layout.tokens * (kept_layers * layer_bytes_per_token(step) + inputs)


def offloaded_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the bytes of host memory that activation offloading takes on one rank.

    torch rounds each pinned allocation up to a power of two.
    """
    if not step.offload_activations:
        return 0
    one_input = layout.tokens * step.compute_bytes * step.model.hidden
    return layout.checkpointed_layers * (1 << (one_input - 1).bit_length())


def _transient_bytes(step: StepSpec, layout: Layout) -> int:
    """Return what the backward pass adds to the kept activations while it is in a layer.

    A checkpointed layer is recomputed after the layers behind it have freed theirs. So it adds to
    the peak only where all layers are checkpointed, and then after the loss is freed.
    """
    recomputed = 0
    if layout.checkpointed_layers == step.model.layers:
        layer = layout.tokens * layer_bytes_per_token(step)
        recomputed = max(0, layer - _loss_bytes(step, layout.tokens).backward)
    if not step.is_fast:
        return recomputed + _dora_bytes(step)
    features = 2 * step.model.hidden + 3 * step.model.intermediate
    return recomputed + layout.tokens * step.compute_bytes * features


def _dora_bytes(step: StepSpec) -> int:
    """Return what DoRA holds to take the length of a linear's weights."""
    if step.is_full:
        return 0
    options = step.adapter_options
    kept = 0
    if step.mode == "qlora":
        kept = options.kept_weight_bytes(step.model, step.lora_targets)
    working = options.working_bytes(step.model, step.lora_targets)
    return step.compute_bytes // 2 * (working + kept)


def _working_bytes(step: StepSpec, tokens: int) -> int:
    """Return what a layer holds while it computes and nothing of it is kept.

    Fitted to 1B, 8B and 14B. Unfused, the whole logits are far more.
    """
    if not step.is_fast:
        return 0
    return tokens * step.compute_bytes * (10 * step.model.hidden + 3 * step.model.intermediate)


def _loss_bytes(step: StepSpec, tokens: int) -> _Moments:
    """Return what the loss holds: all logits and what is made of them.

    Fused, a chunk of them, the last hidden states and their gradient, of which the gradient stays.
    The gradient of a head that is trained comes with the loss.
    """
    logits = tokens * step.model.vocab * LOGIT_BYTES
    matrix = step.model.vocab * step.model.hidden
    if not step.has_fused_loss:
        merged = 0
        if not step.is_full and step.adapter_options.trained_tokens:
            merged = step.compute_bytes * matrix  # the head with its trained rows
        return _Moments(logits + merged, logits + merged)
    hidden = 2 * tokens * step.compute_bytes * step.model.hidden
    if step.is_full:
        hidden += step.compute_bytes * matrix
    forward = min(logits, LOSS_CHUNK_BYTES) + hidden
    if step.is_full or not step.adapter_options.saves_head:
        return _Moments(forward, hidden)
    # its cast and its gradient in 16 bits; then the gradient in both types
    cast = 2 * step.compute_bytes * matrix
    return _Moments(forward + cast, hidden + (step.compute_bytes + 4) * matrix)
