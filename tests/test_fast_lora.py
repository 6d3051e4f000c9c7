"""Fused LoRA linears compute what PEFT computes: outputs, gradients, what is saved and merged."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from tiny_models import with_adapters
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from sft_kernels.linears import lora
from sft_kernels.linears.lora import (
    LinearGroup,
    bind_when_changed,
    fuse_lora_linear,
    why_not_fusable,
)

IN, OUT, TOKENS = 64, 96, 10
# float32: sums of up to 96 terms in another order; each is off by 6e-8 of its largest term
EXACT = 1e-6


@dataclass
class Case:
    """Linears that share an input, as PEFT wraps them."""

    outs: tuple[int, ...] = (OUT, 32, 32)
    r: int = 16
    targets: tuple[str, ...] = ("0", "1", "2")
    bias: bool = False
    rslora: bool = False
    nf4: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    def modules(self) -> list[nn.Module]:
        """Return the wrapped linears with random B.

        PEFT initializes B to zero, for which dA and the adapter's output are zero.
        """
        torch.manual_seed(0)
        linears = [self._linear(out) for out in self.outs]
        config = LoraConfig(
            r=self.r,
            lora_alpha=24,
            target_modules=list(self.targets),
            use_rslora=self.rslora,
            lora_dropout=self.dropout,
        )
        model = get_peft_model(nn.ModuleList(linears), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return list(model.base_model.model)

    def _linear(self, out: int) -> nn.Module:
        plain = nn.Linear(IN, out, bias=self.bias, dtype=self.dtype)
        if not self.nf4:
            return plain
        packed = bnb.nn.Linear4bit(
            IN, out, bias=self.bias, quant_type="nf4", compute_dtype=self.dtype
        )
        packed.load_state_dict(plain.state_dict())
        packed.support_avx512bf16_for_cpu = False  # see models/bnb.py
        return packed.to("cpu")


Linears = Callable[[torch.Tensor, list[nn.Module]], tuple[torch.Tensor, ...]]


def plainly(x: torch.Tensor, modules: list[nn.Module]) -> tuple[torch.Tensor, ...]:
    return tuple(module(x) for module in modules)


def lora_linears(x: torch.Tensor, modules: list[nn.Module]) -> tuple[torch.Tensor, ...]:
    outputs = LinearGroup(*modules).fused(x)
    return plainly(x, modules) if outputs is None else outputs


def results(linears: Linears, modules: list[nn.Module], passes: int = 1) -> dict[str, torch.Tensor]:
    """Return the outputs of the last pass, and the gradients of x and of every adapter.

    Gradients accumulate over all passes.
    """
    modules = copy.deepcopy(modules)
    torch.manual_seed(1)
    found = {}
    for number in range(passes):
        x = torch.randn(2, TOKENS // 2, IN, requires_grad=True)
        outputs = linears(x, modules)
        sum((output * torch.randn(output.shape)).sum() for output in outputs).backward()
        found |= {
            f"x.grad {number}": x.grad,
            **{f"y{i}": output.detach() for i, output in enumerate(outputs)},
        }
    adapters = {
        f"{i}.{name}": p.grad
        for i, module in enumerate(modules)
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return found | adapters


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest element of its tensor; inf for NaN."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert (
            found[name].dtype == wanted[name].dtype and found[name].shape == wanted[name].shape
        ), name
    differences = [
        (found[name] - wanted[name]).abs().max() / wanted[name].abs().max() for name in wanted
    ]
    return float(torch.stack(differences).float().nan_to_num(torch.inf).max())


def fused_one_by_one(x: torch.Tensor, modules: list[nn.Module]) -> tuple[torch.Tensor, ...]:
    for module in modules:
        if isinstance(module, LoraLayer):
            fuse_lora_linear(module)
    return plainly(x, modules)


@pytest.mark.parametrize("linears", [lora_linears, fused_one_by_one])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(r=4),
        Case(bias=True),
        Case(rslora=True, r=4),
        Case(targets=("0", "2")),
        Case(outs=(OUT,), targets=("0",)),
        Case(bias=True, targets=("1",)),
        Case(nf4=True),
        Case(nf4=True, bias=True),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_pefts(case, linears):
    modules = case.modules()
    # On a CPU bitsandbytes' forward multiplies packed weights with another kernel; its result
    # differs by this from that of the unpacked weights
    most = 1e-5 if case.nf4 else EXACT
    assert worst(results(linears, modules, passes=2), results(plainly, modules, passes=2)) < most


def test_linears_without_any_adapter_share_one_input_gradient():
    modules = [
        nn.Linear(IN, OUT).requires_grad_(False),
        nn.Linear(IN, 32, bias=False).requires_grad_(False),
    ]
    assert worst(results(lora_linears, modules), results(plainly, modules)) < EXACT


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_has_the_same_gradients(reentrant):
    modules = Case().modules()

    def checkpointed(x, modules):
        return checkpoint(lambda x: lora_linears(x, modules), x, use_reentrant=reentrant)

    assert worst(results(checkpointed, modules), results(plainly, modules)) < EXACT


@pytest.mark.parametrize("input_type", [torch.float32, torch.bfloat16])
def test_under_autocast_gradients_are_float32_and_close_to_the_exact_ones(input_type):
    modules = Case(bias=True).modules()

    def half(x, modules):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = lora_linears(x.to(input_type), modules)
        assert all(output.dtype == torch.bfloat16 for output in outputs)
        return tuple(output.float() for output in outputs)

    # bfloat16 has 8 bits: x, W, the product, dU and the gradient are each rounded by up to 2^-9 of
    # their size
    assert worst(results(half, modules), results(plainly, modules)) < 2e-2


def test_bfloat16_weights_round_no_more_than_peft_does():
    exact = Case()
    wanted = results(plainly, exact.modules())
    modules = [module.bfloat16() for module in exact.modules()]
    for module in modules:
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()

    def of(linears):
        return lambda x, modules: tuple(y.float() for y in linears(x.bfloat16(), modules))

    assert worst(results(of(lora_linears), modules), wanted) < 1.5 * worst(
        results(of(plainly), modules), wanted
    )


def test_a_gradient_whose_features_lie_apart_is_read_right():
    modules = Case(outs=(OUT,), targets=("0",)).modules()

    def turned(linears):
        return lambda x, modules: tuple(y.transpose(1, 2) for y in linears(x, modules))

    assert worst(results(turned(lora_linears), modules), results(turned(plainly), modules)) < EXACT


def test_without_gradients_the_outputs_are_the_same():
    modules, x = Case().modules(), torch.randn(TOKENS, IN)
    with torch.no_grad():
        for found, wanted in zip(lora_linears(x, modules), plainly(x, modules), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            assert not found.requires_grad


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    modules, x = Case().modules(), torch.randn(TOKENS, IN, requires_grad=True)
    loss = sum(output.square().sum() for output in lora_linears(x, modules))
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def saved_bytes(work: Callable[[], object], parameters: list[nn.Parameter]) -> int:
    """Return the bytes of distinct storages that are saved for backward, without parameters."""
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = work()
    del kept
    for parameter in parameters:
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def test_backward_keeps_the_input_and_rank_features_a_token():
    modules = [module.bfloat16() for module in Case(outs=(OUT, OUT, OUT)).modules()]
    tokens, ranks = 1000, 3 * 16
    x = torch.randn(tokens, IN, dtype=torch.bfloat16, requires_grad=True)
    parameters = [p for module in modules for p in module.parameters()]
    adapters = ranks * IN + ranks * OUT  # their copies in the dtype of the products
    assert saved_bytes(lambda: lora_linears(x, modules), parameters) <= 2 * (
        tokens * (IN + ranks) + adapters
    )


def tiny_model() -> PeftModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=IN,
            intermediate_size=OUT,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    return with_adapters(model)


def fused_model() -> PeftModel:
    model = tiny_model()
    fused = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for module in fused:
        fuse_lora_linear(module)
    assert len(fused) == 14
    bind_when_changed(model.get_base_model().model)
    return model


IDS = torch.arange(12)[None]


def other_scale(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = 0.25


def other_weights(model: PeftModel) -> None:
    for number, module in enumerate(model.modules()):
        if isinstance(module, LoraLayer):
            torch.manual_seed(number)
            b = module.lora_B["default"]
            b.weight = nn.Parameter(torch.randn_like(b.weight))


def other_adapter(model: PeftModel) -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model.add_adapter("other", config)
    model.set_adapter("other")


def no_adapter_at_all(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = nn.Dropout(1.0)


def hooks_on_outputs(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.register_forward_hook(lambda _, args, output: 2 * output)


def adapted(model: PeftModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def without_the_other_adapter(model: PeftModel) -> None:
    other_adapter(model)
    model(IDS)
    model.set_adapter("default")
    model.delete_adapter("other")
    other_scale(model)


def merged_and_back(model: PeftModel) -> None:
    model.merge_adapter()
    model(IDS)
    model.unmerge_adapter()
    other_scale(model)


def hooks_on_bases(model: PeftModel) -> None:
    for module in adapted(model):
        module.base_layer.register_forward_pre_hook(lambda _, args: (3 * args[0],))


def hooks_that_are_gone(model: PeftModel) -> None:
    handles = [each.register_forward_hook(lambda _, args, y: 2 * y) for each in adapted(model)]
    model(IDS)
    for handle in handles:
        handle.remove()
    other_scale(model)


def other_bases(model: PeftModel) -> None:
    for module in adapted(model):
        base = module.base_layer
        base.weight = nn.Parameter(base.weight.detach().flip(0), requires_grad=False)


def moved_bases(model: PeftModel) -> None:
    """As offloading, FSDP and ZeRO-3 do: the parameter stays."""
    for module in adapted(model):
        weight = module.base_layer.weight
        weight.data = weight.detach().flip(0)


def trained_bases(model: PeftModel) -> None:
    for module in adapted(model):
        module.base_layer.weight.requires_grad_()
    other_scale(model)


CHANGES = {
    "scale": other_scale,
    "weights": other_weights,
    "adapter": other_adapter,
    "adapter removed": without_the_other_adapter,
    "hooks": hooks_on_outputs,
    "hooks on bases": hooks_on_bases,
    "hooks removed": hooks_that_are_gone,
    "dropout": no_adapter_at_all,
    "merged": lambda model: model.merge_adapter(),
    "unmerged": merged_and_back,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "base weights": other_bases,
    "moved weights": moved_bases,
    "trained weights": trained_bases,
    "dtype": lambda model: (model.double(), other_scale(model)),
    "evaluated in between": lambda model: (model.eval()(IDS), model.train(), other_scale(model)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_linears_are_bound_again_once_they_have_changed(name):
    found = []
    for model in (tiny_model(), fused_model()):
        before = model(IDS).logits
        CHANGES[name](model)
        logits = model(IDS).logits
        if name != "merged":
            assert not torch.allclose(before, logits.to(before.dtype), rtol=1e-2, atol=1e-3)
        if logits.requires_grad:  # not without any adapter
            logits.square().sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([logits, *gradients])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_linears_are_bound_once_while_nothing_changes(monkeypatch):
    model, bound = fused_model(), []
    monkeypatch.setattr(
        lora, "bind_linears", lambda m, bind=lora.bind_linears: bound.append(m) or bind(m)
    )
    for _ in range(3):
        model(IDS)
        moved_bases(model)
        model.eval()(IDS)
        model.train()
    assert len(bound) == 14


def test_linears_may_be_bound_while_zero_3_has_freed_their_adapters():
    modules = Case().modules()
    x = torch.randn(3, IN)
    expected = plainly(x, modules)
    weights = [each for module in modules for each in module.parameters() if each.requires_grad]
    whole = [weight.data for weight in weights]
    for weight in weights:
        weight.data = torch.empty(0)  # as DeepSpeed leaves it
    group = LinearGroup(*modules)
    assert group.bind() is not None
    for weight, data in zip(weights, whole, strict=True):
        weight.data = data
    torch.testing.assert_close(group.fused(x), expected, rtol=1e-5, atol=1e-5)


def test_a_linear_says_why_it_keeps_its_own_forward():
    module = Case().modules()[0]
    assert why_not_fusable(module) is None and why_not_fusable(module.base_layer) is None
    assert "dropout" in why_not_fusable(Case(dropout=0.1).modules()[0])
    dora = LoraConfig(r=4, target_modules=["0"], use_dora=True)
    with_dora = get_peft_model(nn.ModuleList([nn.Linear(IN, OUT)]), dora)
    assert "DoRA" in why_not_fusable(with_dora.base_model.model[0])
    assert "trained" in why_not_fusable(nn.Linear(2, 2))
    assert "Conv1d" in why_not_fusable(nn.Conv1d(2, 2, 1))
    twice = tiny_model()
    twice.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    twice.base_model.set_adapter(["default", "other"])
    assert "2 active" in why_not_fusable(twice.base_model.model.model.layers[0].mlp.up_proj)
    module.register_forward_hook(lambda *_: None)
    assert "hooks" in why_not_fusable(module)
    with pytest.raises(ValueError, match="hooks"):
        fuse_lora_linear(module)


def test_linears_that_cannot_be_fused_compute_as_they_do():
    modules = Case(dropout=0.5).modules()
    for module in modules:
        module.eval()
    assert worst(results(lora_linears, modules), results(plainly, modules)) == 0.0
