"""sft_play.plan.step: micro-batches of a step, packed and not."""

import doctest
from itertools import product

import pytest
from plan_examples import asked

from sft_play.plan import step as step_module
from sft_play.plan.batch import choose_layout, smallest
from sft_play.plan.step import Layout

# batch size, accumulation and ranks of a step
CUTS = list(product((1, 2, 3, 8), (1, 4, 5), (1, 2, 7)))


def test_the_examples_in_the_docstring_hold():
    result = doctest.testmod(step_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "batch_size, world_size, fullest_step, micro_batches, sequences",
    [
        (1, 1, 4, 4, 1),
        (2, 1, 4, 2, 2),
        (4, 1, 9, 3, 3),
        (8, 1, 9, 2, 5),
        (32, 1, 9, 1, 9),
        (4, 2, 9, 2, 3),
        (4, 8, 9, 1, 2),
        (4, 16, 9, 1, 1),
    ],
)
def test_packed_micro_batches_are_as_few_as_suffice_and_then_no_larger(
    batch_size, world_size, fullest_step, micro_batches, sequences
):
    grad_accum = 64 // (batch_size * world_size)
    packed = Layout(batch_size, grad_accum, world_size, max_seq_len=10).packed(fullest_step)
    assert (packed.micro_batches, packed.sequences) == (micro_batches, sequences)


@pytest.mark.parametrize("batch_size, grad_accum, world_size", CUTS)
def test_a_packed_step_holds_the_fullest_in_no_more_than_it_needs(
    batch_size, grad_accum, world_size
):
    unpacked = Layout(batch_size, grad_accum, world_size, max_seq_len=64)
    for fullest_step in range(1, unpacked.rows_per_step + 1):
        packed = unpacked.packed(fullest_step)
        at_once = packed.sequences * world_size
        assert packed.micro_batches * at_once >= fullest_step
        assert (packed.micro_batches - 1) * batch_size * world_size < fullest_step
        assert packed.micro_batches * (at_once - world_size) < fullest_step
        assert packed.sequences <= batch_size
        assert packed.micro_batches <= grad_accum
        assert packed.rows_per_step == unpacked.rows_per_step
        assert packed.unpacked() == unpacked


def test_gradients_accumulate_over_packed_micro_batches_not_over_rows():
    layout = Layout(batch_size=4, grad_accum=8, world_size=1, max_seq_len=64)
    assert layout.packed(5).accumulates
    assert not layout.packed(4).accumulates


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("fullest_step", [None, 1, 5, 12, 100])
@pytest.mark.parametrize("rows_that_fit", [1, 3, 1000])
@pytest.mark.parametrize("explicit", [{}, {"batch_size": 3}, {"grad_accum": 4}], ids=str)
def test_every_layout_of_a_request_keeps_the_rows_of_a_step(
    explicit, rows_that_fit, fullest_step, world_size
):
    request = asked(
        effective_batch=288,
        is_effective_set=True,
        world_size=world_size,
        fullest_step=fullest_step,
        **explicit,
    )
    budget = rows_that_fit * request.row.max_seq_len
    for layout in (choose_layout(request, lambda layout: layout.tokens, budget), smallest(request)):
        if layout is not None:
            assert layout.rows_per_step == 288
            assert layout.fullest_step == fullest_step
