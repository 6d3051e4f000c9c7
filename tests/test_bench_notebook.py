"""benchmarks.notebook: what each run is given, what is wrong with runs, and a run of the toy."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inputs import TINY
from benchmarks.machine import ROOT
from benchmarks.notebook import SAID_OF_GPUS, Run, Size, find_faults, prepare, table

SIZE = Size(TINY, 64, 256, 2, 12, 2e-3)
ALONE = Run(
    "notebook",
    1,
    1,
    step_seconds=1.0,
    rows_per_step=32,
    losses=[12.0, 8.0],
    weights={"cuda:0": 100},
    peak_gib={"cuda:0": 10.0},
    busy_percent=[90.0, 0.0],
)
SPLIT = replace(ALONE, name="split", gpus=2, weights={"cuda:0": 50, "cuda:1": 50})
SPLIT.busy_percent = [45.0, 44.0]
SCRIPT = replace(SPLIT, name="script", processes=2, step_seconds=0.55)
NOTEBOOK, SPLIT_RUN, SCRIPT_RUN = Run("notebook", 1, 1), Run("split", 2, 1), Run("script", 2, 2)


def test_a_run_on_two_processes_accumulates_half_of_what_one_does(tmp_path: Path) -> None:
    texts = {}
    for run in (NOTEBOOK, SPLIT_RUN, SCRIPT_RUN):
        out = tmp_path / run.name
        out.mkdir()
        command = prepare(run, SIZE, out)
        texts[run.name] = Path(command[-2]).read_text(encoding="utf-8")
        assert ("--nproc_per_node=2" in command) == (run is SCRIPT_RUN)
    assert "device_map" not in texts["notebook"]
    assert 'device_map = \\"balanced\\"' in texts["split"]
    for name, accumulated in (("notebook", 4), ("split", 4), ("script", 2)):
        assert f"gradient_accumulation_steps = {accumulated}" in texts[name]


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        ([ALONE, SPLIT, SCRIPT], None),
        ([ALONE, replace(SPLIT, weights={"cuda:0": 100}), SCRIPT], "split: its weights lie on"),
        ([ALONE, SPLIT, replace(SCRIPT, busy_percent=[90.0, 0.0])], "script: GPU 1 did nothing"),
        ([ALONE, SPLIT, replace(SCRIPT, step_seconds=1.1)], "script: two GPUs are no faster"),
        ([ALONE, SPLIT, replace(SCRIPT, losses=[12.0, 7.9])], "script: a loss is 1.2% off"),
        ([ALONE, replace(SPLIT, rows_per_step=64), SCRIPT], "split: 64 rows a step, not 32"),
        ([ALONE, Run("split", 2, 1, error="ended with 1: x"), SCRIPT], "split: ended with 1: x"),
    ],
)
def test_what_the_guide_does_not_promise_is_a_fault(runs: list[Run], fault: str | None) -> None:
    found = find_faults(runs, on_cpu=False)
    assert [each[: len(fault or "")] for each in found] == ([fault] if fault else [])
    columns = {line.count("|") for line in table(runs).splitlines()}
    assert len(columns) == 1, "each line has as many cells"


def test_lines_about_gpus_are_kept_and_warnings_are_not() -> None:
    kept = ["GPU 1: Peak reserved = 3.1 GB (2.2%)", "Detected 2 GPU(s)", "Total across 2 GPUs: 1"]
    assert all(map(SAID_OF_GPUS.match, kept))
    assert not SAID_OF_GPUS.match("[WARNING] If you have GPU or other accelerator")


@pytest.mark.long
def test_the_toy_trains_alike_as_notebook_converted_and_as_script(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="make install installs it")
    command = [sys.executable, "-m", "benchmarks.notebook", "--toy", "--folder", str(tmp_path)]
    command += ["--results", str(tmp_path / "toy.json"), "--seconds", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=330)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "toy.json").read_text())
    notebook, split, script = (run["losses"] for run in found["runs"])
    assert len(notebook) == 20
    assert split == notebook
    assert script == pytest.approx(notebook, rel=1e-4)
