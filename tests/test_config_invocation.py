"""The variables that are no settings."""

import pytest

from sft_play.config.invocation import Invocation, read_invocation
from sft_play.errors import ConfigError


def test_nothing_set_is_one_machine_left_to_itself():
    assert read_invocation({}) == Invocation(
        config=None, run=None, num_gpus=None, deepspeed_config=None, tb_port=6006, device="auto",
        nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=None, gpus=None, exact=False,
    )  # fmt: skip


def test_every_variable_arrives_typed_and_an_empty_one_counts_as_unset():
    environ = {
        "CONFIG": "configs/a.yaml",
        "RUN": "first",
        "RESUME": "auto",
        "ELASTIC": "1",
        "NUM_GPUS": "2",
        "DEEPSPEED_CONFIG": "a.json",
        "TB_PORT": " 7007 ",
        "DEVICE": "cpu",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GPUS": "4xH200",
        "EXACT": "1",
    }
    typed = ("configs/a.yaml", "first", "auto", True, 2, "a.json", 7007, "cpu", 2, 1)
    assert read_invocation(environ | {"OTHER": "x"}) == Invocation(
        *typed, "10.0.0.1", 29500, "4xH200", True
    )
    assert (
        read_invocation(dict.fromkeys(environ, ""))
        == read_invocation(dict.fromkeys(environ, "  "))
        == read_invocation({})
    )


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({"NUM_GPUS": "two"}, "NUM_GPUS=two 1"),
        ({"NUM_GPUS": "0"}, "NUM_GPUS=0 1"),
        ({"NUM_GPUS": "1_0"}, "NUM_GPUS=1_0 1"),
        ({"NUM_GPUS": "²"}, "NUM_GPUS=² 1"),
        ({"TB_PORT": "65536"}, "TB_PORT=65536 1 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http 65535"),
        ({"DEVICE": "gpu"}, "DEVICE=gpu auto, cpu cuda"),
        ({"EXACT": "yes"}, "EXACT=yes 0 1"),
        ({"NODE_RANK": "2", "NNODES": "2"}, "NODE_RANK=2 NNODES=2 0 1,"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 NNODES=1 NODE_RANK=0"),
        ({"NODE_RANK": "5", "NNODES": "x", "TB_PORT": "x"}, "TB_PORT=x \n NNODES=x"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(environ, facts):
    with pytest.raises(ConfigError) as error:
        read_invocation(environ)
    assert all(fact in str(error.value) for fact in facts.split(" ")), error.value


def test_unsloths_variable_gives_one_process():
    assert read_invocation({"UNSLOTH_FORCE_SINGLE_GPU": "1"}).num_gpus == 1
    assert read_invocation({"UNSLOTH_FORCE_SINGLE_GPU": "0"}).num_gpus is None
    for several in ({"NUM_GPUS": "2"}, {"NNODES": "2"}):
        with pytest.raises(ConfigError, match="=2 with UNSLOTH_FORCE_SINGLE_GPU=1: leave one"):
            read_invocation({"UNSLOTH_FORCE_SINGLE_GPU": "1", **several})
