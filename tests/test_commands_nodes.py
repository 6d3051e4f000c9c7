"""Machines of a run meet, say whom they wait for, and stop waiting at a signal or a limit."""

import os
import signal
import socket
import threading
import time
from multiprocessing.process import BaseProcess

import pytest
from rank_processes import start_command, wait_for
from run_files import run_json

from sft_play.commands import nodes
from sft_play.commands.nodes import Wait, meet
from sft_play.errors import EnvironmentFault, ExitClass, SftPlayError
from sft_play.plan.launch import free_port
from sft_play.runs.folder import RunFolder


class Machine(threading.Thread):
    """One machine that comes to a meeting, and what it says."""

    def __init__(self, node: int, count: int, port: int, seconds: float = 20) -> None:
        super().__init__(daemon=True)
        self.said: list[str] = []
        self.error: SftPlayError | None = None
        self.wait = Wait(node, count, "127.0.0.1", port, seconds, self.said.append)
        self.start()

    def run(self) -> None:
        try:
            meet(self.wait)
        except SftPlayError as error:
            self.error = error


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_machines_go_once_each_has_come(order):
    port = free_port()
    machines = [Machine(node, 3, port) for node in order[:2]]
    time.sleep(0.3)
    assert all(machine.is_alive() for machine in machines), "one is missing"
    machines.append(Machine(order[2], 3, port))
    for machine in machines:
        machine.join(20)
        assert not machine.is_alive() and machine.error is None
    with socket.create_server(("", port)):
        pass  # the port is free for the launcher


def test_a_stranger_at_the_port_is_no_machine():
    port = free_port()
    first = Machine(0, 2, port)
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.05)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]", b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(text)
    second = Machine(1, 2, port)
    for machine in (first, second):
        machine.join(20)
        assert not machine.is_alive() and machine.error is None


@pytest.mark.parametrize(("node", "awaited"), [(0, "1, 2"), (1, "0")])
def test_a_wait_says_who_is_missing_and_ends_with_class_17(monkeypatch, node, awaited):
    monkeypatch.setattr(nodes, "SAY_SECONDS", 0.3)
    machine = Machine(node, 3, free_port(), seconds=1)
    machine.join(20)
    assert machine.error.exit_class == ExitClass.PEER_LOST
    assert f"machine {awaited} of 3 (from 0) did not come to" in str(machine.error)
    assert f"machine {node} waits for machine {awaited} of 3 (from 0)" in machine.said[0]


def test_a_port_that_another_program_uses_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"MASTER_PORT={port}: .* set another"):
            meet(Wait(0, 2, "127.0.0.1", port, 1, print))


def say_soon() -> None:
    nodes.SAY_SECONDS = 0.3


def lone_machine(tmp_path, settings_of, **variables: str) -> BaseProcess:
    """Start one of two machines as make does; the other one never comes."""
    settings = settings_of({"train.output_dir": tmp_path, "train.predict_with_generate": False})
    words = {name.upper().replace(".", "_"): str(value) for name, value in settings.items()}
    environ = {**os.environ, **words, "CONFIG": "tests/fixtures/empty.yaml", "RUN": "run"}
    environ |= {"DEVICE": "cpu", "NUM_GPUS": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **variables}
    output = tmp_path / "output.txt"
    return start_command(("train", "--distributed"), environ, output, say_soon)


def test_a_lone_machine_stops_at_once(tmp_path, settings_of):
    machine = lone_machine(tmp_path, settings_of)
    output, deadline = tmp_path / "output.txt", time.monotonic() + 60
    while not (output.exists() and " waits for machine 1 of 2" in output.read_text()):
        assert machine.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(machine.pid, signal.SIGTERM)
    began = time.monotonic()
    assert wait_for(machine, 20) == ExitClass.STOPPED, output.read_text()
    assert time.monotonic() - began < 5
    report = run_json(RunFolder(tmp_path / "run"))
    assert (report["status"], report["exit_class"]) == ("stopped", 75)


def test_a_lone_machine_ends_at_its_limit(tmp_path, settings_of):
    machine = lone_machine(tmp_path, settings_of, TRAIN_RENDEZVOUS_TIMEOUT="1")
    code, said = wait_for(machine, 60), (tmp_path / "output.txt").read_text()
    assert code == ExitClass.PEER_LOST, said
    assert "machine 1 of 2 (from 0) did not come to 127.0.0.1:" in said
    report = run_json(RunFolder(tmp_path / "run"))
    assert (report["status"], report["exit_class"]) == ("failed", 17)
