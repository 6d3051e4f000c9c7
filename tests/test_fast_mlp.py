"""The fused gated MLP computes what transformers and PEFT compute, and saves less for backward."""

from collections.abc import Callable
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from test_fast_lora import saved_bytes, worst
from tiny_models import with_adapters
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from sft_kernels.linears.glu import GluFunction, activation_of, glu_backward, glu_forward
from sft_kernels.linears.lora import LinearGroup
from sft_kernels.linears.mlp import lora_mlp

HIDDEN, INNER, TOKENS = 64, 160, 12
# float32: sums of up to 320 terms in another order, three products deep
EXACT = 2e-6
FAMILIES = {
    "llama": (LlamaMLP, LlamaConfig),
    "mistral": (MistralMLP, MistralConfig),
    "qwen2": (Qwen2MLP, Qwen2Config),
    "gemma2": (Gemma2MLP, Gemma2Config),
    "phi3": (Phi3MLP, Phi3Config),
}
ALL = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


def an_mlp(
    family: str = "llama",
    targets: tuple[str, ...] = ALL,
    nf4: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a family's MLP with adapters on some of its linears, with random B."""
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    plain = kind(config(hidden_size=HIDDEN, intermediate_size=INNER, pad_token_id=0)).to(dtype)
    if nf4:
        for name, linear in list(plain.named_children()):
            if isinstance(linear, nn.Linear):
                packed = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=False,
                    quant_type="nf4",
                    compute_dtype=dtype,
                )
                packed.load_state_dict(linear.state_dict())
                packed.support_avx512bf16_for_cpu = False  # see models/bnb.py
                setattr(plain, name, packed.to("cpu"))
    present = [name for name in targets if hasattr(plain, name)]
    options = {"lora_alpha": 6, "target_modules": present, "lora_dropout": dropout}
    model = with_adapters(nn.ModuleDict({"mlp": plain}), task_type=None, **options)
    return model.base_model.model["mlp"]


def fused(x: torch.Tensor, mlp: nn.Module) -> torch.Tensor:
    activation = activation_of(getattr(mlp, "act_fn", None) or mlp.activation_fn)
    inner = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
    return lora_mlp(x, LinearGroup(*inner), LinearGroup(mlp.down_proj), activation)


def plainly(x: torch.Tensor, mlp: nn.Module) -> torch.Tensor:
    return mlp(x)


def results(
    work: Callable[[torch.Tensor, nn.Module], torch.Tensor], mlp: nn.Module, passes: int = 1
) -> dict[str, torch.Tensor]:
    """Return the output and the gradient of x of the last pass, and the parameters' gradients.

    The parameters' gradients accumulate over the passes.
    """
    mlp.zero_grad()
    torch.manual_seed(1)
    for _ in range(passes):
        x = torch.randn(2, TOKENS // 2, HIDDEN, requires_grad=True)
        y = work(x, mlp)
        (y * torch.randn(y.shape)).sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad.clone() for name, p in mlp.named_parameters() if p.requires_grad},
    }


@pytest.mark.parametrize("targets", [ALL, ("gate_proj",)], ids=["all", "gate"])
def test_a_model_may_add_to_the_output_in_place(targets):
    """As Llama 4 adds its experts to the output of a shared one."""

    def added(work):
        return lambda x, mlp: work(x, mlp).add_(x)

    mlp = an_mlp(targets=targets)
    assert worst(results(added(fused), mlp), results(added(plainly), mlp)) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_that_no_token_has_chosen_gets_gradients_of_zero(family):
    mlp = an_mlp(family)
    y = fused(torch.zeros(0, HIDDEN, requires_grad=True), mlp)
    y.sum().backward()
    assert y.shape == (0, HIDDEN)
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    assert trained and not any(parameter.grad.any() for parameter in trained)


@pytest.mark.parametrize(
    "family, targets, nf4",
    [
        *((family, ALL, False) for family in FAMILIES),
        *(("llama", targets, False) for targets in (ALL[:1], ALL[:2], ALL[1:3], ALL[2:3])),
        ("llama", ALL, True),
        ("phi3", ALL, True),
    ],
)
def test_outputs_and_gradients_are_the_plain_ones(family, targets, nf4):
    mlp = an_mlp(family, targets, nf4)
    # On a CPU bitsandbytes' forward multiplies packed weights with another kernel; its result
    # differs by this from that of the unpacked weights
    most = 2e-5 if nf4 else EXACT
    assert worst(results(fused, mlp, passes=2), results(plainly, mlp, passes=2)) < most


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_mlp_has_the_same_gradients(reentrant):
    mlp = an_mlp()
    found = results(lambda x, mlp: checkpoint(fused, x, mlp, use_reentrant=reentrant), mlp)
    assert worst(found, results(plainly, mlp)) < EXACT


def test_under_autocast_gradients_are_float32_and_close_to_the_exact_ones():
    mlp = an_mlp()

    def half(x, mlp):
        with torch.autocast("cpu", torch.bfloat16):
            y = fused(x, mlp)
        assert y.dtype == torch.bfloat16
        return y.float()

    # bfloat16 has 8 bits; each of three successive products is rounded by up to 2^-9 of its size
    assert worst(results(half, mlp), results(plainly, mlp)) < 3e-2


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    mlp, x = an_mlp(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    loss = fused(x, mlp).square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_an_mlp_whose_weights_are_trained_has_their_gradients(family):
    mlp = FAMILIES[family][0](
        FAMILIES[family][1](hidden_size=HIDDEN, intermediate_size=INNER, pad_token_id=0)
    )
    assert worst(results(fused, mlp), results(plainly, mlp)) < EXACT


def test_an_mlp_with_dropout_computes_as_peft_does():
    mlp = an_mlp(dropout=0.5)
    torch.manual_seed(3)
    wanted = mlp(torch.ones(1, HIDDEN))
    torch.manual_seed(3)
    torch.testing.assert_close(fused(torch.ones(1, HIDDEN), mlp), wanted)


def test_backward_keeps_the_input_and_two_inner_outputs():
    mlp, tokens = an_mlp(dtype=torch.bfloat16), 500
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    adapters = sum(p.numel() for p in mlp.parameters() if p.requires_grad)
    ranks = 3 * 4
    most = 2 * (tokens * (HIDDEN + 2 * INNER + ranks) + adapters)
    assert saved_bytes(lambda: fused(x, mlp), []) <= most


REFERENCE = {"silu": functional.silu, "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh")}


@pytest.mark.parametrize("activation", REFERENCE)
def test_the_formula_is_torchs_activation(activation):
    gate, up = (
        torch.linspace(-30, 30, 1000, dtype=torch.float64)
        .roll(shift)
        .view(100, 10)
        .mT.contiguous()
        .requires_grad_()
        for shift in (0, 3)
    )
    ours = GluFunction.apply(gate, up, activation)
    theirs = REFERENCE[activation](gate) * up
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(result.sum(), (gate, up)) for result in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    few = [tensor[:1].detach().requires_grad_() for tensor in (gate, up)]
    assert torch.autograd.gradcheck(lambda g, u: GluFunction.apply(g, u, activation), few)


@pytest.mark.parametrize("activation", REFERENCE)
def test_backward_may_write_the_product_over_its_gradient(activation):
    both, dh = torch.randn(2, 7, 2 * INNER), torch.randn(7, INNER)
    gate, up = both[0].chunk(2, -1)  # rows that lie apart
    wanted, dboth = GluFunction.apply(gate, up, activation), torch.empty_like(both[0])
    product = dh.clone()
    glu_backward(product, gate, up, activation, *dboth.chunk(2, -1), h=product)
    torch.testing.assert_close(product, wanted)
    leaf = both[0].clone().requires_grad_()
    (REFERENCE[activation](leaf[:, :INNER]) * leaf[:, INNER:]).backward(dh)
    torch.testing.assert_close(dboth, leaf.grad)


def test_activations_are_known_by_what_they_compute():
    kinds = {
        name: activation_of(
            FAMILIES[name][0](
                FAMILIES[name][1](hidden_size=HIDDEN, intermediate_size=INNER, pad_token_id=0)
            ).act_fn
        )
        for name in ("llama", "gemma2", "qwen2")
    }
    assert kinds == {"llama": "silu", "gemma2": "gelu_tanh", "qwen2": "silu"}
    assert activation_of(nn.GELU()) is None and activation_of(nn.ReLU()) is None
    assert activation_of(nn.GELU(approximate="tanh")) == "gelu_tanh"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", REFERENCE)
def test_the_gpu_kernels_compute_the_formula(activation, dtype):
    torch.manual_seed(0)
    rows, features = 33, 1500  # no multiple of a block
    gate, up = (4 * torch.randn(rows, 2 * features, device="cuda", dtype=dtype)).chunk(2, -1)
    dh = torch.randn(rows, features, device="cuda", dtype=dtype)
    cpu = SimpleNamespace(
        gate=gate.cpu(),
        up=up.cpu(),
        dgate=torch.empty(rows, features, dtype=dtype),
        dup=torch.empty(rows, features, dtype=dtype),
    )
    h = dh.cpu()
    glu_backward(h, cpu.gate, cpu.up, activation, cpu.dgate, cpu.dup, h)
    dboth, product = torch.empty(rows, 2 * features, device="cuda", dtype=dtype), dh.clone()
    glu_backward(product, gate, up, activation, *dboth.chunk(2, -1), product)
    # In float32 Triton's exponential has a relative error of 1e-6; in bfloat16 such a difference
    # may change a rounding, by one step of 2^-7
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for found, wanted in (
        (dboth[:, :features], cpu.dgate),
        (dboth[:, features:], cpu.dup),
        (product, h),
        (glu_forward(gate, up, activation), h),
    ):
        torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=1e-5)
