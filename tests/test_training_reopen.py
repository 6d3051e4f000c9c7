"""The end of a run: a fresh process opens what was saved."""

import shutil

import pytest
from run_files import run_json

from sft_play.errors import CheckpointError
from sft_play.evaluation.reopened import Folder, Reference, reopen

CHECK = "plain transformers opens the saved weights and says the same"


def test_a_run_opens_what_it_saved_and_prints_what_was_found(plan_run, run_worker):
    folder = plan_run({"train.reopen_saved": True})
    assert run_worker(folder) == 0
    (check,) = [check for check in run_json(folder)["checks"] if check["name"] == CHECK]
    assert check["passed"]
    log = (folder.path / "logs" / "rank-0.log").read_text()
    line = next(line for line in log.splitlines() if "adapter eval_loss=" in line)
    assert line.endswith("on 6 rows top-1 agreement=1.000 KL=0.0e+00 (at most 1e-06) stops=6/6")
    loss = run_json(folder)["metrics"]["after"]["eval_loss"]
    assert f"eval_loss={loss:.4f} (run {loss:.4f})" in line, "six rows are all of the test rows"


@pytest.mark.long
def test_a_folder_that_cannot_be_opened_is_class_12_with_the_reason(finished, tmp_path):
    folder = finished("lora")
    weights = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    (weights / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="transformers cannot open and use it: "):
        reopen(Folder(weights, "float32", {"": "cpu"}), Reference.read(folder.evaluation))
