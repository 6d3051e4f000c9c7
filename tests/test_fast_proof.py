"""Fused code that computes something else is caught before it is installed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, with_adapters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from sft_kernels.attention import forward as attention
from sft_kernels.attention.install import bind_attention, unmasked_call
from sft_kernels.capture import ForwardCall
from sft_kernels.install import FusedKernels
from sft_kernels.linears import mlp as linear_install
from sft_kernels.norms import residual
from sft_kernels.process import Process
from sft_kernels.proof import prove
from sft_kernels.recognize import (
    AttentionKind,
    attention_kind_of,
    gated_mlp_of,
    layer_roles_of,
    norm_kind_of,
)
from sft_kernels.training_setup import TrainingSetup, Unsupported, fuse
from sft_kernels.trial import Result, Trial, difference, own_code
from sft_play.config.schema import Config
from sft_play.models import fast
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast import install_fused_kernels
from sft_play.models.trace import fake_kernels

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Config.model_validate({"tuning": {"lora": {"dropout": 0.0}}})


def model_of(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return with_adapters(tiny_model(model_type, **changes).to(dtype))


def setup_of(model: Any, dtype: torch.dtype = torch.float32) -> TrainingSetup:
    setup = fast.setup_of(model, CONFIG, Process.alone(torch.device("cpu"), dtype))
    assert setup.proof_inputs.samples
    return setup


def installed(model_type: str, dtype: torch.dtype = torch.float32) -> FusedKernels:
    process = Process.alone(torch.device("cpu"), dtype)
    return install_fused_kernels(model_of(model_type, dtype), CONFIG, process)


ALL_PARTS = {"attention": 2, "linears": 8, "mlp": 2, "norms": 4, "loss": 1}


@pytest.mark.parametrize(
    "model_type, dtype, parts",
    [
        ("smollm3", torch.float32, ALL_PARTS),
        ("granite", torch.float32, ALL_PARTS),
        ("mistral", torch.bfloat16, ALL_PARTS),  # rounding is no difference
        ("mistral", torch.float16, ALL_PARTS),
        ("glm4", torch.float32, {"attention": 2, "linears": 8, "mlp": 2, "loss": 1}),
        ("nemotron", torch.float32, {"attention": 2, "linears": 12, "loss": 1}),
        (
            "gpt_oss",
            torch.float32,
            {"attention": 2, "linears": 8, "experts": 2, "norms": 4, "loss": 1},
        ),
    ],
)
def test_a_part_is_fused_by_what_it_computes(model_type, dtype, parts):
    assert installed(model_type, dtype).on == parts


class EachHead(nn.Module):
    """A norm of all heads at once, computed for each head alone."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.norm = attention.q_norm
        self.features = attention.head_dim

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        heads = query.unflatten(-1, (-1, self.features))
        variance = heads.float().pow(2).mean(-1, keepdim=True)
        normed = heads * torch.rsqrt(variance + self.norm.variance_epsilon)
        return (self.norm.weight * normed.flatten(-2)).to(query.dtype)


def other_norm(module: nn.Module, norm: nn.Module) -> dict[str, Any]:
    return {"_modules": {**module._modules, "q_norm": norm}}


MUTANTS = {
    "scale": lambda module: {"scaling": 1.0},
    "window": lambda module: {"sliding_window": None},
    "a longer window": lambda module: {"sliding_window": module.sliding_window + 1},
    "norm of queries": lambda module: other_norm(module, nn.Identity()),
    "norm of each head": lambda module: other_norm(module, EachHead(module)),
}


def mutant_of(name: str) -> Callable[..., Any]:
    """Return a fused attention that leaves one thing out."""

    def forward(module, *args, **kwargs):
        state = dict(vars(module))
        try:
            vars(module).update(MUTANTS[name](module))
            return attention.attention_forward(module, *args, **kwargs)
        finally:
            vars(module).update(state)

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "model_type, mutant",
    [
        ("qwen3", "scale"),
        ("gemma3", "window"),
        ("gemma3", "a longer window"),
        ("qwen3", "norm of queries"),
        ("olmo2", "norm of queries"),
        ("olmo2", "norm of each head"),
    ],
)
def test_a_mutant_of_attention_is_caught(model_type, mutant, dtype):
    setup = setup_of(model_of(model_type, dtype), dtype)
    modules = [layer.self_attn for layer in setup.decoder.layers]
    for module in modules:
        bind_attention(module, attention_kind_of(module))
        assert module.attention_kind.rotates
    if "window" in mutant:
        modules = [module for module in modules if module.sliding_window]
    right = prove(modules, attention.attention_forward, setup, unmasked_call(modules, setup))
    assert right == modules
    with pytest.raises(Unsupported, match="computes something else"):
        prove(modules, mutant_of(mutant), setup, unmasked_call(modules, setup))


def test_a_mutant_of_an_mlp_is_caught():
    setup = setup_of(model_of("llama"))
    modules = [layer.mlp for layer in setup.decoder.layers]
    for module in modules:
        roles = gated_mlp_of(module)
        assert (roles.gate, roles.up, roles.down) == ("gate_proj", "up_proj", "down_proj")
        linear_install.bind_mlp(module, roles)
    assert prove(modules, linear_install.mlp_forward, setup) == modules
    for module in modules:
        module.fused_activation = "gelu_tanh"
    with pytest.raises(Unsupported, match="LlamaMLP computes something else"):
        prove(modules, linear_install.mlp_forward, setup)


def test_fused_code_that_finds_no_memory_is_not_taken_for_one_that_is_called_otherwise():
    setup = setup_of(model_of("llama"))
    modules = [layer.mlp for layer in setup.decoder.layers]

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        prove(modules, refuse, setup)


def layers_with_roles(setup: TrainingSetup) -> list[nn.Module]:
    """Return the layers of a decoder, ready for a fused residual add."""
    layers = list(setup.decoder.layers)
    modules = list(setup.decoder.modules())
    norms = {module: kind for module in modules if (kind := norm_kind_of(module))}
    for module, kind in norms.items():
        module.norm_kind = kind
    for layer in layers:
        layer.fused_roles = layer_roles_of(layer, norms)
    return layers


def test_a_layer_with_a_fused_residual_add_is_checkpointed_like_any_other():
    model = model_of("granite")
    setup = setup_of(model)
    layers = layers_with_roles(setup)
    fuse(layers, residual.layer_forward)
    checkpoint_layers(setup.base, 1)
    calls = [0] * len(layers)
    for number, layer in enumerate(layers):

        def count(*_, number=number):
            calls[number] += 1

        layer.mlp.register_forward_pre_hook(count)
    ids = torch.arange(12)[None]
    setup.base.train()(input_ids=ids, use_cache=False).logits.sum().backward()
    assert calls == [2] + [1] * (len(layers) - 1)


@pytest.mark.parametrize("mutant", ["offset", "multiplier"])
def test_a_mutant_of_a_layer_is_caught(mutant):
    setup = setup_of(model_of("granite"))
    layers = layers_with_roles(setup)
    assert all(layer.fused_roles.multiplier == layer.residual_multiplier != 1.0 for layer in layers)
    assert prove(layers, residual.layer_forward, setup) == layers
    for layer in layers:
        if mutant == "offset":
            kind = layer.input_layernorm.norm_kind
            layer.input_layernorm.norm_kind = replace(kind, offset=1.0)
        else:
            roles = layer.fused_roles
            names = (roles.norm1, roles.block1, roles.norm2, roles.block2)
            flags = (roles.is_tuple1, roles.is_tuple2, 1.0, roles.arguments, roles.passes_more)
            layer.fused_roles = residual.LayerRoles(*names, *flags)
    with pytest.raises(Unsupported, match="GraniteDecoderLayer computes something else"):
        prove(layers, residual.layer_forward, setup)


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("llama", ("llama", 0.0)),
        ("gemma3", ("gemma", 1.0)),
        ("olmo2", ("gemma", 0.0)),
        ("qwen3_next", ("gemma", 1.0)),
        *((model_type, None) for model_type in ("cohere2", "nemotron", "stablelm")),  # LayerNorm
    ],
)
def test_a_norm_is_known_by_its_numbers(model_type, expected):
    kind = norm_kind_of(tiny_model(model_type).model.norm)
    assert (kind and (kind.casting, kind.offset)) == expected


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("llama", [True, True]),
        ("phi3", [True, True]),
        ("gpt_oss", [True, True]),  # with sinks, and tables of half a head
        ("smollm3", [True, False]),
        ("ministral3", [None, None]),  # it scales queries by their position
        ("glm4", [None, None]),  # it rotates pairs of neighbors
    ],
)
def test_rotary_is_known_by_its_numbers(model_type, expected):
    kinds = [attention_kind_of(layer.self_attn) for layer in tiny_model(model_type).model.layers]
    found = [kind and kind.rotates for kind in kinds]
    assert sorted(map(str, found)) == sorted(map(str, expected))


def test_attention_is_known_among_fake_kernels():
    """What recognizes it computes numbers, while a trace has fake kernels and no numbers."""
    model = tiny_model("qwen3")
    with FakeTensorMode(allow_non_fake_inputs=True), fake_kernels(True):
        kinds = [attention_kind_of(layer.self_attn) for layer in model.model.layers]
    assert kinds == [AttentionKind(rotates=True, norms_all_heads=False)] * 2


@pytest.mark.parametrize("clip_qkv", [8.0, None])
def test_clamped_queries_are_not_like_llamas(clip_qkv):
    for layer in tiny_model("olmoe", clip_qkv=clip_qkv).model.layers:
        assert (attention_kind_of(layer.self_attn) is None) == (clip_qkv is not None)


def test_a_layer_without_a_window_has_not_the_windows_of_its_config():
    model = model_of("qwen2_moe")
    assert model.config.sliding_window is not None
    layers = model.get_base_model().model.layers
    assert [attention._window(layer.self_attn) for layer in layers] == [None, None]


@pytest.mark.parametrize("model_type", ["olmo2", "cohere2", "gemma2", "glm4"])
def test_layers_of_another_order_keep_their_adds(model_type):
    decoder = tiny_model(model_type).model
    norms = {module: kind for module in decoder.modules() if (kind := norm_kind_of(module))}
    assert layer_roles_of(decoder.layers[0], norms) is None


def test_the_proof_leaves_a_model_as_it_was():
    model = model_of("qwen3").eval()
    model.get_base_model().model.layers[0].train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    install_fused_kernels(model, CONFIG, Process.alone(torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Picked(nn.Module):
    """One matrix for each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nh,nhf->nf", x, self.weight[choice[:, 0]])


class Routed(nn.Module):
    """Tokens of which each goes to one matrix; `noise` is that of another way to round."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.picked = Picked()
        self.noise = 0.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        return self.picked(x, (logits + self.noise * logits.flip(0)).topk(1).indices)


def test_a_token_that_rounding_sends_to_another_expert_is_no_difference():
    torch.manual_seed(0)
    # a decoder layer is given integers too, which are no choice
    call = ForwardCall((torch.randn(64, 8),), {"position_ids": torch.arange(64)[None]})
    trial = Trial(Routed(), call, Process.alone(torch.device("cpu")), False)
    own = trial.run(own_code)
    assert [value.shape for value in own.choices] == [(64, 1)]
    trial.module.noise = 1.0
    again = trial.run(own_code, choices=own.choices)
    assert difference(own, again) is None
    assert difference(own, trial.run(own_code)) is not None


def result_of(output: torch.Tensor, reach: bool = True) -> Result:
    tensors = {"output": output, "reach of the last token": torch.tensor([reach])}
    return Result(tensors, torch.bfloat16, [])


def test_fused_code_may_round_as_much_as_its_own():
    torch.manual_seed(0)
    exact = torch.randn(64, 8)
    own, other = torch.randn(2, 64, 8)
    right = result_of(exact)
    rounded = result_of(exact + 0.2 * own)
    assert difference(rounded, result_of(exact + 0.2 * other)) is not None
    assert difference(rounded, result_of(exact + 0.2 * other), right) is None
    assert difference(rounded, result_of(exact + 0.5 * other), right) is not None
    assert difference(rounded, result_of(exact, reach=False), right) is not None
    assert difference(right, result_of(exact + 0.2 * other), right) is not None


def test_the_model_that_ships_is_fused_in_16_bits():
    """Weights that were trained round more than random ones."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data" / "tiny_llama", dtype=torch.bfloat16)
    model = with_adapters(model, r=16)
    process = Process.alone(torch.device("cpu"), torch.bfloat16)
    kernels = install_fused_kernels(model, CONFIG, process)
    depth = model.config.num_hidden_layers
    assert kernels.on["attention"] == depth
    assert kernels.off == {}
