"""Linears that compute with the rounded weight: products, gradients, fused, and whole runs."""

import copy
from dataclasses import replace

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from marks import long
from peft import LoraConfig, get_peft_model
from rank_processes import train_on_two
from run_files import run_json
from tiny_models import TINY, tiny_model
from torch import nn

from sft_kernels.linears.lora import LinearGroup, fuse_lora_linear
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.inference import exported as parity
from sft_play.inference.evaluate import evaluate_run
from sft_play.inference.export import export_run
from sft_play.inference.load import load_run
from sft_play.models.compressed import KINDS, Rounding
from sft_play.models.delivered import (
    DeliveredLinear,
    DeliveredLoraLinear,
    as_trained,
    deliver,
    deliver_adapters,
)
from sft_play.runs.exports import ExportAsked

LONG = pytest.mark.long
IN, OUT, TOKENS = 64, 96, 10


def rounding(kind: str) -> Rounding:
    return Rounding.of(kind, [nn.Linear(IN, OUT)], "a model")


def linears(kind: str, adapted: bool = True, count: int = 1) -> list[nn.Module]:
    """Return linears that are rounded, with adapters whose B is not zero."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(IN, OUT) for _ in range(count))
    for linear in model:
        linear.__class__, linear.rounding = DeliveredLinear, rounding(kind)
    if not adapted:
        return list(model)
    names = [str(number) for number in range(count)]
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=names))
    deliver_adapters(wrapped)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return list(wrapped.base_model.model)


def whole_weight(module: nn.Module) -> torch.Tensor:
    """Return W + s B A by PEFT's own merge."""
    if not isinstance(module, DeliveredLoraLinear):
        return module.weight.detach()
    return (module.base_layer.weight + module.get_delta_weight("default")).detach()


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_of_the_weight_that_is_written(kind, adapted):
    (module,) = linears(kind, adapted)
    x = torch.randn(2, TOKENS, IN)
    written = rounding(kind).weight(whole_weight(module).bfloat16()).float()
    bias = module.bias if not adapted else module.base_layer.bias
    expected = nn.functional.linear(rounding(kind).inputs(x), written, bias)
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)
    plain = nn.functional.linear(x, whole_weight(module), bias)
    assert (module(x) - plain).abs().max() > 1e-3
    with as_trained(nn.ModuleList([module])):
        torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-5)
    if adapted:
        module.enable_adapters(False)
        base = module.base_layer
        assert module(x).equal(nn.functional.linear(x, base.weight, base.bias))  # as published


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_the_rounding(kind, adapted):
    (module,) = linears(kind, adapted)
    plain = copy.deepcopy(module)
    x, dy = torch.randn(TOKENS, IN, requires_grad=True), torch.randn(TOKENS, OUT)
    trained = [p for p in module.parameters() if p.requires_grad]
    dx, *found = torch.autograd.grad(module(x), [x, *trained], dy)
    written = rounding(kind).weight(whole_weight(module).bfloat16()).float()
    torch.testing.assert_close(dx, dy @ written, rtol=1e-5, atol=1e-5)
    with as_trained(nn.ModuleList([plain])):
        others = [p for p in plain.parameters() if p.requires_grad]
        expected = torch.autograd.grad(plain(x), others, dy)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def own_and_fused(modules: list[nn.Module], x: torch.Tensor) -> tuple[list, list]:
    """Return outputs and gradients of linears that share x, by their own code and fused."""
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        own, fused = [module(x) for module in modules], LinearGroup(*modules).fused(x)
    weights = [torch.randn_like(y) for y in own]
    own_gradients, fused_gradients = (
        torch.autograd.grad(outputs, [x, *trained], weights) for outputs in (own, fused)
    )
    return [*own, *own_gradients], [*fused, *fused_gradients]


@pytest.mark.parametrize("kind", KINDS)
def test_fused_linears_compute_the_same(kind):
    modules = linears(kind, count=3)
    x = torch.randn(2, TOKENS, IN, requires_grad=True)
    own, fused = own_and_fused(modules, x)
    for one, other in zip(fused, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    fuse_lora_linear(modules[0])
    assert modules[0].train()(x).equal(own[0])
    mixed = LinearGroup(modules[1], nn.Linear(IN, OUT).requires_grad_(False))
    assert mixed.fused(x) is None  # part of its inputs would be rounded, and part not


SETTINGS = {
    "train.max_steps": 4,
    "train.learning_rate": 0.01,
    "train.lr_scheduler_type": "constant",
    "train.batch_size": "auto",
    "train.grad_accum": "auto",
    "train.effective_batch_size": 8,
    "train.predict_with_generate": False,
    "tuning.lora.dropout": 0.0,
    "tuning.mode": "lora",
}


@pytest.fixture(scope="module")
def delivered(plan_run, run_worker):
    """A function that returns a finished run that was trained for a format."""
    runs = {}

    def run(kind: str, mode: str = "lora", **changes: object):
        key = (kind, mode, *sorted(changes.items()))
        if key not in runs:
            settings = {"train.deliver_as": kind, "tuning.mode": mode, **changes}
            runs[key] = plan_run(SETTINGS | settings)
            assert run_worker(runs[key]) == 0, run_json(runs[key])["cause"]
        return runs[key]

    return run


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("int4", "lora"),
        long("int4", "full"),
        long("fp8", "lora"),
        long("fp8", "full"),
        long("nvfp4", "lora"),
    ],
)
def test_a_run_scores_what_its_export_says(delivered, kind, mode, monkeypatch):
    monkeypatch.setattr(parity, "MOST_TOKENS", 4)
    run = delivered(kind, mode)
    lines = export_run(run, ExportAsked(kind), "cpu")
    line = next(line for line in lines if line.startswith(f"{kind} "))
    assert "gain kept=1.00" in line or "gain kept=0.99" in line, line
    assert not any("warning" in line for line in lines)
    report = run_json(run)
    fused = report["fast_path"]["on"]
    assert "mlp" in fused and ("linears" in fused or mode == "full")
    again = evaluate_run(run, "cpu")
    assert f"eval_loss={report['metrics']['after']['eval_loss']:.4f}" in "".join(again)


@pytest.mark.usefixtures("opens_here")
def test_other_formats_are_written_with_a_warning(delivered, monkeypatch, losses_of):
    monkeypatch.setattr(parity, "MOST_TOKENS", 4)
    run = delivered("int4")
    lines = export_run(run, ExportAsked("safetensors"), "cpu")
    assert "scored as int4" in lines[-1] and "FORMAT=int4 writes" in lines[-1]
    rounded = [type(module) for module in load_run(run, "cpu").model.modules()]
    assert DeliveredLoraLinear in rounded
    own = delivered("int4", **{"train.fast_path": False})
    before = [run_json(each)["metrics"]["before"]["eval_loss"] for each in (run, own)]
    assert before[0] == pytest.approx(before[1], rel=1e-6)  # of the base as it was published
    assert losses_of(own)[:2] == pytest.approx(losses_of(run)[:2], abs=2e-3)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("ddp", "lora"), long("fsdp", "lora"), long("fsdp", "full"), long("zero2", "lora")],
)
@pytest.mark.slow
def test_ranks_train_as_one_process_does(delivered, plan_run, strategy, mode, losses_of):
    alone = delivered("int4", mode)
    zero = "configs/deepspeed_zero2.json" if strategy == "zero2" else None
    settings = SETTINGS | {"train.deliver_as": "int4", "tuning.mode": mode}
    if zero is None:
        settings["train.strategy"] = strategy
    together = plan_run(settings, num_gpus=2, deepspeed_config=zero)
    train_on_two(together)
    assert losses_of(together) == pytest.approx(losses_of(alone), abs=2e-3)


def test_models_that_are_not_rounded_are_refused():
    config = Config.model_validate({"model": {"name": "a"}, "train": {"deliver_as": "int4"}})
    experts = tiny_model("qwen3_moe")
    with pytest.raises(ConfigError, match=r"experts of Qwen3Moe.*TRAIN_DELIVER_AS=null"):
        deliver(experts, config)
    packed = tiny_model("llama", replace(TINY, intermediate=64))
    packed.model.layers[1].mlp.up_proj.__class__ = Linear4bit
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj is quantized to 4 bits"):
        deliver(packed, config)
