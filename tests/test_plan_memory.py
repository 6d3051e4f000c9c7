"""sft_play.plan.memory: bytes of a step by hand, how they grow, and beside what was measured."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from plan_examples import EIGHT_B, EXAMPLE, LAYOUT, STEP, held, peak, plan_for

from sft_play.config.deepspeed_json import Fetching
from sft_play.plan.activations import OFFLOADS_IN_FLIGHT, TILE_TOKENS, offloaded_bytes
from sft_play.plan.memory import (
    GIB,
    PHASES,
    PhaseBytes,
    evaluation_rows,
    step_bytes,
)
from sft_play.plan.model_shape import ModelShape, load_shape
from sft_play.plan.step import PLAIN

TOKENS = LAYOUT.tokens
FEW_WORDS = replace(EIGHT_B, vocab=1000)
MODES = ("lora", "qlora", "full")
# Bytes that PEFT's layers keep of a token, at 8B; 7.6 MiB over 32 layers
UNFUSED_LAYER = 22 * 4096 + 11 * 14336


# By hand


def test_the_bytes_of_a_lora_step_by_hand() -> None:
    model = ModelShape(
        vocab=100,
        hidden=8,
        intermediate=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=4,
        is_tied=True,
    )
    weights = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 100 * 8 + 5 * 8
    adapters = 4 * 2 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 16) * 3)
    assert model.parameters == weights
    assert PLAIN.adapter_weights(model, 4, "all-linear") == adapters
    example = EXAMPLE.changed(model=model, lora_rank=4, batch_size=1, max_seq_len=10)
    state = PhaseBytes(
        weights=2 * weights,
        adapters=4 * adapters,
        gradients=4 * adapters,
        optimizer=8 * adapters,
        context=int(0.75 * GIB),
    )
    logits = 10 * 100 * 12
    computing = replace(state, activations=10 * 2 * (22 * 8 + 11 * 16), logits=logits)
    assert example.memory.phases == {
        "load": replace(state, gradients=0, optimizer=0),
        "forward": computing,
        "backward": computing,
        # torch's foreach form copies the gradients
        "optimizer": replace(state, activations=4 * adapters),
        "evaluation": replace(state, gradients=0, logits=logits),
        "save": replace(state, gradients=0),
    }
    assert tuple(example.memory.phases) == PHASES
    assert example.changed(grad_accum=1).memory.phases["forward"].gradients == 0


def test_quantised_weights_by_hand() -> None:
    quantised = [held(mode="qlora", double_quant=double).weights for double in (True, False)]
    other = 2 * (2 * 128256 * 4096 + 65 * 4096)  # embedding, head and norms stay in 16 bits
    assert quantised == [int(size * 6_979_321_856) + other for size in (0.516, 0.5625)]


def test_checkpointed_activations_by_hand() -> None:
    assert held().activations == TOKENS * 32 * UNFUSED_LAYER
    expected = TOKENS * (30 * 2 * 4096 + 2 * UNFUSED_LAYER)
    assert held(checkpointed_layers=30).activations == expected


def test_offloaded_inputs_are_on_the_host_but_for_two() -> None:
    offloaded = {"offload_activations": True}
    expected = TOKENS * (2 * 2 * 4096 + 2 * UNFUSED_LAYER)
    assert held(checkpointed_layers=30, **offloaded).activations == expected
    one = TOKENS * (2 * 4096 + 31 * UNFUSED_LAYER)
    assert held(checkpointed_layers=1, **offloaded).activations == one


@pytest.mark.parametrize("tokens", [2048, 2049, 262_144])
def test_pinned_memory_is_that_of_the_inputs(tokens: int) -> None:
    step = replace(STEP, offload_activations=True)
    layout = replace(LAYOUT, batch_size=1, max_seq_len=tokens, checkpointed_layers=32)
    assert offloaded_bytes(step, layout) == 32 * tokens * 4096 * 2
    assert offloaded_bytes(replace(step, host_layers=5), layout) == 5 * tokens * 4096 * 2
    assert offloaded_bytes(STEP, layout) == 0


def test_the_inputs_in_flight_are_those_of_the_code() -> None:
    from sft_play.models.checkpointing import IN_FLIGHT

    assert OFFLOADS_IN_FLIGHT == IN_FLIGHT


def test_the_tiles_are_those_of_the_code() -> None:
    from sft_play.models.fast.linears import tiles

    assert TILE_TOKENS == tiles.TILE_TOKENS


def test_the_recomputed_layer_adds_to_the_peak_where_all_are_and_it_outgrows_the_loss() -> None:
    inputs = 32 * 2 * 4096
    # 1.5 MB a token are the logits'
    assert held(checkpointed_layers=32).activations == TOKENS * inputs
    every = held(model=FEW_WORDS, checkpointed_layers=32).activations
    assert every == TOKENS * (inputs + UNFUSED_LAYER - 12 * 1000)
    but_one = held(model=FEW_WORDS, checkpointed_layers=31).activations
    assert but_one == TOKENS * (31 * 2 * 4096 + UNFUSED_LAYER)


def test_the_bytes_of_a_fused_step_by_hand() -> None:
    def activations(**changes: Any) -> int:
        return held(is_fast=True, **changes).activations

    # inputs and outputs of norms, queries, keys, values, the attention's output, gate and up
    layer = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 14336)
    assert 32 * layer / 2**20 == 3.375  # MiB a token
    gradients = 2 * (2 * 4096 + 3 * 14336)  # of one layer
    expected = TOKENS * (32 * layer + gradients)
    assert activations(mode="lora") == activations(mode="qlora") == expected
    full = activations(mode="full")
    assert full == TOKENS * (32 * (layer + 2 * 14336) + gradients)
    residual_stream = TOKENS * 32 * 2 * 2 * 4096
    assert activations(mode="full", weight_bytes=4) - full == residual_stream
    # which is what Gemma's two further norms keep
    gemma = replace(EIGHT_B, model_type="gemma2")
    assert activations(model=gemma) - activations() == residual_stream


def test_the_bytes_of_a_fused_loss_by_hand() -> None:
    def loss(phase: str = "backward", **changes: Any) -> int:
        return held(phase, is_fast=True, **changes).logits

    hidden_states = TOKENS * 2 * 2 * 4096  # the last ones and their gradient
    assert loss(mode="lora") == loss(mode="qlora") == hidden_states
    head = 2 * 128256 * 4096  # its gradient, where it is trained
    assert loss(mode="full") == hidden_states + head
    # a chunk of logits, and fewer where there are not so many
    assert loss("forward") - hidden_states == GIB // 4
    assert loss("forward", model=FEW_WORDS) - hidden_states == TOKENS * 12 * 1000


def test_what_several_processes_hold_beside_the_model_by_hand() -> None:
    def beside(**changes: Any) -> tuple[int, float]:
        phase = held(**changes)
        return phase.buckets, phase.context / GIB

    adapters = PLAIN.adapter_weights(EIGHT_B, 16, "all-linear")
    assert beside() == (0, pytest.approx(0.75))
    # DDP's copy of the gradients, and NCCL
    assert beside(world_size=2) == (4 * adapters, pytest.approx(1.25))
    assert beside(world_size=2, mode="full") == (2 * EIGHT_B.parameters, pytest.approx(1.25))
    assert beside(world_size=2, zero_stage=2) == (GIB, pytest.approx(1.25))
    assert beside(world_size=2, is_gpu=False) == (4 * adapters, pytest.approx(0.8))


def test_the_peak_is_the_sum_of_its_components() -> None:
    memory = EXAMPLE.memory
    assert memory.predicted_peak == sum(memory.peak.components().values())


# How they grow


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed_layers", [0, 12, 32])
@pytest.mark.parametrize("is_fast", [True, False])
def test_more_tokens_never_need_fewer_bytes(
    mode: str, checkpointed_layers: int, is_fast: bool
) -> None:
    fixed = {"mode": mode, "checkpointed_layers": checkpointed_layers, "is_fast": is_fast}

    def sizes(batches: tuple[int, ...], lengths: tuple[int, ...]) -> list[int]:
        return [
            peak(batch_size=batch, max_seq_len=length, **fixed)
            for batch, length in product(batches, lengths)
        ]

    batches, lengths = (1, 2, 3, 8), (1, 512, 513, 4096)
    for length in lengths:
        by_rows = sizes(batches, (length,))
        assert by_rows == sorted(by_rows)
    for batch in batches:
        by_length = sizes((batch,), lengths)
        assert by_length == sorted(by_length)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", ["hidden", "intermediate", "layers", "vocab", "kv_heads"])
def test_a_larger_model_needs_more(mode: str, field: str) -> None:
    larger = replace(EIGHT_B, **{field: 2 * getattr(EIGHT_B, field)})
    assert peak(model=larger, mode=mode) > peak(mode=mode)


def test_a_higher_rank_and_more_targets_need_more() -> None:
    by_rank = [peak(lora_rank=rank) for rank in (1, 8, 16, 256)]
    assert by_rank == sorted(set(by_rank))
    targets = [("q_proj",), ("q_proj", "v_proj"), "all-linear"]
    by_targets = [peak(lora_targets=names) for names in targets]
    assert by_targets == sorted(set(by_targets))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_fast", [True, False])
def test_checkpointing_needs_less(mode: str, is_fast: bool) -> None:
    fixed = {"mode": mode, "is_fast": is_fast}
    by_layers = [held(**fixed, checkpointed_layers=count).total for count in range(33)]
    assert by_layers == sorted(by_layers, reverse=True)
    assert by_layers[-1] < by_layers[0] / (1 if mode == "full" else 1.1)


@pytest.mark.parametrize("mode", MODES)
def test_fused_kernels_need_less(mode: str) -> None:
    assert held(mode=mode, is_fast=True).total < held(mode=mode).total


def test_quantising_needs_less() -> None:
    plain_constants = peak(mode="qlora", double_quant=False)
    assert peak(mode="qlora") < plain_constants < peak(mode="lora") < peak(mode="full")
    # whose copies outweigh 1,024 tokens
    assert EXAMPLE.changed(mode="full").memory.peak_phase == "optimizer"


# ZeRO and the optimizer


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_zero_divides_optimizer_gradients_and_weights_in_turn(mode: str) -> None:
    def at(stage: int, world_size: int = 4) -> PhaseBytes:
        return held(mode=mode, zero_stage=stage, world_size=world_size)

    assert at(1, 1).optimizer // 4 == at(1).optimizer == at(2).optimizer == at(3).optimizer
    assert at(1, 1).gradients == at(1).gradients == 4 * at(2).gradients == 4 * at(3).gradients
    assert at(1, 1).weights == at(2).weights == 4 * at(3).weights
    peaks = [peak(mode=mode, zero_stage=3, world_size=world) for world in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(("stage", "copies"), [(0, 0), (1, 2), (2, 2), (3, 1)])
def test_the_optimizers_step_copies_gradients_under_zero(stage: int, copies: int) -> None:
    full = {"mode": "full", "zero_stage": stage, "world_size": 4}
    stepping = held("optimizer", **full, optim="adamw_torch_fused")
    assert stepping.activations == copies * stepping.gradients


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("compute_bytes", [2, 4])
def test_zero_keeps_a_float32_copy_of_what_it_trains(stage: int, compute_bytes: int) -> None:
    full = {"mode": "full", "weight_bytes": 4, "compute_bytes": compute_bytes, "world_size": 4}
    expected = 12 * EIGHT_B.parameters // 4 if stage else 8 * EIGHT_B.parameters
    assert held(**full, zero_stage=stage).optimizer == expected


def test_offloading_frees_a_gpu_and_not_a_host() -> None:
    zero = {"zero_stage": 2, "world_size": 2}
    kept = held(**zero).optimizer
    assert kept > 0
    assert held(**zero, offload=True).optimizer == 0
    assert held(**zero, offload=True, is_gpu=False).optimizer == kept
    assert held(**zero, is_gpu=False).optimizer == kept


def test_zero_3_holds_whole_what_computes_and_what_it_fetches_ahead() -> None:
    zero3 = {"zero_stage": 3, "world_size": 2}
    ahead, twice = (Fetching(weights, 0, live=0) for weights in (10**8, 2 * 10**8))
    assert held("optimizer", **zero3).gathered == held("forward", zero_stage=2).gathered == 0
    gathered = held("forward", **zero3, fetching=ahead).gathered
    head = EIGHT_B.vocab * EIGHT_B.hidden
    layer = EIGHT_B.block_weights // EIGHT_B.layers
    adapters = 4 * PLAIN.adapter_weights(EIGHT_B, 16, "all-linear")
    assert gathered == pytest.approx(2 * (head + 2 * layer + 10**8) + adapters, rel=1e-6)
    more = held("forward", **zero3, fetching=twice).gathered
    assert more - gathered == pytest.approx(2 * 10**8, rel=1e-6)
    # the last layers, each of whose weights is passed twice before it is needed again
    reused = 2 * (head + 3 * layer)
    kept = held("forward", **zero3, fetching=Fetching(10**8, reused, live=0)).gathered
    assert kept - gathered == pytest.approx(2 * 3 * layer, rel=1e-6)
    # each module fetches ahead, until so many are whole; the head may be the last
    full = held("forward", **zero3, fetching=Fetching(10**8, 0, live=10**9)).gathered
    assert full == pytest.approx(2 * (10**9 + head + layer) + adapters, rel=1e-6)
    never_ahead = held("forward", **zero3, fetching=Fetching(0, 0, live=10**9)).gathered
    assert never_ahead == pytest.approx(2 * (head + 2 * layer) + adapters, rel=1e-6)
    of_all = held("forward", **zero3, fetching=Fetching(10**8, 0, live=10**12)).gathered
    assert of_all == pytest.approx(2 * (EIGHT_B.block_weights + head + layer) + adapters, rel=1e-6)


def test_two_h200s_needed_what_is_planned_for_zero_3_without_fused_linears() -> None:
    """4 x 2,048 tokens of each, PEFT's linears, plain norms and loss: 104.7 GiB."""
    unfused = {"is_fast": False, "zero_stage": 3, "world_size": 2}
    changes = {"batch_size": 4, "max_seq_len": 2048, "checkpointed_layers": 0}
    assert peak(**unfused, **changes) / GIB == pytest.approx(104.7, rel=0.1)


def test_weights_that_are_offloaded_leave_the_gpu() -> None:
    zero3 = {"mode": "full", "zero_stage": 3, "world_size": 2, "offload_weights": True}
    assert held(**zero3).weights == 0 < held(**zero3, is_gpu=False).weights


def test_adams_moments_have_the_type_of_the_weights() -> None:
    def state_bytes(optim: str, **changes: Any) -> float:
        return held(mode="full", optim=optim, **changes).optimizer / EIGHT_B.parameters

    assert state_bytes("adamw_torch", weight_bytes=4) == 8
    assert state_bytes("adamw_torch", weight_bytes=2) == 4
    assert state_bytes("adamw_8bit") == 2
    assert state_bytes("sgd") == 0
    # with a float32 copy of the weights
    assert state_bytes("adamw_torch", weight_bytes=4, zero_stage=1) == 12


def test_only_autocast_keeps_a_second_copy_of_full_weights() -> None:
    full = {"mode": "full", "weight_bytes": 4}
    weights = 4 * EIGHT_B.parameters
    copied = weights + 2 * EIGHT_B.block_weights
    for phase in PHASES:
        expected = copied if phase in ("forward", "backward") else weights
        assert held(phase, **full).weights == expected, phase
    assert held(**full, compute_bytes=4).weights == weights
    # ZeRO turns them to 16 bits once they are loaded
    assert held("load", **full, zero_stage=2).weights == weights
    assert held("forward", **full, zero_stage=2).weights == 2 * EIGHT_B.parameters


# Evaluation


def test_an_evaluation_takes_rows_whose_logits_fit_where_a_step_has_its_activations() -> None:
    one_b = load_shape("meta-llama/Llama-3.2-1B-Instruct", None, {})
    example = EXAMPLE.changed(model=one_b, batch_size=4, max_seq_len=2048)
    # 12 bytes a token and word, 2.9 GiB a row, which a step has in training, too
    assert evaluation_rows(*example) == 4
    assert evaluation_rows(*example.changed(checkpointed_layers=16)) == 4
    assert evaluation_rows(*example.changed(batch_size=1)) == 1
    # a chunk of logits is the same for any number of rows
    fused = example.changed(is_fast=True)
    assert evaluation_rows(*fused) == 4
    assert evaluation_rows(*fused.changed(checkpointed_layers=16)) == 4


def test_the_users_evaluation_batch_is_taken() -> None:
    assert evaluation_rows(replace(STEP, eval_batch_size=7), LAYOUT) == 7


def test_an_evaluation_is_not_packed() -> None:
    assert evaluation_rows(STEP, LAYOUT.packed(1)) == evaluation_rows(STEP, LAYOUT)


# Beside what was measured on one H200


@pytest.mark.parametrize(
    ("changes", "measured_gib"),
    [
        # sequence 2048, 8192 tokens a micro-batch
        ({"checkpointed_layers": 32}, 29),
        ({}, 87),
        ({"mode": "qlora"}, 69),
    ],
)
def test_an_8b_step_is_not_put_below_what_was_measured_nor_a_tenth_above(
    changes: dict[str, Any], measured_gib: float
) -> None:
    estimate = peak(batch_size=4, max_seq_len=2048, **changes) / GIB
    assert measured_gib < estimate < 1.1 * measured_gib


@pytest.mark.parametrize(
    ("model", "changes", "measured_gib"),
    [
        # peak reserved by make train-bnb, 8,192 tokens a micro-batch (docs/evidence/speed-h200.md), less
        # the context
        ("meta-llama/Llama-3.2-1B-Instruct", {"mode": "full", "grad_accum": 1}, 17.07),
        ("meta-llama/Llama-3.2-1B-Instruct", {"grad_accum": 1}, 10.23),
        ("meta-llama/Llama-3.2-1B-Instruct", {}, 10.30),
        ("meta-llama/Llama-3.1-8B-Instruct", {"mode": "full", "grad_accum": 1}, 80.68),
        ("meta-llama/Llama-3.1-8B-Instruct", {"grad_accum": 1}, 43.40),
        ("meta-llama/Llama-3.1-8B-Instruct", {}, 43.56),
        # without optimizer and context, by a bare step
        ("meta-llama/Llama-3.1-8B-Instruct", {"checkpointed_layers": 16}, 30.8),
        ("meta-llama/Llama-3.1-8B-Instruct", {"checkpointed_layers": 31}, 19.0),
    ],
)
def test_a_fused_step_is_estimated_to_a_fiftieth_of_what_was_measured(
    model: str, changes: dict[str, Any], measured_gib: float
) -> None:
    fused = EXAMPLE.changed(
        model=load_shape(model, None, {}),
        is_fast=True,
        optim="adamw_torch_fused",
        batch_size=4,
        max_seq_len=2048,
    )
    memory = fused.changed(**changes).memory
    estimate = (memory.predicted_peak - memory.peak.context) / GIB
    assert estimate == pytest.approx(measured_gib, rel=0.02)


def test_packed_rows_need_the_bytes_of_the_sequences_that_they_fill() -> None:
    packed = step_bytes(STEP, replace(LAYOUT, batch_size=4, grad_accum=8).packed(9)).phases
    three_of_three = EXAMPLE.changed(batch_size=3, grad_accum=3).memory.phases
    for name in ("forward", "backward", "optimizer"):
        assert packed[name] == three_of_three[name]


@pytest.mark.parametrize(
    ("mode", "measured_gib"),
    [("lora", 58.42), ("qlora", 17.69)],
)
def test_experts_are_read_and_proven_beside_the_weights(mode: str, measured_gib: float) -> None:
    choice = ("model.name=Qwen/Qwen3-30B-A3B", f"tuning.mode={mode}", "tuning.lora.experts=shared")
    loading = plan_for("1xH200", *choice).plan.memory.phases["load"]
    assert loading.total / GIB == pytest.approx(measured_gib, rel=0.02)


@pytest.mark.parametrize(
    ("name", "measured_gib"), [("openai/gpt-oss-20b", 12.96), ("openai/gpt-oss-120b", 60.57)]
)
def test_experts_that_stay_in_mxfp4_have_its_exponents(name: str, measured_gib: float) -> None:
    choice = (f"model.name={name}", "tuning.mode=qlora", "tuning.lora.experts=shared")
    held = plan_for("1xH200", *choice).plan.memory.phases["optimizer"]
    assert held.total / GIB == pytest.approx(measured_gib, rel=0.01)
