"""Converted notebooks train as before on one device, and as scripts on two.

`unsloth` is the stand-in of tests/stand_ins, which computes by transformers and PEFT: Unsloth itself
needs a GPU. TRL and its trainer are the real ones.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from notebook_files import FOLDER, converted
from rank_processes import run_two

from notebook_converter import code as codes
from notebook_converter.script import export
from sft_play.commands.notebook import read_notebook

TINY = FOLDER / "tiny.ipynb"
STAND_INS = ROOT / "tests" / "stand_ins"


def run_cells(text: str) -> dict[str, Any]:
    """Run the code cells of a notebook one after the other; return its variables."""
    variables: dict[str, Any] = {}
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] == "code":
            code = codes.parse(number, "".join(cell["source"]))
            exec(compile("\n".join(code.lines), f"cell {number}", "exec"), variables)
    return variables


def losses(trainer: Any) -> list[float]:
    """Return the losses that a trainer logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def in_a_folder_of_its_own(tmp_path, monkeypatch) -> Path:
    """A current folder with the model and rows that ship; `unsloth` is the stand-in."""
    trl = pytest.importorskip("trl", reason="make install installs it")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(trl, "SFTTrainer", trl.SFTTrainer)  # the stand-in changes it
    monkeypatch.syspath_prepend(STAND_INS)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "unsloth"]:
        del sys.modules[name]


def test_one_device_trains_to_the_same_losses_before_and_after_conversion(
    in_a_folder_of_its_own, capsys
):
    before = run_cells(TINY.read_text(encoding="utf-8"))
    plain = capsys.readouterr().out
    after = run_cells(converted(TINY).text)
    printed = capsys.readouterr().out
    assert len(losses(before["trainer"])) == 3
    assert losses(after["trainer"]) == losses(before["trainer"])
    assert "GPU(s)" not in plain
    assert "Detected 0 GPU(s)\nSingle GPU mode - no device_map needed" in printed
    assert "2 rows x 1 data-parallel x 2 accumulated = 4 rows an update" in printed
    assert plain.splitlines()[-1] == printed.splitlines()[-1]  # the generated answer


def run_script(folder: Path) -> int:
    """Run the script of a folder there, as a process of torchrun; write its losses."""
    os.chdir(folder)
    sys.path.insert(0, str(STAND_INS))
    try:
        variables = runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:  # of every process but the first
        return int(end.code or 0)
    trainer = variables["trainer"]
    written = {"losses": losses(trainer), "world": trainer.args.world_size}
    (folder / "result.json").write_text(json.dumps(written))
    return 0


def write_script(folder: Path) -> Path:
    text, _ = export(read_notebook(TINY), folder / "train.py")
    (folder / "train.py").write_text(text, encoding="utf-8")
    return folder / "train.py"


@pytest.mark.long
def test_the_script_trains_data_parallel_on_two_processes(in_a_folder_of_its_own):
    folder = in_a_folder_of_its_own
    write_script(folder)
    output = folder / "output.txt"
    assert run_two(run_script, folder, output=output) == [0, 0], output.read_text()
    printed = output.read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["world"] == 2
    text = TINY.read_text(encoding="utf-8")
    same_rows = text.replace("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 4")
    alone = losses(run_cells(same_rows)["trainer"])
    assert result["losses"] == pytest.approx(alone, rel=1e-4)
    assert printed.count("2 rows x 2 data-parallel x 2 accumulated = 8 rows an update") == 1
    assert (folder / "lora_model" / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_the_script_starts_under_torchrun(in_a_folder_of_its_own):
    script = write_script(in_a_folder_of_its_own)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"= (\d+) rows an update", done.stdout) == ["8"]
