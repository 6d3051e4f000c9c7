"""Bytes of activations and of the loss in a step, in closed form or traced. Pure: no torch, no I/O.

With fused kernels the closed form follows from the tensors that the kernels save. The factors
without fused kernels were fitted to an 8B Llama and are rough elsewhere.
"""

from typing import NamedTuple

from sft_play.config.sections.model import HEADS
from sft_play.plan.model_shape import FOUR_NORMS, HEAD_NORMS
from sft_play.plan.step import Layout, StepSpec

# Per token and word: bf16 logits, float32 log-softmax and gradient, and the bf16 gradient
LOGIT_BYTES = 12
LOSS_CHUNK_BYTES = 2**28  # of 16-bit logits: linear_cross_entropy.CHUNK_BYTES
TILE_TOKENS = 16_384  # tokens of an MLP over a long row that is recomputed: sft_kernels.linears
OFFLOADS_IN_FLIGHT = 2  # inputs of layers on the GPU: checkpointing.IN_FLIGHT


class Working(NamedTuple):
    """Bytes of activations and of the loss in forward and backward passes."""

    forward: int  # activations at the peak of the forward pass
    forward_logits: int
    backward: int  # activations at the peak of the backward pass
    backward_logits: int
    last_layer: int  # activations when the backward pass ends


def working_bytes(step: StepSpec, layout: Layout) -> Working:
    """Return the activations of a step, traced or by the closed form.

    Ranks that share experts compute as many rows as ranks that do not, on average. The exact number
    is known only on the GPU, so they allocate memory for the choices of all ranks' tokens. Hidden
    states and what experts save for the tokens of other ranks are added: once in each layer that is
    not recomputed; twice, plus their outputs, in the layer that runs.
    """
    of_rank = _closed_working if step.traced is None else _traced_working
    working = of_rank(step, layout)
    if step.expert_ranks == 1:
        return working
    model = step.model
    stacked = [kind for kind in model.counts.matrices if kind.is_stacked]
    read = max(kind.active * kind.outputs for kind in stacked if kind.inputs == model.hidden)
    written = max(kind.active * kind.outputs for kind in stacked if kind.outputs == model.hidden)
    elsewhere = (step.expert_ranks - 1) * layout.tokens * step.compute_bytes
    of_layer = elsewhere * (model.hidden + read)
    kept = of_layer * (model.layers - layout.checkpointed_layers)
    running = 2 * of_layer + elsewhere * written
    return working._replace(
        forward=working.forward + kept + running,
        backward=working.backward + kept + running,
        last_layer=working.last_layer + of_layer + running,
    )


def _closed_working(step: StepSpec, layout: Layout) -> Working:
    """Return the activations of a step without tokens of other ranks, by the closed form.

    In the backward pass a checkpointed layer is recomputed after the layers above it have freed
    theirs. So it adds to the peak only if all layers are checkpointed, and then after the loss is
    freed.
    """
    forward_loss, backward_loss = _loss_bytes(step, layout.tokens)
    kept = _kept_bytes(step, layout)
    are_all = layout.checkpointed_layers == step.model.layers
    in_forward = max(0, _dora_bytes(step) - forward_loss)
    recomputed = 0
    if are_all:
        in_forward = max(0, layer_working_bytes(step, layout.tokens) - forward_loss)
        recomputed = max(0, _recomputed_bytes(step, layout.tokens) - backward_loss)
    return Working(
        forward=kept + in_forward,
        forward_logits=forward_loss,
        backward=kept + recomputed + _gradient_bytes(step, layout, are_all),
        backward_logits=backward_loss,
        last_layer=_last_layer_bytes(step, layout),
    )


def _traced_working(step: StepSpec, layout: Layout) -> Working:
    """Return the activations of a traced step.

    A fused loss works in chunks and does not grow linearly, so the closed form is used for it.
    """
    traced = step.traced
    assert traced is not None, "only a traced step has them"
    rows = layout.sequences
    tokens = layout.row_tokens
    forward_loss = int(traced.logits.at(rows, tokens))
    backward_loss = int(traced.logits_kept.at(rows, tokens))
    found = traced.at(rows, tokens, layout.checkpointed_layers / step.model.layers)
    beside_loss = found.backward - backward_loss
    if step.has_fused_loss:
        forward_loss, backward_loss = _loss_bytes(step, layout.tokens)
    inputs = max(0, step.offloaded(layout.checkpointed_layers) - OFFLOADS_IN_FLIGHT)
    on_host = inputs * layout.tokens * step.compute_bytes * step.model.hidden
    untraced = _kept_attention_bytes(step, layout) - on_host
    kept, in_layers = found.kept + untraced, found.layers + untraced
    return Working(
        forward=max(kept, in_layers - forward_loss),
        forward_logits=forward_loss,
        backward=beside_loss + untraced,
        backward_logits=backward_loss,
        last_layer=found.last_layer,
    )


def layer_bytes_per_token(step: StepSpec) -> int:
    """Return the bytes per token that the backward pass of one layer needs.

    With fused kernels these are the input of each linear layer once, queries, keys and values, the
    residual stream before each norm, and gate and up of the MLP, whose product is recomputed. At
    8B that is 3.4 MiB over all layers, while PEFT saves 7.6 (lora) and 6.5 (qlora).
    """
    model = step.model
    hidden, intermediate = model.hidden, model.intermediate
    wide = step.compute_bytes // 2
    kept = 0
    if not step.is_full and not step.is_fast:
        kept = _peft_bytes_per_token(step)
        if step.zero_stage == 3 and step.is_half:
            # without autocast adapters compute in float32, and PEFT casts the input of each linear
            kept += 12 * hidden + 2 * intermediate
    if not step.is_fast and not step.has_fused_loss:
        adapters = {"lora": 4 * hidden + 2 * intermediate, "qlora": hidden + intermediate // 2}
        return wide * (18 * hidden + 9 * intermediate + adapters.get(step.mode, 0) + kept)
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim  # queries, output, keys, values
    if model.model_type in HEAD_NORMS:
        heads += (model.heads + model.kv_heads) * model.head_dim
    norms = 4 if model.model_type in FOUR_NORMS else 2
    residual = 2 * norms * hidden
    if step.context_parallel > 1:  # once more, because attention saves a copy
        heads += model.heads * model.head_dim
    product = 0
    if step.is_full:
        residual = norms * hidden * _stream_bytes(step)
        if step.casts_weights:  # and the outputs of norms in both types
            residual += 2 * (norms + 1) * hidden
        product = 2 * intermediate  # needed for the gradient of down_proj's weight
    return wide * (4 * hidden + residual + 2 * heads + 4 * intermediate + product + kept)


def _stream_bytes(step: StepSpec) -> int:
    """Return the bytes per number in the residual stream, which has the embedding's type."""
    return step.weight_bytes if step.casts_weights else step.compute_bytes


def _recomputed_bytes(step: StepSpec, tokens: int) -> int:
    """Return the bytes that the backward pass of a recomputed layer needs for all its tokens.

    The MLP of a long row is recomputed in tiles, and saves only its input.
    """
    in_mlp = step.compute_bytes * (3 if step.is_full else 2) * step.model.intermediate
    return tokens * layer_bytes_per_token(step) - (tokens - _mlp_tokens(step, tokens)) * in_mlp


def _mlp_tokens(step: StepSpec, tokens: int) -> int:
    """Return how many of a row's tokens a recomputed MLP processes at once."""
    is_tiled = step.is_fast and step.zero_stage < 3 and tokens >= 2 * TILE_TOKENS
    return TILE_TOKENS if is_tiled else tokens


def _peft_bytes_per_token(step: StepSpec) -> int:
    """Return the bytes per token that PEFT saves in a layer, beyond its plain adapters, in 16 bits.

    Dropout saves a copy of each linear's input and a mask, DoRA several outputs of each linear. For
    a 1B Llama on an H200 with fused kernels: 2.6 bytes per input for dropout, 5.3 per output for
    DoRA, and 7.7 over 4-bit weights, because PEFT computes the base once more.
    """
    of_input = 3 * step.adapters.has_dropout
    of_output = (8 if step.mode == "qlora" else 6) * step.adapters.use_dora
    kept = 0
    for kind in step.adapted_matrices:
        of_one = of_input * kind.inputs + of_output * kind.outputs
        kept += kind.count * kind.active * of_one
    return kept // step.model.layers


def evaluation_logit_bytes(step: StepSpec, tokens: int) -> int:
    """Return the bytes of logits in an evaluation: one chunk if fused, otherwise all of them."""
    if step.has_fused_loss:
        return _loss_bytes(step, tokens)[0]
    return tokens * step.model.vocab * LOGIT_BYTES


def _kept_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the activations in memory when the backward pass begins.

    A checkpointed layer saves only its input. With offloading, all but two inputs are on the host.
    """
    kept_layers = step.model.layers - layout.checkpointed_layers
    on_host = step.offloaded(layout.checkpointed_layers)
    kept_inputs = max(layout.checkpointed_layers - on_host, min(OFFLOADS_IN_FLIGHT, on_host))
    recomputed = kept_inputs * _stream_bytes(step) * step.model.hidden
    kept = layout.tokens * (kept_layers * layer_bytes_per_token(step) + recomputed)
    return kept + _kept_attention_bytes(step, layout)


def _kept_attention_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the attention outputs that recomputed layers save, with one float32 per head."""
    if not step.keeps_attention:
        return 0
    of_head = step.compute_bytes * step.model.head_dim + 4
    return layout.tokens * layout.checkpointed_layers * step.model.heads * of_head


def _last_layer_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the bytes of the backward pass in its last layer, which is the model's first layer."""
    gradients = _gradient_bytes(step, layout, is_recomputed=layout.checkpointed_layers > 0)
    if layout.checkpointed_layers:
        return gradients + _recomputed_bytes(step, layout.tokens)
    return gradients + layout.tokens * layer_bytes_per_token(step)


def offloaded_bytes(step: StepSpec, layout: Layout) -> int:
    """Return the bytes of host memory that activation offloading needs on one rank."""
    one_input = layout.tokens * step.compute_bytes * step.model.hidden
    return step.offloaded(layout.checkpointed_layers) * one_input


def _gradient_bytes(step: StepSpec, layout: Layout, is_recomputed: bool) -> int:
    """Return the bytes that the backward pass computes in a layer, beyond its saved activations."""
    model, tokens = step.model, layout.tokens
    in_mlp = _mlp_tokens(step, tokens) if is_recomputed else tokens
    beside = _float8_bytes(step, in_mlp)
    if not step.is_fast:
        return beside + _dora_bytes(step)
    of_mlp = 3 * model.intermediate * in_mlp
    # of the output, queries, keys and values
    of_attention = 2 * (model.heads + model.kv_heads) * model.head_dim * tokens
    features = 2 * model.hidden * tokens + max(of_mlp, of_attention)
    return beside + step.compute_bytes * features


def _float8_bytes(step: StepSpec, tokens: int) -> int:
    """Return the bytes that the input gradient of the widest float8 linear allocates in addition.

    On a GPU these are the output's gradient in 8 bits, the transposed weight, and the GEMM's result
    before it is added to those with the same input. Elsewhere they are float32 copies of gradient
    and weight.
    """
    if not step.is_float8:
        return 0
    needed = 0
    for kind in step.model.float8_matrices:
        matrix = kind.inputs * kind.outputs
        on_gpu = tokens * (kind.outputs + step.compute_bytes * step.model.hidden) + matrix
        on_cpu = 4 * (tokens * (2 * kind.outputs + kind.inputs) + matrix)
        needed = max(needed, on_gpu if step.is_gpu else on_cpu)
    return needed


def _dora_bytes(step: StepSpec) -> int:
    """Return the bytes that DoRA needs for the norm of the largest linear's weights.

    PEFT multiplies A and B by an identity matrix in 32 and in 16 bits. 4-bit weights are saved
    in 16 bits for the backward pass.
    """
    if step.is_full or not step.adapters.use_dora:
        return 0
    working = 0
    kept = 0
    for kind in step.adapted_matrices:
        working = max(working, 6 * kind.inputs * kind.inputs + 4 * kind.inputs * kind.outputs)
        if step.mode == "qlora":
            kept += 2 * kind.weights
    return step.compute_bytes // 2 * (working + kept)


def layer_working_bytes(step: StepSpec, tokens: int) -> int:
    """Return the bytes of a layer while it computes, if it saves no activations.

    Fitted to 1B, 8B and 14B. Unfused, all logits are far more.
    """
    if not step.is_fast:
        return 0
    in_mlp = 3 * step.model.intermediate * _mlp_tokens(step, tokens)
    return step.compute_bytes * (tokens * 10 * step.model.hidden + in_mlp)


def _loss_bytes(step: StepSpec, tokens: int) -> tuple[int, int]:
    """Return the bytes of the loss when the forward pass ends, and when the backward pass begins.

    These are all logits and the tensors computed from them.

    With fused kernels: a chunk of logits, the last hidden states and their gradient, which is the
    only one that stays. The gradient of a trained head is computed with the loss.
    """
    logits = tokens * step.model.vocab * LOGIT_BYTES
    matrix = step.model.vocab * step.model.hidden
    if not step.has_fused_loss:
        merged = 0
        if not step.is_full and step.adapters.trained_tokens:
            merged = step.compute_bytes * matrix  # the head with its trained rows
        return logits + merged, logits + merged
    hidden = 2 * tokens * step.compute_bytes * step.model.hidden
    if step.is_full:
        hidden += step.compute_bytes * matrix
    forward = min(logits, LOSS_CHUNK_BYTES) + hidden
    if step.casts_weights:
        forward += step.compute_bytes * matrix
    if step.is_full or not step.adapters.saved_names & HEADS:
        return forward, hidden
    # its cast and its gradient in 16 bits; then the gradient in both types
    cast = 2 * step.compute_bytes * matrix
    return forward + cast, hidden + (step.compute_bytes + 4) * matrix


def stepping_bytes(step: StepSpec, gradients: int) -> int:
    """Return the bytes that an optimizer step allocates while it runs on `gradients` bytes.

    torch's foreach steps copy all gradients; fused and 8-bit ones copy nothing. ZeRO flattens and
    casts the gradients, as seen on a CPU. Adafactor and Muon use copies of one matrix at a time.
    """
    if step.zero_stage:
        return gradients * (1 if step.zero_stage == 3 else 2)
    if step.optim == "adamw_torch":
        return gradients
    model = step.model
    if step.optim == "adafactor" and step.is_full:
        sizes = [kind.weights // kind.count for kind in model.matrices]
        copies = 2 if step.trained_bytes == 4 else 4  # of 16-bit weights and gradients, too
        return 4 * copies * max(model.vocab * model.hidden, *sizes)
    if step.optim == "muon":  # in bfloat16, with two GEMMs of the matrix and its transpose
        sizes = [kind.inputs * kind.outputs for kind in model.matrices]
        return (step.trained_bytes + 8) * max(sizes, default=0)
    return 0
