"""The shape of a model, which determines its bytes and FLOPs.

Reads config.json; loads no torch and no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from sft_play.errors import EnvironmentFault
from sft_play.plan.config_json import ModelConfigJson, is_composite, read_typed, text_part
from sft_play.plan.structure import LayerKind, MatrixKind, Structure

REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("intermediate_size", "num_key_value_heads", "head_dim")
READ = (*REQUIRED, *OPTIONAL, "tie_word_embeddings", "model_type")
# Architectures like Llama, for which the sizes in config.json are the structure
LLAMA_LIKE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3")
)
HEAD_NORMS = ("qwen3", "gemma3", "gemma3_text")  # norms over queries and keys, which keep inputs
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")  # two more norms, after attention and MLP
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
# their config.json on the hub leaves tie_word_embeddings to the class
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Without a `structure` its layers are those of Llama."""

    vocab: int
    hidden: int  # features
    intermediate: int  # features of the MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # features of a head
    is_tied: bool  # the output head shares the embedding's weights
    model_type: str = ""  # as config.json names the architecture, of a composite one its text part
    composite: str | None = None  # the class of a model that has encoders next to its text part
    structure: Structure | None = None  # counted on the model's modules
    guess: str | None = None  # why nobody counted, if the layers may not be those of Llama
    in_mxfp4: bool = False  # its experts are published in MXFP4, and remain so over a 4-bit base

    @cached_property
    def counts(self) -> Structure:
        """The counted structure, otherwise the structure of a Llama of these sizes."""
        if self.structure is not None:
            return self.structure
        query = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        sizes = {
            "self_attn.q_proj": (self.hidden, query),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (query, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }
        matrices = []
        for name, (inputs, outputs) in sizes.items():
            matrices.append(MatrixKind(f"model.layers.*.{name}", inputs, outputs, self.layers))
        vocabularies = 1 if self.is_tied else 2
        parameters = sum(kind.weights for kind in matrices)
        parameters += (vocabularies * self.vocab + 2 * self.layers + 1) * self.hidden  # and norms
        layers = (LayerKind(self.layers, query_features=query, kv_features=keys),)
        return Structure(parameters, parameters, tuple(matrices), layers)

    @cached_property
    def matrices(self) -> tuple[MatrixKind, ...]:
        """The matrices of the layers, which determine adapters, 4-bit weights and FLOPs."""
        return self.counts.matrices

    @property
    def block_weights(self) -> int:
        """Number of weights in the matrices of all layers."""
        return self.counts.product_weights

    @property
    def float8_matrices(self) -> tuple[MatrixKind, ...]:
        """The matrices that a float8 base stores in 8 bits."""
        return tuple(kind for kind in self.matrices if kind.fits_float8)

    @property
    def parameters(self) -> int:
        """All weights; tied ones once."""
        return self.counts.parameters

    @property
    def active_parameters(self) -> int:
        """All weights except those of experts that a token is not routed to."""
        return self.counts.active_parameters

    def with_vocab(self, rows: int) -> Self:
        """Return the shape with another number of rows in embedding and output head."""
        shape = replace(self, vocab=rows)
        if self.structure is None:
            return shape
        more = (rows - self.vocab) * self.hidden * (1 if self.is_tied else 2)
        return replace(shape, structure=self.structure.with_more(more))


def shape_of(config: ModelConfigJson, name: str) -> ModelShape:
    """Return the shape that a transformers config.json describes.

    Raises: EnvironmentFault with the keys that it lacks.
    """
    text = text_part(config)
    if any(text.get(key) is None for key in REQUIRED):
        text = _completed_by_class(config)
    read = read_typed(text, name)
    sizes = {}
    for key in (*REQUIRED, *OPTIONAL):
        size = getattr(read, key)
        if isinstance(size, list):  # it differs between layers, as in Gemma 3n
            size = max(size, default=None)
        sizes[key] = size
    missing = [key for key in REQUIRED if not sizes[key]]
    if missing:
        raise EnvironmentFault(
            f"model.name={name}: its config.json names no {', '.join(missing)}; "
            "is it a language model? Set MODEL_NAME to one that is"
        )
    heads = sizes["num_attention_heads"]
    head_dim = sizes["head_dim"] or sizes["hidden_size"] // heads
    if head_dim == 0:
        raise EnvironmentFault(
            f"model.name={name}: its config.json says num_attention_heads={heads}, and "
            f"hidden_size={sizes['hidden_size']} is less; get the model again"
        )
    tied_by_default = text.get("model_type") in TIED_BY_DEFAULT
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", tied_by_default))
    packing = config.get("quantization_config")
    return ModelShape(
        vocab=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"] or 4 * sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=sizes["num_key_value_heads"] or heads,
        head_dim=head_dim,
        model_type=text.get("model_type") or config.get("model_type") or "",
        composite=(config.get("architectures") or [""])[0] if is_composite(config) else None,
        is_tied=bool(is_tied),
        in_mxfp4=isinstance(packing, Mapping) and packing.get("quant_method") == "mxfp4",
    )


def _completed_by_class(config: ModelConfigJson) -> ModelConfigJson:
    """Return the sizes by the model's class, {} if transformers has no such class.

    The class knows what config.json leaves out (Gemma 3) or names differently (GPT-2).
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # takes seconds, so only for such files

    try:
        text = AutoConfig.for_model(**config).get_text_config()
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ):  # no model_type, an unknown one, or values that its class refuses
        return {}
    return {key: getattr(text, key, None) for key in READ}
