"""The end of a run: a fresh process opens what was saved."""

import shutil

import pytest

from sft_play.errors import CheckpointError
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import Folder, reopen


@pytest.mark.long
def test_a_folder_that_cannot_be_opened_is_class_12_with_the_reason(finished, tmp_path):
    folder = finished("lora")
    weights = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    (weights / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="transformers cannot open and use it: "):
        reopen(Folder(weights, "float32", {"": "cpu"}), Reference.read(folder.evaluation))
