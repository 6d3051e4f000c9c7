"""model.adapter: training continues from an adapter, with other rows and in a run of its own."""

import json
import re
import shutil
from pathlib import Path

import pytest
from run_files import run_json
from tiny_models import tiny_model

from sft_play.data.templates import DEFAULT_TEMPLATE
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.runs import earlier_adapter, seal, stamp

SHAPE = {
    "tuning.lora.r": 4,
    "tuning.lora.target_modules": ["q_proj", "up_proj"],
    "tuning.lora.use_rslora": True,
}


@pytest.fixture(scope="module")
def earlier(train_run):
    folder = train_run({**SHAPE, "train.predict_with_generate": False})
    return folder


def loss(folder, when: str) -> float:
    return run_json(folder)["metrics"][when]["eval_loss"]


def plain_adapter(earlier, folder: Path) -> Path:
    """Return a copy of the adapter as PEFT would have written it."""
    shutil.copytree(earlier.path / "adapter", folder)
    for name in (stamp.NAME, seal.NAME):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("named", ["run", "name", "folder", "plain"])
def test_a_run_goes_on_from_an_adapter(train_run, earlier, named, tmp_path, monkeypatch):
    adapter = {
        "run": earlier.path,
        "name": earlier.path.name,
        "folder": earlier.path / "adapter",
        "plain": tmp_path / "plain",
    }[named]
    if named == "plain":
        plain_adapter(earlier, adapter)
    changes = {"model.adapter": adapter, "train.predict_with_generate": False}
    if named == "name":
        monkeypatch.setenv("TRAIN_OUTPUT_DIR", str(earlier.path.parent))
    folder = train_run(changes)
    assert loss(folder, "before") == pytest.approx(loss(earlier, "after"), rel=1e-6)
    assert loss(folder, "after") != loss(folder, "before")
    saved = json.loads((folder.path / "adapter" / "adapter_config.json").read_text())
    then = json.loads((earlier.path / "adapter" / "adapter_config.json").read_text())
    assert {**saved, "target_modules": set(saved["target_modules"])} == {
        **then,
        "target_modules": set(then["target_modules"]),
    }


def test_the_remedy_for_another_shape_works(plan_run, earlier):
    with pytest.raises(ConfigError) as error:
        plan_run({"model.adapter": earlier.path, "tuning.lora.r": 16, "tuning.lora.alpha": 8})
    remedies = dict(re.findall(r"set TUNING_LORA_(\w+)=(\S+)", str(error.value)))
    assert {name: float(value) for name, value in remedies.items()} == {"R": 4, "ALPHA": 32}
    changes = {f"tuning.lora.{name.lower()}": value for name, value in remedies.items()}
    plan_run({"model.adapter": earlier.path, **changes})


def test_what_cannot_go_on_is_refused(plan_run, earlier, tmp_path):
    with pytest.raises(ConfigError, match="no run with an adapter"):
        plan_run({"model.adapter": tmp_path})
    with pytest.raises(ConfigError, match=rf"did you mean \S*{earlier.name}\?"):
        plan_run({"model.adapter": f"{earlier.path}x"})
    with pytest.raises(ConfigError, match="set TUNING_MODE=lora"):
        plan_run({"model.adapter": earlier.path, "tuning.mode": "full"})
    other = tiny_model("llama")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="trained on"):
        plan_run({"model.adapter": earlier.path, "model.name": tmp_path / "other"})
    plain = plain_adapter(earlier, tmp_path / "plain")
    config = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": {"q": 2}}))
    with pytest.raises(ConfigError, match="rank_pattern="):
        plan_run({"model.adapter": plain})


def test_an_adapter_that_was_changed_or_pickled_is_refused(plan_run, earlier, tmp_path):
    changed = Path(shutil.copytree(earlier.path / "adapter", tmp_path / "changed"))
    weights = changed / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        plan_run({"model.adapter": changed})
    weights.rename(changed / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        plan_run({"model.adapter": changed})


def test_an_adapter_of_other_layers_is_refused(plan_run, run_worker, earlier, tmp_path):
    plain = plain_adapter(earlier, tmp_path / "plain")
    config = json.loads((plain / "adapter_config.json").read_text())
    (plain / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["k_proj"]}))
    folder = plan_run({"model.adapter": plain})
    assert run_worker(folder) == 10
    assert "no adapter of this model and these settings" in run_json(folder)["cause"]


def test_a_resumed_run_needs_the_earlier_adapter_no_more(
    train_run, plan_run, run_worker, earlier, tmp_path
):
    plain = plain_adapter(earlier, tmp_path / "plain")
    every_step = {"train.save_strategy": "steps", "train.save_steps": 1}
    settings = {"model.adapter": plain, "train.predict_with_generate": False, **every_step}
    whole = train_run(settings)
    stopped = plan_run({**settings, "train.stop_after": 2})
    assert run_worker(stopped) == 75
    shutil.rmtree(plain)
    resumed = train_run(
        {
            "train.output_dir": stopped.path.parent,
            "train.resume_from": stopped.path,
            "train.predict_with_generate": False,
        }
    )
    assert loss(resumed, "after") == loss(whole, "after")


@pytest.mark.parametrize("setting", [None, "default"])
def test_training_uses_and_saves_the_template_of_an_adapter_unless_one_is_set(
    train_run, earlier, tmp_path, setting
):
    adapter = plain_adapter(earlier, tmp_path / "plain")
    template = "Hello. " + (adapter / "chat_template.jinja").read_text()
    (adapter / "chat_template.jinja").write_text(template)
    (adapter / "tokenizer_config.json").unlink()
    changes = {"model.adapter": adapter, "train.predict_with_generate": False}
    folder = train_run({**changes, "model.chat_template": setting})
    saved = (folder.path / "adapter" / "chat_template.jinja").read_text()
    assert saved.endswith(DEFAULT_TEMPLATE if setting else template)


def test_an_adapter_whose_config_is_nested_without_end_is_refused_in_words(tmp_path):
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(EnvironmentFault, match="nested too deeply; get the model again"):
        earlier_adapter.settings_of_adapter(str(tmp_path), tmp_path)
