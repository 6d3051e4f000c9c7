"""What adapters train beyond rank and targets, and how many weights that is. Pure: no torch.

Counts are exact where the matrices of the model are, but for biases of modules that are trained
whole; `models.parameters` counts the real model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.config.schema import LoraSection
from sft_play.config.sections.model import EMBEDDINGS, HEADS
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.structure import MatrixKind, adapted_matrices

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class AdapterOptions:
    """The settings of tuning.lora that change what is trained."""

    layers: tuple[int, ...] | None = None  # with adapters; None: all
    use_dora: bool = False
    has_dropout: bool = False
    saved_modules: tuple[str, ...] = ()  # trained whole
    experts: str = "auto"  # per_expert, none
    trained_tokens: int = 0  # whose rows of embedding and head are trained

    @classmethod
    def of(cls, lora: LoraSection) -> "AdapterOptions":
        """Return the options of a config."""
        layers = lora.layers_to_transform
        return cls(
            layers=None if layers is None else tuple(sorted(set(layers))),
            use_dora=lora.use_dora,
            has_dropout=lora.dropout > 0,
            experts=lora.experts,
            saved_modules=tuple(lora.modules_to_save or ()),
            trained_tokens=len(set(lora.trainable_tokens or ())),
        )

    def adapted(self, model: ModelShape, targets: str | Sequence[str]) -> tuple[MatrixKind, ...]:
        """Return the matrices that have adapters."""
        kinds = adapted_matrices(model.matrices, targets, self.experts)
        if self.layers is None:
            return kinds
        return tuple(kind.in_layers(self.layers, model.layers) for kind in kinds)

    def adapter_weights(self, model: ModelShape, rank: int, targets: str | Sequence[str]) -> int:
        """Return the weights of the A and B matrices, and of DoRA's magnitudes.

        Each expert has an A and a B of its own.
        """
        weights = 0
        for kind in self.adapted(model, targets):
            weights += kind.count * kind.experts * self._weights_of_one(kind, rank)
        return weights

    def active_adapter_weights(
        self, model: ModelShape, rank: int, targets: str | Sequence[str]
    ) -> int:
        """Return those of `adapter_weights` that a token meets."""
        weights = 0
        for kind in self.adapted(model, targets):
            weights += kind.count * kind.active * self._weights_of_one(kind, rank)
        return weights

    def _weights_of_one(self, kind: MatrixKind, rank: int) -> int:
        """Return the weights of the adapter of one matrix."""
        return rank * (kind.inputs + kind.outputs) + self.use_dora * kind.outputs

    def kept_bytes_per_token(
        self, model: ModelShape, targets: str | Sequence[str], is_4bit: bool
    ) -> int:
        """Return what PEFT keeps of a token in a layer, beyond its plain adapters, in 16 bits.

        Dropout keeps a copy of each linear's input and a mask, DoRA several outputs of each linear.
        A 1B Llama on an H200, beside the fused kernels: 2.6 bytes an input for dropout, 5.3 an
        output for DoRA, and 7.7 over 4-bit weights, where PEFT computes the base once more.
        """
        kept = 0
        for kind in self.adapted(model, targets):
            of_one = 3 * self.has_dropout * kind.inputs
            of_one += (8 if is_4bit else 6) * self.use_dora * kind.outputs
            kept += kind.count * kind.active * of_one
        return kept // model.layers

    def kept_weight_bytes(self, model: ModelShape, targets: str | Sequence[str]) -> int:
        """Return the 4-bit weights in 16 bits, which DoRA keeps for the backward pass."""
        if not self.use_dora:
            return 0
        return 2 * sum(kind.weights for kind in self.adapted(model, targets))

    def working_bytes(self, model: ModelShape, targets: str | Sequence[str]) -> int:
        """Return what DoRA holds to take the length of the largest linear's weights, in 16 bits.

        PEFT multiplies A and B through an identity matrix in 32 and in 16 bits.
        """
        if not self.use_dora:
            return 0
        sizes = []
        for kind in self.adapted(model, targets):
            sizes.append(6 * kind.inputs * kind.inputs + 4 * kind.inputs * kind.outputs)
        return max(sizes, default=0)

    @property
    def saves_head(self) -> bool:
        """Whether the output head is trained whole."""
        return bool(self._saved_words & HEADS)

    @property
    def _saved_words(self) -> set[str]:
        return {name.rpartition(".")[2] for name in self.saved_modules}

    def other_weights(self, model: ModelShape) -> int:
        """Return the weights of whole modules and of rows of tokens."""
        matrices = 1 if model.is_tied else 2
        rows = self.trained_tokens * matrices * model.hidden
        names = self._saved_words
        saved_matrices = bool(names & EMBEDDINGS) + bool(names & HEADS)
        rows += min(matrices, saved_matrices) * model.vocab * model.hidden  # tied: either is both
        sizes = _module_sizes(model)
        return rows + sum(sizes.get(name, 0) for name in names)


PLAIN = AdapterOptions()  # on the linear layers of all blocks, and nothing else


def adapter_words(lora: LoraSection) -> str:
    """Return what adapters train beyond rank and targets, after a comma; "" for nothing."""
    words = []
    if lora.layers_to_transform is not None:
        words.append(f"layers {', '.join(map(str, sorted(set(lora.layers_to_transform))))}")
    if lora.use_dora:
        words.append("DoRA")
    if lora.modules_to_save:
        words.append(f"{', '.join(lora.modules_to_save)} whole")
    if lora.trainable_tokens:
        words.append(f"the rows of {len(set(lora.trainable_tokens))} tokens")
    return "".join(f", {word}" for word in words)


def _module_sizes(model: ModelShape) -> dict[str, int]:
    """Return the weights of all modules of a name, of those beside embedding and head."""
    sizes = {"norm": model.hidden}
    for name in LAYER_NORMS:
        sizes[name] = model.layers * model.hidden
    for kind in model.matrices:
        word = kind.name.rpartition(".")[2]
        sizes[word] = sizes.get(word, 0) + kind.weights
    return sizes
