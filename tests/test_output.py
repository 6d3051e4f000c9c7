"""Standard streams that are full or closed: an answer says so, a run continues and has its log."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from calls import outcome_of
from rank_processes import start_rank, wait_for, work
from run_files import run_json

from sft_play.plan.launch import free_port
from sft_play.runs.folder import RunFolder

COMMAND = f"{sys.executable} -m sft_play"
TRAIN = (
    f"{COMMAND} train --config tests/fixtures/empty.yaml --set model.name=data/tiny_llama "
    "--set model.max_seq_len=256 --set data.train_path=data/desk/test.jsonl "
    "--set train.batch_size=2 --set train.grad_accum=1 --set train.max_steps=1 "
    "--set train.predict_with_generate=false --set train.reopen_saved=false "
    "--set train.run_name=run --set train.output_dir="
)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEVICE": "cpu"}
    bash = ["bash", "-c", f"set -o pipefail; {line}"]
    return outcome_of(bash, environ)


def test_an_answer_that_cannot_be_printed_is_an_error_that_says_so() -> None:
    done = shell(f"{COMMAND} config >/dev/full")
    assert (done.returncode, done.stdout) == (16, "")
    assert done.stderr.startswith("No space left on device: standard output; ")
    assert shell(f"{COMMAND} config >/dev/full 2>/dev/full").returncode == 16


@pytest.mark.parametrize("command", ["data-check", "memory-check"])
def test_what_python_would_write_when_it_exits_has_the_same_end(command: str) -> None:
    """These print lines, which wait in a buffer unless PYTHONUNBUFFERED is set."""
    environ = "env -u PYTHONUNBUFFERED DATA_TRAIN_PATH=data/desk/test.jsonl"
    done = shell(f"{environ} {COMMAND} {command} >/dev/full")
    assert done.returncode == 16 and "Exception ignored" not in done.stderr
    done = shell(f"{environ} {COMMAND} {command} | true")
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr


def test_streams_that_are_closed_are_no_error() -> None:
    assert shell(f"{COMMAND} config >&- 2>&- <&-").returncode == 0
    assert shell(f"{COMMAND} config --set train.epoch=1 >&- 2>&-").returncode == 10
    done = shell(f"{COMMAND} config | head -1")
    assert done.stdout.startswith("model.name") and done.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize("output", ["| head -1", ">&- 2>&- <&-"])
def test_a_run_goes_on_without_its_output(output: str, tmp_path: Path) -> None:
    done = shell(f"{TRAIN}{tmp_path} {output}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_finished(RunFolder(tmp_path / "run"))


def test_a_program_that_a_command_becomes_has_streams_that_were_closed(tmp_path: Path) -> None:
    """As the front end becomes a launcher or a rank: the first files that it opens are no streams."""
    look = f"import os; open('{tmp_path}/seen', 'w').write(str([os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)]))"
    become = "import os, sys; from sft_play.progress import guard_output; guard_output(); "
    become += f"os.execv(sys.executable, [sys.executable, '-c', {look!r}])"
    assert shell(f"{sys.executable} -c {shlex.quote(become)} >&- 2>&- <&-").returncode == 0
    assert (tmp_path / "seen").read_text() == str(["/dev/null"] * 3)


@pytest.mark.parametrize("lose", ["reader", "streams"])
def test_a_rank_goes_on_without_its_output(lose: str, plan_run, tmp_path: Path) -> None:
    folder = plan_run({"train.max_steps": 1, "train.predict_with_generate": False})
    arguments = (folder.path, {"reader": lose_reader, "streams": lose_streams}[lose])
    rank = start_rank(work, arguments, 0, free_port(), tmp_path / "output.txt", world_size=1)
    assert wait_for(rank) == 0
    assert (tmp_path / "output.txt").read_text() == "", "and says nothing about it"
    assert_finished(folder)


def lose_reader() -> None:
    """Let standard output be a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


def lose_streams() -> None:
    """Be a process that was started with its standard streams closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)


def assert_finished(folder: RunFolder) -> None:
    assert run_json(folder)["status"] == "done"
    assert "after eval_loss" in (folder.path / "logs" / "rank-0.log").read_text()
