"""What launchers say of a process, and the make variables that mean the same."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sft_play.config.place import (
    LaunchPlace,
    as_for_make,
    is_of_launcher,
    read_place,
    remarks,
    without_launcher,
)
from sft_play.errors import ConfigError

# What each launcher sets for the second of two processes on one machine, with versions of
# requirements.lock
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
ACCELERATE = {
    **TORCHRUN,
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}
ACCELERATE_DEEPSPEED = {
    **ACCELERATE,
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "mine.json",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
BY_HAND = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SECOND = LaunchPlace(1, 2, 1, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"RANK": "", "WORLD_SIZE": " "}, None),
        (TORCHRUN, SECOND),
        (ACCELERATE, SECOND),
        (ACCELERATE_DEEPSPEED, LaunchPlace(1, 2, 1, 2, "127.0.0.1", 29500, True, "mine.json")),
        (
            {**ACCELERATE, "ACCELERATE_USE_FSDP": "true"},
            LaunchPlace(1, 2, 1, 2, "127.0.0.1", 29500, uses_fsdp=True),
        ),
        (DEEPSPEED, LaunchPlace(1, 2, 1, 2, "127.0.0.1", 29500, True)),
        ({**DEEPSPEED, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"},
         LaunchPlace(0, 1, 0, 1, "127.0.0.1", 29500, True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, LaunchPlace(1, 2, 1, 2, "localhost", 12355)),
        (BY_HAND, LaunchPlace(1, 2, 1, 2, "localhost", 29500)),
        ({**BY_HAND, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
         LaunchPlace(3, 4, 1, 2, "10.0.0.1", 29500)),
    ],
)  # fmt: skip
def test_a_place_is_what_the_launcher_set(environ, place):
    assert read_place(environ) == place


def test_torch_finds_the_place_by_the_same_variables_whoever_set_them():
    expected = {name: value for name, value in TORCHRUN.items() if name in SECOND.variables()}
    assert read_place(DEEPSPEED).variables() == read_place(TORCHRUN).variables() == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE: set both"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one: write a whole number of at least 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: write a number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
         "without LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "1"}, "without LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "set them to this process's"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0: write a whole"),
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "every machine must run as many processes"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_place(environ)


@pytest.mark.parametrize(
    ("environ", "variables"),
    [
        (TORCHRUN, {"NUM_GPUS": "2"}),
        (ACCELERATE_DEEPSPEED, {"NUM_GPUS": "2", "DEEPSPEED_CONFIG": "mine.json"}),
        ({**ACCELERATE, "ACCELERATE_USE_FSDP": "true"},
         {"NUM_GPUS": "2", "TRAIN_STRATEGY": "fsdp"}),
        (DEEPSPEED, {"NUM_GPUS": "2"}),
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"NUM_GPUS": "2"}),
        ({**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
         {"NUM_GPUS": "2", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1",
          "MASTER_PORT": "29500"}),
    ],
)  # fmt: skip
def test_the_run_is_that_of_make_with_these_variables(environ, variables):
    users = {"PATH": "/bin", "TRAIN_BATCH_SIZE": "4", "CUDA_VISIBLE_DEVICES": "1,2"}
    kept = {name: value for name, value in environ.items() if "ELASTIC" in name}
    place = read_place(environ)
    own = without_launcher(environ | users, place)
    assert own == kept | users
    assert as_for_make(own, place) == kept | users | variables


def test_a_process_without_a_launcher_may_be_a_machine_of_make():
    environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert without_launcher({**environ, "ACCELERATE_MIXED_PRECISION": "no"}, None) == environ


def test_the_users_own_deepspeed_json_wins_over_accelerates():
    environ = {**ACCELERATE_DEEPSPEED, "DEEPSPEED_CONFIG": "yours.json"}
    assert as_for_make(environ, read_place(environ))["DEEPSPEED_CONFIG"] == "yours.json"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "NUM_GPUS": "4"}, "NUM_GPUS=4: the launcher has started 2 processes"),
        (
            {**ACCELERATE, "ACCELERATE_USE_FSDP": "true", "TRAIN_STRATEGY": "ddp"},
            "TRAIN_STRATEGY=ddp: .*use_fsdp",
        ),
    ],
)
def test_what_contradicts_the_launcher_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        as_for_make(environ, read_place(environ))


def test_a_number_type_of_accelerate_is_not_dropped_without_a_word():
    assert remarks(ACCELERATE, SECOND) == remarks({}, None) == []
    assert "LOCAL_WORLD_SIZE=2" in remarks(BY_HAND, read_place(BY_HAND))[0]
    given = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    for place in (None, SECOND):
        assert "mixed precision bf16 does not count" in remarks(given, place)[0]


# What launchers and their ranks read that changes no number, no rank and no program
KEPT = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_FR|TORCH_DISTRIBUTED|CUDA|KMP|OMP|UCX|AWS|PYTORCH|PDSH)_.*|PT_HPU_.*|XPU_.*"
    r"|MASTER_(ADDR|PORT)|NODE_RANK|AZ_BATCH.*|.*_VISIBLE_(DEVICES|CORES|MODULES)|(XDG_CACHE_)?HOME|LOGLEVEL"
    r"|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|TORCHELASTIC_ERROR_FILE|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|USE_(LIBUV|TORCH_XLA)"
)
FILES = (
    *("accelerate/state.py", "accelerate/accelerator.py", "accelerate/parallelism_config.py"),
    *("accelerate/commands/launch.py", "accelerate/utils/*.py", "torch/distributed/run.py"),
    *("torch/distributed/rendezvous.py", "torch/distributed/distributed_c10d.py"),
    *("torch/distributed/launcher/*.py", "torch/distributed/elastic/**/*.py"),
    *("deepspeed/constants.py", "deepspeed/comm/*.py", "deepspeed/launcher/*.py"),
    *("deepspeed/accelerator/*.py", "deepspeed/runtime/*.py", "transformers/training_args.py"),
)
READERS = re.compile(r"environ|getenv|_from_env")


def variables_in(path: Path) -> Iterator[str]:
    """Yield the variables of the environment that a module reads by name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        words: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and READERS.search(ast.unparse(node.value)):
            words = [node.slice]
        elif isinstance(node, ast.Call) and READERS.search(ast.unparse(node.func)):
            words = node.args[:1]
            if words and isinstance(words[0], ast.List):
                words = words[0].elts
        for each in words:
            if isinstance(each, ast.Constant) and str(each.value).isupper():
                yield each.value


def test_every_variable_that_launchers_read_is_the_plans_or_changes_nothing():
    packages = Path(torch.__file__).parents[1]
    files = [path for pattern in FILES for path in packages.glob(pattern)]
    names = {name for path in files for name in variables_in(path)}
    assert len(names) > 60 and "ACCELERATE_MIXED_PRECISION" in names
    unknown = {name for name in names if not is_of_launcher(name) and not KEPT.fullmatch(name)}
    assert unknown == set(), "say in config/place.py or KEPT what becomes of them"
