"""Two machines on this host: namespaces with a network, a name and a disk of their own, or agents."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_files import run_json, variables_of

from sft_play.plan.launch import free_port
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SECONDS = 240
TIMEOUT_SECONDS = 15  # of a collective
pytestmark = pytest.mark.long
# A disk of its own is mounted where the runs go; what the machine leaves is copied out in the end.
MACHINE = """
hostname machine-$NODE_RANK && mount -t tmpfs tmpfs "$TRAIN_OUTPUT_DIR" || exit 1
"$PYTHON" -m sft_play train --distributed
status=$?
cp "$TRAIN_OUTPUT_DIR"/run*/run.json "$LEFT/$NODE_RANK.json"
exit $status
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other."""
    names = [f"sft-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "veth", "netns", names[0], "type", "veth")
        ip("-n", names[0], "link", "set", "veth0", "netns", names[1])
        for name, address, link in zip(names, ADDRESSES, ("veth", "veth0"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("ip"), reason="namespaces need root and ip"
)
def test_a_machine_that_is_cut_off_ends_both_in_time(spaces, settings_of, tmp_path):
    outputs = tmp_path / "out"
    outputs.mkdir()
    changes = {
        "train.max_steps": 3000,
        "train.predict_with_generate": False,
        "train.output_dir": outputs,
        "train.ddp_timeout": TIMEOUT_SECONDS,
    }
    settings = variables_of(settings_of(changes))
    environ = {**os.environ, **settings, "LEFT": str(tmp_path), "PYTHON": sys.executable}
    environ |= {"CONFIG": "tests/fixtures/empty.yaml", "DEVICE": "cpu", "NUM_GPUS": "1"}
    environ |= {"RUN": "run", "NNODES": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    environ |= {"OMP_NUM_THREADS": "1"}
    machines = []
    logs = [tmp_path / f"{number}.log" for number in (0, 1)]
    for number, space in enumerate(spaces):
        command = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount"]
        with logs[number].open("w") as log:
            machine = subprocess.Popen(
                [*command, "bash", "-c", MACHINE],
                cwd=ROOT,
                env={**environ, "NODE_RANK": str(number)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        machines.append(machine)
    try:
        deadline = time.monotonic() + SECONDS
        while "step 5/" not in logs[0].read_text():
            assert time.monotonic() < deadline, logs[0].read_text()[-3000:]
            time.sleep(0.1)
        ip("-n", spaces[1], "link", "set", "veth0", "down")
        cut = time.monotonic()
        assert all(machine.wait(SECONDS) != 0 for machine in machines)
        assert time.monotonic() - cut < TIMEOUT_SECONDS + 45
    finally:
        for machine in machines:
            machine.terminate()
    for number in (0, 1):
        report = json.loads((tmp_path / f"{number}.json").read_text())
        assert (report["status"], report["exit_class"]) == ("failed", 17)
    assert "machine 1 host=machine-1 ranks=1 device=CPU disk=" in logs[0].read_text()
    assert "of its own" in logs[0].read_text()


def test_torchrun_on_each_of_two_machines_trains_one_run(settings_of, tmp_path):
    """Two agents on this host, each of which starts one process; the settings are of the shell."""
    changes = {"train.predict_with_generate": False, "train.output_dir": tmp_path}
    settings = variables_of(settings_of(changes))
    environ = {**os.environ, **settings, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    meeting = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting]
    script = ["scripts/train.py", "--config", "tests/fixtures/empty.yaml"]
    port = free_port()
    agents = [
        subprocess.Popen(
            [*launcher, f"--master_port={port}", f"--node_rank={number}", *script],
            cwd=ROOT,
            env={**environ, "RUN": "mine"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        printed = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)[-3000:]
    first, second = (RunFolder(tmp_path / name) for name in ("mine", "mine-node1"))
    reports = [run_json(folder) for folder in (first, second)]
    for report in reports:
        assert (report["status"], report["world_size"], report["exit_class"]) == ("done", 2, 0)
    assert first.weights("lora").is_dir() and not second.weights("lora").exists()
