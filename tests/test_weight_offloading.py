"""Frozen weights in host memory: every number is that of weights that stay on the device."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored_forms
import torch
from marks import long
from rank_processes import train_on_two
from run_files import run_json
from safetensors.torch import load_file
from tiny_models import GPU_SIZES, Sizes, write_base
from torch import nn

from sft_kernels.install import fused_kernels_of
from sft_kernels.modules import ATTRIBUTE
from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of
from sft_play.config.schema import Config
from sft_play.models import bnb, weight_offloading
from sft_play.models.architecture import decoder_layers
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.load import WeightPlaces, load_model
from sft_play.models.weight_offloading import CopyStream, chosen_layers
from sft_play.plan.run_plan import read_plan
from sft_play.runs.folder import RunFolder

LAYERS = 5
SIZES = Sizes(hidden=64, head=16, intermediate=128, expert=64)
CPU_BF16 = Process.alone(torch.device("cpu"), torch.bfloat16)
MODES = {
    "lora": {"mode": "lora"},
    "qlora": {"mode": "qlora"},
    "float8": {"mode": "lora", "base_dtype": "float8"},
}


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return write_base("llama", folder, tokenizer, SIZES, num_hidden_layers=LAYERS)


def loaded(
    base: Path, tuning: dict, offloaded: int, process: Process = CPU_BF16, **train: object
) -> nn.Module:
    torch.manual_seed(0)
    named = {"name": str(base), "max_seq_len": 128}
    if process.is_gpu:  # the backward pass of others adds in another order each time
        named["attn_implementation"] = "eager"
    config = Config.model_validate({"model": named, "tuning": tuning, "train": train})
    model = load_model(config, process, WeightPlaces(offloaded_layers=offloaded))
    with torch.no_grad():  # B is zero, and would hide A
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model.train()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (2, 48), generator=generator) for _ in range(6)]


def trained(model: nn.Module, recomputed: int = 0) -> list[torch.Tensor]:
    """Return losses and gradients of 3 steps of 2 micro-batches, evaluations, and the weights."""
    checkpoint_layers(base_model_of(model), recomputed)
    device = next(model.parameters()).device
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    found = []
    for step in range(3):
        for ids in batches()[2 * step : 2 * step + 2]:
            ids = ids.to(device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(loss.detach().clone())
        found += [weight.grad.clone() for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            found.append(model(input_ids=batches()[0].to(device)).logits)
        model.train()
    return [*found, *(weight.detach().clone() for weight in weights)]


def assert_equal(found: list[torch.Tensor], resident: list[torch.Tensor]) -> None:
    assert len(found) == len(resident) and all(map(torch.equal, found, resident))


@pytest.fixture(scope="module")
def expected(base):
    """A function that returns what a resident model computes, once for each mode."""
    found: dict[tuple, list[torch.Tensor]] = {}

    def of(mode: str, recomputed: int) -> list[torch.Tensor]:
        if (mode, recomputed) not in found:
            found[mode, recomputed] = trained(loaded(base, MODES[mode], 0), recomputed)
        return found[mode, recomputed]

    return of


SHORT = [("float8", LAYERS, LAYERS), ("lora", 4, 0), ("qlora", 3, 2)]
LONG = [long(mode, count, again) for mode in MODES for count in (3, 4, 5) for again in (0, 2, 5)]


@pytest.mark.parametrize("mode, offloaded, recomputed", [*SHORT, *LONG])
def test_losses_gradients_and_weights_are_those_of_a_resident_model(
    base, expected, mode, offloaded, recomputed
):
    model = loaded(base, MODES[mode], offloaded)
    assert {"mlp", "attention"} <= fused_kernels_of(model).on.keys()
    assert_equal(trained(model, recomputed), expected(mode, recomputed))


@pytest.mark.parametrize("experts", ["per_expert", long("shared")])
def test_experts_in_mxfp4_train_as_resident_ones_and_are_not_unpacked_for_their_shape(
    tmp_path, monkeypatch, experts
):
    folder = stored_forms.mxfp4(tmp_path)
    tuning = {**MODES["qlora"], "lora": {"experts": experts}}
    expected = trained(loaded(folder, tuning, 0))
    without_unpacking = SimpleNamespace(pack_mxfp4=bnb.mxfp4.pack_mxfp4)
    monkeypatch.setattr(bnb, "mxfp4", without_unpacking)  # as PEFT reads experts
    model = loaded(folder, tuning, 2)
    assert_equal(trained(model), expected)


@pytest.mark.parametrize(
    "mode, train",
    [
        ("lora", {"fast_path": False}),
        long("qlora", {"fast_path": False}),
        long("float8", {"fast_path": False}),
        long("lora", {"deliver_as": "int4"}),
    ],
)
def test_the_original_implementation_and_rounded_weights_compute_the_same_too(base, mode, train):
    losses = []
    for offloaded in (0, LAYERS):
        model = loaded(base, MODES[mode], offloaded, **train)
        assert bool(fused_kernels_of(model).on) == ("deliver_as" in train)
        losses.append(trained(model, recomputed=2))
    assert_equal(*losses)


KINDS = ["sliding_attention", "full_attention"] * 3
OF_GPT = {"layer_types": KINDS[:LAYERS]}
OTHERS = [
    ("qwen3_moe", "lora", "shared", {}),
    long("qwen3_moe", "qlora", "shared", {}),
    long("qwen3_moe", "lora", "per_expert", {}),
    long("gpt_oss", "qlora", "per_expert", OF_GPT),
]


@pytest.mark.parametrize("model_type, mode, experts, changes", OTHERS)
def test_experts_compute_the_same_too(tokenizer, tmp_path, model_type, mode, experts, changes):
    tuning = {**MODES[mode], "lora": {"experts": experts}}
    changes = {"num_hidden_layers": LAYERS, **changes}
    folder = write_base(model_type, tmp_path, tokenizer, SIZES, **changes)
    losses = [trained(loaded(folder, tuning, count), 2) for count in (0, LAYERS)]
    assert_equal(*losses)


def test_layers_take_turns_in_two_buffers_and_all_else_stays(base):
    model = loaded(base, MODES["qlora"], LAYERS)
    storages = [
        {weight.untyped_storage().data_ptr() for weight in layer.parameters() if frozen(weight)}
        for layer in decoder_layers(base_model_of(model))
    ]
    assert all(len(each) == 1 for each in storages)
    assert storages[0] == storages[2] == storages[4] != storages[1] == storages[3]
    weight = decoder_layers(base_model_of(model))[0].mlp.up_proj.base_layer.weight
    assert weight.quant_state.absmax.untyped_storage().data_ptr() in storages[0]
    trainable = [each for each in model.parameters() if each.requires_grad]
    own = {each.untyped_storage().data_ptr() for each in trainable}
    assert len(own) == len(trainable) and not own & (storages[0] | storages[1])


def frozen(weight: torch.Tensor) -> bool:
    return not weight.requires_grad and weight.nbytes >= weight_offloading.MIN_BYTES


@pytest.mark.parametrize("mistake", ["late", "early", "turned"])
def test_a_copy_at_the_wrong_time_would_be_seen(base, expected, monkeypatch, mistake):
    """The test above sees it: layers compute with the weights of others."""
    layers = weight_offloading.OffloadedLayers
    start_copy = layers._start_copy

    def too_far(self: object, number: int) -> None:
        start_copy(self, min(number + 1, LAYERS - 1))

    if mistake == "late":  # recomputed layers bring none
        monkeypatch.setattr(layers, "_before_backward", lambda *_: None)
        monkeypatch.setattr(layers, "_bring", lambda self, number: None)
    elif mistake == "early":
        monkeypatch.setattr(layers, "_start_copy", too_far)
    else:
        monkeypatch.setattr(layers, "_before_backward", lambda *_: None)
    found = trained(loaded(base, MODES["lora"], LAYERS), 0)
    assert not all(map(torch.equal, found, expected("lora", 0)))


def test_layers_are_spread_evenly(base):
    model = loaded(base, MODES["lora"], 0)
    layers = decoder_layers(model)
    assert chosen_layers(model, 2) == [layers[0], layers[2]]
    assert chosen_layers(model, 3) == [layers[0], layers[1], layers[3]]
    assert chosen_layers(model, LAYERS) == layers


def test_a_copied_layer_brings_the_same_weights(base):
    model = base_model_of(loaded(base, MODES["lora"], LAYERS))
    layer = copy.deepcopy(decoder_layers(model)[3])
    (hook,) = layer._forward_pre_hooks.values()
    assert hook.func.__self__ is vars(model)[ATTRIBUTE]


SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 1e-2,
    "train.save_strategy": "steps",
    "train.save_steps": 2,
    "train.eval_strategy": "steps",
    "train.eval_steps": 2,
    "train.gradient_checkpointing": True,
    "train.probe": True,
    "tuning.lora.dropout": 0.1,
}


@pytest.fixture(scope="module")
def finished(plan_run, run_worker, base):
    """A function that returns a finished run, the same one to every test."""
    runs: dict[tuple, RunFolder] = {}

    def run(mode: str, offloads: bool, ranks: int = 1, resume_from: Path | None = None):
        key = (mode, offloads, ranks, resume_from)
        if key not in runs:
            changes = {**SETTINGS, "model.name": base, "tuning.mode": mode}
            changes |= {"train.weight_offloading": offloads, "train.resume_from": resume_from}
            folder = plan_run(changes, num_gpus=ranks)
            assert (run_worker(folder) if ranks == 1 else train_on_two(folder)) in (0, None)
            runs[key] = folder
        return runs[key]

    return run


def scores(folder: RunFolder) -> tuple:
    report = run_json(folder)
    metrics = [report["metrics"][when] for when in ("before", "after")]
    names = [name for name in metrics[0] if not name.endswith("seconds")]
    return report["loss"], report["fast_path"], [[each[name] for name in names] for each in metrics]


def adapter(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.path / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "mode, ranks", [long("qlora", 1), long("lora", 2), ("lora", 1), long("qlora", 2)]
)
@pytest.mark.slow
def test_a_run_trains_scores_and_saves_as_with_resident_weights(finished, mode, ranks):
    resident, offloaded = finished(mode, False, ranks), finished(mode, True, ranks)
    assert read_plan(offloaded).step.offloaded_weight_layers == LAYERS
    assert scores(offloaded) == scores(resident)
    torch.testing.assert_close(adapter(offloaded), adapter(resident), rtol=0, atol=0)


@pytest.mark.long
def test_a_run_resumes_with_weights_elsewhere(finished):
    resident, offloaded = finished("qlora", False), finished("qlora", True)
    checkpoint = resident.checkpoints / "checkpoint-2"
    again = finished("qlora", True, resume_from=checkpoint)
    torch.testing.assert_close(adapter(again), adapter(resident), rtol=0, atol=0)
    back = finished("qlora", False, resume_from=offloaded.checkpoints / "checkpoint-2")
    torch.testing.assert_close(adapter(back), adapter(resident), rtol=0, atol=0)


def slow_copies(monkeypatch) -> None:
    """Let each copy begin late: who does not wait for it computes with other weights."""
    copy_now = CopyStream.copy

    def copy_late(self: CopyStream, *tensors: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(20_000_000)  # cycles, 10 ms
        return copy_now(self, *tensors)

    monkeypatch.setattr(CopyStream, "copy", copy_late)


def slow_layers(model: nn.Module) -> None:
    """Let each layer compute late: a copy that does not wait for it takes its weights away."""
    for layer in decoder_layers(base_model_of(model)):
        layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["nothing", "copies", "layers"])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_computes_the_same_however_long_copies_take(
    tokenizer, tmp_path, monkeypatch, mode, slow
):
    folder = write_base("llama", tmp_path, tokenizer, GPU_SIZES, num_hidden_layers=LAYERS)
    process = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    expected = trained(loaded(folder, MODES[mode], 0, process), 2)
    again = trained(loaded(folder, MODES[mode], 0, process), 2)
    assert all(map(torch.equal, again, expected)), "kernels are not deterministic"
    if slow == "copies":
        slow_copies(monkeypatch)
    model = loaded(folder, MODES[mode], LAYERS, process)
    assert vars(base_model_of(model))[ATTRIBUTE].memory.is_pinned()
    if slow == "layers":
        slow_layers(model)
    assert all(map(torch.equal, trained(model, 2), expected))
