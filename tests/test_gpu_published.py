"""Published composite checkpoints on a GPU, by the command that a user types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from published_models import write_published
from tiny_models import GPU_SIZES
from transformers import AutoTokenizer

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[1]
TYPES = ("gemma3", "mistral3", "qwen3_5", "qwen2_5_vl", "llama4")


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_composite_checkpoint_trains_and_is_reopened(model_type, mode, tmp_path):
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
    done = subprocess.run(
        [sys.executable, "-m", "sft_play", "train", *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["device"] == "cuda" and "attention" in report["fast_path"]["on"]
    assert report["metrics"]["after"]["eval_loss"] < report["metrics"]["before"]["eval_loss"]
