"""sft_kernels.trial: the original code of a few experts is compared instead of all."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_fast_experts import MODEL_TYPES, hidden_size, some_experts
from test_mxfp4 import numbers_of_mxfp4
from tiny_models import WHOLE_BLOCKS, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sft_kernels import mxfp4, trial
from sft_kernels.capture import ForwardCall
from sft_kernels.expert_modules import find_experts, unwrap
from sft_kernels.experts import function, install
from sft_kernels.install import FusedKernels
from sft_kernels.process import Process
from sft_kernels.trial import Trial, TrialPart, own_code, relative_error
from sft_play.config.schema import Config
from sft_play.models.bnb import unpack_with_adapter
from sft_play.models.experts import expert_weights
from sft_play.models.fast import install_fused_kernels

CPU = Process.alone(torch.device("cpu"))
EXPERTS, FEW, TOKENS = 6, 4, 40


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(trial, "PROVEN_EXPERTS", FEW)


def call_of(experts: nn.Module) -> ForwardCall:
    like = unwrap(experts)[1].down_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, hidden_size(experts), generator=generator).to(like)
    choices = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices
    return ForwardCall((x, choices, torch.rand(TOKENS, 2, generator=generator).to(like)), {})


def check_part(experts: nn.Module, found: TrialPart) -> None:
    """Assert that own code computes the same of a part as of the whole module."""
    own = Trial(found.module, found.call, CPU, mixes_tokens=False).run(own_code)
    whole = Trial(experts, found.whole_call, CPU, mixes_tokens=False).run(own_code)
    of_whole = found.of_whole(whole.tensors)
    assert own.tensors.keys() == of_whole.keys()
    for name, expected in own.tensors.items():
        assert expected.shape == of_whole[name].shape
        assert relative_error(expected, of_whole[name]) < 1e-5, name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_own_code_computes_the_same_of_a_few_experts(model_type):
    experts = some_experts(model_type)
    found = trial.few_experts(experts, call_of(experts))
    ids = found.whole_call.args[1]
    last = len(unwrap(experts)[1].down_proj) - 1
    assert set(ids.unique().tolist()) == {0, 1, last - 1, last}
    check_part(experts, found)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    for parameter in found.module.parameters():
        parameter.data.zero_()  # of its own memory
    assert all(torch.equal(before[name], now) for name, now in experts.state_dict().items())


def test_experts_in_4_bits_are_unpacked():
    experts = some_experts("gpt_oss", sizes=WHOLE_BLOCKS)
    base = unwrap(experts)[1]
    for name in ("gate_up_proj", "down_proj"):
        numbers = numbers_of_mxfp4(*getattr(base, name).shape, is_turned=True).float() / 64
        setattr(base, name, mxfp4.pack_mxfp4(numbers, is_turned=True))
        parametrize.register_parametrization(base, name, Unpacked(), unsafe=True)
    for wrapper in unwrap(experts)[0]:
        unpack_with_adapter(wrapper)
    found = trial.few_experts(experts, call_of(experts))
    assert not any(hasattr(weight, "quant_state") for weight in found.module.parameters())
    check_part(experts, found)
    assert base.down_proj.shape == base.parametrizations.down_proj.original.quant_state.shape


class Unpacked(nn.Module):
    """What own code reads of a packed parameter."""

    def forward(self, packed: Tensor) -> Tensor:
        return mxfp4.unpack_mxfp4(packed, packed.quant_state)


def test_all_experts_are_run_where_there_are_few(monkeypatch):
    monkeypatch.setattr(trial, "PROVEN_EXPERTS", EXPERTS)
    experts = some_experts("mixtral")
    assert trial.few_experts(experts, call_of(experts)) is None


def dead(original: Callable) -> Callable:
    """Return products in which the last expert has no weights."""

    def rows_times(x, matrices, *rest, **options):
        alive = torch.ones(len(matrices), 1, 1)
        alive[-1] = 0
        return original(x, matrices * alive, *rest, **options)

    return rows_times


def start(model_type: str) -> tuple[nn.Module, FusedKernels]:
    """Return a model with adapters on its experts, and the kernels that were proved for it."""
    model = tiny_model(model_type)
    names = [weight.name for weight in expert_weights(model)]
    adapters = LoraConfig(r=4, target_modules=[], target_parameters=names)
    model = get_peft_model(model, adapters).train()
    return model, install_fused_kernels(model, Config(), CPU)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_start_proves_a_few_and_finds_a_mistake(model_type, monkeypatch):
    found: list[TrialPart | None] = []
    original = trial.few_experts
    monkeypatch.setattr(
        install, "few_experts", lambda *given: found.append(original(*given)) or found[-1]
    )
    assert "experts" in start(model_type)[1].on
    assert isinstance(found[0], TrialPart)
    monkeypatch.setattr(function, "rows_times", dead(function.rows_times))
    assert "computes something else" in start(model_type)[1].off["experts"]


def test_what_comes_behind_experts_is_proved_without_their_own_code(monkeypatch):
    rows: list[int] = []
    experts_class = type(unwrap(find_experts(tiny_model("qwen3_moe"))[0])[1])
    own = experts_class.forward

    def counted(self, *given):
        rows.append(self.num_experts)
        return own(self, *given)

    monkeypatch.setattr(experts_class, "forward", counted)
    model, kernels = start("qwen3_moe")
    assert {"experts", "attention", "norms"} <= kernels.on.keys()
    assert set(rows) == {FEW}
    assert not any("forward" in vars(unwrap(each)[1]) for each in find_experts(model))
