"""sft_play.plan.batch: the longest row is the longest that the plan of bytes lets through."""

from dataclasses import replace
from typing import Any

import pytest
from plan_examples import STEP, asked

from sft_play.plan.batch import STEP_TOKENS, LongestRow, LongestRows, longest_rows
from sft_play.plan.memory import GIB, step_bytes
from sft_play.plan.step import Layout

FUSED = replace(STEP, mode="lora", is_fast=True, fuses_loss=True, is_gpu=True)
H200 = int(0.92 * 139.8 * GIB)


def rows(step: Any = FUSED, budget_bytes: int = H200, **changes: Any) -> LongestRows:
    request = asked(effective_batch=8, layers=step.model.layers, **changes)
    return longest_rows(step, request, budget_bytes)


def peak(tokens: int, offloads: bool, checkpointed_layers: int = 32) -> int:
    step = replace(FUSED, offload_activations=offloads)
    return step_bytes(step, Layout(1, 2, 1, tokens, checkpointed_layers)).predicted_peak


def test_the_longest_row_fits_and_a_longer_one_does_not():
    found = rows()
    for row, offloads in ((found.kept, False), (found.offloaded, True)):
        assert peak(row.tokens, offloads) <= H200 < peak(row.tokens + STEP_TOKENS, offloads)


def test_an_8b_model_on_an_h200_trains_256k_tokens_and_512k_offloaded():
    found = rows()
    assert 262_144 <= found.kept.tokens < 524_288 <= found.offloaded.tokens
    assert found.kept.host_bytes == 0
    assert found.offloaded.host_bytes >= 32 * found.offloaded.tokens * 4096 * 2


@pytest.mark.parametrize(
    "changes", [{"recomputes_by_layer": False}, {"gradient_checkpointing": False}]
)
def test_where_nothing_can_be_offloaded_no_such_row_is_named(changes):
    assert rows(**changes).offloaded is None
    assert rows(replace(FUSED, is_gpu=False)).offloaded is None


def test_where_the_weights_do_not_fit_no_row_does():
    assert rows(budget_bytes=GIB) == LongestRows(LongestRow(0), None)
