"""sft_play.plan.memory: bytes of a step by hand, how they grow, and next to what was measured."""

from dataclasses import replace
from itertools import product

import pytest
from plan_examples import EIGHT_B, EXAMPLE, LAYOUT, STEP, held, load_shape, peak, plan_for

from sft_play.config.deepspeed_json import Fetching
from sft_play.plan.activations import OFFLOADS_IN_FLIGHT, TILE_TOKENS
from sft_play.plan.memory import GIB, PHASES, PhaseBytes, evaluation_rows, step_bytes
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.step import Adapters

TOKENS = LAYOUT.tokens
MODES = ("lora", "qlora", "full")
ONE_B = load_shape("meta-llama/Llama-3.2-1B", None, {})
# Bytes that PEFT's layers keep of a token, at 8B; 7.6 MiB over 32 layers
UNFUSED_LAYER = 22 * 4096 + 11 * 14336


# By hand


def test_the_bytes_of_a_lora_step_by_hand():
    model = ModelShape(100, 8, 16, layers=2, heads=2, kv_heads=1, head_dim=4, is_tied=True)
    weights = 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 100 * 8 + 5 * 8
    adapters = 4 * 2 * ((8 + 8) * 2 + (8 + 4) * 2 + (8 + 16) * 3)
    assert model.parameters == weights
    assert Adapters(rank=4).weights(model) == adapters
    example = EXAMPLE.changed(model=model, adapters=Adapters(rank=4), batch_size=1, max_seq_len=10)
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


def test_quantized_weights_by_hand():
    quantized = [held(mode="qlora", double_quant=double).weights for double in (True, False)]
    other = 2 * (2 * 128256 * 4096 + 65 * 4096)  # embedding, head and norms stay in 16 bits
    assert quantized == [int(size * 6_979_321_856) + other for size in (0.516, 0.5625)]


def test_offloaded_inputs_are_on_the_host_but_for_two():
    offloaded = {"offload_activations": True}
    expected = TOKENS * (2 * 2 * 4096 + 2 * UNFUSED_LAYER)
    assert held(checkpointed_layers=30, **offloaded).activations == expected
    one = TOKENS * (2 * 4096 + 31 * UNFUSED_LAYER)
    assert held(checkpointed_layers=1, **offloaded).activations == one


def test_the_constants_are_those_of_the_code():
    from sft_kernels.linears import tiles
    from sft_play.models.checkpointing import IN_FLIGHT

    assert (OFFLOADS_IN_FLIGHT, TILE_TOKENS) == (IN_FLIGHT, tiles.TILE_TOKENS)


def test_what_several_processes_hold_beside_the_model_by_hand():
    def beside(**changes):
        phase = held(**changes)
        return phase.buckets, phase.context / GIB

    adapters = Adapters().weights(EIGHT_B)
    assert beside() == (0, pytest.approx(0.75))
    # DDP's copy of the gradients, and NCCL
    assert beside(world_size=2) == (4 * adapters, pytest.approx(1.25))
    assert beside(world_size=2, mode="full") == (2 * EIGHT_B.parameters, pytest.approx(1.25))
    assert beside(world_size=2, zero_stage=2) == (GIB, pytest.approx(1.25))
    assert beside(world_size=2, is_gpu=False) == (4 * adapters, pytest.approx(0.8))


# By hand once: a recomputed layer that outgrows the loss, gradients in separate buffers, the last
# layer, ZeRO's copies of gradients
COUNTED = [
    ("backward", "activations", {"vocab": 1000, "checkpointed_layers": 32}, 509_902_848),
    ("forward", "gradients", {"mode": "full", "grad_accum": 1, "world_size": 2}, 16_060_522_496),
    ("backward", "activations", {"mode": "full", "grad_accum": 1, "batch_size": 1}, 103_809_024),
    *(
        ("optimizer", "activations", {"mode": "full", "zero_stage": stage, "world_size": 4}, size)
        for stage, size in ((1, 32_121_044_992), (2, 8_030_261_248), (3, 4_015_130_624))
    ),
]


@pytest.mark.parametrize("phase, component, changes, size", COUNTED)
def test_components_have_the_bytes_that_were_counted(phase, component, changes, size):
    model = replace(EIGHT_B, vocab=changes.get("vocab", EIGHT_B.vocab))
    others = {name: value for name, value in changes.items() if name != "vocab"}
    found = held(phase, model=model, **{"optim": "adamw_torch_fused", **others})
    assert getattr(found, component) == size


# How they grow


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointed_layers", [0, 12, 32])
@pytest.mark.parametrize("is_fast", [True, False])
def test_more_tokens_never_need_fewer_bytes(mode, checkpointed_layers, is_fast):
    def size(rows, tokens):
        changes = {"mode": mode, "checkpointed_layers": checkpointed_layers, "is_fast": is_fast}
        return peak(batch_size=rows, max_seq_len=tokens, **changes)

    for rows, tokens in product((1, 2, 8), (1, 512, 4096)):
        assert size(rows, tokens) <= min(size(rows + 1, tokens), size(rows, tokens + 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("field", ["hidden", "intermediate", "layers", "vocab", "kv_heads"])
def test_a_larger_model_needs_more(mode, field):
    larger = replace(EIGHT_B, **{field: 2 * getattr(EIGHT_B, field)})
    assert peak(model=larger, mode=mode) > peak(mode=mode)


def test_a_higher_rank_and_more_targets_need_more():
    by_rank = [peak(adapters=Adapters(rank)) for rank in (1, 8, 16, 256)]
    assert by_rank == sorted(set(by_rank))
    targets = [("q_proj",), ("q_proj", "v_proj"), "all-linear"]
    by_targets = [peak(adapters=Adapters(targets=names)) for names in targets]
    assert by_targets == sorted(set(by_targets))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_fast", [True, False])
def test_checkpointing_needs_less(mode, is_fast):
    fixed = {"mode": mode, "is_fast": is_fast}
    by_layers = [held(**fixed, checkpointed_layers=count).total for count in range(33)]
    assert by_layers == sorted(by_layers, reverse=True)
    assert by_layers[-1] < by_layers[0] / (1 if mode == "full" else 1.1)


# ZeRO and the optimizer


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_zero_divides_optimizer_gradients_and_weights_in_turn(mode):
    def at(stage, world_size=4):
        return held(mode=mode, zero_stage=stage, world_size=world_size)

    assert at(1, 1).optimizer // 4 == at(1).optimizer == at(2).optimizer == at(3).optimizer
    assert at(1, 1).gradients == at(1).gradients == 4 * at(2).gradients == 4 * at(3).gradients
    assert at(1, 1).weights == at(2).weights == 4 * at(3).weights
    peaks = [peak(mode=mode, zero_stage=3, world_size=world) for world in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_offloading_frees_a_gpu_and_not_a_host():
    zero = {"zero_stage": 2, "world_size": 2}
    kept = held(**zero).optimizer
    assert kept > 0
    assert held(**zero, offload=True).optimizer == 0
    assert held(**zero, offload=True, is_gpu=False).optimizer == kept
    assert held(**zero, is_gpu=False).optimizer == kept


def test_zero_3_holds_whole_what_computes_and_what_it_fetches_ahead():
    zero3 = {"zero_stage": 3, "world_size": 2}

    def gathered(*fetching):
        return held("forward", **zero3, fetching=Fetching(*fetching)).gathered

    assert held("optimizer", **zero3).gathered == held("forward", zero_stage=2).gathered == 0
    layer, head = EIGHT_B.block_weights // EIGHT_B.layers, EIGHT_B.vocab * EIGHT_B.hidden
    least = gathered(10**8, 0, 0)
    assert 2 * (head + 2 * layer + 10**8) < least < gathered(2 * 10**8, 0, 0)
    # the last layers, each of whose weights is passed twice before it is needed again
    kept = gathered(10**8, 2 * (head + 3 * layer), 0) - least
    assert kept == pytest.approx(2 * 3 * layer, rel=1e-6)
    # each module fetches ahead, until so many weights are whole
    assert gathered(0, 0, 10**9) < gathered(10**8, 0, 10**9) < gathered(10**8, 0, 10**12)


def test_two_h200s_needed_what_is_planned_for_zero_3_without_fused_linears():
    """4 x 2,048 tokens of each, PEFT's linears, plain norms and loss: 104.7 GiB."""
    unfused = {"is_fast": False, "zero_stage": 3, "world_size": 2}
    changes = {"batch_size": 4, "max_seq_len": 2048, "checkpointed_layers": 0}
    assert peak(**unfused, **changes) / GIB == pytest.approx(104.7, rel=0.1)


def test_adams_moments_have_the_type_of_the_weights():
    def state_bytes(optim, **changes):
        return held(mode="full", optim=optim, **changes).optimizer / EIGHT_B.parameters

    assert state_bytes("adamw_torch", weight_bytes=4) == 8
    assert state_bytes("adamw_torch", weight_bytes=2) == 4
    in_32_bits = EIGHT_B.vocab * EIGHT_B.hidden / EIGHT_B.parameters  # the embedding
    assert state_bytes("adamw_8bit") == pytest.approx(2 + 6 * in_32_bits)
    assert state_bytes("adamw_8bit", zero_stage=1) == 6  # flat parts, and a copy in float32
    assert state_bytes("lion", weight_bytes=2) == 4
    assert state_bytes("lion_8bit") == pytest.approx(1 + 3 * in_32_bits)
    assert state_bytes("sgd") == 0
    # with a float32 copy of the weights
    assert state_bytes("adamw_torch", weight_bytes=4, zero_stage=1) == 12


def test_adafactor_and_muon_keep_and_allocate_less_than_adamw():
    full = {"mode": "full", "weight_bytes": 2}
    adamw = held(**full, optim="adamw_torch").optimizer
    assert held(**full, optim="adafactor").optimizer < 0.02 * EIGHT_B.parameters
    assert held(**full, optim="muon").optimizer == adamw - 2 * EIGHT_B.block_weights
    # of one matrix: the embedding, in float32 four times; an MLP's in bfloat16
    embedding, mlp = EIGHT_B.vocab * EIGHT_B.hidden, EIGHT_B.intermediate * EIGHT_B.hidden
    assert held("optimizer", **full, optim="adafactor").activations == 16 * embedding
    assert held("optimizer", **full, optim="muon").activations == 10 * mlp


def test_only_autocast_keeps_a_second_copy_of_full_weights():
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


def test_an_evaluation_takes_rows_whose_logits_fit_where_a_step_has_its_activations():
    example = EXAMPLE.changed(model=ONE_B, batch_size=4, max_seq_len=2048)
    # 12 bytes a token and word, 2.9 GiB a row, which a step has in training, too
    assert evaluation_rows(*example) == 4
    assert evaluation_rows(*example.changed(checkpointed_layers=16)) == 4
    assert evaluation_rows(*example.changed(batch_size=1)) == 1
    # a chunk of logits is the same for any number of rows
    fused = example.changed(is_fast=True)
    assert evaluation_rows(*fused) == 4
    assert evaluation_rows(*fused.changed(checkpointed_layers=16)) == 4


def test_an_evaluation_is_not_packed():
    assert evaluation_rows(STEP, LAYOUT.packed(1)) == evaluation_rows(STEP, LAYOUT)


# Next to what was measured on one H100 and on one H200


@pytest.mark.parametrize(
    "changes, batch, allocated",
    [
        # a Llama of 1B, forward pass, beyond what is held between steps
        ({"mode": "full", "weight_bytes": 4}, (4, 512), 6_468_711_424),
        ({"mode": "full", "weight_bytes": 4}, (4, 2048), 16_096_400_384),
        ({"mode": "full", "weight_bytes": 4, "checkpointed_layers": 16}, (4, 2048), 4_535_866_368),
        ({"mode": "full"}, (4, 2048), 10_873_984_000),
        ({}, (4, 2048), 8_218_432_512),
    ],
)
def test_a_forward_pass_allocates_what_is_planned(changes, batch, allocated):
    rows, tokens = batch
    fixed = {**changes, "model": ONE_B, "is_fast": True, "batch_size": rows, "max_seq_len": tokens}
    phase = held("forward", **fixed)
    planned = phase.activations + phase.logits + phase.weights - held("optimizer", **fixed).weights
    assert planned == pytest.approx(allocated, rel=0.03)


@pytest.mark.parametrize(
    "changes, measured_gib",
    [
        # sequence 2048, 8192 tokens a micro-batch
        ({"checkpointed_layers": 32}, 29),
        ({}, 87),
        ({"mode": "qlora"}, 69),
    ],
)
def test_an_8b_step_is_not_put_below_what_was_measured_nor_a_tenth_above(changes, measured_gib):
    estimate = peak(batch_size=4, max_seq_len=2048, **changes) / GIB
    assert measured_gib < estimate < 1.1 * measured_gib


@pytest.mark.parametrize(
    "model, changes, measured_gib",
    [
        # peak reserved by make train-bnb, 8,192 tokens a micro-batch (docs/evidence/speed-h200.md), less
        # the context
        (ONE_B, {"mode": "full", "grad_accum": 1}, 17.07),
        (ONE_B, {"grad_accum": 1}, 10.23),
        (EIGHT_B, {"mode": "full", "grad_accum": 1}, 80.68),
        (EIGHT_B, {"grad_accum": 1}, 43.40),
        # without optimizer and context, by a bare step
        (EIGHT_B, {"checkpointed_layers": 16}, 30.8),
        (EIGHT_B, {"checkpointed_layers": 31}, 19.0),
    ],
)
def test_a_fused_step_is_estimated_to_a_fiftieth_of_what_was_measured(model, changes, measured_gib):
    fused = EXAMPLE.changed(
        model=model, is_fast=True, optim="adamw_torch_fused", batch_size=4, max_seq_len=2048
    )
    memory = fused.changed(**changes).memory
    estimate = (memory.predicted_peak - memory.peak.context) / GIB
    assert estimate == pytest.approx(measured_gib, rel=0.02)


def test_packed_rows_need_the_bytes_of_the_sequences_that_they_fill():
    packed = step_bytes(STEP, replace(LAYOUT, batch_size=4, grad_accum=8).packed(9)).phases
    three_of_three = EXAMPLE.changed(batch_size=3, grad_accum=3).memory.phases
    for name in ("forward", "backward", "optimizer"):
        assert packed[name] == three_of_three[name]


@pytest.mark.parametrize(
    "name, mode, phase, measured_gib",
    [
        ("Qwen/Qwen3-30B-A3B", "lora", "load", 58.42),  # experts are read and verified
        ("Qwen/Qwen3-30B-A3B", "qlora", "load", 17.69),
        ("openai/gpt-oss-20b", "qlora", "optimizer", 12.96),  # with the exponents of MXFP4
        ("openai/gpt-oss-120b", "qlora", "optimizer", 60.57),
    ],
)
@pytest.mark.usefixtures("traces_nothing")
def test_experts_need_the_bytes_that_were_measured(name, mode, phase, measured_gib):
    choice = (f"model.name={name}", f"tuning.mode={mode}", "tuning.lora.experts=shared")
    found = plan_for("1xH200", *choice).plan.memory.phases[phase]
    assert found.total / GIB == pytest.approx(measured_gib, rel=0.02)
