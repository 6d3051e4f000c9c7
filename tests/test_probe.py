"""The fit of a probe, the choice by it, and where it is remembered."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from sft_play.plan.sizing import Choice

from sft_play.errors import OutOfMemory
from sft_play.plan import batch, memory, probe_fit
from sft_play.plan.batch import Wanted
from sft_play.plan.memory import StepShape
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.probe_fit import Fit, Line, Point, Subject

GIB = 2**30
SHAPE = ModelShape(
    vocab=128256,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    is_tied=False,
    model_type="llama",
)
WANTED = Wanted(
    "auto",
    "auto",
    effective_batch=32,
    is_effective_set=True,
    gradient_checkpointing="auto",
    seq_len=2048,
    world_size=1,
    layers=32,
)
STEP = StepShape(
    mode="lora",
    batch_size=1,
    seq_len=2048,
    compute_bytes=2,
    weight_bytes=2,
    lora_rank=16,
    lora_targets="all-linear",
    optim="adamw_torch_fused",
    double_quant=True,
    checkpointed_layers=0,
    is_fast=True,
    world_size=1,
    zero_stage=0,
    offload=False,
    is_gpu=True,
)
CHOICE = Choice(WANTED, STEP, SHAPE)
MODES = [
    {},
    {"is_fast": False},
    {"mode": "qlora"},
    {"mode": "full", "weight_bytes": 4, "optim": "adamw_torch"},
    {"world_size": 2},
]


def measured(
    choice: Choice,
    tokens: int,
    layers: int,
    change: Callable[[str, int], float] = lambda name, total: total,
) -> Point:
    """The point that a device would give whose phases are the closed form's, changed."""
    step = replace(choice.step, seq_len=tokens, checkpointed_layers=layers)
    phases = memory.step_bytes(choice.shape, step).phases
    found = {
        name: round(change(name, phases[name].total)) - phases[name].context
        for name in ("forward", "backward", "optimizer")
    }
    return Point(tokens, layers, accumulates=True, phases=found)


def fit_of(
    choice: Choice, layers: int = 0, change: Callable[[str, int], float] = lambda name, total: total
) -> Fit:
    return Fit(
        choice, measured(choice, 1024, layers, change), measured(choice, 2048, layers, change)
    )


@pytest.mark.parametrize("change", MODES, ids=str)
@pytest.mark.parametrize("layers", [0, 8, 32])
def test_a_closed_form_that_is_right_is_left_as_it_is(change: dict[str, Any], layers: int) -> None:
    choice = Choice(WANTED, replace(STEP, **change), SHAPE)
    fit = fit_of(choice, layers)
    for rows, checkpointed in ((1, 0), (1, 32), (4, 0), (4, 7), (16, 32)):
        closed = {
            name: phase.total for name, phase in choice.bytes_of(rows, checkpointed).phases.items()
        }
        assert fit.phases(rows, checkpointed) == pytest.approx(closed, abs=2)  # bytes: rounding


def test_activations_that_outgrow_gradients_are_told_by_the_forward_pass() -> None:
    """An 8B model trained in full on one H200, without accumulation: at 1,024 and 2,048 tokens the backward pass ends fullest, at 8,192 it begins so."""
    choice = Choice(
        replace(WANTED, effective_batch=4), replace(STEP, mode="full", accumulates=False), SHAPE
    )
    seen = {1024: (50.44, 59.90, 59.89), 2048: (54.73, 59.91, 59.89)}  # GiB, without the context
    points = [
        Point(
            tokens,
            0,
            False,
            dict(
                zip(
                    ("forward", "backward", "optimizer"),
                    (round(size * GIB) for size in sizes),
                    strict=True,
                )
            ),
        )
        for tokens, sizes in seen.items()
    ]
    found = Fit(choice, *points).phases(4, 0)
    context = probe_fit.context_bytes(choice)
    assert (found["forward"] - context) / GIB == pytest.approx(80.45, rel=0.005)
    assert (found["backward"] - context) / GIB == pytest.approx(80.56, rel=0.01)


@pytest.mark.parametrize("change", MODES, ids=str)
@pytest.mark.parametrize("layers", [0, 8, 32])
def test_both_points_are_met_exactly(change: dict[str, Any], layers: int) -> None:
    choice = Choice(WANTED, replace(STEP, **change), SHAPE)
    fit = fit_of(choice, layers, lambda name, total: 1.3 * total + 7 * GIB)
    for point in (fit.small, fit.large):
        rows_of = replace(
            choice,
            step=replace(choice.step, seq_len=point.tokens),
            wanted=replace(WANTED, seq_len=point.tokens),
        )
        found = Fit(rows_of, fit.small, fit.large).phases(1, layers)
        assert {
            name: found[name] - probe_fit.context_bytes(choice) for name in point.phases
        } == pytest.approx(dict(point.phases), abs=2)


def test_what_is_measured_beyond_the_closed_form_at_zero_tokens_is_added_to_every_step() -> None:
    fit = fit_of(CHOICE, 0, lambda name, total: total + 3 * GIB)
    for rows, layers in ((2, 0), (8, 16)):
        closed, found = CHOICE.bytes_of(rows, layers).phases, fit.phases(rows, layers)
        assert {name: found[name] - closed[name].total for name in closed} == pytest.approx(
            {
                **dict.fromkeys(("forward", "backward", "optimizer"), 3 * GIB),
                **dict.fromkeys(("load", "evaluation", "save"), 0),
            },
            abs=2,
        )


def test_a_steeper_line_is_as_much_steeper_with_other_layers_checkpointed() -> None:
    """Activations 1.5 times those of the closed form, in a model whose logits are no part of it."""
    small_words = replace(SHAPE, vocab=64)
    choice = Choice(WANTED, STEP, small_words)

    def activations(tokens: int, layers: int) -> int:
        return (
            memory.step_bytes(
                small_words, replace(STEP, seq_len=tokens, checkpointed_layers=layers)
            )
            .phases["forward"]
            .activations
        )

    def point(tokens: int) -> Point:
        plain = measured(choice, tokens, 0)
        return replace(
            plain,
            phases={
                **plain.phases,
                "forward": plain.phases["forward"] + activations(tokens, 0) // 2,
            },
        )

    found = Fit(choice, point(1024), point(2048)).phases(4, 24)["forward"]
    expected = choice.bytes_of(4, 24).phases["forward"].total + activations(4 * 2048, 24) // 2
    assert found == pytest.approx(
        expected, rel=5e-3
    )  # the last hidden states, which are no activations here, are scaled with them


@pytest.mark.parametrize("noise", [(0, 0), (5 * GIB, 0), (-2 * GIB, 1 * GIB)])
def test_more_rows_never_need_less_and_more_checkpointed_layers_never_more(
    noise: tuple[int, int],
) -> None:
    fit = fit_of(CHOICE)
    noisy = zip((fit.small, fit.large), noise, strict=True)
    points = (
        replace(point, phases={name: peak + extra for name, peak in point.phases.items()})
        for point, extra in noisy
    )
    fit = Fit(CHOICE, *points)
    by_rows = [
        [fit.phases(rows, layers)["forward"] for rows in (1, 2, 4, 8, 16)] for layers in (0, 16, 32)
    ]
    assert all(sizes == sorted(sizes) for sizes in by_rows)
    by_layers = [
        [fit.phases(rows, layers)["forward"] for layers in (32, 24, 8, 0)] for rows in (1, 4, 16)
    ]
    assert all(sizes == sorted(sizes) for sizes in by_layers)


def test_a_line_never_falls_and_two_points_of_as_many_tokens_say_nothing_of_slope() -> None:
    assert Line.through((10, 100), (20, 150)) == Line(50.0, 5.0)
    assert Line.through((10, 150), (20, 100)) == Line(100.0, 0.0)
    assert Line.through((10, 100), (10, 100)) == Line(100.0, 0.0)
    fit = Fit(CHOICE, measured(CHOICE, 2048, 0), measured(CHOICE, 2048, 0))
    assert fit.peak(4, 0) == pytest.approx(CHOICE.bytes_of(4, 0).predicted_peak, abs=2)


def test_the_choice_by_a_fit_is_the_choice_by_its_peaks() -> None:
    """Where a step takes half as much again as the closed form says, a budget gives what one a third smaller gave."""
    budget = 60 * GIB
    planned = batch.choose(
        WANTED, lambda rows, layers: CHOICE.bytes_of(rows, layers).predicted_peak, budget, "a GPU"
    )
    fit = fit_of(CHOICE, 0, lambda name, total: 1.5 * total)
    chosen = batch.choose(WANTED, fit.peak, budget, "a GPU")
    assert (
        fit.peak(chosen.batch_size, chosen.checkpointed_layers)
        <= budget
        < fit.peak(planned.batch_size, planned.checkpointed_layers)
    )
    assert chosen.effective_batch == planned.effective_batch == 32


def test_a_batch_chosen_again_keeps_the_rows_of_a_step() -> None:
    given_way = replace(
        WANTED, effective_batch=30, is_effective_set=False, grad_accum=4
    )  # became 32 when it was planned
    again = probe_fit.to_choose_again(replace(CHOICE, wanted=given_way), 32, 0).wanted
    assert batch.smallest(again).effective_batch == 32
    unsloth = replace(CHOICE, wanted=replace(WANTED, is_by_layer=False))
    assert [
        probe_fit.to_choose_again(unsloth, 32, layers).wanted.gradient_checkpointing
        for layers in (0, 32)
    ] == [False, True]


def test_a_step_is_known_to_fit_when_one_at_least_as_large_was_measured_within_the_budget() -> None:
    chosen, context = batch.Chosen(2, 16, 8, 32, 32), probe_fit.context_bytes(CHOICE)
    point = Point(4096, 8, accumulates=True, phases={"forward": 10 * GIB, "backward": 12 * GIB})
    assert probe_fit.is_known_to_fit(chosen, CHOICE, [point], 12 * GIB + context)
    assert not probe_fit.is_known_to_fit(chosen, CHOICE, [point], 12 * GIB + context - 1)
    for smaller in ({"tokens": 2048}, {"checkpointed_layers": 9}, {"accumulates": False}):
        assert not probe_fit.is_known_to_fit(chosen, CHOICE, [replace(point, **smaller)], 99 * GIB)


def test_no_room_names_a_batch_that_fits_with_as_many_rows_a_step() -> None:
    fit = fit_of(Choice(replace(WANTED, batch_size=16, gradient_checkpointing=False), STEP, SHAPE))
    error = probe_fit.no_room(fit, batch.Chosen(16, 2, 0, 32, 32), 60 * GIB, 60 * GIB, "a GPU")
    assert isinstance(error, OutOfMemory)
    assert str(error).startswith("train.batch_size=16 does not fit: a step takes about 1") and str(
        error
    ).endswith("; try TRAIN_BATCH_SIZE=4 TRAIN_GRAD_ACCUM=8")
    least = probe_fit.no_room(fit, batch.Chosen(1, 32, 32, 32, 32), 10 * GIB, 12 * GIB, "a GPU")
    assert "a GPU has 12.0 GiB; try TUNING_MODE=qlora" in str(least)


def test_the_sums_of_the_phases_are_the_fitted_ones() -> None:
    closed = CHOICE.bytes_of(4, 0)
    fitted = {
        name: phase.total + 5 * number for number, (name, phase) in enumerate(closed.phases.items())
    }
    for name, parts in probe_fit.phases_json(fitted, closed).items():
        assert (
            parts["total"]
            == fitted[name]
            == sum(value for part, value in parts.items() if part != "total")
        )


# Memory of probes

SUBJECT = Subject(
    shape=SHAPE,
    step=STEP,
    tuning={"mode": "lora"},
    model={"name": "base"},
    precision="bf16",
    packing=True,
    strategy="ddp",
    deepspeed=None,
    ddp={"ddp_bucket_cap_mb": None},
    fast_parts=("attention", "loss"),
    gpus=(("NVIDIA H200", 150 * GIB),),
    versions={"torch": "2.11.0"},
    code="0",
)
OTHERS: dict[str, Any] = {
    "shape": replace(SHAPE, layers=16),
    "step": replace(STEP, lora_rank=8),
    "tuning": {"mode": "qlora"},
    "model": {"name": "other"},
    "precision": "fp16",
    "packing": False,
    "strategy": "single",
    "deepspeed": {"train_batch_size": 4},
    "ddp": {"ddp_bucket_cap_mb": 5},
    "fast_parts": ("loss",),
    "gpus": (("NVIDIA H100", 80 * GIB),),
    "versions": {"torch": "2.12.0"},
    "code": "1",
}


@pytest.mark.parametrize("name", [field.name for field in fields(Subject)])
def test_whatever_a_step_follows_from_changes_the_fingerprint(name: str) -> None:
    assert (
        replace(SUBJECT, **{name: OTHERS[name]}).fingerprint()
        != SUBJECT.fingerprint()
        == replace(SUBJECT).fingerprint()
    )


@pytest.mark.parametrize(
    "name",
    [
        field.name
        for field in fields(StepShape)
        if field.name not in ("lora_targets", "mode", "optim")
    ],
)
def test_every_number_of_a_step_is_in_the_fingerprint(name: str) -> None:
    changed = replace(STEP, **{name: (getattr(STEP, name) or 0) + 1})
    assert replace(SUBJECT, step=changed).fingerprint() != SUBJECT.fingerprint()


def test_points_are_remembered_as_they_were(tmp_path: Path) -> None:
    points = (
        measured(CHOICE, 1024, 0),
        measured(CHOICE, 2048, 0),
        Point(8192, 3, accumulates=False, phases={"forward": 1, "backward": 2}),
    )
    probe_fit.remember(tmp_path / "probes", SUBJECT.fingerprint(), points)
    assert probe_fit.remembered(tmp_path / "probes", SUBJECT.fingerprint()) == points
    assert probe_fit.remembered(tmp_path / "probes", replace(SUBJECT, code="1").fingerprint()) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"points": [{"tokens": 1}]}', "{}"])
def test_a_damaged_file_is_measured_anew_and_named(tmp_path: Path, caplog, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert probe_fit.remembered(tmp_path, "x") == ()
    assert f"{tmp_path / 'x.json'}: cannot be read" in caplog.text


def test_a_choice_survives_plan_json() -> None:
    assert Choice.from_json(json.loads(json.dumps(CHOICE.as_json()))) == CHOICE
    assert asdict(CHOICE) == CHOICE.as_json()


def test_the_digest_of_the_code_is_of_sources_that_are_there() -> None:
    assert (
        all(list(probe_fit.PACKAGE.glob(pattern)) for pattern in probe_fit.COMPUTING)
        and len(probe_fit.digest_of_code()) == 64
    )
