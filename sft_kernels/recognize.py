"""Find out what a module computes, from its structure and its class's code; no list of names.

The forward method of a module's class runs on a shallow copy of the module. The copy's children are
replaced by simple functions, and its input is a few float64 numbers on the CPU. The result is
compared with the formula that a fused module computes. No weights are read, so this also works on
the meta device and in a trace. `proof` then runs the fused module itself, with its weights, on its
device.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from sft_kernels.attention.reference import Scoring, attend_document, rotate_reference
from sft_kernels.expert_modules import true_shape
from sft_kernels.linears.glu import Activation, sigmoid_argument
from sft_kernels.norms.residual import LayerRoles, NormKind, ReferenceNorms
from sft_kernels.sharded import shallow_copy

# What a class's forward method may raise if it is called with children that it does not expect
MISMATCH_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)
# Casting and offset of an RMSNorm: see `NormKind`
NORM_KINDS = (("llama", 0.0), ("gemma", 1.0), ("gemma", 0.0), ("llama", 1.0))
# Share of a norm's outputs that may round to the number next to the formula's, because the norm may
# multiply in another order. Casting at another place changes a third of them.
OTHER_ROUNDING = 0.02
ATTENDED = 3  # tokens


@dataclass(frozen=True)
class GatedMlp:
    """The names of a gated MLP's linears: down(act(gate(x)) * up(x))."""

    gate: str
    up: str | None  # None if `gate` computes both, gate's features first
    down: str
    activation: Activation


class Stub(nn.Module):
    """A child that computes a simple function and stores the keyword arguments of its call."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Return the function of the input, and store the other arguments."""
        self.kwargs = kwargs
        return self.function(hidden_states)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, with or without an adapter."""
    if isinstance(module, ModulesToSaveWrapper):
        module = module.original_module
    if isinstance(module, LoraLayer):
        module = module.get_base_layer()
    return isinstance(module, nn.Linear)


@contextlib.contextmanager
def real_numbers() -> Iterator[None]:
    """Compute real numbers on the CPU, even inside a trace, without gradients and autocast."""
    with (
        unset_fake_temporarily(),
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def own_result(
    module: nn.Module, replaced: dict[str, nn.Module | Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Return what a module's class computes with some children or weights replaced.

    Return None if its code does not accept the arguments. The module is not changed.
    """
    copied = shallow_copy(module)
    weights = {name: value for name, value in replaced.items() if isinstance(value, Tensor)}
    children = {name: value for name, value in replaced.items() if name not in weights}
    vars(copied)["_parameters"] = {**module._parameters, **weights}
    vars(copied)["_modules"] = {**module._modules, **children}
    try:
        return type(module).forward(copied, *args, **kwargs)
    except MISMATCH_ERRORS:
        return None


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def agrees(result: Any, expected: Tensor, rtol: float = 1e-9) -> bool:
    """Return whether a result is a tensor equal to the expected float64 one."""
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return torch.allclose(result.double(), expected, rtol=rtol, atol=1e-12)


@real_numbers()
def gated_mlp_of(module: nn.Module) -> GatedMlp | None:
    """Return the roles of a gated MLP's linears; None if a module is not a gated MLP."""
    linears = [name for name, child in module.named_children() if is_linear(child)]
    if len(linears) not in (2, 3) or module._parameters:
        return None
    for activation in ("silu", "gelu_tanh"):
        for gate, *up, down in itertools.permutations(linears):
            roles = GatedMlp(gate, up[0] if up else None, down, activation)
            if _computes_gated_mlp(module, roles):
                return roles
    return None


def _computes_gated_mlp(module: nn.Module, roles: GatedMlp) -> bool:
    """Return whether the class's code computes the gated MLP formula with these roles."""

    def both(x: Tensor) -> Tensor:
        return torch.cat((x.sin(), (2 * x).cos()), dim=-1)

    x = numbers(2, 6)
    gate, up = both(x).chunk(2, dim=-1)
    p, _ = sigmoid_argument(gate, roles.activation)
    expected = (gate * torch.sigmoid(p) * up).tanh()
    stubs = {roles.gate: Stub(both), roles.down: Stub(torch.tanh)}
    if roles.up is not None:
        stubs |= {roles.gate: Stub(torch.sin), roles.up: Stub(lambda x: (2 * x).cos())}
    return agrees(own_result(module, stubs, x), expected)


@real_numbers()
def norm_kind_of(module: nn.Module) -> NormKind | None:
    """Return how an RMSNorm computes; None if a module is not an RMSNorm of a known kind."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if names != ["weight"] or module._modules or not isinstance(eps, float):
        return None
    shape = true_shape(module.weight)
    arguments = inspect.signature(type(module).forward).parameters
    if len(shape) != 1 or len(arguments) != 2:  # self and the input
        return None
    weight = numbers(*shape, dtype=torch.bfloat16, seed=1)
    x = numbers(8, *shape, dtype=torch.bfloat16)
    result = own_result(module, {"weight": weight}, x)
    if not isinstance(result, Tensor) or result.dtype != x.dtype or result.shape != x.shape:
        return None
    for casting, offset in NORM_KINDS:
        kind = NormKind(casting, offset, eps)
        expected, *_ = ReferenceNorms.forward(x, None, weight, kind)
        differing = float(result.ne(expected).double().mean())
        is_near = torch.allclose(result.float(), expected.float(), rtol=2**-6)
        if is_near and differing <= OTHER_ROUNDING:
            return kind
    return None


@real_numbers()
def layer_roles_of(layer: nn.Module, norms: dict[nn.Module, NormKind]) -> LayerRoles | None:
    """Return the roles of a decoder layer's children; None if the layer computes anything else.

    The formula is s = h + m block1(norm1(h)), s + m block2(norm2(s)). The layer sets the number m.
    """
    norm_names = []
    block_names = []
    for name, child in layer.named_children():
        if child in norms:
            norm_names.append(name)
        elif any(True for _ in child.parameters()):
            block_names.append(name)
        elif getattr(child, "p", 0.0):
            return None  # dropout between block and stream
    if len(norm_names) != 2 or len(block_names) != 2 or layer._parameters:
        return None
    numbers_of_layer = [value for value in vars(layer).values() if isinstance(value, float)]
    candidates = itertools.product(
        itertools.permutations(norm_names),
        itertools.permutations(block_names),
        # False first: some layers unpack a tuple only if they get one
        itertools.product((False, True), repeat=2),
        (1.0, *numbers_of_layer),
    )
    for (norm1, norm2), (block1, block2), (tuple1, tuple2), multiplier in candidates:
        roles = LayerRoles(norm1, block1, norm2, block2, tuple1, tuple2, multiplier)
        found = _with_arguments(layer, roles)
        if found is not None:
            return found
    return None


def _with_arguments(layer: nn.Module, roles: LayerRoles) -> LayerRoles | None:
    """Return the roles, with the arguments of the first block, if the formula fits."""

    def first(x: Tensor) -> Any:
        return (x.exp(), None) if roles.is_tuple1 else x.exp()

    def second(x: Tensor) -> Any:
        return (x.tanh(), None) if roles.is_tuple2 else x.tanh()

    stubs = {
        roles.norm1: Stub(torch.sin),
        roles.norm2: Stub(torch.cos),
        roles.block1: Stub(first),
        roles.block2: Stub(second),
    }
    x = numbers(1, 2, 3)
    stream = x + roles.multiplier * x.sin().exp()
    expected = stream + roles.multiplier * stream.cos().tanh()
    signature = inspect.signature(inspect.unwrap(type(layer).forward))
    marks: dict[str, object] = {}  # the layer's arguments
    for parameter in list(signature.parameters.values())[2:]:  # after self and the input
        is_open = parameter.kind is inspect.Parameter.VAR_KEYWORD
        marks[UNKNOWN_ARGUMENT if is_open else parameter.name] = object()
    if not agrees(own_result(layer, stubs, x, **marks), expected):
        return None
    given = stubs.pop(roles.block1).kwargs
    if any(stub.kwargs for stub in stubs.values()):
        return None
    names = {id(mark): name for name, mark in marks.items()}
    renamed = {name: names.get(id(value)) for name, value in given.items()}
    if None in renamed.values():
        return None
    passes_more = renamed.pop(UNKNOWN_ARGUMENT, None) is not None
    return replace(roles, arguments=tuple(renamed.items()), passes_more=passes_more)


UNKNOWN_ARGUMENT = "an_unknown_argument"  # in the place of a layer's **kwargs


def calls_attention_interface(module: nn.Module) -> bool:
    """Return whether a module's code calls one of the attention functions of transformers."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@dataclass(frozen=True)
class AttentionKind:
    """How attention like Llama's treats queries and keys."""

    rotates: bool  # some layers know no positions
    norms_all_heads: bool  # at once, as OLMo 2 does, if there are norms
    has_half_tables: bool = False  # cos and sin as in gpt-oss; Llama's contain each number twice


ATTENTION_KINDS = [
    *itertools.starmap(AttentionKind, itertools.product((True, False), (False, True))),
    AttentionKind(rotates=True, norms_all_heads=False, has_half_tables=True),
]


@real_numbers()
def attention_kind_of(module: nn.Module) -> AttentionKind | None:
    """Return the kind of an attention module; None if `attention_forward` does not fit it.

    It fits projections of queries, keys and values (or one projection for all three) and of the
    output. Norms of each head, or of all heads at once, and sinks are optional. Rotary embeddings
    are over the halves of a head.
    """
    children = dict(module.named_children())
    linears = {name for name, child in children.items() if is_linear(child)}
    if linears not in ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}):
        return None
    if module._parameters.keys() - {"sinks"}:
        return None
    if children.keys() - linears not in (set(), {"q_norm", "k_norm"}):
        return None
    if not (hasattr(module, "scaling") and hasattr(module, "head_dim")):
        return None
    for kind in ATTENTION_KINDS:
        # OLMo clamps large queries, keys and values
        if all(_computes_attention(module, kind, size) for size in (1, 1000)):
            return kind
    return None


def _computes_attention(module: nn.Module, kind: AttentionKind, size: int) -> bool:
    """Return whether the class's code computes attention of this kind.

    It runs on given queries, keys and values of magnitude `size`, with tables for full heads.
    """
    width = module.head_dim
    if hasattr(module, "qkv_proj"):
        keys = module.num_key_value_heads * width
        queries = module.qkv_proj.out_features - 2 * keys
    else:
        queries, keys = module.q_proj.out_features, module.k_proj.out_features
    query = size * numbers(1, ATTENDED, queries, seed=1)
    key = size * numbers(1, ATTENDED, keys, seed=2)
    value = size * numbers(1, ATTENDED, keys, seed=3)
    angles = numbers(1, ATTENDED, width // 2, seed=4)
    tables = angles if kind.has_half_tables else angles.repeat(1, 1, 2)
    sinks = numbers(queries // width, seed=5) if "sinks" in module._parameters else None
    # eager attention gets its mask from the model
    mask = torch.full((ATTENDED, ATTENDED), -torch.inf, dtype=query.dtype).triu(1)
    stubs = {
        "q_proj": Stub(lambda x: query.clone()),  # OLMo clamps in place
        "k_proj": Stub(lambda x: key.clone()),
        "v_proj": Stub(lambda x: value.clone()),
        "qkv_proj": Stub(lambda x: torch.cat((query, key, value), dim=-1)),
        "o_proj": Stub(lambda x: x),
        "q_norm": Stub(lambda x: functional.normalize(x, dim=-1)),
        "k_norm": Stub(lambda x: functional.normalize(x.sin(), dim=-1)),
    }
    present = {name: stubs[name] for name, _ in module.named_children() if name in stubs}
    if sinks is not None:
        present["sinks"] = sinks
    inputs = {"position_embeddings": (tables.cos(), tables.sin()), "attention_mask": mask}
    result = own_result(module, present, hidden_states=numbers(1, ATTENDED, 4), **inputs)
    if kind.norms_all_heads and "q_norm" in present:
        query, key = stubs["q_norm"](query), stubs["k_norm"](key)
    query, key, value = (each.unflatten(-1, (-1, width)) for each in (query, key, value))
    if not kind.norms_all_heads and "q_norm" in present:
        query, key = stubs["q_norm"](query), stubs["k_norm"](key)
    if kind.rotates:
        query, key = (rotate_reference(each, angles.cos(), angles.sin()) for each in (query, key))
    expected = attend_document(query, key, value, Scoring(module.scaling, sinks=sinks)).flatten(2)
    return isinstance(result, tuple) and agrees(result[0], expected, rtol=1e-5)
