"""Which process is which: not changed by a clock, and not guessed where it cannot be seen."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from namespaces import CONTAINER, in_container, moved_clock, needs_namespaces, run
from run_files import GONE

from sft_play import process_id
from sft_play.process_id import ProcessId

# with the module itself, as the project's folder may be closed to another user
ASK = (
    inspect.getsource(process_id) + "\nimport json\n"
    "print(ProcessId.from_json(json.loads(sys.argv[1])).is_alive())"
)


@pytest.fixture
def other() -> Iterator[subprocess.Popen]:
    """Another process that lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def asked(process: ProcessId) -> list[str]:
    """Return the command that prints whether a process lives."""
    return [sys.executable, "-c", ASK, json.dumps(asdict(process))]


def test_a_process_lives_until_it_was_killed(other) -> None:
    process = ProcessId.read(other.pid)
    assert process.is_alive() is True
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie is gone
    assert process.is_alive() is False and ProcessId.read(other.pid) is None
    other.wait()
    assert process.is_alive() is False and ProcessId.read(other.pid) is None


def test_another_process_of_the_same_number_is_not_it(other) -> None:
    process = ProcessId.read(other.pid)
    assert replace(process, started=process.started - 1).is_alive() is False
    assert GONE.is_alive() is False


def test_a_process_of_another_boot_or_version_is_not_known() -> None:
    own = ProcessId.read()
    assert replace(own, boot="another").is_alive() is None
    assert ProcessId.from_json({"pid": 1, "host": own.host, "started": 1.5}).is_alive() is None
    assert ProcessId.from_json({"pid": 1}) is ProcessId.from_json([1]) is None


@needs_namespaces
def test_a_clock_that_was_set_changes_nothing(other, tmp_path) -> None:
    process = ProcessId.read(other.pid)
    ask_psutil = "import sys, psutil; print(psutil.Process(int(sys.argv[1])).create_time())"
    words = [sys.executable, "-c", ask_psutil, str(other.pid)]
    before = float(run(words).stdout)
    after = float(run(moved_clock(words, tmp_path / "stat")).stdout)
    assert after - before == pytest.approx(3600, abs=1), "psutil's start time moves"
    assert run(moved_clock(asked(process), tmp_path / "stat")).stdout == "True\n"


@needs_namespaces
def test_what_cannot_be_seen_is_not_gone(other) -> None:
    process = ProcessId.read(other.pid)
    for answer, words in (
        ("None", CONTAINER),
        ("None", ("unshare", "--time", "--boottime", "3600", "--fork")),
        ("True", ("unshare", "--uts")),
    ):
        done = run([*words, *asked(process)])
        assert done.stdout == f"{answer}\n", (words, done.stderr)


@needs_namespaces
def test_a_process_that_proc_hides_is_not_gone(other) -> None:
    process = ProcessId.read(other.pid)
    hide = "mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "
    command = ["unshare", "--mount", "sh", "-c", f'{hide} "$@"', "sh"]
    for asked_of, answer in ((process, "None"), (GONE, "False")):
        done = run([*command, *asked(asked_of)])
        assert done.stdout == f"{answer}\n", done.stderr


@needs_namespaces
def test_a_stranger_with_the_number_is_not_taken_for_it() -> None:
    done = in_container(asked(replace(ProcessId.read(), pid=1)))
    assert done.stdout == "None\n", done.stderr
