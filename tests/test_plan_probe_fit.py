"""sft_play.plan.probe_fit: the fit of a probe, the choice by it, and where its points are kept."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from plan_examples import PROBED_REQUEST, PROBED_STEP, fit_of, measured

from sft_play.plan import batch, counting, probe_fit
from sft_play.plan.memory import GIB, step_bytes
from sft_play.plan.probe_fit import LinearFit, MeasuredFit, ProbePoint
from sft_play.plan.step import Layout

MODES = [
    {},
    {"is_fast": False},
    {"mode": "qlora"},
    {"mode": "full", "weight_bytes": 4, "optim": "adamw_torch"},
    {"world_size": 2},
]


def layout_of(rows: int, layers: int, world_size: int = 1, tokens: int = 2048) -> Layout:
    """Return a layout that accumulates gradients."""
    return Layout(rows, 2, world_size, tokens, layers)


# The fit


@pytest.mark.parametrize("change", MODES, ids=str)
@pytest.mark.parametrize("layers", [0, 8, 32])
def test_a_right_closed_form_is_left_as_it_is_and_both_points_of_another_are_met_exactly(
    change, layers
):
    changes = dict(change)
    world_size = changes.pop("world_size", 1)
    step = replace(PROBED_STEP, **changes)
    fit = fit_of(step, layers, world_size)
    for rows, checkpointed in ((1, 0), (1, 32), (4, 0), (4, 7), (16, 32)):
        layout = layout_of(rows, checkpointed, world_size)
        closed = step_bytes(step, layout).totals()
        assert fit.phases(layout) == pytest.approx(closed, abs=2)  # bytes: rounding
    fit = fit_of(step, layers, world_size, lambda name, size: 1.3 * size + 7 * GIB)
    for point in (fit.small, fit.large):
        layout = layout_of(1, layers, world_size, point.tokens)
        found = fit.phases(layout)
        context = probe_fit.context_bytes(step, layout)
        sizes = {name: found[name] - context for name in point.phases}
        assert sizes == pytest.approx(dict(point.phases), abs=2)


@pytest.mark.parametrize("beyond, peak", [(-GIB, 40 * GIB), (3 * GIB, 43 * GIB)])
def test_a_step_that_was_tried_as_planned_has_the_bytes_that_it_took(beyond, peak):
    layout = layout_of(4, 0, world_size=2)
    step = replace(PROBED_STEP, zero_stage=3)
    context = probe_fit.context_bytes(step, layout)
    phases = {"forward": 30 * GIB - context, "backward": 40 * GIB - context}
    point = ProbePoint(layout.tokens, 0, True, phases)
    memory = probe_fit.memory_as_measured(step, layout, point, 40 * GIB + beyond)
    assert memory.predicted_peak == peak and memory.peak_phase == "backward"
    assert memory.totals()["forward"] == 30 * GIB
    closed = step_bytes(step, layout).totals()
    assert memory.totals()["save"] == closed["save"]


def test_activations_that_outgrow_gradients_are_told_by_the_forward_pass():
    """An 8B model trained in full on one H200, without accumulation.

    At 1,024 and 2,048 tokens the backward pass holds most when it ends, at 8,192 when it begins.
    """
    step = replace(PROBED_STEP, mode="full")
    # GiB of forward, backward and optimizer, without the context
    seen = {1024: (50.44, 59.90, 59.89), 2048: (54.73, 59.91, 59.89)}
    points = []
    for tokens, gib in seen.items():
        sizes = [round(size * GIB) for size in gib]
        phases = dict(zip(("forward", "backward", "optimizer"), sizes, strict=True))
        points.append(ProbePoint(tokens, 0, accumulates=False, phases=phases))
    layout = Layout(batch_size=4, grad_accum=1, world_size=1, max_seq_len=2048)
    found = MeasuredFit(step, *points).phases(layout)
    context = probe_fit.context_bytes(step, layout)
    assert (found["forward"] - context) / GIB == pytest.approx(80.45, rel=0.005)
    assert (found["backward"] - context) / GIB == pytest.approx(80.56, rel=0.01)


def test_a_steeper_line_is_as_much_steeper_with_other_layers_checkpointed():
    """Activations 1.5 times those of the closed form, in a model whose logits are no part of it."""
    step = replace(PROBED_STEP, model=replace(PROBED_STEP.model, vocab=64))

    def extra(layout):
        return step_bytes(step, layout).phases["forward"].activations // 2

    points = []
    for tokens in (1024, 2048):
        point = measured(step, tokens, 0)
        forward = point.phases["forward"] + extra(layout_of(1, 0, tokens=tokens))
        points.append(replace(point, phases={**point.phases, "forward": forward}))
    layout = layout_of(4, 24)
    found = MeasuredFit(step, *points).phases(layout)["forward"]
    expected = step_bytes(step, layout).phases["forward"].total + extra(layout)
    # the last hidden states, which are no activations here, are scaled with them
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("noise", [(0, 0), (5 * GIB, 0), (-2 * GIB, 1 * GIB)])
def test_more_rows_never_need_less_and_more_checkpointed_layers_never_more(noise):
    exact = fit_of()
    points = [
        replace(point, phases={name: size + extra for name, size in point.phases.items()})
        for point, extra in zip((exact.small, exact.large), noise, strict=True)
    ]
    fit = MeasuredFit(PROBED_STEP, *points)
    counts = (16, 8, 4, 1), (0, 8, 24, 32)
    by_rows = [
        [fit.phases(layout_of(rows, layers))["forward"] for rows in counts[0]]
        for layers in counts[1]
    ]
    for sizes in (*by_rows, *zip(*by_rows, strict=True)):
        assert list(sizes) == sorted(sizes, reverse=True)


def test_a_line_never_falls_and_two_points_of_as_many_tokens_say_nothing_of_slope():
    assert LinearFit.through((10, 20), (100, 150)) == LinearFit(50.0, 5.0)
    assert LinearFit.through((10, 20), (150, 100)) == LinearFit(100.0, 0.0)
    assert LinearFit.through((10, 10), (100, 100)) == LinearFit(100.0, 0.0)
    point = measured(PROBED_STEP, 2048, 0)
    layout = layout_of(4, 0)
    closed = step_bytes(PROBED_STEP, layout).predicted_peak
    assert MeasuredFit(PROBED_STEP, point, point).peak(layout) == pytest.approx(closed, abs=2)


def test_the_components_and_what_was_measured_beyond_them_sum_to_the_fit():
    fit = fit_of(change=lambda name, size: 1.2 * size)
    layout = layout_of(4, 0)
    memory = fit.memory(layout)
    closed = step_bytes(PROBED_STEP, layout)
    assert memory.totals() == fit.phases(layout)
    assert memory.predicted_peak == fit.peak(layout)
    for name, phase in memory.phases.items():
        assert replace(phase, measured_beyond=0) == closed.phases[name]
        components = phase.components()
        assert sum(components.values()) == phase.total
        assert ("measured_beyond" in components) == (phase.measured_beyond != 0)


# The choice by it


def test_a_batch_chosen_again_keeps_the_rows_of_a_step():
    request = replace(PROBED_REQUEST, effective_batch=30, is_effective_set=False, grad_accum=4)
    planned = request.layout(8, 0)
    assert planned.rows_per_step == 32  # the default of 30 gave way when it was planned
    again = probe_fit.request_of_started_run(request, planned)
    assert batch.smallest(again).rows_per_step == 32


@pytest.mark.parametrize("layers", [0, 32])
def test_a_backend_that_patched_all_layers_keeps_its_checkpointing(layers):
    request = replace(PROBED_REQUEST, recomputes_by_layer=False)
    again = probe_fit.request_of_started_run(request, request.layout(2, layers))
    assert again.gradient_checkpointing is (layers > 0)


def test_a_step_is_known_to_fit_when_one_at_least_as_large_was_measured_within_the_budget():
    layout = Layout(2, 16, 1, 2048, checkpointed_layers=8)
    context = probe_fit.context_bytes(PROBED_STEP, layout)
    point = ProbePoint(
        4096, 8, accumulates=True, phases={"forward": 10 * GIB, "backward": 12 * GIB}
    )

    def is_known(point, budget):
        return probe_fit.is_known_to_fit(PROBED_STEP, layout, [point], budget)

    assert is_known(point, 12 * GIB + context)
    assert not is_known(point, 12 * GIB + context - 1)
    for smaller in ({"tokens": 2048}, {"checkpointed_layers": 9}, {"accumulates": False}):
        assert not is_known(replace(point, **smaller), 99 * GIB)


# Points that are kept

FACTS: dict[str, Any] = {
    "step": asdict(PROBED_STEP),
    "max_seq_len": 2048,
    "tuning": {"mode": "lora"},
    "precision": "bf16",
    "packing": True,
    "deepspeed": None,
    "fast_parts": ["attention", "loss"],
    "gpus": [("NVIDIA H200", 150 * GIB)],
    "code": "0",
}


def test_every_fact_and_every_field_of_a_step_changes_the_fingerprint():
    fingerprint = counting.fingerprint(**FACTS)
    others = [{**FACTS, name: "another"} for name in FACTS]
    others += [{**FACTS, "step": {**FACTS["step"], name: "another"}} for name in FACTS["step"]]
    assert fingerprint not in {counting.fingerprint(**other) for other in others}
    assert counting.fingerprint(**dict(reversed(FACTS.items()))) == fingerprint


def test_points_are_read_as_they_were_written(tmp_path):
    points = (
        measured(PROBED_STEP, 1024, 0),
        measured(PROBED_STEP, 2048, 0),
        ProbePoint(8192, 3, accumulates=False, phases={"forward": 1, "backward": 2}),
    )
    folder = tmp_path / "probes"
    fingerprint = counting.fingerprint(**FACTS)
    probe_fit.write_points(folder, fingerprint, points)
    assert probe_fit.read_points(folder, fingerprint) == points
    other = counting.fingerprint(**{**FACTS, "code": "1"})
    assert probe_fit.read_points(folder, other) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"points": [{"tokens": 1}]}', "{}"])
def test_a_damaged_file_is_measured_anew_and_named(tmp_path, caplog, text):
    (tmp_path / "x.json").write_text(text)
    assert probe_fit.read_points(tmp_path, "x") == ()
    assert f"{tmp_path / 'x.json'}: cannot be read" in caplog.text


def test_the_digest_of_the_code_is_of_sources_that_are_there():
    for pattern in probe_fit.COMPUTING:
        assert list(counting.PACKAGE.parent.glob(pattern)), pattern
    assert len(probe_fit.digest_of_step()) == 64
