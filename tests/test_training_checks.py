"""What must hold before a run continues, and of its weights before it calls itself done."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from sft_play.errors import CheckpointError, DivergedError, EnvironmentFault
from sft_play.training import checks, saved_weights
from sft_play.training.checkpoints import write_weights


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_weights_that_came_back_as_they_were_saved_pass_and_others_do_not(
    plan_run, mode, tmp_path, build_loop
):
    trainer, _ = build_loop(plan_run({"tuning.mode": mode}))
    trainer.start()
    trainer.train()
    write_weights(trainer.engine, tmp_path)
    checked = (
        saved_weights.check_saved_model if mode == "full" else saved_weights.check_saved_adapter
    )
    trained = saved_weights.trained_tensors(trainer.engine.model, 0)
    checked(tmp_path, trained)
    file = tmp_path / ("model.safetensors" if mode == "full" else "adapter_model.safetensors")
    good = load_file(file)
    name = sorted(good)[-1]

    def saved_with(changes):
        tensors = {
            key: value.clone() for key, value in {**good, **changes}.items() if value is not None
        }
        save_file(tensors, file, metadata={"format": "pt"})

    saved_with({name: good[name] + 1e-6})
    with pytest.raises(
        CheckpointError, match=f"1 tensors on disk are not those that were trained, {name} first"
    ):
        checked(tmp_path, trained)
    if mode == "lora":
        saved_with({name: None})
        words = f"{len(good) - 1} tensors were saved and {len(good)} were trained"
        with pytest.raises(CheckpointError, match=words):
            checked(tmp_path, trained)
    saved_with({name: good[name] * math.nan})
    with pytest.raises(DivergedError, match=f"1 tensors contain NaN or infinity, {name} first"):
        checked(tmp_path, trained)
    with pytest.raises(DivergedError):
        checked(tmp_path, None)  # shards in memory: the file is looked at anyway
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read back"):
        checked(tmp_path, trained)
    file.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        checked(tmp_path, trained)


def test_an_adapter_that_never_moved_is_refused_unless_the_run_was_stopped(
    plan_run, tmp_path, build_loop
):
    trainer, _ = build_loop(plan_run({}))
    write_weights(trainer.engine, tmp_path)
    trained = saved_weights.trained_tensors(trainer.engine.model, 0)
    saved_weights.check_saved_adapter(tmp_path, trained, is_complete=False)
    with pytest.raises(DivergedError, match="still has its initial values, so nothing was learned"):
        saved_weights.check_saved_adapter(tmp_path, trained)


def test_saved_weights_use_their_cache_as_the_base_does(finished):
    config = json.loads((finished("full").weights("full") / "config.json").read_text())
    assert config["use_cache"] is True, "Trainer turns it off to train"


def test_an_engine_is_what_its_strategy_calls_for(tmp_path):
    plain = torch.nn.Linear(2, 2)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(plain)
    finally:
        torch.distributed.destroy_process_group()
    checks.check_engine(plain, "single")
    checks.check_engine(wrapped, "ddp")
    for model, strategy in (
        (plain, "ddp"),
        (plain, "deepspeed"),
        (wrapped, "single"),
        (wrapped, "deepspeed"),
        (torch.nn.DataParallel(plain), "single"),
    ):
        with pytest.raises(
            EnvironmentFault,
            match=f"strategy={strategy} was planned, and the model is wrapped in {type(model).__name__}",
        ):
            checks.check_engine(model, strategy)
