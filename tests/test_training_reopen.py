"""The end of a run: a fresh process opens what was saved."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import Folder, reopen
from sft_play.runs.report import RunReport
from sft_play.training import saved_weights


@pytest.mark.long
def test_a_folder_that_cannot_be_opened_is_class_12_with_the_reason(finished, tmp_path):
    folder = finished("lora")
    weights = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    (weights / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="transformers cannot open and use it: "):
        reopen(Folder(weights, "float32", {"": "cpu"}), Reference.read(folder.evaluation))


def test_the_time_to_open_saved_weights_is_what_this_run_measured():
    after = {"eval_loss_seconds": 6.0, "rows": 12}
    report = RunReport(metrics={"after": after}, seconds={"load": 5.0}, world_size=2)
    assert saved_weights.seconds_to_reopen(report, rows=16) == 5 + 16 * 2 * 0.5


@pytest.mark.parametrize(
    ("quick_bytes", "seconds", "free_bytes", "reason"),
    [
        (1e9, 100, 1e9, None),  # small weights are always opened
        (1e3, 6, 1e9, None),
        (1e3, 8, 1e9, r"0.0 GB need about 8.0 s, more than a tenth of the 70.0 s of training"),
        (1e9, 1, 1e4, r"0.0 GB, and 0.0 GB of cpu are free; TRAIN_REOPEN_SAVED=true"),
    ],
)
def test_saved_weights_are_opened_if_time_and_memory_allow_it(
    monkeypatch, quick_bytes, seconds, free_bytes, reason
):
    monkeypatch.setitem(saved_weights.QUICK_BYTES, "cpu", quick_bytes)
    host = SimpleNamespace(available_bytes=free_bytes)
    monkeypatch.setattr(saved_weights, "host_memory", lambda: host)
    process = Process.alone(torch.device("cpu"))
    context = SimpleNamespace(config=Config(), process=process)
    engine = SimpleNamespace(model=nn.Linear(64, 64))
    loop = SimpleNamespace(engine=engine, step_log=SimpleNamespace(train_seconds=70.0))
    found = saved_weights.why_not(Path("adapter"), context, loop, seconds)
    assert (found is None) if reason is None else re.search(reason, found)
