"""The structure of a model: its matrices, experts and kinds of layers. Pure: no torch.

`models.structure` counts them on the model itself, without weights. Bytes, adapters and FLOPs
follow from the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pydantic import TypeAdapter

from sft_kernels.needs import FLOAT8_MULTIPLE

# Parameters of experts, and the names of their parts in earlier layouts
FUSED = (
    ("experts.gate_up_proj", ("gate_proj", "up_proj")),
    ("experts.gate_up_proj", ("w1", "w3")),
    ("experts.down_proj", ("w2",)),
)


@dataclass(frozen=True)
class MatrixKind:
    """Matrices of one name and size, each of which multiplies the features of a token.

    The experts of a layer, stacked in one parameter or in a list of modules, are one matrix here.
    """

    name: str  # with a * for each number: model.layers.*.mlp.up_proj
    inputs: int  # features
    outputs: int
    count: int  # in the model
    layers: tuple[int, ...] | None = None  # decoder layers that have it; None: all
    experts: int = 1
    active: int = 1  # number of experts that a token is routed to
    is_adapted: bool = True  # if all linear layers have adapters
    is_quantized: bool = True  # over a 4-bit base
    is_stacked: bool = False  # the experts are one parameter with three dimensions

    @cached_property
    def weights(self) -> int:
        return self.count * self.experts * self.inputs * self.outputs

    @property
    def active_weights(self) -> int:
        """Weights that a token is multiplied by."""
        return self.count * self.active * self.inputs * self.outputs

    @property
    def fits_float8(self) -> bool:
        """Whether float8 GEMMs support it: no router, no stacked experts, sizes of full blocks."""
        sizes = self.inputs % FLOAT8_MULTIPLE + self.outputs % FLOAT8_MULTIPLE
        return self.is_quantized and not self.is_stacked and sizes == 0

    def has_name(self, target: str) -> bool:
        """Return whether a target matches it, by PEFT's rule: the last words of a name."""
        return f".{self.name}".endswith(f".{target}")

    def in_layers(self, chosen: Sequence[int], decoder_layers: int) -> "MatrixKind":
        """Return the matrices of the chosen ones of the decoder's layers."""
        own = range(decoder_layers) if self.layers is None else self.layers
        kept = tuple(layer for layer in own if layer in chosen)
        count = self.count * len(kept) // len(own) if own else 0
        return replace(self, layers=kept, count=count)


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers that mix tokens in one way: by attention, by a recurrence, or by both."""

    count: int
    query_features: int = 0  # of all query heads; 0: no attention
    kv_features: int = 0  # of all key heads
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    is_recurrent: bool = False
    has_experts: bool = False


@dataclass(frozen=True)
class Structure:
    """The counts of one model. Output head and embedding are not matrices here."""

    parameters: int  # tied ones once
    active_parameters: int  # without the experts that a token is not routed to
    matrices: tuple[MatrixKind, ...]
    layers: tuple[LayerKind, ...]
    encoders: int = 0  # parameters in encoders, which are not trained

    def with_more(self, weights: int) -> "Structure":
        """Return the counts with more (or fewer) weights outside of the matrices."""
        parameters, active = self.parameters + weights, self.active_parameters + weights
        return replace(self, parameters=parameters, active_parameters=active)

    def with_experts_of_rank(self, ranks: int) -> "Structure":
        """Return the counts of one of `ranks` ranks that share the experts equally."""
        matrices = []
        for kind in self.matrices:
            experts = kind.experts // ranks if kind.is_stacked else kind.experts
            matrices.append(replace(kind, experts=experts))
        part = replace(self, matrices=tuple(matrices))
        elsewhere = self.product_weights - part.product_weights
        return replace(part, parameters=self.parameters - elsewhere)

    @property
    def experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        return max((kind.experts for kind in self.matrices if kind.experts > 1), default=0)

    @property
    def stacked_experts(self) -> int:
        """Experts of a layer that are stacked in one parameter, 0 without such experts."""
        return max((kind.experts for kind in self.matrices if kind.is_stacked), default=0)

    @property
    def active_experts(self) -> int:
        return max((kind.active for kind in self.matrices if kind.experts > 1), default=0)

    @property
    def recurrent_layers(self) -> int:
        return sum(kind.count for kind in self.layers if kind.is_recurrent)

    @cached_property
    def product_weights(self) -> int:
        """Weights of all matrices."""
        return sum(kind.weights for kind in self.matrices)

    @cached_property
    def active_product_weights(self) -> int:
        """Weights of the matrices that a token is multiplied by."""
        return sum(kind.active_weights for kind in self.matrices)

    @cached_property
    def quantized_weights(self) -> int:
        """Weights that a 4-bit base packs."""
        return sum(kind.weights for kind in self.matrices if kind.is_quantized)

    @cached_property
    def kv_features(self) -> int:
        """Features of a token's keys in all layers: half of a cache."""
        return sum(kind.count * kind.kv_features for kind in self.layers)

    def describe(self) -> str:
        """Return the special features of the layers, after a comma; "" for nothing."""
        words = ""
        if self.experts:
            words += f", {self.active_experts} of {self.experts} experts per token"
        if self.recurrent_layers:
            layers = sum(kind.count for kind in self.layers)
            words += f", {self.recurrent_layers} of {layers} layers recurrent"
        return words


def adapted_matrices(
    matrices: Sequence[MatrixKind], targets: str | Sequence[str], experts: str = "auto"
) -> tuple[MatrixKind, ...]:
    """Return the matrices that get an adapter.

    `experts` is tuning.lora.experts, which decides about experts in one parameter.
    """
    chosen = []
    for kind in matrices:
        if kind.is_stacked and experts != "auto":
            is_chosen = experts != "none"
        elif targets == "all-linear":
            is_chosen = kind.is_adapted
        else:
            is_chosen = any(kind.has_name(name) for name in with_fused(targets))
        if is_chosen:
            chosen.append(kind)
    return tuple(chosen)


def with_fused(targets: str | Sequence[str]) -> list[str]:
    """Return targets, plus the fused parameters whose parts are all among them."""
    names = [targets] if isinstance(targets, str) else list(targets)
    for fused, parts in FUSED:
        if set(parts) <= set(names):
            names.append(fused)
    return names


@cache
def _adapter() -> TypeAdapter[Structure]:
    return TypeAdapter(Structure)


def structure_from_json(facts: object) -> Structure:
    """Return the structure that `structure_as_json` wrote.

    Raises: ValidationError for invalid facts.
    """
    return _adapter().validate_python(facts)


def structure_as_json(structure: Structure) -> object:
    """Return a structure as plain data, without fields that have their default value."""
    return _adapter().dump_python(structure, mode="json", exclude_defaults=True)
