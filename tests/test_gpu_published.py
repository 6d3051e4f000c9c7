"""Published composite checkpoints on a GPU, by the command that a user types."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from calls import outcome_of
from published_models import write_published
from safetensors import safe_open
from tiny_models import GPU_SIZES
from transformers import AutoTokenizer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
TYPES = (
    *("gemma3", "mistral3", "qwen3_5", "qwen2_5_vl", "llama4"),
    *("qwen3_vl_moe", "qwen3_5_moe"),
)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_composite_checkpoint_trains_is_reopened_and_merged(model_type, mode, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")
    write_published(model_type, tmp_path / "base", tokenizer, GPU_SIZES, dtype=torch.bfloat16)
    settings = {
        "model.name": tmp_path / "base",
        "tuning.mode": mode,
        "train.max_steps": 4,
        "train.learning_rate": 1e-3,
        "train.output_dir": tmp_path,
        "train.run_name": "run",
        "train.predict_with_generate": "false",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    run_command(["train", *words])
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["device"] == "cuda" and "attention" in report["fast_path"]["on"]
    assert report["metrics"]["after"]["eval_loss"] < report["metrics"]["before"]["eval_loss"]
    # a merge in float32 rounds nothing, so only its names and shapes could keep it from its base's
    run_command(["merge"], RUN=str(tmp_path / "run"), MODEL_DTYPE="float32")
    assert names_of(tmp_path / "run" / "merged") == names_of(tmp_path / "base")


def run_command(words: list[str], **settings: str) -> None:
    """Run a command on the first visible GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = outcome_of(
        [sys.executable, "-m", "sft_play", *words],
        {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, **settings},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def names_of(folder: Path) -> set[str]:
    """Return the names of the tensors in the files of a model."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names
