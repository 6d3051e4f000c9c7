"""An adapter that does not fit its base is named with both sizes; a model inside a folder is used."""

import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sft_play.commands.call import load_config, read_call
from sft_play.config import loader
from sft_play.errors import ConfigError
from sft_play.models import expert_adapters
from sft_play.models.adapter_state import why_not_fitting
from sft_play.plan.base_model import model_inside


def test_resized_embeddings_over_the_old_base_are_named_with_both_sizes(
    tiny_base: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    rows = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(rows + 8)
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    get_peft_model(base, settings).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError) as caught:
        expert_adapters.load_frozen_adapter(
            AutoModelForCausalLM.from_pretrained(tiny_base), tmp_path
        )
    reason = why_not_fitting(caught.value)
    assert "embed_tokens" in reason and "set MODEL_NAME" in reason
    assert f"[{rows + 8}, 64]" in reason and f"[{rows}, 64]" in reason


def test_adapters_on_an_embedding_are_refused_with_the_settings() -> None:
    words = ["tuning.lora.target_modules=q_proj,embed_tokens"]
    with pytest.raises(ConfigError, match="TUNING_LORA_MODULES_TO_SAVE=embed_tokens"):
        loader.load_merged("base", {}, words)


@pytest.mark.parametrize("named", ["", "snapshots"])
def test_the_one_model_inside_a_folder_is_used(
    tiny_base: Path, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    shutil.copytree(tiny_base, snapshot)
    call = read_call(None, (f"model.name={tmp_path / named}",), environ={"DEVICE": "cpu"})
    assert load_config(call).config.model.name == str(snapshot)
    assert str(snapshot) in capsys.readouterr().err
    shutil.copytree(tiny_base, tmp_path / "snapshots" / "def")
    assert model_inside(tmp_path) is None, "two are no answer"
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("abc\n")
    assert model_inside(tmp_path) == snapshot
