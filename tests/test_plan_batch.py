"""sft_play.plan.batch: the micro-batch, accumulation and checkpointing that fit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from plan_examples import REQUEST, asked

from sft_play.plan.batch import (
    HOST_MARGIN,
    SATURATED_TOKENS,
    choose_layout,
    merged_layout,
    smallest,
)
from sft_play.plan.step import Layout

LAYERS = REQUEST.layers
BUDGET_BYTES = 1000


def bytes_where_so_many_fit(rows: int, checkpointed_rows: int = 0) -> Callable[[Layout], float]:
    """Return a model of memory.

    `rows` fit without checkpointing, and `checkpointed_rows` with all layers checkpointed.
    """
    plain = BUDGET_BYTES / rows
    least = BUDGET_BYTES / (checkpointed_rows or rows)

    def peak_bytes(layout):
        share = layout.checkpointed_layers / LAYERS
        return layout.batch_size * (plain + (least - plain) * share)

    return peak_bytes


def choice(rows: int = 1000, checkpointed_rows: int = 0, **changes: Any) -> Layout | None:
    """Return what is chosen where so many rows fit."""
    request = asked(**changes)
    return choose_layout(request, bytes_where_so_many_fit(rows, checkpointed_rows), BUDGET_BYTES)


def numbers(layout: Layout) -> tuple[int, int, int, int]:
    """Return micro-batch, accumulation, checkpointed layers and effective batch."""
    return (layout.batch_size, layout.grad_accum, layout.checkpointed_layers, layout.rows_per_step)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_effective_batch_is_kept_exactly(world_size):
    for multiple, rows in product((1, 8, 31), (1, 3, 1000)):
        effective = multiple * world_size
        chosen = choice(
            rows, world_size=world_size, effective_batch=effective, is_effective_set=True
        )
        assert chosen.rows_per_step == effective
        assert chosen.batch_size * chosen.grad_accum * world_size == effective
        assert chosen.batch_size <= rows


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_default_effective_batch_is_rounded_up_to_what_the_ranks_can_make(world_size):
    chosen = choice(world_size=world_size)
    assert chosen.rows_per_step == -(-32 // world_size) * world_size
    assert chosen.batch_size * chosen.grad_accum * world_size == chosen.rows_per_step


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"batch_size": 5, "grad_accum": 3, "world_size": 2}, (5, 3, 0, 30)),
        ({"batch_size": 8, "world_size": 2}, (8, 2, 0, 32)),
        ({"batch_size": 5}, (5, 7, 0, 35)),
        ({"grad_accum": 4, "world_size": 2}, (4, 4, 0, 32)),
        ({"grad_accum": 64}, (1, 64, 0, 64)),
        ({"batch_size": 4, "gradient_checkpointing": True}, (4, 8, LAYERS, 32)),
        ({"batch_size": 4, "grad_accum": 8, "is_effective_set": True}, (4, 8, 0, 32)),
    ],
)
def test_explicit_values_survive_and_the_others_follow(changes, expected):
    assert numbers(choice(**changes)) == expected


@pytest.mark.parametrize(
    "rows, checkpointed, changes, expected",
    [
        (1000, 0, {}, (4, 0)),  # 8192 tokens saturate the device
        (1000, 0, {"max_seq_len": 512}, (16, 0)),
        (1000, 0, {"max_seq_len": 100_000}, (1, 0)),
        (2, 100, {}, (2, 0)),  # half of what saturates, and nothing computed twice
        # one row short of it: recomputing a layer costs less than half of the tokens at once
        (15, 100, {"max_seq_len": 256}, (16, 1)),
        (12, 100, {"max_seq_len": 512}, (8, 0)),
        # a sixteenth of it is slower than computing all twice
        (1, 100, {"max_seq_len": 512}, (16, 10)),
        (1, 100, {"gradient_checkpointing": False, "max_seq_len": 512}, (1, 0)),
        (1, 100, {"recomputes_by_layer": False, "max_seq_len": 512}, (16, 10)),
        (1000, 0, {"gradient_checkpointing": True}, (4, 10)),
        # 31 is prime: 1 or all
        (4, 100, {"effective_batch": 31, "is_effective_set": True}, (1, 0)),
        # the fullest packed step is two micro-batches that saturate
        (1000, 0, {"fullest_step": 8}, (4, 0)),
        # 4 rows would make three of 6,144 tokens, over 3 % slower than one of all
        (1000, 0, {"fullest_step": 9}, (8, 0)),
        (1000, 0, {"fullest_step": 7}, (4, 0)),  # two of 7,168 tokens are not
        # one micro-batch on each rank, whatever it may hold: the smallest that does
        (1000, 0, {"fullest_step": 9, "world_size": 4}, (4, 0)),
    ],
)
def test_the_fastest_step_that_fits_is_chosen(rows, checkpointed, changes, expected):
    chosen = choice(rows, checkpointed, **changes)
    assert (chosen.batch_size, chosen.checkpointed_layers) == expected


def test_a_batch_that_an_accumulation_calls_for_is_checkpointed_before_it_is_made_smaller():
    assert numbers(choice(7, 100, grad_accum=4)) == (8, 4, 2, 32)
    assert numbers(choice(2, 5, grad_accum=4)) == (5, 4, LAYERS, 20)
    without = choice(2, 5, grad_accum=4, gradient_checkpointing=False)
    assert numbers(without) == (2, 4, 0, 8)


def test_an_explicit_batch_that_does_not_fit_stands_with_checkpointing():
    assert numbers(choice(1, 2, batch_size=8)) == (8, 4, LAYERS, 32)
    without = choice(1, 2, batch_size=8, gradient_checkpointing=False)
    assert numbers(without) == (8, 4, 0, 32)


def test_nothing_is_chosen_where_nothing_fits():
    assert choice(0.9) is None
    # 7 rows would fit, and the effective batch is the user's
    assert choice(7, 7, grad_accum=4, is_effective_set=True) is None


def test_the_smallest_layout_has_one_row_and_every_layer_checkpointed():
    assert numbers(smallest(REQUEST)) == (1, 32, LAYERS, 32)
    unchecked = replace(REQUEST, gradient_checkpointing=False)
    assert numbers(smallest(unchecked)) == (1, 32, 0, 32)
    rows = replace(REQUEST, grad_accum=4, is_effective_set=True)
    assert numbers(smallest(rows)) == (8, 4, LAYERS, 32)


def test_layers_are_recomputed_where_a_micro_batch_costs_as_much_as_its_tokens():
    dense = choice(1, 8)
    mixture = choice(1, 8, overhead_tokens=2700)
    assert numbers(dense) == (1, 32, 0, 32)
    assert numbers(mixture) == (4, 8, 9, 32)


def test_a_slow_host_is_worth_recomputing_for():
    few_rows = {"rows": 1, "checkpointed_rows": 8}
    plain = choice(**few_rows)
    assert (plain.batch_size, plain.checkpointed_layers) == (1, 0)
    paced = choice(**few_rows, host_tokens=10 * plain.tokens)
    assert paced.batch_size == 8
    assert paced.rows_per_step == plain.rows_per_step


def test_a_micro_batch_is_as_large_as_keeps_the_gpu_busy():
    enough = choice()
    larger = choice(host_tokens=2 * enough.tokens / HOST_MARGIN)
    assert larger.tokens == 2 * enough.tokens
    largest = choice(host_tokens=1000 * enough.tokens)
    assert (largest.batch_size, largest.grad_accum) == (largest.rows_per_step, 1)


@pytest.mark.parametrize(
    "step_tokens, rows_that_fit, expected",
    [
        (12_600, 1000, (8, 4, 1)),  # 6,300 in each of two
        (2 * SATURATED_TOKENS, 1000, (4, 8, 2)),  # two have enough
        (12_600, 7, (4, 8, 2)),  # memory for no more
        (1_000, 1000, (8, 4, 1)),
    ],
)
def test_packed_micro_batches_have_enough_tokens_of_a_usual_step(
    step_tokens, rows_that_fit, expected
):
    request = asked(effective_batch=32, fullest_step=8, step_tokens=step_tokens)
    packed = Layout(4, 8, 1, 2048).packed(8)
    peak_bytes = bytes_where_so_many_fit(rows_that_fit)
    found = merged_layout(request, packed, peak_bytes, BUDGET_BYTES)
    assert (found.batch_size, found.grad_accum, found.micro_batches) == expected
    assert found.rows_per_step == packed.rows_per_step and found.fullest_step == 8
    assert choose_layout(request, peak_bytes, BUDGET_BYTES) == found, "a probe chooses the same"
    request = replace(request, step_tokens=None)
    assert merged_layout(request, packed, lambda _: 0, BUDGET_BYTES) == packed


def test_ranks_share_the_tokens_of_a_step():
    request = asked(effective_batch=32, world_size=4)
    packed = Layout(2, 4, 4, 2048).packed(16)  # 2 micro-batches of 2 sequences on each rank
    enough = 4 * 2 * SATURATED_TOKENS
    for tokens, micro_batches in ((enough, 2), (enough - 1, 1)):
        found = merged_layout(
            replace(request, step_tokens=tokens), packed, lambda _: 0, BUDGET_BYTES
        )
        assert found.micro_batches == micro_batches
