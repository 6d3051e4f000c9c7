"""The training targets on real GPUs, each as a user types it: `make test-gpu`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"TRAIN_MAX_STEPS": "6", "TRAIN_LOGGING_STEPS": "1", "TRAIN_GENERATION_MAX_ROWS": "8", "TRAIN_SAVE_STRATEGY": "no", "CONFIG": "configs/tiny.yaml"}

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(tmp_path: Path, target: str, **variables: str) -> dict:
    """Run a make target to its end; return run.json."""
    words = {**SHORT, "TRAIN_OUTPUT_DIR": str(tmp_path), "RUN": "run", "PY": sys.executable, **variables}
    done = subprocess.run(
        ["make", target, *(f"{name}={value}" for name, value in words.items())], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((tmp_path / "run" / "run.json").read_text())


def check_learned(report: dict) -> None:
    losses = [entry["loss"] for entry in report["loss"]]
    assert report["status"] == "done" and report["exit_class"] == 0 and report["device"] == "cuda"
    assert len(losses) == 6 and all(loss < 20 for loss in losses)
    assert report["metrics"]["after"]["eval_loss"] < report["metrics"]["before"]["eval_loss"]
    assert report["tokens_per_second"] > 0 and 0 < report["peak_bytes"]["measured"] < 20 * 2**30


@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_backend_trains_in_each_mode(tmp_path: Path, backend: str, mode: str) -> None:
    if backend == "unsloth" and importlib.util.find_spec("unsloth") is None:
        pytest.skip("unsloth is not installed (make install-unsloth)")
    report = train(tmp_path, f"train-{backend}", TUNING_MODE=mode, **({"TRAIN_LEARNING_RATE": "1e-3"} if mode == "full" else {}))
    check_learned(report)
    assert (report["backend"], report["mode"], report["world_size"]) == (backend, mode, 1)


def test_one_process_on_a_host_of_many_gpus_uses_one(tmp_path: Path) -> None:
    assert train(tmp_path, "train")["engine"] == "PeftModelForCausalLM"


@needs_two
@pytest.mark.parametrize(
    ("target", "variables", "engine"),
    [
        ("train-distributed", {}, "DistributedDataParallel"),
        ("train-distributed", {"TUNING_MODE": "qlora"}, "DistributedDataParallel"),
        ("train-deepspeed", {}, "DeepSpeedEngine"),
        ("train-deepspeed", {"DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json"}, "DeepSpeedEngine"),
        ("train-deepspeed", {"DEEPSPEED_CONFIG": "configs/deepspeed_zero3.json", "TUNING_MODE": "full", "TRAIN_LEARNING_RATE": "1e-3"}, "DeepSpeedEngine"),
    ],
    ids=["ddp-lora", "ddp-qlora", "zero2-lora", "zero3-lora", "zero3-full"],
)
def test_two_gpus_train_together(tmp_path: Path, target: str, variables: dict[str, str], engine: str) -> None:
    report = train(tmp_path, target, NUM_GPUS="2", **variables)
    check_learned(report)
    assert (report["world_size"], report["engine"]) == (2, engine)


@needs_two
def test_two_gpus_learn_what_one_learns(tmp_path: Path) -> None:
    """On the same global batch; bfloat16 sums in another order, hence 2e-2 on losses of about 5."""
    one = train(tmp_path / "one", "train")
    two = train(tmp_path / "two", "train-distributed", NUM_GPUS="2")
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one["loss"], two["loss"], strict=True)) < 2e-2
