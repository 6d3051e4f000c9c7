"""Adapters beside weights on a GPU: their kernels write what the formulas say, and steps agree."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from sft_play.config.schema import Config
from sft_play.models.fast.install import install_fused_kernels
from sft_play.models.fast.linears import beside as installed
from sft_play.models.fast.linears import lora, mlp, products
from sft_play.models.fast.linears.beside import copy_adapters_at_once
from sft_play.models.fast.linears.columns import Beside, ColumnWriter
from sft_play.models.fast.linears.four_bit import unpack
from sft_play.models.fast.linears.products import fit_beside
from sft_play.models.fast.linears.room import beside
from sft_play.models.fast.norms.rms import GEMMA, LLAMA
from sft_play.process import Process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = torch.device("cuda", 0)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def test_all_matrices_are_written_to_their_places_and_nothing_else() -> None:
    torch.manual_seed(0)
    shapes = [(16, 4096), (14336, 16), (1, 3), (1024, 16), (8, 5000)]
    sources = [torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in shapes]
    wholes = [torch.full((rows + 1, width + 64), 7.0, device=GPU) for rows, width in shapes]
    wholes = [whole.bfloat16() for whole in wholes]
    scales = [1.0, 2.0, 0.3, 1.0, 0.125]
    places, expected = [], []
    for source, whole, scale in zip(sources, wholes, scales, strict=True):
        rows, width = source.shape
        places.append(Beside(source, whole[:rows, 32 : 32 + width], scale))
        after = whole.clone()
        after[:rows, 32 : 32 + width] = (source.float() * scale).bfloat16()
        expected.append(after)
    writer = ColumnWriter(sources, places)
    writer.write()
    assert all(map(torch.equal, wholes, expected))
    sources[0].mul_(2)  # what is written is what the sources are now
    writer.write()
    assert torch.equal(wholes[0][:16, 32 : 32 + 4096], sources[0])


@pytest.mark.parametrize("kind", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_norms_leave_room(kind: Any) -> None:
    from sft_play.models.fast.norms import residual_kernels

    x, stream, dy, ds = torch.randn(4, 2, 37, 1000, device=GPU, dtype=torch.bfloat16)
    weight = torch.randn(1000, device=GPU, dtype=torch.bfloat16)
    plain = residual_kernels.forward(x, stream, weight, 1e-6, kind)
    y, s, inverse, _ = residual_kernels.forward(x, stream, weight, 1e-6, kind, room=88)
    assert torch.equal(y, plain[0]) and torch.equal(s, plain[1]) and y.stride(1) == 1088
    expected = residual_kernels.backward(dy, ds, s, weight, inverse, kind)
    wide = torch.empty(2, 37, 1088, device=GPU, dtype=torch.bfloat16)[..., :1000]
    dx = residual_kernels.backward(wide.copy_(dy), ds, s, weight, inverse, kind, room=88)
    assert torch.equal(dx, expected) and dx.stride(1) == 1088
    dx = residual_kernels.backward(dy, wide.copy_(ds), s, weight, inverse, kind)
    assert torch.equal(dx, expected)


def a_model(quantised: bool, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    if quantised:
        model.save_pretrained(folder)
        options = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=options, dtype=torch.bfloat16, device_map=0
        )
    model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=12, target_modules="all-linear")
    ).to(GPU)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    model.config.use_cache = False
    mode = "qlora" if quantised else "lora"
    config = Config.model_validate({"tuning": {"mode": mode, "lora": {"dropout": 0.0}}})
    process = Process.alone(GPU, torch.bfloat16)
    install_fused_kernels(model.train(), config, process)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, 512, (4, 256), device=GPU)
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.float()
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    squares = sum((one[name] - other[name]).square().sum() for name in one)
    return (squares / sum(value.square().sum() for value in one.values())).sqrt().item()


@pytest.mark.parametrize("quantised", [False, True], ids=["lora", "qlora"])
def test_a_step_is_as_close_to_float32_as_without(
    quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, backward = [], []

    def counted(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        calls.append(columns.shape)
        return beside(x, columns)

    def noted(*arguments: Any) -> bool:
        backward.append(fit_beside(*arguments))
        return backward[-1]

    monkeypatch.setattr(products, "beside", counted)
    monkeypatch.setattr(lora, "fit_beside", noted)
    monkeypatch.setattr(mlp, "fit_beside", noted)
    monkeypatch.setattr(installed, "LARGEST_SHARE", 8)  # the model is small
    model = a_model(quantised, tmp_path)
    exact = float32_gradients(model)
    apart = distance(exact, gradients(model))
    assert not calls and not any(backward)
    copy_adapters_at_once(model, model)
    together = distance(exact, gradients(model))
    # forward q, k and v; gate and up; down. Backward gate and up; o; down where a layer follows
    assert len(calls) == 3 * 3 and sum(backward) == 3 * 2 + 2
    assert together <= 1.05 * apart + 1e-4, (together, apart)
    print(f"distance to float32: apart {apart:.2e}, beside {together:.2e}")


def float32_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of the same model computed in float32 by PEFT's own code."""
    full = LlamaForCausalLM(LlamaConfig(**SIZES)).to(GPU)
    source = model.get_base_model()
    own = dict(source.named_modules())
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            module = own[name.rpartition(".")[0]]
            weight = getattr(module, "base_layer", module).weight
            weight = unpack(weight) if hasattr(weight, "quant_state") else weight
            parameter.copy_(weight)
    full = get_peft_model(
        full, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=12, target_modules="all-linear")
    ).to(GPU)
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    for name, parameter in full.named_parameters():
        if name in adapters:
            parameter.data = copy.deepcopy(adapters[name].data)
    full.config.use_cache = False
    torch.manual_seed(1)
    tokens = torch.randint(0, 512, (4, 256), device=GPU)
    full(input_ids=tokens, labels=tokens).loss.backward()
    return gradients_of(full)
