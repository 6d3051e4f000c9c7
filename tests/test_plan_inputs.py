"""sft_play.plan.inputs: what a plan is made from, and why a step does not fit."""

from dataclasses import replace
from typing import Any

import pytest
from plan_examples import CPU, EIGHT_B, load_shape, plan_for

from sft_play.config.invocation import Invocation
from sft_play.config.schema import Config
from sft_play.plan.activations import offloaded_bytes
from sft_play.plan.batch import smallest
from sft_play.plan.candidates import plan_step
from sft_play.plan.cards import parse_hardware
from sft_play.plan.inputs import Draft, PlanInputs, draft_of, rank_step
from sft_play.plan.memory import GIB, step_bytes
from sft_play.plan.ranks import Machine, plan_ranks
from sft_play.plan.warnings import shortage

ROW_TOKENS = 2048


def inputs_of(budget_gib: float, host_gib: float = 0, **train: Any) -> PlanInputs:
    """Return the inputs of an 8B Llama with LoRA on one GPU."""
    train = {"weight_offloading": False, **train}
    ranks = plan_ranks(
        Invocation(), parse_hardware("1xH200"), {}, distributed=False, use_deepspeed=False
    )
    return PlanInputs(
        config=Config.model_validate({"model": {"max_seq_len": ROW_TOKENS}, "train": train}),
        is_effective_set="effective_batch_size" in train,
        machine=Machine(
            ranks=ranks,
            precision="bf16",
            budget_bytes=int(budget_gib * GIB),
            gpu_names=("NVIDIA H200",),
            gpu_count=1,
            host_budget_bytes=int(host_gib * GIB),
        ),
        model=EIGHT_B,
    )


def planned(inputs: PlanInputs) -> Draft:
    return plan_step(inputs, rank_step(inputs))


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
    draft = planned(inputs_of(2, **train))
    assert draft.layout == smallest(draft.request)
    needed = f"{step_bytes(draft.step, draft.layout).predicted_peak / GIB:.2f} GiB"
    for part in (words, needed, "2.00 GiB"):
        assert part in shortage(draft)


def test_a_step_that_takes_the_whole_budget_fits():
    draft = planned(inputs_of(100))
    assert draft.peak_bytes == step_bytes(draft.step, draft.layout).predicted_peak
    for budget, fits in ((draft.peak_bytes, True), (draft.peak_bytes - 1, False)):
        machine = replace(draft.inputs.machine, budget_bytes=budget)
        tight = replace(draft, inputs=replace(draft.inputs, machine=machine))
        assert (shortage(tight) is None) == tight.fits == fits


def test_the_request_says_what_the_config_says():
    request = planned(inputs_of(2, batch_size=2, gradient_checkpointing=False)).request
    assert (request.batch_size, request.grad_accum) == (2, "auto")
    assert (request.row.max_seq_len, request.layers) == (ROW_TOKENS, 32)
    assert request.gradient_checkpointing is False
    assert not request.is_effective_set
    assert request.recomputes_by_layer


def test_a_backend_that_patches_all_layers_is_asked_for_all_or_none():
    unsloth = inputs_of(2).changed({"tuning.backend": "unsloth"})
    assert not planned(unsloth).request.recomputes_by_layer


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
    run = plan_for(gpus, *settings)
    parameters = load_shape(run.config.model.name, None, {}).parameters
    assert run.plan.memory.phases["load"].weights == weight_bytes * parameters


def long_row(budget_gib: float, host_gib: float, **train: Any) -> Draft:
    """Return the plan of rows of 65,536 tokens."""
    return planned(inputs_of(budget_gib, host_gib, **train).changed({"model.max_seq_len": 65_536}))


def gib_without_offloading() -> float:
    """Return what a row of 65,536 tokens needs with all layers checkpointed."""
    draft = long_row(1000, 64, activation_offloading=False, gradient_checkpointing=True)
    step = replace(draft.step, keeps_attention=False)
    return draft_of(draft.inputs, step).peak_bytes / GIB


def test_activations_are_offloaded_where_a_row_does_not_fit_otherwise():
    assert not long_row(1000, host_gib=64).step.offload_activations
    tight = long_row(gib_without_offloading() - 4, host_gib=64)
    assert tight.step.offload_activations and tight.fits
    layers = tight.layout.checkpointed_layers
    assert offloaded_bytes(tight.step, tight.layout) == layers * 65_536 * 4096 * 2
    some = long_row(gib_without_offloading() - 4, host_gib=12)  # of the 16 GiB of all layers
    assert some.fits and some.step.offloaded(32) == some.step.host_layers == 24


def test_activations_are_not_offloaded_where_that_does_not_help():
    tight = gib_without_offloading() - 4
    on_a_small_host = long_row(tight, host_gib=1)
    far_too_long = long_row(20, host_gib=64)
    unchecked = long_row(tight, host_gib=64, gradient_checkpointing=False)
    for draft in (on_a_small_host, far_too_long, unchecked):
        assert not draft.step.offload_activations
    for is_asked in (True, False):  # is kept
        draft = long_row(1000, 0, activation_offloading=is_asked)
        assert draft.step.offload_activations is is_asked
