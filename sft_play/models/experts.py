"""Find the experts of mixture-of-experts models: where their weights are, and what routes tokens.

Experts are recognized by shape, not by the model's name. transformers stores the experts of a layer
in 3-D parameters of one module. Their shape is (experts, out, in), or (experts, in, out) if
`is_transposed`. Older layouts use a list with one module per expert, whose linear layers are like
any others.

`find_experts` returns modules in the form of transformers' `use_experts_implementation`. It sets
flags on a module that describe the memory layout of its matrices. PEFT wraps such a module once for
each adapted parameter. The outermost wrapper gets the fused forward method.

Legend: E experts, r rank, `in` and `out` features.
"""

import functools
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass

from peft import PeftModel
from peft.utils.other import _get_submodules
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sft_kernels.expert_modules import SharedParamWrapper, packed_weight, true_shape
from sft_play.models.architecture import encoders_of, text_modules

# argument of transformers' models that compute a load-balancing loss
BALANCE = "output_router_logits"


@dataclass(frozen=True)
class ExpertWeight:
    """A 3-D parameter that stores one projection of all experts of a layer."""

    module_name: str  # name in `named_modules` of the module that has the parameter
    parameter_name: str
    shape: tuple[int, int, int]  # the first dimension is the number of experts

    @property
    def name(self) -> str:
        """Return the parameter's full name."""
        return f"{self.module_name}.{self.parameter_name}"

    @property
    def experts(self) -> int:
        """Return the number of experts."""
        return self.shape[0]


def expert_weights(model: nn.Module) -> list[ExpertWeight]:
    """Return the 3-D expert parameters of a model without adapters, in the order of its modules.

    Convolutions have 3-D weights too, and are skipped.
    """
    found: list[ExpertWeight] = []
    for module_name, module in text_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if is_expert_weight(module, parameter):
                found.append(ExpertWeight(module_name, name, true_shape(parameter)))
        for name in getattr(module, "parametrizations", ()):
            packed = packed_weight(module, name)
            if packed is not None:
                found.append(ExpertWeight(module_name, name, true_shape(packed)))
    return found


def is_expert_weight(module: nn.Module, parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter of a module stores one projection of all experts."""
    if parameter is None or isinstance(module, _ConvNd | ParametrizationList):
        return False
    shape = true_shape(parameter)
    return len(shape) == 3 and shape[0] > 1


def routing_linears(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that choose or weight experts: they get no adapters.

    They have one output per expert, or one output that weights a shared expert, and are next to the
    experts of a layer. A router with a class of its own is not a linear layer.
    """
    names: set[str] = set()
    for experts_name, experts in _expert_counts(model).items():
        block_name = experts_name.rpartition(".")[0]
        for child_name, child in model.get_submodule(block_name).named_children():
            full_name = f"{block_name}.{child_name}"
            if full_name == experts_name:
                continue
            linears = [name for name, part in child.named_modules() if is_adaptable_linear(part)]
            if len(linears) != 1:
                continue  # attention or an MLP
            linear = f"{full_name}.{linears[0]}".rstrip(".")
            layer = model.get_submodule(linear)
            outputs = layer.nf if isinstance(layer, Conv1D) else layer.out_features
            if outputs in (1, experts):
                names.add(linear)
    return names


def unquantized_linears(model: nn.Module) -> set[str]:
    """Return the names of linear layers that no base stores in fewer bits.

    They are routers, or their parent module's code uses their weight directly. It multiplies by the
    weight, or changes the weight's data, as Gemma 3n does in training.
    """
    names = routing_linears(model)
    for name in linear_names(model):
        parent_name, _, word = name.rpartition(".")
        parent = type(model.get_submodule(parent_name))
        if reads_weight(word, parent) or f"self.{word}.weight.data" in source_of(parent):
            names.add(name)
    return names


@functools.cache
def reads_weight(word: str, module_class: type[nn.Module]) -> bool:
    """Return whether a class multiplies by the weight of layer `word` without calling it."""
    weight = rf"self\.{re.escape(word)}\.weight"
    of_function = rf"\blinear\([^()]*(\([^()]*\)[^()]*)*{weight}\b"
    ways = (f"{weight} @", of_function, rf"{weight}\.clamp\(")  # the last: Gemma 3n, in training
    source = source_of(module_class)
    return any(re.search(way, source) for way in ways)


@functools.cache
def source_of(module_class: type[nn.Module]) -> str:
    """Return the code of the methods that a class defines, "" if there are none.

    inspect finds methods by line; for a class it parses the whole file.
    """
    methods = [value for value in vars(module_class).values() if inspect.isfunction(value)]
    try:
        return "".join(inspect.getsource(method) for method in methods)
    except OSError:
        return ""


def is_adaptable_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that adapters can wrap."""
    return isinstance(module, nn.Linear | Conv1D)


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that read text and that adapters can wrap."""
    return [name for name, module in text_modules(model) if is_adaptable_linear(module)]


def encoder_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of encoders that adapters can wrap."""
    found = []
    for encoder, module in encoders_of(model).items():
        for own, part in module.named_modules(prefix=encoder):
            parent, _, word = own.rpartition(".")
            if is_adaptable_linear(part) and not reads_weight(
                word, type(model.get_submodule(parent))
            ):
                found.append(own)
    return found


def is_named(name: str, targets: Iterable[str]) -> bool:
    """Return whether a target names a module or parameter, by PEFT's rule."""
    return any(f".{name}".endswith(f".{target}") for target in targets)


def layer_of(name: str) -> int | None:
    """Return the index of the decoder layer that a name belongs to."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[0]) if numbers else None


def _expert_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of experts by the name of the module that contains them."""
    counts = {weight.module_name: weight.experts for weight in expert_weights(model)}
    for name, module in text_modules(model):
        if isinstance(module, nn.ModuleList) and _is_list_of_experts(name, module):
            counts[name] = len(module)
    return counts


def _is_list_of_experts(name: str, modules: nn.ModuleList) -> bool:
    """Return whether a list contains MLPs of the same class inside a numbered decoder layer."""
    if len(modules) < 2 or not any(part.isdecimal() for part in name.split(".")):
        return False
    classes = {type(module) for module in modules}
    return len(classes) == 1 and any(is_adaptable_linear(part) for part in modules[0].modules())


def computes_balance(model: nn.Module) -> bool:
    """Return whether a model without adapters computes a loss that balances its experts."""
    return BALANCE in inspect.signature(type(model).forward).parameters


def wrap_shared(model: PeftModel, adapter: str, weight: ExpertWeight) -> None:
    """Wrap a parameter of experts, possibly already wrapped, with one adapter for all experts."""
    tuner = model.base_model
    config = model.peft_config[adapter]
    parent, child, child_name = _get_submodules(tuner.model, weight.module_name)
    wrapper = SharedParamWrapper(
        child, adapter, weight.parameter_name, config, r=config.r, lora_alpha=config.lora_alpha
    )
    tuner._replace_module(parent, child_name, wrapper, child)
