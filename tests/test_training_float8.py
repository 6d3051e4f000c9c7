"""A run over a float8 base: scored as it was trained, resumed to the bit, merged into either base."""

import json

import pytest
import torch
from run_files import run_json
from safetensors.torch import load_file
from typer.testing import CliRunner

from sft_kernels.e4m3.linear import Float8Linear
from sft_play import cli
from sft_play.errors import CheckpointError
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("opens_here")
SETTINGS = {
    "tuning.base_dtype": "float8",
    "train.save_strategy": "steps",
    "train.save_steps": 2,
    "train.predict_with_generate": False,
}


@pytest.fixture(scope="module")
def float8_run(train_run, taught_base):
    """A finished run of three steps, not to change."""
    folder = train_run({**SETTINGS, "model.name": taught_base, "train.reopen_saved": True})
    return folder


def adapter(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.weights("lora") / "adapter_model.safetensors")


def test_eval_scores_a_float8_run_as_training_did(float8_run):
    trained = load_run(float8_run, "cpu").model
    assert sum(isinstance(module, Float8Linear) for module in trained.modules()) == 14
    done = CliRunner().invoke(cli.app, ["eval"], env={"RUN": str(float8_run.path), "DEVICE": "cpu"})
    assert done.exit_code == 0, done.output
    expected = run_json(float8_run)["metrics"]["after"]["eval_loss"]
    assert f"eval_loss={expected:.4f}" in done.output


def test_a_resumed_float8_run_ends_with_the_same_adapter(train_run, float8_run, taught_base):
    resumed = train_run(
        {
            **SETTINGS,
            "model.name": taught_base,
            "train.resume_from": float8_run.checkpoints / "checkpoint-2",
        }
    )
    expected, found = adapter(float8_run), adapter(resumed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_its_checkpoint_is_refused_by_a_run_over_another_base_dtype(float8_run):
    config = float8_run.read_config()
    tuning = config.tuning.model_copy(update={"base_dtype": "auto"})
    other = stamp.wanted_stamp(config.model_copy(update={"tuning": tuning}))
    with pytest.raises(CheckpointError, match="quantisation: the checkpoint has float8 e4m3"):
        stamp.refuse_mismatch(float8_run.checkpoints / "checkpoint-2", other)


def test_a_float8_adapter_is_merged_into_both_bases_and_the_better_is_kept(float8_run):
    lines = merge_run(float8_run)
    report = json.loads((float8_run.path / "merge_report.json").read_text())
    stored, rounded = (report["candidates"][name] for name in ("as stored", "rounded to float8"))
    assert report["kept"] == "rounded to float8" and lines[1].endswith(", kept")
    assert rounded["kl"] < stored["kl"] < 0.05
    merged = load_file(float8_run.path / "merged" / "model.safetensors")
    changes = adapter(float8_run)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (changes[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    layer = load_run(float8_run, "cpu").model.get_submodule(f"base_model.model.{name}.base_layer")
    expected = layer.dequantized_weight(torch.float32) + 2 * (b @ a)
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
