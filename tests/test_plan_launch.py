"""sft_play.plan.launch: the command and environment that start the ranks of a run."""

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from plan_examples import EMPTY, plan_for

from sft_play.commands.call import read_call, without_meeting
from sft_play.commands.plan import plan_for_display, plan_text
from sft_play.errors import EnvironmentFault
from sft_play.plan import launch
from sft_play.plan.launch import (
    WORKER,
    Launch,
    accelerate_config,
    launch_command,
    rank_command,
    write_accelerate_config,
)
from sft_play.plan.ranks import Ranks

RUN = Path("outputs/a run")


def ranks_of(strategy: str, device: str, per_node: int, **changes: Any) -> Ranks:
    """Return the ranks of one machine."""
    ranks = Ranks(
        strategy,
        device,
        per_node,
        nodes=1,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=None,
        visible=tuple(map(str, range(per_node))) if device == "cuda" else (),
        cpu_count=8,
    )
    return replace(ranks, **changes)


def command(ranks: Ranks, **environ: str) -> Launch:
    return launch_command(ranks, RUN, environ)


# Commands


def test_two_cpu_processes_are_two_by_accelerates_own_reading(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    ranks = ranks_of("ddp", "cpu", 2)
    write_accelerate_config(tmp_path / "accelerate.yaml", accelerate_config(ranks, "no"), "a test")
    started = launch_command(ranks, tmp_path, {})
    assert started.argv[:3] == (sys.executable, "-m", "accelerate.commands.launch")
    parsed = launch_command_parser().parse_args(list(started.argv[3:]))
    arguments, _, _ = _validate_launch_command(parsed)
    assert (arguments.num_processes, arguments.num_machines) == (2, 1)
    assert (arguments.multi_gpu, arguments.use_cpu) == (True, True)
    assert arguments.use_deepspeed is False
    assert arguments.training_script == str(WORKER)
    assert arguments.training_script_args == [str(tmp_path)]
    assert (arguments.gpu_ids, arguments.mixed_precision) == ("all", "no")
    assert started.env["ACCELERATE_USE_CPU"] == "true"


def test_the_accelerate_file_names_everything_that_accelerate_would_guess(tmp_path):
    node = {"nodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29600}
    config = accelerate_config(ranks_of("ddp", "cuda", 4, **node), "bf16")
    write_accelerate_config(tmp_path / "a.yaml", config, "Written by a test.")
    text = (tmp_path / "a.yaml").read_text()
    assert text.startswith("# Written by a test.\n")
    expected = {
        "distributed_type": "MULTI_GPU",
        "num_machines": 2,
        "num_processes": 8,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29600,
        "mixed_precision": "bf16",
        "use_cpu": False,
        "rdzv_backend": "static",
        "compute_environment": "LOCAL_MACHINE",
    }
    assert expected.items() <= yaml.safe_load(text).items()


def test_deepspeed_on_a_cpu_counts_its_processes():
    from torch.distributed.run import parse_args

    started = command(ranks_of("deepspeed", "cpu", 2))
    arguments = parse_args(started.argv[3:])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("1", "2")
    assert (arguments.training_script, arguments.training_script_args) == (str(WORKER), [str(RUN)])
    assert started.env["DS_ACCELERATOR"] == "cpu"
    assert started.env["ACCELERATE_USE_CPU"] == "false"
    assert started.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("visible", ["2, 3", "GPU-aaaa,GPU-bbbb"])
def test_deepspeed_sees_the_gpus_that_are_visible(visible):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    ranks = plan_for("2xH200", environ=environ, use_deepspeed=True).plan.ranks
    started = command(ranks, **environ)
    assert started.argv[1:3] == ("-m", "torch.distributed.run")
    assert started.env["CUDA_VISIBLE_DEVICES"] == visible.replace(" ", "")
    assert "DS_ACCELERATOR" not in started.env


def test_several_machines_meet_at_one_address():
    from torch.distributed.run import parse_args

    ranks = ranks_of("deepspeed", "cuda", 2, nodes=2, node_rank=1, master_addr="10.0.0.1")
    arguments = parse_args(command(ranks).argv[3:])
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", 1, "2")
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 29500)
    ddp = command(replace(ranks, strategy="ddp")).argv
    assert ddp[ddp.index("--main_process_port") + 1] == "29500"
    assert command(replace(ranks, strategy="fsdp")).argv == ddp
    assert accelerate_config(ranks, "no")["main_process_ip"] == "10.0.0.1"
    alone = command(ranks_of("ddp", "cuda", 2)).argv
    assert alone[alone.index("--main_process_port") + 1] == "0"  # a free one when it starts
    named = command(replace(ranks, master_port=4000)).argv
    assert named[named.index("--master_port") + 1] == "4000"


ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file")
LAUNCHERS = {"single": (), "deepspeed": ("-m", "torch.distributed.run", "--nnodes")}


@pytest.mark.parametrize(
    "strategy, nodes",
    [("single", 1), *((name, n) for name in ("ddp", "fsdp", "deepspeed") for n in (1, 2))],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_strategy_has_its_launcher(strategy, nodes, device):
    per_node = 1 if strategy == "single" else 2
    ranks = ranks_of(strategy, device, per_node, nodes=nodes, node_rank=nodes - 1)
    started = command(ranks)
    expected = LAUNCHERS.get(strategy, ACCELERATE)
    assert started.argv[1 : 1 + len(expected)] == expected
    assert started.argv[-2:] == (str(WORKER), str(RUN))
    if device == "cpu":
        assert started.env["CUDA_VISIBLE_DEVICES"] == ""
        assert started.env["OMP_NUM_THREADS"] == str(8 // per_node)
        assert started.env["ACCELERATE_USE_CPU"] == str(strategy != "deepspeed").lower()


def test_a_launcher_that_still_starts_records_signals_and_runs_the_same_words():
    started = command(ranks_of("deepspeed", "cpu", 2))
    watched = launch.recorded(started, RUN)
    assert watched.argv[1:3] == (str(launch.LAUNCHER), str(RUN))
    assert watched.argv[3:] == started.argv[2:] and watched.env == started.env


# Environment


def test_num_gpus_takes_the_first_of_the_visible_ones():
    environ = {"CUDA_VISIBLE_DEVICES": "5,7", "NUM_GPUS": "1"}
    ranks = plan_for("2xH200", environ=environ).plan.ranks
    assert launch_command(ranks, RUN, environ).env["CUDA_VISIBLE_DEVICES"] == "5"


OF_PYTHON = str(Path(sys.executable).parent)
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
LEFT = {"CUDA_VISIBLE_DEVICES": "0", "ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize(
    "strategy, device, environ, expected",  # a variable is None where it stays as it is
    [
        ("ddp", "cuda", {}, {ALLOCATOR: "expandable_segments:True", "OMP_NUM_THREADS": "4"}),
        ("ddp", "cuda", {ALLOCATOR: "max_split_size_mb:64"}, {ALLOCATOR: None}),
        ("ddp", "cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {ALLOCATOR: None}),
        ("ddp", "cuda", {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": None}),
        (
            "ddp", "cpu", {"OMP_WAIT_POLICY": "ACTIVE"},
            {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None},
        ),
        (
            "ddp", "cpu", LEFT,
            {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"},
        ),
        (
            "ddp", "cuda", {"NCCL_ASYNC_ERROR_HANDLING": "1"},
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        ),
        ("single", "cuda", {}, {"UNSLOTH_COMPILE_LOCATION": str(RUN.absolute() / "unsloth")}),
        (
            "single", "cuda", {"UNSLOTH_COMPILE_LOCATION": "/tmp/x"},
            {"UNSLOTH_COMPILE_LOCATION": None},
        ),
        ("single", "cpu", {}, {"UNSLOTH_COMPILE_LOCATION": None}),
        ("single", "cpu", {"PATH": "/usr/bin"}, {"PATH": f"{OF_PYTHON}{os.pathsep}/usr/bin"}),
        ("single", "cpu", {"PATH": f"/usr/bin{os.pathsep}{OF_PYTHON}"}, {"PATH": None}),
    ],
)  # fmt: skip
def test_the_environment_of_a_rank_keeps_what_the_user_set(strategy, device, environ, expected):
    env = command(ranks_of(strategy, device, 1 if strategy == "single" else 2), **environ).env
    assert {name: env.get(name) for name in expected} == expected


def test_a_rank_has_a_thread_where_it_has_not_a_core():
    assert command(ranks_of("ddp", "cpu", 16)).env["OMP_NUM_THREADS"] == "1"


def test_a_free_port_is_free():
    port = launch.free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        assert probe.getsockname()[1] == port


# Execution


def test_the_place_that_another_launcher_left_is_not_passed_on():
    program = """
import os
left = [name for name in os.environ if "RANK" in name or "WORLD" in name]
print(sorted(left), os.environ["A"], os.environ["B"])
"""
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
        "A": "theirs",
        "B": "theirs",
    }
    code = f"""
from sft_play.plan.launch import Launch, execute
execute(Launch(({sys.executable!r}, "-c", {program!r}), {{"B": "ours"}}), {environ!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] theirs ours\n", done.stderr


def test_a_launcher_that_is_not_there_is_an_environment_fault():
    with pytest.raises(EnvironmentFault, match=r"/no/such/python .*make install"):
        launch.execute(Launch(("/no/such/python",), {}), {})


def test_a_rank_that_is_started_already_is_the_worker_alone():
    """Its launcher may have given it more GPUs than it starts processes."""
    ranks = ranks_of("ddp", "cuda", 2, visible=("5", "3"))
    started = rank_command(ranks, RUN, {"CUDA_VISIBLE_DEVICES": "5,3,1"})
    assert started.argv == (sys.executable, str(WORKER), str(RUN))
    assert started.env["CUDA_VISIBLE_DEVICES"] == "5,3"
    assert started.env == command(ranks, CUDA_VISIBLE_DEVICES="5,3,1").env


def test_gloo_of_several_machines_gets_the_interface_that_reaches_the_first(monkeypatch):
    """By the host's name it would often find a loopback address, and wait for ever."""
    own = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.7"]}
    faces = {
        name: [SimpleNamespace(address=address) for address in found] for name, found in own.items()
    }
    monkeypatch.setattr(launch.psutil, "net_if_addrs", lambda: faces)
    probe = SimpleNamespace(connect=lambda _: None, getsockname=lambda: ("192.0.2.7", 40000))
    monkeypatch.setattr(launch.socket, "socket", lambda *_: contextlib.nullcontext(probe))
    assert launch.interface_to("192.0.2.1") == "eth0"
    one = ranks_of("ddp", "cpu", 1)
    two = replace(one, nodes=2, master_addr="192.0.2.1")
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert rank_command(two, RUN, {}).env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in rank_command(two, RUN, environ).env
    assert "GLOO_SOCKET_IFNAME" not in rank_command(one, RUN, {}).env


def test_an_address_without_a_way_to_it_has_no_interface():
    assert launch.interface_to("127.0.0.1") is None
    assert launch.interface_to("no such host.invalid") is None


def test_a_plan_of_several_machines_needs_no_address_to_meet_at():
    environ = {"CONFIG": EMPTY, "NNODES": "2", "GPUS": "8xH200"}
    call = without_meeting(read_call(None, (), None, environ))
    planned = plan_for_display(call, False, False)
    assert planned.plan.ranks.world_size == 16
    assert "MASTER_ADDR=the-first-machine" in plan_text(call, planned, False)
    named = read_call(None, (), None, {**environ, "MASTER_ADDR": "node0"})
    assert without_meeting(named) is named
