"""Two processes that divide a model by FSDP: equal to DDP, saved in the same form, resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from marks import long
from peft import PeftModel
from rank_processes import run_two, train_on_two
from run_files import run_json
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from sft_kernels.process import Process
from sft_kernels.sharded import outermost_layers
from sft_play.config.schema import Config
from sft_play.models.bnb import storage_type
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.slow

# 10 rows, 8 a step: two steps an epoch, and the second holds 2 rows and 6 fillers
SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 1e-3,
    "train.save_strategy": "steps",
    "train.save_steps": 3,
    "train.eval_strategy": "steps",
    "train.eval_steps": 3,  # an evaluation leaves weights whole, a save frees those of one rank
    "train.gradient_checkpointing": True,
    "train.probe": True,
    "train.predict_with_generate": True,
    "tuning.lora.dropout": 0.1,
}
LONG = [long(mode) for mode in ("qlora", "float8", "full")]
QUICK_AND_LONG = ["lora", *LONG]


def note_held_weights(folder: Path) -> None:
    """Make a rank's check of its engine write down how many weights the rank holds, and of how many."""
    from torch.distributed.fsdp import FSDPModule

    from sft_play.models.sharding import local_shard
    from sft_play.training import worker

    check = worker.check_engine

    def note(model, strategy):
        check(model, strategy)
        frozen = [p for n, p in model.named_parameters() if "lora_" not in n]
        found = [sum(local_shard(p).numel() for p in frozen), sum(p.numel() for p in frozen)]
        rank = torch.distributed.get_rank()
        (folder / f"held-{rank}.json").write_text(json.dumps(found))
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        integers = [n for n, p in model.named_parameters() if not p.is_floating_point()]
        assert not (units and integers), "torch before 2.13 divides floating-point tensors alone"
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        policies = [type(group.offload_policy).__name__ for group in groups if group is not None]
        (folder / f"policies-{rank}.json").write_text(json.dumps(policies))

    worker.check_engine = note


@pytest.fixture(scope="module")
def finished(plan_run, taught_base):
    """A function that returns a finished run of two processes, the same one to every test."""
    runs: dict[tuple, RunFolder] = {}

    def run(strategy, mode, resume_from=None, offload=False):
        key = (strategy, mode, resume_from, offload)
        if key not in runs:
            changes = {**SETTINGS, "model.name": taught_base, "tuning.mode": mode}
            if mode == "float8":
                changes |= {"tuning.mode": "lora", "tuning.base_dtype": "float8"}
            if resume_from is not None:
                changes["train.resume_from"] = resume_from
            changes |= {"train.strategy": strategy, "train.fsdp_offload": offload}
            folder = plan_run(changes, num_gpus=2)
            train_on_two(folder, note_held_weights, folder.path)
            runs[key] = folder
        return runs[key]

    return run


def saved(folder: RunFolder, mode: str) -> dict[str, torch.Tensor]:
    (path,) = folder.weights(mode).glob("*.safetensors")
    return load_file(path)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("mode", QUICK_AND_LONG)
def test_a_divided_model_trains_as_under_ddp(finished, mode):
    ddp, fsdp = finished("ddp", mode), finished("fsdp", mode)
    one, two = run_json(ddp), run_json(fsdp)
    assert two["strategy"] == "fsdp"
    assert two["fast_path"] == one["fast_path"]
    assert two["fast_path"]["on"]
    losses = [[entry["loss"] for entry in report["loss"]] for report in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for when in ("before", "after"):
        scores = [report["metrics"][when] for report in (one, two)]
        for name in ("eval_loss", "rougeL"):
            assert scores[1][name] == pytest.approx(scores[0][name], abs=1e-5)
    assert one["metrics"]["after"]["rougeL"] > 0.5, "empty answers are equal too"
    torch.testing.assert_close(saved(fsdp, mode), saved(ddp, mode), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", QUICK_AND_LONG)
def test_each_rank_holds_its_part_of_the_base(finished, mode):
    folder = finished("fsdp", mode)
    for rank in (0, 1):
        held, total = json.loads((folder.path / f"held-{rank}.json").read_text())
        assert held == total // 2


@pytest.mark.parametrize("mode", QUICK_AND_LONG)
def test_what_is_saved_has_the_form_of_ddp(finished, mode):
    ddp, fsdp = finished("ddp", mode), finished("fsdp", mode)
    assert files(fsdp.weights(mode)) == files(ddp.weights(mode))
    before, after = (folder.checkpoints / "checkpoint-3" for folder in (ddp, fsdp))
    changed = files(before) ^ files(after)
    assert changed == ({"optimizer.pt", "divided_optimizer"} if mode == "full" else set())
    name = "config.json" if mode == "full" else "adapter_config.json"
    config = json.loads((fsdp.weights(mode) / name).read_text())
    assert "fsdp" not in json.dumps(config).lower()


def compare_bases(folder: Path, seen: Path) -> None:
    """Be a rank that loads a base divided and whole; write down the tensors that differ."""
    from sft_play.models.load import WeightPlaces, load_base

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    config = Config.model_validate({"model": {"name": str(folder)}, "tuning": {"mode": "lora"}})
    process = Process(rank, rank, 2, torch.device("cpu"))
    whole = load_base(config, process)
    divided = load_base(config, process, WeightPlaces(is_fsdp=True))
    names = [dict(model.named_parameters()).keys() for model in (whole, divided)]
    differing = list(names[0] ^ names[1])
    for name, tensor in divided.named_parameters():
        if not torch.equal(tensor.full_tensor(), whole.get_parameter(name)):
            differing.append(name)
    for name, buffer in divided.named_buffers():
        if not torch.equal(buffer, whole.get_buffer(name)):
            differing.append(name)
    (seen / f"{rank}.json").write_text(json.dumps(differing))


@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen2_moe"])
def test_a_divided_base_has_the_weights_and_buffers_of_a_whole_one(base_of, tmp_path, model_type):
    output = tmp_path / "output.txt"
    exits = run_two(compare_bases, base_of(model_type), tmp_path, output=output)
    assert exits == [0, 0], output.read_text()[-3000:]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[], []]


def compare_quantized(folder: Path, seen: Path, mode: str) -> None:
    """Be a rank that loads a quantized model divided and whole; write down the tensors that differ.

    And the bytes of layers that were there before the model was divided, and those that were read.
    """
    from sft_play.models import load, sharding
    from sft_play.models.sharding import local_shard

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    tuning = {"mode": "qlora"} if mode == "qlora" else {"mode": "lora", "base_dtype": mode}
    config = Config.model_validate({"model": {"name": str(folder)}, "tuning": tuning})
    process = Process(rank, rank, 2, torch.device("cpu"), torch.bfloat16)
    whole = load.load_model(config, process, load.WeightPlaces())
    divide, held = sharding.shard_quantized, []

    def note(base, *args):
        weights = [w for layer in outermost_layers(base) for w in layer.parameters()]
        frozen = [w for w in weights if not w.requires_grad]
        held.append(sum(w.untyped_storage().nbytes() for w in frozen))
        held.append(sum(w.nbytes for w in frozen if w.nbytes >= sharding.MIN_BYTES))
        divide(base, *args)

    sharding.shard_quantized = note
    divided = load.load_model(config, process, load.WeightPlaces(is_fsdp=True))
    differing = []
    for name, tensor in divided.named_parameters():
        found, expected = local_shard(tensor), whole.get_parameter(name).data
        if expected.dtype != found.dtype:  # packed bytes
            expected = expected.flatten().view(found.dtype)[:, None]
        if isinstance(tensor, DTensor):
            expected = expected.chunk(2)[rank]
        as_bytes = [each.flatten().view(torch.uint8) for each in (found, expected)]
        if not torch.equal(*as_bytes):
            differing.append(name)
    (seen / f"{rank}.json").write_text(json.dumps([differing, *held]))


@pytest.mark.parametrize(
    "model_type, mode", [("llama", "qlora"), long("gpt_oss", "qlora"), long("llama", "float8")]
)
def test_a_quantized_base_is_divided_as_it_is_read(base_of, tmp_path, model_type, mode):
    output = tmp_path / "output.txt"
    base = base_of(model_type, "qlora")
    exits = run_two(compare_quantized, base, tmp_path, mode, output=output)
    assert exits == [0, 0], output.read_text()[-3000:]
    for rank in (0, 1):
        differing, held, total = json.loads((tmp_path / f"{rank}.json").read_text())
        assert differing == []
        assert held < 0.3 * total, "only norms, biases and routers are there"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_head_of_its_own_is_trained_under_every_strategy(
    train_run, plan_run, base_of, tmp_path, strategy
):
    """Of files that hold two matrices where config ties them, transformers on one GPU takes both."""
    base = shutil.copytree(base_of("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    changes = {"model.name": base, "tuning.mode": "full", "train.max_steps": 1}
    alone = train_run(changes)
    both = plan_run(changes | {"train.strategy": strategy}, num_gpus=2)
    train_on_two(both)
    losses = [run_json(run)["metrics"]["before"]["eval_loss"] for run in (alone, both)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert "lm_head.weight" in saved(both, "full")


def test_plain_peft_opens_the_adapter_of_a_divided_model(finished, taught_base):
    ids = torch.arange(5, 25)[None]
    logits = []
    for strategy in ("ddp", "fsdp"):
        base = AutoModelForCausalLM.from_pretrained(taught_base, dtype=torch.float32)
        untrained = base(ids).logits
        model = PeftModel.from_pretrained(base, finished(strategy, "lora").weights("lora"))
        with torch.no_grad():
            logits.append(model(ids).logits)
        assert not torch.allclose(logits[-1], untrained)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


@pytest.mark.long
def test_plain_transformers_opens_a_divided_model(finished):
    folder = finished("fsdp", "full").weights("full")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "begun, goes_on, mode",
    [("fsdp", "fsdp", "lora"), long("fsdp", "fsdp", "full"), long("ddp", "fsdp", "lora")],
)
def test_a_resumed_run_is_the_one_that_never_stopped(finished, begun, goes_on, mode, losses_of):
    whole = finished(begun, mode)
    again = finished(goes_on, mode, whole.checkpoints / "checkpoint-3")
    losses = [losses_of(run) for run in (whole, again)]
    assert len(losses[0]) == 4
    tolerance = 0.0 if begun == goes_on else 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=tolerance)
    torch.testing.assert_close(saved(again, mode), saved(whole, mode), rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", QUICK_AND_LONG)
@pytest.mark.long
def test_weights_in_host_memory_train_save_and_resume_as_on_the_device(finished, mode):
    fsdp, offloaded = finished("fsdp", mode), finished("fsdp", mode, offload=True)
    policies = json.loads((offloaded.path / "policies-0.json").read_text())
    assert set(policies) == {"CPUOffloadPolicy"}
    assert set(json.loads((fsdp.path / "policies-0.json").read_text())) == {"OffloadPolicy"}
    reports = [run_json(run) for run in (fsdp, offloaded)]
    assert reports[1]["loss"] == reports[0]["loss"]
    assert reports[1]["fast_path"] == reports[0]["fast_path"]
    torch.testing.assert_close(saved(offloaded, mode), saved(fsdp, mode), rtol=0, atol=0)
    assert files(offloaded.weights(mode)) == files(fsdp.weights(mode))
    checkpoint = offloaded.checkpoints / "checkpoint-3"
    again = finished("fsdp", mode, checkpoint, offload=True)
    torch.testing.assert_close(saved(again, mode), saved(fsdp, mode), rtol=0, atol=0)


def test_packed_bytes_are_divided_in_a_type_that_no_copy_changes():
    """torch copies bfloat16 of several tensors through float32: of 253 bit patterns it makes others."""
    assert storage_type(torch.bfloat16, zero_stage=0, is_fsdp=True) == torch.float32
    assert storage_type(torch.bfloat16, zero_stage=3) == torch.bfloat16, "it is cast else"
    assert storage_type(torch.bfloat16, zero_stage=2) == torch.uint8, "it is whole"
