"""Count a model's structure on its modules without weights, because `plan` may not load them.

The front end starts `python -m sft_play.models.structure` as a process. Each line on stdin names a
module and a request, and the module's answer is a line on stdout. Both are JSON.
"""

import importlib
import json
import re
import select
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import Config, LoraSection
from sft_play.errors import ConfigError, SftPlayError, first_line
from sft_play.models.architecture import decoder_layers, empty_model, encoders_of, text_modules
from sft_play.models.expert_adapters import choose_targets
from sft_play.models.experts import expert_weights, linear_names, unquantized_linears
from sft_play.models.fake_model import load_architecture
from sft_play.plan.structure import LayerKind, MatrixKind, Structure, structure_as_json

# Errors of a config with an unknown type, untrusted code or sizes that do not fit
UNBUILDABLE = (
    SftPlayError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
)
# In transformers' errors, for packages that its code or a model's code needs
PIP_INSTALL = re.compile(r"`pip install ([^`]+)`")
IDLE_SECONDS = 5.0
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Names in config.json for the number of experts that process a token
ACTIVE_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
)
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "out")
KEY_PROJECTIONS = ("k_proj", "key", "k")


def count_structure(config: PretrainedConfig, trust_remote_code: bool = False) -> Structure:
    """Return the structure of the model that a config describes, built on the meta device.

    Raises: whatever the model's class raises for the config.
    """
    return structure_of(empty_model(config, torch.bfloat16, trust_remote_code))


def structure_of(model: PreTrainedModel) -> Structure:
    """Return the structure of a model without adapters; it may be on the meta device."""
    modules = _Modules(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Structure(
        parameters=parameters,
        active_parameters=parameters - modules.unmet_parameters(),
        matrices=modules.matrices(),
        layers=modules.layer_kinds(),
        encoders=sum(
            parameter.numel()
            for encoder in encoders_of(model).values()
            for parameter in encoder.parameters()
        ),
    )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"answer": the structure}, or {"refused": why the model cannot be built}.

    If its code needs a package that is not installed, return {"missing": what to type}.
    """
    try:
        config = Config.model_validate({"model": request["model"]})
        structure = count_structure(load_architecture(config), config.model.trust_remote_code)
    except ConfigError as error:  # the model cannot be trained on text
        return {"answer": {"unusable": str(error)}}
    except UNBUILDABLE as error:
        package = _missing_package(error)
        if package is not None:
            name = request["model"]["name"]
            command = f"{sys.executable} -m pip install {package}"
            return {"missing": f"model.name={name}: its code needs {package}; type {command}"}
        return {"refused": f"{type(error).__name__}: {first_line(error)}"}
    return {"answer": structure_as_json(structure)}


def _missing_package(error: Exception) -> str | None:
    """Return what to install, None if the error is not about a missing package."""
    found = PIP_INSTALL.search(str(error)) if isinstance(error, ImportError) else None
    if found is None and isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return None if find_spec(package) else package
    return found and found[1]


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a model, or all the experts of a layer in one parameter."""

    name: str
    inputs: int
    outputs: int
    layer: int | None  # the index of its decoder layer
    experts: int = 1  # number in its layer, if it is an expert's matrix
    is_stacked: bool = False


class _Modules:
    """The modules of a model, and what its config specifies about experts."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config()
        self.layers = decoder_layers(model)
        self.layer_numbers: dict[nn.Module, int] = {}
        for number, layer in enumerate(self.layers):
            self.layer_numbers.update(dict.fromkeys(layer.modules(), number))
        stacked = expert_weights(model)
        self.stacked = {weight.name for weight in stacked}
        # the number of experts in the layer, for each module that is one expert or contains all of
        # them
        self.experts = {model.get_submodule(each.module_name): each.experts for each in stacked}
        self.listed: set[nn.Module] = set()
        for name, modules in model.named_modules():
            if isinstance(modules, nn.ModuleList) and name.endswith("experts"):
                inside = {part for expert in modules for part in expert.modules()}
                self.listed |= inside
                self.experts.update(dict.fromkeys(inside, len(modules)))
        targets = choose_targets(model, LoraSection())
        self.adapted = {*targets.linears, *(weight.name for weight in targets.experts)}
        self.quantized = (set(linear_names(model)) - unquantized_linears(model)) | self.stacked

    def matrices(self) -> tuple[MatrixKind, ...]:
        """Return the kinds of matrices, in the order of the model, without embedding and head."""
        found: dict[tuple[str, int, int], list[_Matrix]] = {}
        left_out = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        for name, module in text_modules(self.model):
            if any(module is matrix for matrix in left_out):
                continue
            for matrix in self._matrices_of(name, module):
                key = (NUMBER.sub("*", matrix.name), matrix.inputs, matrix.outputs)
                found.setdefault(key, []).append(matrix)
        return tuple(self._kind(name, alike) for (name, _, _), alike in found.items())

    def unmet_parameters(self) -> int:
        """Return the number of expert parameters, including biases, that a token does not use."""
        unmet = 0
        for _, module in text_modules(self.model):
            count = self.experts.get(module, 1)
            if count == 1:
                continue
            for parameter in module.parameters(recurse=False):
                if module in self.listed or parameter.shape[0] == count:
                    unmet += parameter.numel() * (count - self._active(count)) // count
        return unmet

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of decoder layers with their counts; () if none were found."""
        counts = Counter(self._layer_kind(number) for number in range(len(self.layers)))
        return tuple(LayerKind(count, *facts) for facts, count in counts.items())

    def _layer_kind(self, number: int) -> tuple[int, int, int | None, bool, bool]:
        """Return the fields of a LayerKind after its count."""
        query_features = 0
        kv_features = 0
        window = None
        is_recurrent = False
        has_experts = False
        for module in self.layers[number].modules():
            if _is_attention(module):
                query_features, kv_features = _attention_features(module)
                window = self._window(module, number)
            is_recurrent |= hasattr(module, "A_log") or isinstance(module, nn.Conv1d)
            has_experts |= self.experts.get(module, 1) > 1
        return query_features, kv_features, window, is_recurrent, has_experts

    def _window(self, attention: nn.Module, number: int) -> int | None:
        """Return how many tokens a token of a layer can attend to, None for all previous ones."""
        types = getattr(self.config, "layer_types", None) or ()
        layer_type = types[number] if number < len(types) else ""
        window = getattr(attention, "sliding_window", None)
        if layer_type == "sliding_attention":
            window = window or getattr(self.config, "sliding_window", None)
        if layer_type == "chunked_attention":
            window = getattr(self.config, "attention_chunk_size", None)
        return window if isinstance(window, int) and window > 0 else None

    def _active(self, experts: int) -> int:
        """Return how many experts a token uses: all of them if the config does not set a number."""
        for name in ACTIVE_EXPERTS:
            active = getattr(self.config, name, None)
            if isinstance(active, int) and active > 0:
                return min(active, experts)
        return experts

    def _matrices_of(self, name: str, module: nn.Module) -> Iterator[_Matrix]:
        """Yield the matrices that belong directly to a module."""
        layer = self.layer_numbers.get(module)
        experts = self.experts.get(module, 1)
        if isinstance(module, nn.Linear):
            yield _Matrix(name, module.in_features, module.out_features, layer, experts)
        elif isinstance(module, Conv1D):
            yield _Matrix(name, module.nx, module.nf, layer, experts)
        elif layer is not None and not isinstance(module, nn.Embedding):
            for own_name, parameter in module.named_parameters(recurse=False):
                full_name = f"{name}.{own_name}"
                if full_name in self.stacked:
                    outputs, inputs = parameter.shape[1:]
                    if getattr(module, "is_transposed", False):
                        inputs, outputs = outputs, inputs
                    yield _Matrix(full_name, inputs, outputs, layer, experts, is_stacked=True)
                elif parameter.ndim == 2 and own_name == "weight":  # a router
                    outputs, inputs = parameter.shape
                    yield _Matrix(name, inputs, outputs, layer)

    def _kind(self, name: str, alike: list[_Matrix]) -> MatrixKind:
        first = alike[0]
        layers = sorted({each.layer for each in alike if each.layer is not None})
        is_in_all_layers = len(layers) == len(self.layers)
        return MatrixKind(
            name=name,
            inputs=first.inputs,
            outputs=first.outputs,
            count=len(alike) if first.is_stacked else len(alike) // first.experts,
            layers=tuple(layers) if layers and not is_in_all_layers else None,
            experts=first.experts,
            active=self._active(first.experts),
            is_adapted=first.name in self.adapted,
            is_quantized=first.name in self.quantized,
            is_stacked=first.is_stacked,
        )


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is softmax attention that contains its projections."""
    name = type(module).__name__
    return "Attention" in name and "Linear" not in name and _attention_features(module)[0] > 0


def _attention_features(attention: nn.Module) -> tuple[int, int]:
    """Return the features of all query heads and of all key heads; 0 for those not found."""
    query_features = 0
    kv_features = 0
    for name, linear in attention.named_children():
        if name in OUTPUT_PROJECTIONS:
            query_features = getattr(linear, "in_features", None) or getattr(linear, "nx", 0)
        if name in KEY_PROJECTIONS:
            kv_features = getattr(linear, "out_features", 0)
    return query_features, kv_features or query_features


def serve_structures() -> None:
    """Answer requests from stdin until none has arrived for IDLE_SECONDS."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # a model's code may print
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:  # the front end has ended
            return
        module, request = json.loads(line)
        print(json.dumps(importlib.import_module(module).answer(request)), file=answers, flush=True)


if __name__ == "__main__":
    serve_structures()
