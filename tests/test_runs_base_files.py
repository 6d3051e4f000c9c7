"""Base weights that can run code, and models' own code, are loaded on request alone."""

import shutil

import pytest
import torch
from run_files import run_json
from safetensors.torch import load_file

from sft_play.config.schema import Config
from sft_play.errors import ConfigError, ExitClass
from sft_play.runs.model_folder import refuse_unsafe_base


@pytest.fixture
def pickled(tiny_base, tmp_path):
    """The tiny base with its weights as a pickle."""
    folder = shutil.copytree(tiny_base, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_pickled_base_is_refused_and_loaded_where_it_is_allowed(pickled, plan_run, run_worker):
    config = Config.model_validate({"model": {"name": str(pickled)}})
    with pytest.raises(
        ConfigError, match=r"its weights are pytorch_model.bin, a pickle, which can"
    ):
        refuse_unsafe_base(config)
    refused = plan_run({"model.name": pickled, "train.max_steps": 1})
    assert run_worker(refused) == ExitClass.CONFIG
    assert "set MODEL_ALLOW_PICKLED_WEIGHTS=true" in run_json(refused)["cause"]
    allowed = {"model.name": pickled, "model.allow_pickled_weights": True, "train.max_steps": 1}
    assert run_worker(plan_run(allowed)) == ExitClass.DONE


def test_safetensors_beside_a_pickle_are_what_is_loaded(pickled, tiny_base):
    shutil.copy(tiny_base / "model.safetensors", pickled)
    assert refuse_unsafe_base(Config.model_validate({"model": {"name": str(pickled)}})) is None
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="set MODEL_ALLOW_PICKLED_WEIGHTS=true"):
        refuse_unsafe_base(Config.model_validate({"model": {"name": str(pickled)}}))


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "a" * 39])
def test_code_of_a_hub_model_wants_a_commit(revision):
    model = {"name": "org/model", "trust_remote_code": True, "revision": revision}
    with pytest.raises(ConfigError, match="set MODEL_REVISION to the commit that you have read"):
        refuse_unsafe_base(Config.model_validate({"model": model}))
    refuse_unsafe_base(Config.model_validate({"model": {**model, "revision": "a" * 40}}))
    refuse_unsafe_base(Config.model_validate({"model": {**model, "trust_remote_code": False}}))
