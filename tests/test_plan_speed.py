"""sft_play.plan.speed and cards: what a step is predicted to take, beside what was measured."""

import dataclasses
import doctest
import json
import sys
from itertools import product
from typing import Any

import pytest

from sft_play.config.loader import PROJECT_ROOT

sys.path.insert(0, str(PROJECT_ROOT))

from benchmarks.speed.workloads import WORKLOADS
from sft_play.plan import cards
from sft_play.plan.cards import CARDS, MEASURED_FLOPS, Card, key_of
from sft_play.plan.devices import parse
from sft_play.plan.memory import StepShape
from sft_play.plan.model_shape import ModelShape, load_shape
from sft_play.plan.speed import LABELLED, Speed, StepWork, full_rows, predict

EIGHT = load_shape("meta-llama/Llama-3.1-8B-Instruct", None, {})
ONE = load_shape("meta-llama/Llama-3.2-1B-Instruct", None, {})
STEP = StepShape(
    mode="lora", batch_size=4, seq_len=2048, compute_bytes=2, weight_bytes=2, lora_rank=16, lora_targets="all-linear", optim="adamw_torch_fused",
    double_quant=True, checkpointed_layers=0, is_fast=True, world_size=1, zero_stage=0, offload=False, is_gpu=True,
)  # fmt: skip
WORKS = json.loads((PROJECT_ROOT / "benchmarks" / "results" / "speed-h200.json").read_text())[
    "works"
]
ONE_GPU, TWO_GPUS = 0.10, 0.10  # of what was measured


def speed(
    shape: ModelShape = EIGHT,
    card: str = "H200",
    work: StepWork | None = None,
    nodes: int = 1,
    **changes: Any,
) -> Speed:
    step = dataclasses.replace(STEP, **changes)
    found = predict(shape, step, work or full_rows(step, 1), CARDS[card], nodes)
    assert found is not None
    return found


# Beside what was measured


# the peers pad ragged rows in the order in which they come, which the plan's runs never do
MEASURED = [
    (work, arm)
    for work, facts in WORKS.items()
    for arm in ("ours-bnb", "hf-best", "hf-tutorial")
    if arm in facts["arms"] and (arm[0] == "o" or "2048" in work)
]


@pytest.mark.parametrize(("name", "arm"), MEASURED)
def test_one_h200_trains_as_fast_as_predicted(name: str, arm: str) -> None:
    facts = WORKS[name]["arms"][arm]
    shape, mode = load_shape(WORKLOADS[name].shape, None, {}), WORKLOADS[name].mode
    is_ragged, tokens = "ragged" in name, facts["real_tokens"] / facts["timed_steps"]
    rows = 32 if is_ragged else 4
    work = StepWork(
        rows,
        tokens / rows,
        facts["settings"].get("micro_batches", 1),
        facts["trained_tokens"] / facts["real_tokens"],
        1.07 if is_ragged else 1.0,
    )
    layers = shape.layers if facts["settings"]["gradient_checkpointing"] else 0
    found = speed(
        shape, work=work, mode=mode, is_fast=arm == "ours-bnb", checkpointed_layers=layers
    )
    assert found.tokens_per_second == pytest.approx(
        facts["real_tokens"] / facts["seconds"], rel=ONE_GPU
    )
    assert found.mfu == pytest.approx(facts["mfu"], rel=ONE_GPU)


@pytest.mark.parametrize(
    ("layers", "tokens_per_second"), [(0, 18.4e3), (8, 16.5e3), (16, 14.9e3), (31, 12.7e3)]
)
def test_checkpointed_layers_cost_what_they_did(layers: int, tokens_per_second: float) -> None:
    assert speed(checkpointed_layers=layers).tokens_per_second == pytest.approx(
        tokens_per_second, rel=ONE_GPU
    )


@pytest.mark.parametrize(
    ("shape", "layers", "changes", "tokens_per_second"),
    [  # two H200s, unfused, 8,192 tokens of each a step
        (ONE, 16, {"mode": "lora"}, 59.8e3),
        (ONE, 16, {"mode": "full"}, 73.7e3),
        (ONE, 16, {"mode": "full", "zero_stage": 2}, 68.8e3),
        (ONE, 16, {"mode": "full", "zero_stage": 3}, 41.0e3),
        (ONE, 16, {"mode": "lora", "zero_stage": 3}, 17.0e3),
        (EIGHT, 0, {"mode": "lora", "zero_stage": 2}, 20.0e3),
        (EIGHT, 0, {"mode": "lora", "zero_stage": 3}, 12.1e3),
    ],
)
def test_two_h200s_train_as_fast_as_predicted(
    shape: ModelShape, layers: int, changes: dict[str, Any], tokens_per_second: float
) -> None:
    found = speed(shape, world_size=2, is_fast=False, checkpointed_layers=layers, **changes)
    assert found.tokens_per_second == pytest.approx(tokens_per_second, rel=TWO_GPUS)


# What follows from what


def test_the_seconds_of_a_step_are_those_of_its_parts() -> None:
    found = speed(mode="full", world_size=4, zero_stage=2)
    assert found.step_seconds == pytest.approx(
        found.compute_seconds + found.optimizer_seconds + found.collective_seconds
    )
    assert found.tokens_per_second * found.step_seconds == pytest.approx(4 * 8192)
    assert found.mfu == pytest.approx(found.flops_per_token * 8192 / found.step_seconds / 989e12)
    assert found.as_json() == dataclasses.asdict(found)


@pytest.mark.parametrize(
    ("mode", "is_fast", "world"), product(("lora", "qlora", "full"), (True, False), (1, 2))
)
def test_computing_again_and_cutting_finer_never_make_a_step_faster(
    mode: str, is_fast: bool, world: int
) -> None:
    fixed = {"mode": mode, "is_fast": is_fast, "world_size": world}
    by_layers = [speed(checkpointed_layers=layers, **fixed).step_seconds for layers in range(33)]
    assert by_layers == sorted(by_layers) and by_layers[-1] > 1.2 * by_layers[0]
    finer = [
        speed(work=StepWork(16, 2048, count), **fixed).step_seconds for count in (1, 2, 4, 8, 16)
    ]
    assert finer == sorted(finer) and finer[-1] > finer[0]
    assert (
        speed(**fixed).step_seconds
        < speed(work=StepWork(4, 2048, 1, padding=1.3), **fixed).step_seconds
    )


@pytest.mark.parametrize(
    ("shape", "mode", "card", "world"),
    product((ONE, EIGHT), ("lora", "qlora", "full"), ("H200", "A100-80", "4090"), (2, 8)),
)
def test_zero_3_is_never_faster_than_ddp(
    shape: ModelShape, mode: str, card: str, world: int
) -> None:
    for is_fast, layers in product((True, False), (0, shape.layers)):
        fixed = {"mode": mode, "world_size": world, "checkpointed_layers": layers}
        ddp = speed(shape, card, is_fast=is_fast, **fixed)
        assert (
            speed(shape, card, is_fast=False, zero_stage=3, **fixed).tokens_per_second
            < ddp.tokens_per_second
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_more_gpus_train_more_tokens_and_each_of_them_fewer(mode: str, stage: int) -> None:
    alone = speed(mode=mode, is_fast=stage != 3)
    found = [
        speed(mode=mode, is_fast=stage != 3, zero_stage=stage, world_size=world).tokens_per_second
        for world in (2, 4, 8)
    ]
    assert found == sorted(found)
    assert all(
        total / world < alone.tokens_per_second
        for total, world in zip(found, (2, 4, 8), strict=True)
    )


def test_machines_apart_and_slow_links_keep_gpus_waiting() -> None:
    full = {"mode": "full", "world_size": 8}
    few = StepWork(1, 2048, 1)
    assert speed(**full).collective_seconds == 0  # hidden behind the backward pass
    assert speed(nodes=2, **full).collective_seconds > 0
    assert speed(card="4090", work=few, **full).collective_seconds > 0
    assert (
        speed(card="4090", work=few, nodes=2, **full).collective_seconds
        > speed(card="4090", work=few, **full).collective_seconds
    )


def test_offload_pays_for_the_way_to_the_host() -> None:
    zero = {"mode": "full", "world_size": 2, "zero_stage": 2}
    assert speed(offload=True, **zero).optimizer_seconds > 5 * speed(**zero).optimizer_seconds
    three = {"world_size": 2, "zero_stage": 3, "is_fast": False}
    assert (
        speed(offload_weights=True, **three).collective_seconds > speed(**three).collective_seconds
    )


def test_the_host_sets_the_pace_of_small_steps() -> None:
    few = [speed(ONE, work=StepWork(1, tokens, 1)).step_seconds for tokens in (32, 64)]
    assert few[0] == pytest.approx(few[1]) == pytest.approx(16 * 13 * 2 * 0.14e-3, rel=0.01)
    assert speed(ONE, work=StepWork(1, 32, 1), is_fast=False).step_seconds > 3 * few[0]


def test_tokens_without_a_label_are_faster_where_the_head_leaves_them_out() -> None:
    def at(share: float, is_fast: bool) -> float:
        return speed(
            ONE, work=StepWork(16, 2048, 1, labelled=share), is_fast=is_fast, mode="full"
        ).step_seconds

    assert at(0.2, True) < at(LABELLED, True) < at(1.0, True)
    assert at(0.2, False) == at(1.0, False)


def test_nothing_is_said_of_what_nobody_knows() -> None:
    work = full_rows(STEP, 1)
    assert predict(EIGHT, STEP, work, None) is None
    assert predict(EIGHT, dataclasses.replace(STEP, is_gpu=False), work, CARDS["H200"]) is None
    assert predict(EIGHT, dataclasses.replace(STEP, compute_bytes=4), work, CARDS["H200"]) is None


# Cards


@pytest.mark.parametrize("key", CARDS)
def test_a_card_is_known_by_its_device_name(key: str) -> None:
    card = CARDS[key]
    gpu = parse(f"1x{key}").gpus[0]
    assert (key_of(gpu.name), gpu.capability, gpu.total_bytes) == (
        key,
        card.capability,
        int(card.gib * 2**30),
    )
    assert key_of(f"{card.name} MIG 1g.18gb") is None
    assert 0.5 * card.flops < card.reached_flops < card.flops
    assert speed(card=key).mfu < 0.7


def test_a_size_alone_is_no_card() -> None:
    assert key_of(parse("1x24GiB").gpus[0].name) is None
    assert doctest.testmod(cards).failed == 0


def test_what_was_measured_of_a_card_stands() -> None:
    assert {key_of(name) for name in MEASURED_FLOPS} == {"H200"}
    assert CARDS["H200"].reached_flops == 790e12


def test_a_card_with_more_of_everything_is_faster() -> None:
    def more(card: Card, **changes: float) -> float:
        found = predict(EIGHT, STEP, full_rows(STEP, 1), dataclasses.replace(card, **changes))
        assert found is not None
        return found.tokens_per_second

    card = CARDS["A100-40"]
    assert more(card) < min(
        more(card, flops=2 * card.flops), more(card, bandwidth=2 * card.bandwidth)
    )
    by_speed = [
        speed(card=key).tokens_per_second
        for key in ("B200", "H200", "H100", "A100-80", "A100-40", "4090", "3090", "3060")
    ]
    assert by_speed == sorted(by_speed, reverse=True)
