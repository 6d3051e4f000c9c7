"""The variables that are no settings."""

import pytest

from sft_play.config.invocation import Invocation, read
from sft_play.errors import ConfigError


def test_nothing_set_is_one_machine_left_to_itself() -> None:
    assert read({}) == Invocation(
        config=None, run=None, num_gpus=None, deepspeed_config=None, tb_port=6006, device="auto",
        nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=None, gpus=None, exact=False,
    )  # fmt: skip


def test_every_variable_arrives_typed() -> None:
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
        "OTHER": "x",
    }
    assert read(environ) == Invocation(
        "configs/a.yaml",
        "first",
        "auto",
        True,
        2,
        "a.json",
        7007,
        "cpu",
        2,
        1,
        "10.0.0.1",
        29500,
        "4xH200",
        True,
    )


def test_an_empty_variable_counts_as_unset() -> None:
    names = (
        "CONFIG",
        "RUN",
        "NUM_GPUS",
        "DEEPSPEED_CONFIG",
        "TB_PORT",
        "DEVICE",
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GPUS",
        "EXACT",
    )
    assert read(dict.fromkeys(names, "")) == read(dict.fromkeys(names, "  ")) == read({})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NUM_GPUS": "two"}, "NUM_GPUS=two: write a whole number of at least 1"),
        ({"NUM_GPUS": "0"}, "NUM_GPUS=0: write a whole number of at least 1"),
        ({"NUM_GPUS": "-1"}, "NUM_GPUS=-1: write a whole number of at least 1"),
        ({"NUM_GPUS": "2.0"}, "NUM_GPUS=2.0: write a whole number of at least 1"),
        ({"NUM_GPUS": "1_0"}, "NUM_GPUS=1_0: write a whole number of at least 1"),
        ({"NUM_GPUS": "²"}, "NUM_GPUS=²: write a whole number of at least 1"),
        ({"TB_PORT": "0"}, "TB_PORT=0: write a whole number from 1 to 65535"),
        ({"TB_PORT": "65536"}, "TB_PORT=65536: write a whole number from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: write a whole number from 1 to 65535"),
        ({"DEVICE": "gpu"}, "DEVICE=gpu: write auto, cpu or cuda"),
        ({"DEVICE": "CUDA"}, "DEVICE=CUDA: write auto, cpu or cuda"),
        ({"NNODES": "0"}, "NNODES=0: write a whole number of at least 1"),
        ({"EXACT": "yes"}, "EXACT=yes: write 0 or 1"),
        (
            {"NODE_RANK": "2", "NNODES": "2"},
            "NODE_RANK=2 with NNODES=2: write a number from 0 to 1, or a larger NNODES",
        ),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 with NNODES=1: write NODE_RANK=0, or a larger NNODES"),
        ({"NODE_RANK": "5", "NNODES": "x"}, "NNODES=x: write a whole number of at least 1"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(environ)
    assert str(error.value) == message


def test_all_wrong_variables_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read({"NUM_GPUS": "two", "TB_PORT": "x", "DEVICE": "tpu"})
    assert [line.split("=")[0] for line in str(error.value).splitlines()] == [
        "NUM_GPUS",
        "TB_PORT",
        "DEVICE",
    ]


def test_the_environment_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_GPUS", "3")
    assert read({}).num_gpus is None


def test_unsloths_variable_gives_one_process() -> None:
    assert read({"UNSLOTH_FORCE_SINGLE_GPU": "1"}).num_gpus == 1
    assert read({"UNSLOTH_FORCE_SINGLE_GPU": "0"}).num_gpus is None
    for several in ({"NUM_GPUS": "2"}, {"NNODES": "2"}):
        with pytest.raises(ConfigError, match="=2 with UNSLOTH_FORCE_SINGLE_GPU=1: leave one"):
            read({"UNSLOTH_FORCE_SINGLE_GPU": "1", **several})
