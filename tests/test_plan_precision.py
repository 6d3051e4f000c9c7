"""sft_play.plan.ranks: the number type of matrix products."""

import json

import pytest
from plan_examples import CPU, plan_for

from sft_play.plan.devices import Gpu, Hardware
from sft_play.plan.memory import GIB
from sft_play.plan.ranks import DTYPE_NAMES, config_precision

V100, T4, A100 = "1xV100-32", "1xT4", "1xA100-40"


@pytest.mark.parametrize(
    "gpus, settings, expected, warns",
    [
        (A100, (), "bf16", False),
        (T4, (), "fp16", False),
        (V100, (), "fp16", False),
        (CPU, (), "float32", False),
        (A100, ("train.bf16=false",), "float32", False),
        (V100, ("train.bf16=false",), "fp16", False),
        (A100, ("train.bf16=false", "train.fp16=false"), "float32", False),
        (V100, ("train.fp16=false",), "float32", False),
        (A100, ("train.fp16=true",), "fp16", False),
        (A100, ("train.fp16=true", "train.bf16=true"), "bf16", True),
        (V100, ("train.bf16=true",), "fp16", True),
        (T4, ("train.bf16=true", "train.fp16=true"), "fp16", True),
        (V100, ("train.bf16=true", "train.fp16=false"), "float32", True),
        (CPU, ("train.bf16=true",), "bf16", False),
    ],
)
def test_one_precision_is_chosen_by_what_the_device_has(gpus, settings, expected, warns):
    planned = plan_for(gpus, *settings)
    train = planned.config.train
    assert config_precision(planned.config) == expected
    assert (train.bf16, train.fp16) == (expected == "bf16", expected == "fp16")
    assert bool(planned.plan.warnings) == warns
    for warning in planned.plan.warnings:
        assert f"computing in {DTYPE_NAMES[expected]};" in warning


def test_mixed_gpus_compute_in_what_all_of_them_have():
    a100 = Gpu(0, "A100", 40 * GIB, 40 * GIB, (8, 0))
    v100 = Gpu(1, "V100", 32 * GIB, 32 * GIB, (7, 0))
    assert config_precision(plan_for(Hardware("cuda", (a100, v100), 8, GIB)).config) == "fp16"


def test_the_precision_of_a_deepspeed_json_decides_where_the_config_leaves_it_open(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}))
    environ = {"DEEPSPEED_CONFIG": str(path)}
    planned = plan_for("2xH200", environ=environ, use_deepspeed=True)
    assert config_precision(planned.config) == "fp16"
