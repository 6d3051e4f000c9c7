"""Faults of others' making: clocks, containers, variables of launchers, machines that do not come."""

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from namespaces import can_unshare, in_container
from run_files import GONE, held_by_another, write_holder

from faults.bench import Bench, Fault, Guard, Outcome, newest
from faults.disks import NAMED, called, command_line, train_words
from faults.files import nothing
from faults.processes import TWO
from sft_play.commands import launched, nodes
from sft_play.commands.nodes import Wait
from sft_play.errors import ExitClass, SftPlayError
from sft_play.plan import launch
from sft_play.plan.launch import Launch, free_port
from sft_play.runs import lock
from sft_play.training.loop import TrainingLoop
from sft_play.training.ranks import GONE_SECONDS

NEW_MOUNTS, NEW_PROCESSES = (
    0x00020000,
    0x20000000,
)  # CLONE_NEWNS and CLONE_NEWPID of Linux's sched.h
AHEAD_SECONDS = 3600
AMBIENT = {"ACCELERATE_MIXED_PRECISION": "bf16", "PET_NNODES": "2", "FSDP_OFFLOAD_PARAMS": "true"}


def unshare(flags: int) -> None:
    """Give this process namespaces of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def unshare_mounts() -> None:
    """Give this process mounts of its own."""
    unshare(NEW_MOUNTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def need_namespaces() -> None:
    if os.getuid() != 0 or not can_unshare():
        pytest.skip("namespaces need root and unshare")


def enter_container() -> None:
    """Continue in a fork with process numbers of its own, as in a container with this host's name."""
    unshare_mounts()
    unshare(NEW_PROCESSES)  # the next fork is its first process, which must stay
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)


def set_the_clock_in_step_3(stat: Path) -> None:
    """Let this rank see a boot that is an hour later from step 3 on, and look at the others."""
    unshare_mounts()
    compute_loss = TrainingLoop.compute_loss

    def later(self, *arguments, **options):
        if self.state.global_step == 2 and not stat.exists():
            lines = Path("/proc/stat").read_text().splitlines()
            moved = [
                f"btime {int(line.split()[1]) + AHEAD_SECONDS}" if line[:6] == "btime " else line
                for line in lines
            ]
            stat.write_text("\n".join(moved) + "\n")
            subprocess.run(["mount", "--bind", str(stat), "/proc/stat"], check=True)
            time.sleep(2 * GONE_SECONDS)
        return compute_loss(self, *arguments, **options)

    TrainingLoop.compute_loss = later


def psutil_start(pid: int) -> float:
    """Return a start time that moves with the clock."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None


def clock_set(bench: Bench) -> Outcome:
    """The clock is set while two ranks train, as one of them sees it; they train to the end."""
    need_namespaces()
    folder = bench.plan({**TWO, "train.max_steps": 5}, num_gpus=2)
    started = bench.start(folder, 2, set_the_clock_in_step_3, bench.folder / "stat")
    codes = bench.ends(started)
    report = folder.read_report()
    return Outcome(max(codes), report.cause or report.status, report.global_step, newest(folder))


def typed_in_a_container(bench: Bench) -> Outcome:
    """The command of a run that trains is typed again in a container, which cannot see it."""
    need_namespaces()
    run = bench.copy()
    with held_by_another(run.path) as other:
        words = train_words(bench, {"train.output_dir": bench.folder})
        outcome = command_line(bench, words, NAMED, enter_container)
        assert other.is_alive() and run.path.is_dir()
    assert f"kill {other.pid}" not in outcome.said, outcome.said
    return outcome


def of_another_kernel(bench: Bench) -> Outcome:
    """The run of another machine with this one's name has given a sign of life minutes ago."""
    run = bench.copy()
    write_holder(run.path, dataclasses.replace(GONE, boot="another"))
    ago = time.time() - 2 * lock.ORPHAN_SECONDS
    for name in lock.SIGNS:
        if (run.path / name).exists():
            os.utime(run.path / name, (ago, ago))
    with patch.object(lock, "is_local", lambda path: False):
        return called(bench, {"train.output_dir": bench.folder})


def compiled_in_a_container(bench: Bench) -> Outcome:
    """A process that this one cannot see compiles; its lock must stay."""
    need_namespaces()
    path = bench.folder / "lock"
    away = "d._is_open = lambda _: False; " if bench.guard else ""
    code = (
        "import sys; from pathlib import Path; from sft_play.training import deepspeed_start as d; "
        f"{away}d.free_lock(Path(sys.argv[1]))"
    )
    with path.open("w"):
        done = in_container([sys.executable, "-c", code, str(path)])
    assert done.returncode == 0, done.stderr
    return Outcome(ExitClass.DONE, "the lock is there" if path.exists() else "the lock is gone")


def ambient(bench: Bench) -> Outcome:
    """Launchers' variables are in the shell; what a rank sees of them is what counts."""
    code = f"import os; print([name for name in {sorted(AMBIENT)} if name in os.environ])"
    output = bench.folder / "output"
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        launch.execute(Launch((sys.executable, "-c", code), {}), {**os.environ, **AMBIENT})
    os.waitpid(child, 0)
    return Outcome(ExitClass.DONE, f"a rank sees {output.read_text()}")


def by_hand(bench: Bench) -> Outcome:
    """One of two processes, placed by the variables of a guide."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    try:
        found = launched.read_launch({**place, "MASTER_PORT": "29500"})
    except SftPlayError as error:
        return Outcome(error.exit_class, str(error))
    return Outcome(ExitClass.DONE, f"{found.place} {found.warnings}")


def lone_machine(bench: Bench) -> Outcome:
    """The second of two machines does not come."""
    child = os.fork()
    if child == 0:
        try:
            nodes.meet(Wait(0, 2, "127.0.0.1", free_port(), 1.0, print))
        except SftPlayError as error:
            (bench.folder / "cause").write_text(json.dumps([error.exit_class, str(error)]))
        os._exit(0)
    deadline = time.monotonic() + 8
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("it waits for ever")
        time.sleep(0.05)
    return Outcome(*json.loads((bench.folder / "cause").read_text()))


def suspended(bench: Bench) -> Outcome:
    """SIGSTOP of one of two ranks, and SIGCONT before train.hang_timeout: both continue."""
    folder = bench.plan({**TWO, "train.hang_timeout": 10}, num_gpus=2)
    ranks = bench.start(folder, 2)
    bench.wait_for(folder, "step 2/", ranks)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(ranks[1].pid, signal.SIGCONT)
    codes = bench.ends(ranks)
    report = folder.read_report()
    return Outcome(max(codes), report.cause or report.status, report.global_step, newest(folder))


def hasty(self: Any) -> str | None:
    """Give up on a rank that is silent for three seconds."""
    silent = [peer for peer in self.peers if self._silent[peer.rank] > 3]
    return f"{silent} gave no sign of life" if silent else None


def had(*_: Any, **__: Any) -> bool:
    """Have any lock."""
    return True


ROWS = (
    Fault(
        "clock-set",
        "the clock is set by an hour while two ranks train",
        clock_set,
        ExitClass.DONE,
        ("done",),
        Guard("sft_play.process_id:_read_start", psutil_start),
        90,
        loses=0,
    ),
    Fault(
        "typed-in-a-container",
        "the command of a run that trains is typed again in a container, which cannot see it",
        typed_in_a_container,
        ExitClass.ENVIRONMENT,
        ("trains in it", "cannot be seen from here", "make watch RUN="),
        Guard("sft_play.runs.lock:_lock", had),
        10,
    ),
    Fault(
        "of-another-kernel",
        "a run of another machine with this one's name was heard of four minutes ago",
        of_another_kernel,
        ExitClass.ENVIRONMENT,
        ("trains in it", "if it is gone for good, rm "),
        Guard("sft_play.process_id:ProcessId.is_alive", lambda self: False),
        10,
    ),
    Fault(
        "compiled-in-a-container",
        "DeepSpeed's lock is held by a compilation in another container",
        compiled_in_a_container,
        ExitClass.DONE,
        ("the lock is there",),
        Guard("sft_play.training.deepspeed_start:_is_open", nothing),
        10,
    ),
    Fault(
        "ambient-variables",
        "ACCELERATE_MIXED_PRECISION, PET_NNODES and FSDP_OFFLOAD_PARAMS are in the shell",
        ambient,
        ExitClass.DONE,
        ("a rank sees []",),
        Guard("sft_play.plan.launch:is_of_launcher", nothing),
        10,
    ),
    Fault(
        "place-by-hand",
        "RANK, LOCAL_RANK and WORLD_SIZE are set by hand, LOCAL_WORLD_SIZE is not",
        by_hand,
        ExitClass.DONE,
        ("local_world_size=2", "LOCAL_WORLD_SIZE=2 follows from WORLD_SIZE"),
        Guard("sft_play.config.place:_derive", lambda environ: {}),
        5,
    ),
    Fault(
        "lone-machine",
        "the second of two machines does not come",
        lone_machine,
        ExitClass.PEER_LOST,
        ("machine 1 of 2 (from 0) did not come", "(train.rendezvous_timeout)", "NODE_RANK"),
        Guard("sft_play.commands.nodes:Wait.pause", nothing),
        10,
    ),
    Fault(
        "suspended-rank",
        "SIGSTOP of one of two ranks for 6 s, with train.hang_timeout: 10, then SIGCONT",
        suspended,
        ExitClass.DONE,
        ("done",),
        Guard("sft_play.training.ranks:RankWatch._cause", hasty),
        90,
        loses=0,
    ),
)
