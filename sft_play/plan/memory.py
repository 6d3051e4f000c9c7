"""Bytes of a run on one device, phase by phase, in closed form. Pure: no torch, no I/O.

Every term is linear in the quantities that it names. With fused kernels the terms follow from the
tensors that the kernels save; one H200 agreed to 2 % at 1B and 8B. The factors without them were
fitted to an 8B Llama there (PEFT, 8192 tokens per micro-batch, no checkpointing: 87 GiB for lora,
69 for qlora) and are rough elsewhere. Leave a reserve when choosing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from sft_kernels.needs import PROVEN_EXPERTS
from sft_play.plan.activations import (
    evaluation_logit_bytes,
    layer_working_bytes,
    stepping_bytes,
    working_bytes,
)
from sft_play.plan.devices import GIB
from sft_play.plan.placement import parts_by_gpu
from sft_play.plan.step import Layout, StepSpec

NF4_BYTES = 0.516  # half a byte, plus double-quantized constants per block of 64 weights
MXFP4_BYTES = 0.53125  # half a byte, and a one-byte exponent per block of 32
FP4_PLAIN_BYTES = 0.5625  # half a byte, plus one float32 constant per block of 64
GPU_CONTEXT_BYTES = int(0.75 * GIB)  # CUDA context and libraries, outside the allocator: three runs
CPU_CONTEXT_BYTES = int(0.8 * GIB)  # Python with torch and transformers loaded
COLLECTIVE_BYTES = int(0.5 * GIB)  # NCCL's buffers
OFFLOAD_BUCKET_BYTES = int(1.0 * GIB)
# Copies, in the compute dtype, of the largest matrix of all experts of a layer
LOADED_COPIES = 1.8  # while it is read and packed: 1.77 for Qwen3-30B-A3B in 4 bits
PROOF_COPIES = 3  # in a proof of all experts: Qwen3-30B-A3B needed 1.7 GiB for 0.75
PART_COPIES = 8  # of PROVEN_EXPERTS' part of the matrix, including its float32 copy
WEIGHT_BUFFERS = 2  # buffers of layers whose weights are in host memory
GATHERED_LAYERS = 3  # under FSDP: one computes, the next one's shards arrive and are assembled
PHASES = ("load", "forward", "backward", "optimizer", "evaluation", "save")


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes on one device by component, at the moment of a phase's peak."""

    weights: int
    adapters: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buckets: int = 0
    context: int = 0
    gathered: int = 0  # full layers of FSDP or ZeRO-3; FSDP's gradients before they are sharded
    measured_beyond: int = 0  # measured by a probe, beyond the components above

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def components(self) -> dict[str, int]:
        """Return the bytes by component.

        The last two are optional: the first exists under FSDP and ZeRO-3, the second only after
        the probe.
        """
        rare = ("gathered", "measured_beyond")
        return {name: size for name, size in vars(self).items() if size or name not in rare}


_total = attrgetter("total")


@dataclass(frozen=True)
class StepBytes:
    """Bytes on one device in each of PHASES; the largest phase is the run's peak."""

    phases: Mapping[str, PhaseBytes]

    @cached_property
    def peak_phase(self) -> str:
        totals = self.totals()
        return max(totals, key=totals.__getitem__)

    @property
    def peak(self) -> PhaseBytes:
        return self.phases[self.peak_phase]

    @property
    def predicted_peak(self) -> int:
        return max(self.totals().values())

    def totals(self) -> dict[str, int]:
        """Return the bytes of each phase."""
        return {name: phase.total for name, phase in self.phases.items()}


def step_bytes(step: StepSpec, layout: Layout) -> StepBytes:
    """Return the bytes of one rank in each phase.

    ZeRO shards the optimizer from stage 1 on, gradients from 2 on and weights at 3. FSDP shards
    base weights and, in full training, gradients and optimizer; every rank stores all adapters. For
    a model placed on several GPUs the bytes are those of the fullest GPU.
    """
    if step.layers_by_gpu:
        parts = [step_bytes(*part) for part in parts_by_gpu(step, layout)]
        return StepBytes(
            {name: max((part.phases[name] for part in parts), key=_total) for name in PHASES}
        )
    held = _held(step, layout)
    passes = _passes(step, layout, held)
    whole = 0
    if step.zero_stage == 3 and step.is_full:  # the full model, on the rank that saves it
        shard = step.weight_bytes * step.model.parameters // layout.world_size
        whole = shard * (layout.world_size - 1)
    phases = {
        "load": _loading(step, held),
        "forward": passes.forward,
        "backward": max(passes.begin, passes.end, key=_total),
        "optimizer": replace(held, activations=stepping_bytes(step, held.gradients)),
        "evaluation": _evaluation(step, layout, held),
        "save": replace(held, gradients=0, activations=whole, gathered=_gathered_one(step)),
    }
    return StepBytes(phases)


def peak_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the bytes of one rank in the phase that needs most."""
    return step_bytes(step, layout).predicted_peak


def is_fullest_at_begin(step: StepSpec, layout: Layout) -> bool:
    """Return whether the backward pass peaks at its start, with all activations.

    Otherwise it peaks at its end, with all gradients.
    """
    parts = parts_by_gpu(step, layout) if step.layers_by_gpu else [(step, layout)]
    backward = [_passes(*part, _held(*part))[1:] for part in parts]
    begin, end = max(backward, key=lambda moments: max(map(_total, moments)))
    return begin.total >= end.total


def evaluation_rows(step: StepSpec, layout: Layout) -> int:
    """Return how many rows an evaluation processes at once.

    This is the user's number. Otherwise it is as many rows of a micro-batch as have logits that fit
    into the memory of a training step's activations.
    """
    if step.eval_batch_size is not None:
        return step.eval_batch_size
    if step.layers_by_gpu:
        return min(evaluation_rows(*part) for part in parts_by_gpu(step, layout))
    unpacked = layout.unpacked()
    working = working_bytes(step, unpacked)
    free_bytes = working.backward + working.forward_logits
    for rows in range(layout.batch_size, 1, -1):
        if evaluation_logit_bytes(step, rows * layout.max_seq_len) <= free_bytes:
            return rows
    return 1


def base_weight_bytes(step: StepSpec, weight_bytes: int) -> int:
    """Return the bytes of all base weights; each unquantized weight has `weight_bytes`.

    Under qlora the linear layers are quantized; embeddings, head, norms and routers are not. In
    float8 a weight has one byte, and each output has a float32 scale.
    """
    model = step.model
    if step.is_float8:
        kinds = model.float8_matrices
        in_float8 = sum(kind.weights for kind in kinds)
        scales = sum(kind.weights // kind.inputs for kind in kinds)
        return in_float8 + 4 * scales + weight_bytes * (model.parameters - in_float8)
    if step.mode != "qlora":
        return weight_bytes * model.parameters
    four_bit = NF4_BYTES if step.double_quant else FP4_PLAIN_BYTES
    unquantized = model.parameters - model.counts.quantized_weights
    stacked = sum(kind.weights for kind in model.matrices if kind.is_stacked and model.in_mxfp4)
    in_4_bits = four_bit * (model.counts.quantized_weights - stacked) + MXFP4_BYTES * stacked
    return int(in_4_bits) + weight_bytes * unquantized


def _loading(step: StepSpec, held: PhaseBytes) -> PhaseBytes:
    """Weights while they are read: below stage 3 ZeRO reads them in full, then converts their type.

    Fused experts are verified against their original implementation: PROVEN_EXPERTS of them if a
    rank has all.
    """
    loading = replace(held, gradients=0, optimizer=0, buckets=0)
    if step.is_gpu and (step.is_quantized or not step.is_fsdp):
        loading = replace(loading, activations=_loading_experts(step))
    if step.is_fsdp:  # each layer is sharded as it is read, and the vocabulary if not quantized
        matrices = 2 if step.is_quantized and not step.model.is_tied else 1
        return replace(loading, gathered=matrices * _gathered_one(step))
    if step.expert_ranks > 1:  # adapters are added for all experts first
        loading = replace(loading, adapters=4 * step.adapter_weights)
    if step.zero_stage == 3 or step.offloaded_weight_layers:
        return loading
    if step.expert_ranks > 1 and not step.is_quantized:
        return loading
    return replace(loading, weights=base_weight_bytes(step, step.weight_bytes))


def _loading_experts(step: StepSpec) -> int:
    """Return the peak bytes of a layer's experts in the compute dtype, as read or compared."""
    model = step.of_rank().model
    stacked = [kind for kind in model.matrices if kind.is_stacked]
    largest = max(stacked, key=lambda kind: kind.weights // kind.count, default=None)
    if largest is None:
        return 0
    copies = LOADED_COPIES
    if step.is_fast and not step.is_full:
        is_divided = step.is_fsdp or step.zero_stage == 3 or step.expert_ranks > 1
        part = PART_COPIES * PROVEN_EXPERTS / largest.experts
        copies = max(copies, PROOF_COPIES if is_divided else min(part, PROOF_COPIES))
    return int(copies * step.compute_bytes * (largest.weights // largest.count))


class _Passes(NamedTuple):
    """Bytes in the forward pass, and at the start and end of the backward pass."""

    forward: PhaseBytes
    begin: PhaseBytes
    end: PhaseBytes


def _passes(step: StepSpec, layout: Layout, held: PhaseBytes) -> _Passes:
    """Return the bytes at the possible peaks of a micro-batch.

    Gradients of earlier micro-batches exist, and those in separate buffers. Other gradients replace
    activations as these are freed.
    """
    working = working_bytes(step, layout)
    computing = held
    if step.is_fsdp or step.zero_stage == 3:
        computing = replace(held, gathered=_gathered(step))
    elif step.casts_weights and step.traced is None:  # a trace counts them as activations
        copies = step.compute_bytes * step.model.block_weights  # of autocast
        computing = replace(held, weights=held.weights + copies)
    is_held = layout.accumulates or layout.world_size > 1 or step.zero_stage
    gradients = held.gradients if is_held else 0
    forward, logits = working.forward, working.forward_logits
    backward, kept = working.backward, working.backward_logits
    in_layers = replace(computing, gradients=gradients, activations=forward, logits=logits)
    opening = replace(held, gradients=gradients, gathered=_gathered_to_begin(step))
    return _Passes(
        forward=max(in_layers, opening, key=_total),
        begin=replace(computing, gradients=gradients, activations=backward, logits=kept),
        end=replace(computing, activations=working.last_layer),
    )


def _evaluation(step: StepSpec, layout: Layout, held: PhaseBytes) -> PhaseBytes:
    rows = evaluation_rows(step, layout)
    row_tokens = layout.row_tokens if step.has_fused_loss else layout.max_seq_len
    tokens = rows * row_tokens
    logits = evaluation_logit_bytes(step, tokens)
    model = step.model
    cache = 0
    if step.generates:
        cache = rows * layout.max_seq_len * 2 * model.counts.kv_features * step.compute_bytes
    in_layers = layer_working_bytes(step, tokens)
    if step.traced is not None:  # if no layer saves anything
        in_layers = step.traced.at(rows, row_tokens, share=1).layers
    computing = replace(
        held,
        gradients=0,
        activations=max(cache, in_layers - logits),
        logits=logits,
        gathered=_gathered(step),
    )
    opening = replace(held, gradients=0, gathered=_gathered_to_begin(step))
    return max(computing, opening, key=_total)


def _held(step: StepSpec, layout: Layout) -> PhaseBytes:
    """Return the bytes between steps from the first one on, with all gradients."""
    world_size = layout.world_size
    shared, step = step.without_experts(), step.of_rank()
    optimizer_shards = world_size if step.zero_stage >= 1 or step.divides_training else 1
    gradient_shards = world_size if step.zero_stage >= 2 or step.divides_training else 1
    weight_shards = world_size if step.zero_stage >= 3 or step.is_fsdp else 1
    trained = step.trained_weights
    weight_bytes = step.weight_bytes
    adapter_bytes = 4
    if step.zero_stage and step.is_half:  # DeepSpeed converts the weights themselves
        weight_bytes = step.compute_bytes
        adapter_bytes = 2 if step.zero_stage < 3 else 4  # at stage 3 only what it has loaded
    buckets = 0
    if step.zero_stage:
        buckets = OFFLOAD_BUCKET_BYTES
    elif world_size > 1 and not step.divides_training:
        buckets = step.trained_bytes * shared.trained_weights
    # without a GPU, offloaded tensors only move within the host's memory
    weights = base_weight_bytes(step, weight_bytes) // weight_shards
    if step.is_gpu and step.offloaded_weight_layers > WEIGHT_BUFFERS:
        on_host = step.offloaded_weight_layers - WEIGHT_BUFFERS
        weights -= on_host * layer_bytes(step, weight_bytes)
    optimizer = (step.state_bytes + step.master_bytes * trained) // optimizer_shards
    gradients = step.trained_bytes * trained // gradient_shards
    trains_on_host = step.is_gpu and step.offloads_training
    context = CPU_CONTEXT_BYTES
    if step.is_gpu:
        context = GPU_CONTEXT_BYTES + COLLECTIVE_BYTES * (world_size > 1)
    return PhaseBytes(
        weights=0 if step.offload_weights and step.is_gpu else weights,
        adapters=adapter_bytes * step.adapter_weights // (1 if step.is_fsdp else weight_shards),
        gradients=0 if trains_on_host else gradients,
        optimizer=0 if trains_on_host or (step.offload and step.is_gpu) else optimizer,
        buckets=buckets,
        context=context,
    )


def host_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the bytes per GPU rank that FSDP's offloading stores in host memory."""
    if not (step.is_fsdp and step.offload_weights and step.is_gpu):
        return 0
    held = _held(replace(step, offload_weights=False), layout)
    return held.weights + (held.gradients + held.optimizer if step.is_full else 0)


def offloaded_weight_bytes(step: StepSpec) -> int:
    """Return the bytes of frozen weights in host memory, which all ranks of a machine share."""
    return step.offloaded_weight_layers * layer_bytes(step, step.weight_bytes)


def _gathered(step: StepSpec) -> int:
    """Bytes of gathered weights on a rank, in addition to its shard, while it computes.

    Under FSDP these are the output head, which stays gathered from the forward to the backward
    pass, and a few layers. A full run also stores the gradients of the head or of two layers, and
    copies of them to be summed in float32.
    """
    if not step.is_fsdp:
        return _fetched_weights(step) if step.zero_stage == 3 else 0
    layer = layer_bytes(step, step.compute_bytes)
    head = step.compute_bytes * step.model.vocab * step.model.hidden
    weights = head + GATHERED_LAYERS * layer
    if not step.is_full:
        return weights
    copies = (step.compute_bytes + 4) / step.compute_bytes
    return int(weights + copies * max(head, 2 * layer))


def _gathered_to_begin(step: StepSpec) -> int:
    """Bytes that FSDP gathers before the first layer: head and embedding, and buffers of both."""
    # 70B in offloaded 4 bits, two H100s: measured 13.26 GiB, this gives 12.94, the layers 11.44
    matrices = 2 if step.model.is_tied else 4
    return matrices * step.compute_bytes * step.model.vocab * step.model.hidden * step.is_fsdp


def _fetched_weights(step: StepSpec) -> int:
    """Bytes that ZeRO-3 gathers in addition to its shards while it computes.

    These are the output head, a layer and the shards that it is assembled from, prefetched weights,
    and the last layers if the backward pass needs them again soon. Adapters are small enough to
    stay gathered.

    Every module that runs prefetches, not only every layer, so the gathered bytes grow up to
    `fetching.live`: DeepSpeed's fetch_sub_module fetches the next parameters while less than
    stage3_max_live_parameters are available. The last one may be the head, which exceeds the limit.
    """
    model = step.model
    head = model.vocab * model.hidden
    layer = model.block_weights // model.layers
    # between its two passes a layer waits for the layers above it and the head, each of them twice
    reused = min(max(0, step.fetching.reuse // 2 - head), model.block_weights - layer)
    fetched = min(step.fetching.ahead, model.block_weights - layer)
    in_layers = 2 * layer + fetched + reused
    if fetched:
        in_layers = max(in_layers, min(step.fetching.live, model.block_weights) + layer)
    of_layers = layer_bytes(step, step.compute_bytes) * in_layers // layer
    return step.compute_bytes * head + of_layers + 4 * step.adapter_weights


def layer_bytes(step: StepSpec, weight_bytes: int) -> int:
    """Return the bytes of a layer's weights; each unquantized weight has `weight_bytes`."""
    model = step.model
    others = weight_bytes * (model.parameters - model.block_weights)
    return (base_weight_bytes(step, weight_bytes) - others) // model.layers


def _gathered_one(step: StepSpec) -> int:
    """Bytes of the largest matrix, which FSDP gathers separately to save it."""
    if not step.is_fsdp:
        return 0
    return step.weight_bytes * step.model.vocab * step.model.hidden
