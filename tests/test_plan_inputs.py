"""sft_play.plan.inputs: what a plan is made from, and why a step does not fit."""

import re
from dataclasses import replace
from typing import Any

import pytest
from plan_examples import CPU, EIGHT_B, plan_for

from sft_play.config.invocation import Invocation
from sft_play.config.schema import Config
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.batch import smallest
from sft_play.plan.cards import parse
from sft_play.plan.inputs import PlanInputs, choose_layout, shortage, with_offloading
from sft_play.plan.memory import GIB, step_bytes
from sft_play.plan.model_shape import load_shape
from sft_play.plan.ranks import plan_ranks

ROW_TOKENS = 2048


def inputs_of(budget_gib: float, **train: Any) -> PlanInputs:
    """Return the inputs of an 8B Llama with LoRA on one GPU."""
    hardware = parse("1xH200")
    return PlanInputs(
        config=Config.model_validate({"model": {"max_seq_len": ROW_TOKENS}, "train": train}),
        is_effective_set="effective_batch_size" in train,
        model=EIGHT_B,
        ranks=plan_ranks(Invocation(), hardware, {}, distributed=False, use_deepspeed=False),
        is_half=True,
        zero_stage=0,
        offload=False,
        offload_weights=False,
        budget_bytes=int(budget_gib * GIB),
        gpu_names=("NVIDIA H200",),
    )


def needed_gib(inputs: PlanInputs) -> str:
    """Return the bytes of the smallest step, as messages have them."""
    layout = smallest(inputs.request)
    return f"{step_bytes(inputs.step, layout).predicted_peak / GIB:.2f} GiB"


def why_short(inputs: PlanInputs) -> str:
    decided = with_offloading(inputs)
    return shortage(decided, choose_layout(decided))


@pytest.mark.parametrize(
    "train, words",
    [
        ({}, "train.batch_size=auto: even 1 row of 2048 tokens with checkpointing"),
        ({"gradient_checkpointing": False}, "train.batch_size=auto: even 1 row of 2048 tokens"),
        ({"grad_accum": 4, "effective_batch_size": 32}, "even 8 rows, which train.grad_accum=4"),
        ({"batch_size": 8}, "train.batch_size=8"),
    ],
)
def test_what_does_not_fit_says_what_it_needs(train, words):
    inputs = inputs_of(2, **train)
    assert choose_layout(inputs) == smallest(inputs.request)
    message = why_short(inputs)
    for part in (words, needed_gib(inputs), "2.00 GiB"):
        assert part in message


def test_what_is_needed_with_offloading_is_what_fits_with_it():
    said = re.search(
        r"([0-9.]+) GiB with TRAIN_ACTIVATION_OFFLOADING=true", why_short(inputs_of(2))
    )
    least_gib = float(said[1])
    host = {"host_budget_bytes": 64 * GIB}
    for budget_gib, is_enough in ((least_gib - 0.01, False), (least_gib + 0.01, True)):
        inputs = with_offloading(replace(inputs_of(budget_gib), **host))
        assert inputs.fits(choose_layout(inputs)) == is_enough
        assert inputs.offloads_activations == is_enough
    offloaded = inputs_of(2, activation_offloading=True)
    assert "OFFLOADING" not in why_short(offloaded)


def test_a_step_that_takes_the_whole_budget_fits():
    inputs = inputs_of(100)
    layout = choose_layout(inputs)
    peak_bytes = step_bytes(inputs.step, layout).predicted_peak
    assert shortage(inputs, layout) is None
    assert shortage(replace(inputs, budget_bytes=peak_bytes), layout) is None
    assert shortage(replace(inputs, budget_bytes=peak_bytes - 1), layout) is not None


def test_the_request_says_what_the_config_says():
    request = inputs_of(2, batch_size=2, gradient_checkpointing=False).request
    assert (request.batch_size, request.grad_accum) == (2, "auto")
    assert (request.max_seq_len, request.layers) == (ROW_TOKENS, 32)
    assert request.gradient_checkpointing is False
    assert not request.is_effective_set
    assert request.recomputes_by_layer


def test_a_backend_that_patches_all_layers_is_asked_for_all_or_none():
    inputs = inputs_of(2)
    tuning = inputs.config.tuning.model_copy(update={"backend": "unsloth"})
    unsloth = replace(inputs, config=inputs.config.model_copy(update={"tuning": tuning}))
    assert not unsloth.request.recomputes_by_layer


@pytest.mark.parametrize(
    "gpus, settings, weight_bytes",
    [
        ("1xH200", (), 2),
        ("1xV100-32", (), 2),
        (CPU, (), 4),
        ("1xH200", ("train.bf16=false",), 4),
        ("1xH200", ("model.dtype=float32",), 4),
        (CPU, ("model.dtype=bfloat16",), 2),
        ("1xH200", ("tuning.mode=full",), 4),
        ("1xH200", ("tuning.mode=full", "model.dtype=bfloat16"), 2),
        (CPU, ("tuning.mode=full",), 4),
    ],
)
def test_weights_are_counted_in_the_type_that_they_are_loaded_in(gpus, settings, weight_bytes):
    planned = plan_for(gpus, *settings)
    parameters = load_shape(planned.config.model.name, None, {}).parameters
    assert planned.plan.memory.phases["load"].weights == weight_bytes * parameters


def long_row(budget_gib: float, host_gib: float, **train: Any) -> PlanInputs:
    """Return the inputs of rows of 65,536 tokens, as they are once offloading is decided."""
    inputs = inputs_of(budget_gib, **train)
    model = inputs.config.model.model_copy(update={"max_seq_len": 65_536})
    config = inputs.config.model_copy(update={"model": model})
    host_budget = int(host_gib * GIB)
    return with_offloading(replace(inputs, config=config, host_budget_bytes=host_budget))


def gib_without_offloading() -> float:
    """Return what a row of 65,536 tokens needs with all layers checkpointed."""
    inputs = long_row(1000, 64, activation_offloading=False, gradient_checkpointing=True)
    inputs = replace(inputs, keeps_attention=False)
    return step_bytes(inputs.step, choose_layout(inputs)).predicted_peak / GIB


def test_activations_are_offloaded_where_a_row_does_not_fit_otherwise():
    roomy = long_row(1000, host_gib=64)
    assert roomy.config.train.activation_offloading is False
    tight = long_row(gib_without_offloading() - 4, host_gib=64)
    layout = choose_layout(tight)
    assert tight.config.train.activation_offloading is True and tight.fits(layout)
    assert offloaded_bytes(tight.step, layout) == layout.checkpointed_layers * 65_536 * 4096 * 2
    some = long_row(gib_without_offloading() - 4, host_gib=12)  # of the 16 GiB of all layers
    assert some.fits(choose_layout(some)) and some.step.offloaded(32) == some.host_layers == 24


def test_activations_are_not_offloaded_where_that_does_not_help():
    tight = gib_without_offloading() - 4
    on_a_small_host = long_row(tight, host_gib=1)
    far_too_long = long_row(20, host_gib=64)
    unchecked = long_row(tight, host_gib=64, gradient_checkpointing=False)
    for inputs in (on_a_small_host, far_too_long, unchecked):
        assert inputs.config.train.activation_offloading is False
    for is_asked in (True, False):  # is kept
        inputs = long_row(1000, 0, activation_offloading=is_asked)
        assert inputs.step.offload_activations is is_asked
