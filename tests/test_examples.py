"""The scripts in examples/, alone and as two processes of a CPU."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import ROOT
from rank_processes import ON_CPU, QUIET, run_two

from sft_play.config.loader import SHIPPED_MODEL
from sft_play.plan.launch import accelerate_config, free_port, write_accelerate_config
from sft_play.plan.ranks import Ranks

EXAMPLES = ROOT / "examples"
ROWS = ROOT / "data" / "desk" / "test.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model in float32: a CPU takes seconds for a step in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    loaded = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path) -> Path:
    """A file of a few conversations."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS.read_text(encoding="utf-8").splitlines()[:10]))
    return path


def words(model: Path, rows: Path, output: Path) -> list[str]:
    return [
        "--model",
        f"{model}",
        "--rows",
        f"{rows}",
        "--output-dir",
        f"{output}",
        "--max-steps=1",
    ]


def run_script(name: str, arguments: list[str]) -> None:
    """Run an example as Python would run its file."""
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def run_script_here(name: str, arguments: list[str]) -> None:
    """Run an example in this process, and leave its arguments and path as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "path", [*sys.path])
        run_script(name, arguments)


def run_script_on_two(name: str, arguments: list[str], output: Path) -> str:
    """Run an example as two processes; return what both printed."""
    codes = run_two(run_script, name, arguments, output=output)
    printed = output.read_text(encoding="utf-8")
    assert codes == [0, 0], printed
    return printed


@pytest.mark.slow
def test_the_six_lines_train_on_two_processes(model, rows, tmp_path):
    arguments = words(model, rows, tmp_path / "output")
    printed = run_script_on_two("train_multi_gpu.py", arguments, tmp_path / "printed.txt")
    assert printed.count("'train_loss'") == 1  # one process reports


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_train_an_adapter_and_write_the_files_of_the_guide(model, rows, tmp_path):
    output = tmp_path / "multi_gpu_output"
    arguments = ["--config=small", *words(model, rows, output)]
    printed = run_script_on_two("multi_gpu_training.py", arguments, tmp_path / "printed.txt")
    assert printed.count("Effective batch size: 2 x 2 x 4 = 16 samples per update") == 1
    assert "Training on 2 processes in parallel (DDP)" in printed
    results = json.loads((output / "results.json").read_text())
    assert results["num_processes"] == 2 and 0 < results["train_loss"] < 10
    assert (output / "adapter_model.safetensors").exists()
    for rank in (0, 1):
        log = (output / f"debug_gpu_{rank}.log").read_text()
        assert f"process {rank} of 2" in log and "rows=10" in log

    # the adapter answers, and two processes answer as one
    arguments = words(output, rows, tmp_path / "two")
    printed = run_script_on_two("multi_gpu_inference.py", arguments, tmp_path / "answers.txt")
    assert printed.count("10 answers of 2 processes") == 1
    run_script_here("multi_gpu_inference.py", words(output, rows, tmp_path / "one"))
    answers = [
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    ]
    assert answers[0] == answers[1]
    questions = [json.loads(line)["messages"][-2]["content"] for line in rows.open()]
    assert all(
        question in entry["prompt"] for question, entry in zip(questions, answers[0], strict=True)
    )


@pytest.mark.long
def test_the_four_lines_train(model, rows, tmp_path, capsys):
    run_script_here("train_single_gpu.py", words(model, rows, tmp_path / "output"))
    assert "'train_loss'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train_multi_gpu.py", "multi_gpu_training.py"])
def test_an_example_trains_in_bfloat16_as_on_a_gpu(name, model, rows, tmp_path, capsys):
    """transformers refuses an Accelerator that was made with another precision than its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with patch("sft_play.distributed.choose_dtype", return_value=torch.bfloat16):
        sys.modules.pop("example_setup", None)
        run_script_here(name, words(model, rows, tmp_path / "output"))
    assert AcceleratorState().mixed_precision == "bf16"
    assert "'train_loss'" in capsys.readouterr().out
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["train_multi_gpu.py", "multi_gpu_training.py", "multi_gpu_inference.py"]
)
def test_an_example_runs_under_torchrun(name, model, rows, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = [*launcher, str(EXAMPLES / name), *words(model, rows, tmp_path / "output")]
    environ = {**os.environ, **QUIET, **ON_CPU}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_accelerate_launch_starts_an_example_with_the_file_of_setup_accelerate(
    model, rows, tmp_path
):
    ranks = Ranks("ddp", "cpu", 2, 1, 0, "127.0.0.1", free_port(), (), 2)
    file = tmp_path / "accelerate.yaml"
    write_accelerate_config(file, accelerate_config(ranks, "no"), "Of a test.")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    script = [str(EXAMPLES / "multi_gpu_training.py"), "--config=medium"]  # qlora
    output = tmp_path / "output"
    environ = {**os.environ, **QUIET, **ON_CPU, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*launcher, *script, *words(model, rows, output)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "use_reentrant" not in done.stderr
    assert done.stdout.count("Effective batch size: 2 x 2 x 4 = 16 samples per update") == 1
    assert json.loads((output / "results.json").read_text())["num_processes"] == 2
    assert (output / "debug_gpu_1.log").exists()
