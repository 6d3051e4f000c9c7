"""How many GPUs share each row: as few as a step needs, and what says so where it does not fit."""

import pytest
from plan_examples import plan_for
from test_plan_inputs import inputs_of, planned

from sft_play.plan.advice import _context_options

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B-Instruct"
LORA = ("tuning.mode=lora", "train.predict_with_generate=false")


def long_plan(gpus: str, tokens: int, *settings: str):
    row = (LLAMA_8B, f"model.max_seq_len={tokens}", *LORA, *settings)
    return plan_for(gpus, *row, config="configs/base.yaml").plan


@pytest.mark.parametrize(
    "gpus, tokens, shared",
    [
        ("2xH200", 131_072, 1),
        ("2xH200", 1_048_576, 2),
        ("4xH100", 1_048_576, 4),
        ("2xH200", 8192, 1),
    ],
)
def test_rows_are_shared_by_as_few_gpus_as_a_step_needs(gpus, tokens, shared):
    plan = long_plan(gpus, tokens)
    assert plan.fits and plan.layout.context_parallel == shared
    assert plan.layout.replicas * shared == plan.ranks.world_size
    assert plan.layout.rows_per_step == 32


def test_one_row_a_step_is_shared_by_all_gpus():
    plan = long_plan("4xH200", 131_072, "train.effective_batch_size=1")
    assert (plan.layout.context_parallel, plan.layout.rows_per_step) == (4, 1)


def test_two_gpus_that_share_a_row_have_half_of_its_bytes_and_seconds():
    settings = ("train.effective_batch_size=4", "train.gradient_checkpointing=true")
    one = long_plan("1xH200", 131_072, *settings)
    two = long_plan("2xH200", 131_072, "train.context_parallel=2", *settings)
    of_one, of_two = (plan.memory.phases["backward"].activations for plan in (one, two))
    assert 0.45 * of_one < of_two < 0.6 * of_one
    assert 1.8 < two.speed.tokens_per_second / one.speed.tokens_per_second < 2


def test_a_row_that_fits_on_no_gpu_here_is_answered_with_how_many_it_needs():
    plan = long_plan("1xH200", 1_048_576, "train.effective_batch_size=1")
    assert not plan.fits
    change = next(each for each in plan.changes if "CONTEXT_PARALLEL" in each.words)
    assert "NUM_GPUS=2 TRAIN_CONTEXT_PARALLEL=2" in change.words and change.costs == "2 GPUs"
    assert 1.8 < change.relative_speed < 2
    after = long_plan("2xH200", 1_048_576, "train.effective_batch_size=1")
    assert after.fits and after.memory.predicted_peak == change.predicted_peak


def test_what_is_combined_with_sharing_is_kept():
    inputs = inputs_of(130, 1024, effective_batch_size=1, context_parallel=1)
    inputs = inputs.changed({"model.max_seq_len": 524_288}).changed({"tuning.mode": "lora"})
    (sharing,) = _context_options(inputs)
    step = planned(sharing.applied(inputs.changed({"tuning.mode": "qlora"}))).step
    assert (step.mode, step.context_parallel) == ("qlora", 2)
