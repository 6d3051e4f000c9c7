"""Variables of other programs: which slow a run, and which it does not read."""

from dataclasses import replace

from sft_play.config.schema import Config
from sft_play.plan.needs import slow_switches, switch_warnings
from sft_play.plan.ranks import Ranks

RANKS = Ranks("ddp", "cuda", 2, 1, 0, "127.0.0.1", None, ("0", "1"), 8)
ON_CPU = replace(RANKS, device="cpu", visible=())


def config(**settings) -> Config:
    sections: dict[str, dict] = {}
    for name, value in settings.items():
        section, _, key = name.partition("_")
        sections.setdefault(section, {})[key] = value
    return Config.model_validate(sections)


def test_what_makes_every_kernel_wait_is_said() -> None:
    (sentence,) = slow_switches({"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"})
    assert sentence.startswith("CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel")
    assert switch_warnings(config(), RANKS, {"CUDA_LAUNCH_BLOCKING": "1"}) == [sentence]
    assert switch_warnings(config(), ON_CPU, {"CUDA_LAUNCH_BLOCKING": "1"}) == []


def test_a_variable_of_another_backend_has_no_effect() -> None:
    environ = {"UNSLOTH_COMPILE_MAXIMUM": "1"}
    assert switch_warnings(config(), RANKS, environ) == [
        "UNSLOTH_COMPILE_MAXIMUM=1 has no effect: tuning.backend=bnb, and TUNING_BACKEND=unsloth "
        "reads it"
    ]
    assert switch_warnings(config(tuning_backend="unsloth"), RANKS, environ) == []
    assert switch_warnings(config(), RANKS, {"UNSLOTH_FORCE_SINGLE_GPU": "1"}) == [], (
        "read by the launch"
    )


def test_deepspeed_s_json_is_read_under_deepspeed_alone() -> None:
    environ = {"DEEPSPEED_CONFIG": "mine.json"}
    (sentence,) = switch_warnings(config(), RANKS, environ)
    assert sentence.startswith("DEEPSPEED_CONFIG=mine.json has no effect: this run does without")
    assert switch_warnings(config(), replace(RANKS, strategy="deepspeed"), environ) == []


def test_nccl_s_timeout_counts_unless_the_setting_is_given() -> None:
    environ = {"NCCL_TIMEOUT": "600"}
    assert switch_warnings(config(), RANKS, environ) == []
    (sentence,) = switch_warnings(config(train_ddp_timeout=77), RANKS, environ)
    assert sentence.startswith("NCCL_TIMEOUT=600 has no effect: train.ddp_timeout is set")


def test_ranks_on_a_cpu_do_not_read_nccl_s_variables() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_VERSION": "2.28"}
    (sentence,) = switch_warnings(config(), ON_CPU, environ)
    assert "reads GLOO_SOCKET_IFNAME" in sentence
    assert switch_warnings(config(), replace(ON_CPU, strategy="single"), environ) == []
