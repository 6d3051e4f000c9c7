"""What is told to somebody whose run does not fit: settings that make it fit, none of them idle, the dearest last."""

from pathlib import Path
from typing import Any

import pytest
from sft_play.plan.sizing import size
from test_plan import planned

from sft_play.plan import advice
from sft_play.plan.resolve import Plan, short_of_memory

GIB = 2**30


def asked(words: str, model: str, *settings: str, **options: Any) -> Plan:
    return planned(words, f"model.name={model}", *settings, config="configs/base.yaml", **options)


def replanned(plan: Plan, words: str, change: advice.Change, model: str, *settings: str) -> Plan:
    """The plan once its advice is followed: what is typed, typed."""
    environ = dict(word.split("=", 1) for word in change.words.split() if "=" in word)
    return asked(
        words, model, *settings, environ=environ, deepspeed="train-deepspeed" in change.words
    )


SHORT = [
    ("1x4090", "meta-llama/Llama-3.1-8B-Instruct", ("tuning.mode=full",)),
    ("1xT4", "meta-llama/Llama-3.1-8B-Instruct", ("tuning.mode=lora",)),
    ("4x4090", "Qwen/Qwen2.5-32B-Instruct", ("tuning.mode=lora",)),
    ("8xH200", "meta-llama/Llama-3.1-70B-Instruct", ("tuning.mode=full",)),
    ("2xH100", "meta-llama/Llama-3.1-8B-Instruct", ("tuning.mode=full",)),
    (
        "4xH200",
        "meta-llama/Llama-3.1-70B-Instruct",
        (
            "tuning.mode=qlora",
            "model.max_seq_len=4096",
            "train.batch_size=16",
            "train.grad_accum=2",
        ),
    ),
    (
        "1x4090",
        "meta-llama/Llama-3.1-8B-Instruct",
        ("tuning.mode=lora", "train.batch_size=4", "train.gradient_checkpointing=false"),
    ),
]


@pytest.mark.parametrize(("words", "model", "settings"), SHORT)
def test_whoever_types_what_is_advised_gets_a_run_that_fits(
    words: str, model: str, settings: tuple[str, ...]
) -> None:
    plan = asked(words, model, *settings)
    assert not plan.fits and plan.changes
    for change in plan.changes:
        kept = [
            setting
            for setting in settings
            if not any(_variable(setting) == word.split("=")[0] for word in change.words.split())
        ]
        after = replanned(plan, words, change, model, *kept)
        assert (
            after.fits
            and after.memory.predicted_peak == change.predicted_peak <= after.budget_bytes
        )
        if not change.costs:
            assert after.chosen.effective_batch == plan.chosen.effective_batch


def _variable(setting: str) -> str:
    section, _, key = setting.partition("=")[0].partition(".")
    return f"{section}_{key}".replace(".", "_").upper()


@pytest.mark.parametrize(("words", "model", "settings"), SHORT)
def test_no_advised_setting_could_be_left_out(
    words: str, model: str, settings: tuple[str, ...]
) -> None:
    plan = asked(words, model, *settings)
    sets = [frozenset(change.words.split()) for change in plan.changes]
    assert not any(one < other for one in sets for other in sets)
    assert sum(not change.costs for change in plan.changes) or all(
        change.costs for change in plan.changes
    )
    assert [bool(change.costs) for change in plan.changes] == sorted(
        bool(change.costs) for change in plan.changes
    )


def test_the_fastest_change_comes_first_among_those_that_train_the_same() -> None:
    for words, model, settings in SHORT:
        found = asked(words, model, *settings).changes
        for group in (
            [change for change in found if not change.costs],
            [change for change in found if change.costs],
        ):
            speeds = [change.relative_speed for change in group]
            assert None not in speeds and speeds == sorted(speeds, reverse=True)


def test_a_smaller_micro_batch_keeps_the_effective_batch_and_is_named_in_numbers() -> None:
    plan = asked("4xH200", "meta-llama/Llama-3.1-70B-Instruct", *SHORT[5][2])
    assert (plan.chosen.effective_batch, plan.fits) == (16 * 4 * 2, False)
    best = plan.changes[0]
    rows, micro_batches = (int(word.split("=")[1]) for word in best.words.split())
    assert (rows * micro_batches, best.costs) == (16 * 2, "")


def test_zero_is_advised_on_the_gpus_that_are_there_and_on_those_that_idle() -> None:
    model = "Qwen/Qwen2.5-32B-Instruct"
    idle = asked("4x4090", model, "tuning.mode=lora", distributed=False)
    assert idle.ranks.world_size == 1
    assert any(
        "make train-deepspeed NUM_GPUS=4 DEEPSPEED_CONFIG=configs/deepspeed_zero3.json"
        in change.words
        for change in idle.changes
    )
    assert not any(
        "deepspeed" in change.words for change in asked("1x4090", model, "tuning.mode=lora").changes
    )


def test_the_zero_that_is_advised_offloads_nothing(tmp_path: Path) -> None:
    """The JSON that ships does not, whatever the one that is used does."""
    used = tmp_path / "offload.json"
    used.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    words, model, settings = (
        "4x4090",
        "Qwen/Qwen2.5-32B-Instruct",
        ("tuning.mode=lora", "train.batch_size=2"),
    )
    plan = asked(words, model, *settings, environ={"DEEPSPEED_CONFIG": str(used)}, deepspeed=True)
    advised = [change for change in plan.changes if "train-deepspeed" in change.words]
    assert plan.setup.offload and advised
    for change in advised:
        kept = [
            setting
            for setting in settings
            if not any(_variable(setting) == word.split("=")[0] for word in change.words.split())
        ]
        assert (
            replanned(plan, words, change, model, *kept).memory.predicted_peak
            == change.predicted_peak
        )


def test_a_run_that_nothing_makes_fit_says_so() -> None:
    plan = asked("1x4GiB", "meta-llama/Llama-3.1-70B-Instruct", "tuning.mode=qlora")
    assert plan.changes == ()
    assert str(short_of_memory(plan)).endswith("try a smaller model, or a GPU with more memory")


def test_the_error_names_three_ways_and_where_more_are() -> None:
    plan = asked("1xH200", "meta-llama/Llama-3.1-8B-Instruct", "tuning.mode=full")
    text = str(short_of_memory(plan))
    assert text.startswith(plan.shortage) and all(
        change.words in text for change in plan.changes[:3]
    )
    assert ("make plan lists more" in text) == (len(plan.changes) > 3)


@pytest.mark.parametrize("words", ["2x4090", "1xH200", "8xA100-80"])
def test_what_fits_needs_no_advice(words: str) -> None:
    plan = asked(words, "Qwen/Qwen2.5-7B-Instruct", "tuning.mode=qlora")
    assert plan.fits and plan.changes == () and size(plan.setup).fits
