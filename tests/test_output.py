"""Standard streams that are full or closed: an answer says so, a run goes on and has its log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMAND = f"{sys.executable} -m sft_play"
TRAIN = (
    f"{COMMAND} train --set train.max_steps=1 --set train.predict_with_generate=false "
    "--set train.reopen_saved=false --set data.train_path=data/desk/test.jsonl --set train.run_name=run --set train.output_dir="
)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DEVICE": "cpu"}
    bash = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(bash, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_an_answer_that_cannot_be_printed_is_an_error_that_says_so() -> None:
    done = shell(f"{COMMAND} config >/dev/full")
    assert (done.returncode, done.stdout) == (16, "")
    assert done.stderr.startswith("No space left on device: standard output; ")
    assert shell(f"{COMMAND} config >/dev/full 2>/dev/full").returncode == 16


def test_streams_that_are_closed_are_no_error() -> None:
    assert shell(f"{COMMAND} config >&- 2>&- <&-").returncode == 0
    assert shell(f"{COMMAND} config --set train.epoch=1 >&- 2>&-").returncode == 10
    done = shell(f"{COMMAND} config | head -1")
    assert done.stdout.startswith("model.name") and done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("output", ["| head -1", ">&- 2>&- <&-"])
def test_a_run_goes_on_without_its_output(output: str, tmp_path: Path) -> None:
    done = shell(f"{TRAIN}{tmp_path} {output}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    assert "after eval_loss" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
