"""Weights that llm-compressor quantises by a run's training rows, for `make export FORMAT=awq`.

It runs in a process of its own (`calibrate_awq`): it needs another compressed-tensors than we do.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from sft_play.config.loader import environment
from sft_play.data.store import Split
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.inference.exported import Exported, link_files
from sft_play.models.architecture import auto_class_of, empty_model
from sft_play.models.compressed import quantised_linears, scheme_of
from sft_play.models.experts import expert_weights
from sft_play.runs.files import write_json

SCRIPT = Path(__file__).with_name("calibrate_awq.py")
QUANTIZE = Path(sys.prefix) / "quantize"  # where make install-quantize puts llm-compressor
CALIBRATION_ROWS = 128
BLOCK_TOKENS = 2048  # that are computed at once, of several rows


def require_llm_compressor() -> None:
    """Raise EnvironmentFault if it is not installed, before anything is merged."""
    if not QUANTIZE.is_dir() and importlib.util.find_spec("llmcompressor") is None:
        raise EnvironmentFault(
            "FORMAT=awq: llm-compressor is not installed; type make install-quantize, or install "
            "the extra: pip install 'sft-play[quantize]'"
        )


def calibrate(run: Exported, train: Split, source: Path, target: Path) -> None:
    """Write a folder of plain weights as llm-compressor quantises it, by rows of training.

    Raises: EnvironmentFault where llm-compressor fails; ConfigError for experts.
    """
    trusted = run.config.model.trust_remote_code
    described = AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    model = empty_model(described, torch.bfloat16, trusted)
    if expert_weights(model):
        raise ConfigError(
            f"FORMAT=awq: llm-compressor does not see the experts of {type(model).__name__}; "
            "FORMAT=int4 and fp8 quantise them"
        )
    linears, others = quantised_linears(model)
    inputs = (linear.in_features for linear in linears.values())
    ids = np.concatenate([train[index].ids for index in range(min(CALIBRATION_ROWS, len(train)))])
    ends = torch.arange(BLOCK_TOKENS, len(ids) + BLOCK_TOKENS, BLOCK_TOKENS)  # few long batches
    with tempfile.TemporaryDirectory(prefix=".awq-", dir=target.parent) as temporary:
        asked = {
            "model_class": auto_class_of(described).__name__,
            "source": str(source),
            "target": f"{temporary}/target",
            "rows": f"{temporary}/rows.safetensors",
            "group_size": scheme_of("int4", inputs, source.name).weights.group_size,
            "ignore": others,
            "trust_remote_code": trusted,
        }
        save_file({"ids": torch.from_numpy(ids), "ends": ends}, asked["rows"])
        write_json(Path(temporary) / "asked.json", asked)
        words = [sys.executable, "-P", str(SCRIPT), f"{temporary}/asked.json"]
        environ = environment()
        paths = [str(QUANTIZE), *filter(None, [environ.get("PYTHONPATH")])]
        environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise EnvironmentFault(f"FORMAT=awq: llm-compressor failed: {said[-1]}")
        link_files(source, target)
        for path in (*target.glob("*.safetensors"), *target.glob(SAFE_WEIGHTS_INDEX_NAME)):
            path.unlink()
        written = Path(temporary) / "target"
        for path in (written / "config.json", *written.glob("*.safetensors*")):
            shutil.copyfile(path, target / path.name)
