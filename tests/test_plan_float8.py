"""What the plan knows of a float8 base: its bytes, its speed, and where it is offered."""

import re
from dataclasses import replace

import pytest
from plan_examples import STEP, Example, plan_for

from sft_play.config.loader import load_merged
from sft_play.plan import memory
from sft_play.plan.cards import CARDS
from sft_play.plan.needs import may_be_float8
from sft_play.plan.next_command import smaller_settings
from sft_play.plan.speed import predict
from sft_play.plan.step import Layout
from sft_play.plan.structure import MatrixKind
from sft_play.plan.workload import describe_float8

LLAMA_8B = ("model.name=meta-llama/Llama-3.1-8B-Instruct", "model.max_seq_len=2048")
FLOAT8 = "tuning.base_dtype=float8"
EXAMPLE = Example(
    replace(STEP, is_fast=True, optim="adamw_torch_fused"),
    Layout(batch_size=4, grad_accum=1, world_size=1, max_seq_len=2048),
)


def test_a_float8_weight_takes_a_byte_and_each_output_a_float32():
    found = memory.base_weight_bytes(replace(STEP, is_float8=True), 2)
    others = 2 * (2 * 128256 * 4096 + 65 * 4096)  # embedding, head and norms stay in 16 bits
    outputs = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert found == 6_979_321_856 + 4 * outputs + others


@pytest.mark.parametrize(
    "kind, fits",
    [
        (MatrixKind("q_proj", 4096, 1024, 32), True),
        (MatrixKind("q_proj", 4096, 1000, 32), False),
        (MatrixKind("q_proj", 4100, 1024, 32), False),
        (MatrixKind("experts.down_proj", 1024, 1024, 4, experts=8, is_stacked=True), False),
        (MatrixKind("gate", 1024, 16, 4, is_quantized=False), False),
    ],
)
def test_what_is_counted_as_float8_is_what_loading_makes_float8(kind, fits):
    assert kind.fits_float8 == fits


def test_a_step_over_float8_needs_less_than_its_weights_save():
    plain = EXAMPLE.memory.phases["backward"]
    float8 = EXAMPLE.changed(is_float8=True).memory.phases["backward"]
    saved = plain.weights - float8.weights
    assert 0.9 * saved < plain.total - float8.total < saved
    # the widest gradient in 8 bits, the weight transposed, and the product before it is added
    tokens = 4 * 2048
    expected = tokens * (14336 + 2 * 4096) + 4096 * 14336
    assert float8.activations - plain.activations == expected


def test_an_8b_step_over_float8_is_as_fast_as_its_products():
    plain, float8 = (
        predict(replace(EXAMPLE.step, is_float8=is_float8), EXAMPLE.layout, CARDS["H200"])
        for is_float8 in (False, True)
    )
    assert 1.3 < float8.tokens_per_second / plain.tokens_per_second < 10.1 / 5.2
    assert float8.tokens_per_second == pytest.approx(24_000, rel=0.1)


@pytest.mark.parametrize(
    "card, settings, may_be",
    [
        ("H200", (), True),
        ("4090", (), True),
        ("A100-80", (), False),
        (None, (), False),
        ("H200", (FLOAT8,), False),
        ("H200", ("tuning.mode=qlora",), False),
        ("H200", ("tuning.mode=full",), False),
        ("H200", ("tuning.lora.use_dora=true",), False),
    ],
)
def test_float8_is_offered_where_it_would_run(card, settings, may_be):
    config = load_merged(None, None, settings).config
    assert may_be_float8(config, CARDS[card] if card else None) == may_be


def test_a_plan_says_what_float8_would_change():
    words = describe_float8(plan_for("1xH200", *LLAMA_8B))
    assert re.search(r"TUNING_BASE_DTYPE=float8 .* 1\.4 times .* 37 GiB", words)
    assert describe_float8(plan_for("1xH200", *LLAMA_8B, FLOAT8)) is None


def test_a_model_that_fits_in_float8_alone_is_offered_so():
    settings = (*LLAMA_8B, "train.batch_size=1", "train.strategy=ddp")
    settings += ("train.weight_offloading=false",)
    plan = plan_for("1x4090", *settings, "train.gradient_checkpointing=false").plan
    assert not plan.fits
    assert any("TUNING_BASE_DTYPE=float8" in change.words for change in plan.changes)


def test_qlora_in_the_place_of_float8_leaves_float8_out():
    plan = plan_for("1xH200", *LLAMA_8B, FLOAT8)
    found = smaller_settings(plan.config, plan.plan, "load")
    assert found == {"train.weight_offloading": True}
    plan = plan_for("1xH200", *LLAMA_8B, FLOAT8, "train.weight_offloading=true")
    found = smaller_settings(plan.config, plan.plan, "load")
    assert found == {"tuning.mode": "qlora", "tuning.base_dtype": "auto"}
