"""sft_play.plan.next_command: what to type to start a plan, and where memory lacks."""

from dataclasses import replace

import pytest
from plan_examples import CPU, PROBED_REQUEST, fit_of, plan_for

from sft_play.commands import call as calls
from sft_play.commands import plan as planning
from sft_play.commands import train as training
from sft_play.config import invocation
from sft_play.errors import OutOfMemory
from sft_play.plan import next_command
from sft_play.plan.memory import GIB

LLAMA_8B = "model.name=meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "model.name=meta-llama/Llama-3.1-70B-Instruct"


@pytest.mark.parametrize(
    "environ, overrides, words",
    [
        ({}, (), ["make", "train"]),
        (
            {"GPUS": "2xH200", "CONFIG": "small"},
            (),
            ["make", "train-distributed", "CONFIG=small", "NUM_GPUS=2"],
        ),
        (
            {"TRAIN_BATCH_SIZE": "2"},
            ("tuning.lora.r=8",),
            ["make", "train", "TRAIN_BATCH_SIZE=2", "TUNING_LORA_R=8"],
        ),
        (
            {"DATA_SYSTEM_PROMPT": "be brief; rm x"},
            (),
            ["make", "train", "DATA_SYSTEM_PROMPT='be brief; rm x'"],
        ),
        ({"HOME": "/x", "PATH": "/bin"}, ("train.epochs=2",), ["make", "train", "TRAIN_EPOCHS=2"]),
    ],
)
def test_what_to_type_repeats_what_was_asked(environ, overrides, words):
    call = calls.Call(invocation.read_invocation(environ), environ, overrides)
    plan = plan_for(environ.get("GPUS", CPU)).plan
    assert next_command.start_command(plan, planning.given_variables(call)) == words


def test_a_batch_of_the_users_that_may_not_fit_is_a_warning_and_one_of_ours_an_error(capsys):
    settings = (LLAMA_8B, "tuning.mode=qlora")
    training.refuse_what_does_not_fit(plan_for("1x24GiB", *settings).plan)
    assert capsys.readouterr().out == ""
    on_gpu = "train.activation_offloading=false"
    explicit = plan_for("1x24GiB", *settings, on_gpu, "train.batch_size=32")
    training.refuse_what_does_not_fit(explicit.plan)
    printed = capsys.readouterr().out
    assert printed.startswith("warning: train.batch_size=32 ") and "TRAIN_BATCH_SIZE=" in printed
    with pytest.raises(OutOfMemory, match=r"^train.batch_size=auto: .* 2048 tokens"):
        training.refuse_what_does_not_fit(plan_for("1x4GiB", *settings).plan)


def test_the_error_names_three_changes_and_where_more_are():
    plan = plan_for("1xH200", LLAMA_8B, "tuning.mode=full").plan
    message = str(next_command.does_not_fit(plan))
    assert message.startswith(plan.shortage)
    for change in plan.changes[:3]:
        assert change.words in message
    assert ("make plan" in message) == (len(plan.changes) > 3)
    nothing = plan_for("1x4GiB", LLAMA_70B, "tuning.mode=qlora").plan
    assert nothing.changes == () and str(next_command.does_not_fit(nothing))


def test_a_probe_that_lacks_memory_names_a_batch_that_fits_with_as_many_rows_a_step():
    request = replace(PROBED_REQUEST, batch_size=16, gradient_checkpointing=False)
    layout = request.layout(16, 0)
    error = next_command.probe_does_not_fit(fit_of(), request, layout, 60 * GIB, 60 * GIB, "a GPU")
    assert isinstance(error, OutOfMemory)
    message = str(error)
    assert "train.batch_size=16" in message
    assert "TRAIN_BATCH_SIZE=4 TRAIN_GRAD_ACCUM=8" in message


def test_a_probe_whose_smallest_step_lacks_memory_names_other_settings():
    layout = PROBED_REQUEST.layout(1, 32)
    error = next_command.probe_does_not_fit(
        fit_of(), PROBED_REQUEST, layout, 10 * GIB, 12 * GIB, "a GPU"
    )
    assert "12.0 GiB" in str(error) and "TUNING_MODE=qlora" in str(error)


def test_a_micro_batch_of_trees_becomes_smaller_before_layers_are_recomputed():
    planned = plan_for("1xH200", LLAMA_8B, "train.batch_size=4", "train.grad_accum=2")
    packed = planned.packed(8, 8 * 2048)
    trees = packed.with_units(tree_tokens=packed.plan.layout.tokens, fullest_step=2)
    assert trees.plan.layout.sequences == 1
    settings = next_command.smaller_settings(trees.config, trees.plan, "backward")
    assert settings == {"train.batch_size": 2, "train.grad_accum": 4}
