"""sft_play.plan.warnings: variables and micro-batches that slow a run, variables that it ignores."""

from dataclasses import replace

import pytest
from plan_examples import plan_for

from sft_play.config.schema import Config
from sft_play.plan.ranks import Ranks
from sft_play.plan.warnings import slow_switches, switch_warnings

RANKS = Ranks("ddp", "cuda", 2, 1, 0, "127.0.0.1", None, ("0", "1"), 8)
ON_CPU = replace(RANKS, device="cpu", visible=())


def config(**settings) -> Config:
    sections: dict[str, dict] = {}
    for name, value in settings.items():
        section, _, key = name.partition("_")
        sections.setdefault(section, {})[key] = value
    return Config.model_validate(sections)


# What is set, a variable of make, and ranks that are told that it has no effect, and others
CASES = [
    ({"CUDA_LAUNCH_BLOCKING": "1"}, {}, RANKS, True),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, {}, ON_CPU, False),
    ({"UNSLOTH_COMPILE_MAXIMUM": "1"}, {}, RANKS, True),
    ({"UNSLOTH_COMPILE_MAXIMUM": "1"}, {"tuning_backend": "unsloth"}, RANKS, False),
    ({"UNSLOTH_FORCE_SINGLE_GPU": "1"}, {}, RANKS, False),  # the launch reads it
    ({"DEEPSPEED_CONFIG": "mine.json"}, {}, RANKS, True),
    ({"DEEPSPEED_CONFIG": "mine.json"}, {}, replace(RANKS, strategy="deepspeed"), False),
    ({"NCCL_TIMEOUT": "600"}, {}, RANKS, False),
    ({"NCCL_TIMEOUT": "600"}, {"train_ddp_timeout": 77}, RANKS, True),
    ({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_VERSION": "2.28"}, {}, ON_CPU, True),
    ({"NCCL_SOCKET_IFNAME": "eth0"}, {}, replace(ON_CPU, strategy="single"), False),
]


@pytest.mark.parametrize("environ, settings, ranks, is_named", CASES)
def test_a_variable_that_slows_a_run_or_has_no_effect_is_named(environ, settings, ranks, is_named):
    found = switch_warnings(config(**settings), ranks, environ)
    assert len(found) == is_named
    name, value = next(iter(environ.items()))
    assert all(name in words and value in words for words in found)


def test_a_switch_that_is_off_slows_nothing():
    (sentence,) = slow_switches({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"})
    assert sentence.startswith("CUDA_LAUNCH_BLOCKING=1")


@pytest.mark.parametrize(
    "model, setting, is_slow",
    [
        ("Llama-3.2-1B", "train.batch_size=1", True),
        ("Llama-3.2-1B", "train.batch_size=8", False),
        ("Llama-3.1-70B", "train.batch_size=1", False),
    ],
)
def test_micro_batches_that_the_gpu_waits_for_are_named_and_what_makes_them_larger(
    model, setting, is_slow
):
    words = [f"model.name=meta-llama/{model}", "tuning.mode=qlora"]
    plan = plan_for("1xH200", *words, setting).plan
    found = [words for words in plan.warnings if "launch a micro-batch" in words]
    assert len(found) == is_slow
    if is_slow:
        rows = plan.layout.rows_per_step
        larger = plan_for("1xH200", *words, f"train.effective_batch_size={rows}").plan
        assert f"TRAIN_EFFECTIVE_BATCH_SIZE={rows}" in found[0]
        assert larger.layout.tokens > plan.layout.tokens and not larger.warnings
