"""The computation of an optimizer step, and its split into micro-batches. Pure: no torch.

Counts of adapters are exact if the matrices of the model are known, except for biases of modules
that are trained in full; `models.parameters` counts the real model.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from sft_play.config.deepspeed_json import DEFAULT_FETCHING, Fetching
from sft_play.config.schema import Config
from sft_play.config.sections.model import EMBEDDINGS, HEADS
from sft_play.plan.fast import UNKNOWN_KERNELS, FastPlan
from sft_play.plan.model_shape import LAYER_NORMS, ModelShape
from sft_play.plan.structure import MatrixKind, adapted_matrices
from sft_play.plan.traced import TracedStep

LONG_ROW = 32_768  # tokens: attention of 8B takes half of a row's time


@dataclass(frozen=True)
class Layout:
    """One optimizer step: `batch_size` x `replicas` x `grad_accum` rows.

    Packed rows share sequences, so the same rows take fewer and smaller micro-batches.

    >>> step = Layout(batch_size=4, grad_accum=8, world_size=1, max_seq_len=2048)
    >>> step.rows_per_step, step.micro_batches, step.sequences
    (32, 8, 4)
    >>> packed = step.packed(fullest_step=9)  # 2 micro-batches of 4 are 8 sequences, 3 of 3 are 9
    >>> packed.rows_per_step, packed.micro_batches, packed.sequences
    (32, 3, 3)
    """

    batch_size: int  # rows of a micro-batch on one rank
    grad_accum: int  # micro-batches per rank and step, before packing
    world_size: int
    max_seq_len: int  # tokens
    checkpointed_layers: int = 0  # the first ones of the model, recomputed in the backward pass
    fullest_step: int | None = None  # sequences of the fullest packed step; None: not packed
    in_one_row: bool = False  # the packed documents of a micro-batch, without a row's padding
    pair_cost: float = 0.0  # cost of attention between two tokens, relative to a token's other cost
    waits_each_micro_batch: bool = False  # ranks for each other; else once a step, as under DDP
    context_parallel: int = 1  # ranks that share each row
    most_samples: int | None = None  # of a step, if rows give several; None: one per row
    tree_tokens: int | None = None  # maximum of a tree; None: samples share no beginnings

    @cached_property
    def replicas(self) -> int:
        """Number of micro-batches that are computed in parallel."""
        return self.world_size // self.context_parallel

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step on all ranks: the effective batch."""
        return self.batch_size * self.grad_accum * self.replicas

    @property
    def is_packed(self) -> bool:
        return self.fullest_step is not None

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step: if packed, the fewest that fit the fullest step."""
        if self.fullest_step is not None and self.tree_tokens is not None:
            return -(-self.fullest_step // self.replicas)  # trees share one long sequence
        sequences = self.most_samples if self.fullest_step is None else self.fullest_step
        if sequences is None:
            return self.grad_accum
        return -(-sequences // (self.batch_size * self.replicas))

    @cached_property
    def sequences(self) -> int:
        """Maximum sequences per micro-batch: if packed, as few as that many micro-batches allow."""
        if self.fullest_step is None:
            return self.batch_size
        return -(-self.fullest_step // (self.micro_batches * self.replicas))

    @cached_property
    def capacity(self) -> int:
        """Maximum tokens of a sequence: trees may have more than one sample may."""
        return self.tree_tokens or self.max_seq_len

    @cached_property
    def row_tokens(self) -> int:
        """Maximum tokens of a row on one rank."""
        return -(-self.capacity // self.context_parallel)

    @cached_property
    def tokens(self) -> int:
        """Maximum tokens of a micro-batch on one rank."""
        return self.sequences * self.row_tokens

    @property
    def mean_tokens(self) -> float:
        """Tokens of a rank's micro-batch, averaged over those of the fullest step."""
        if self.fullest_step is None:
            return self.tokens
        return self.fullest_step * self.row_tokens / (self.micro_batches * self.replicas)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier micro-batches are in memory during the next one."""
        return self.micro_batches > 1

    def packed(self, fullest_step: int) -> "Layout":
        """Return the layout that packs the same rows into at most `fullest_step` sequences."""
        return replace(self, fullest_step=fullest_step)

    def unpacked(self) -> "Layout":
        """Return the layout in which each row is a sequence."""
        return replace(self, fullest_step=None)


# Bytes of an optimizer's state per trained weight
STATE_BYTES = {
    "paged_adamw_32bit": 8,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "lion": 4,
    "lion_8bit": 1,
    "sgd": 0,
}


@dataclass(frozen=True)
class Adapters:
    """The settings of tuning.lora that decide what is trained."""

    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    layers: tuple[int, ...] | None = None  # with adapters; None: all
    use_dora: bool = False
    has_dropout: bool = False
    saved_modules: tuple[str, ...] = ()  # trained in full
    experts: str = "auto"  # per_expert, shared, none
    trained_tokens: int = 0  # tokens whose rows of embedding and head are trained

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the adapters of a config."""
        lora = config.tuning.lora
        targets, layers = lora.target_modules, lora.layers_to_transform
        return cls(
            rank=lora.r,
            targets=targets if isinstance(targets, str) else tuple(targets),
            layers=None if layers is None else tuple(sorted(set(layers))),
            use_dora=lora.use_dora,
            has_dropout=lora.dropout > 0,
            experts=lora.experts,
            saved_modules=tuple(lora.modules_to_save or ()),
            trained_tokens=len(config.trained_tokens),
        )

    def matrices(self, model: ModelShape) -> tuple[MatrixKind, ...]:
        """Return the matrices that have adapters."""
        kinds = adapted_matrices(model.matrices, self.targets, self.experts)
        if self.layers is None:
            return kinds
        return tuple(kind.in_layers(self.layers, model.layers) for kind in kinds)

    def weights(self, model: ModelShape, is_active: bool = False) -> int:
        """Return the weights of the A and B matrices, and of DoRA's magnitudes.

        Each expert has a separate A and B, or all experts share them; `is_active` counts those
        that a token is multiplied by.
        """
        weights = 0
        for kind in self.matrices(model):
            of_one = self.rank * (kind.inputs + kind.outputs) + self.use_dora * kind.outputs
            adapters = kind.experts
            if is_active:
                adapters = kind.active
            elif kind.is_stacked and self.experts == "shared":
                adapters = 1
            weights += kind.count * adapters * of_one
        return weights

    @cached_property
    def saved_names(self) -> set[str]:
        """The last words of the names of the modules that are trained in full."""
        return {name.rpartition(".")[2] for name in self.saved_modules}

    def describe(self) -> str:
        """Return the trained parts beyond rank and targets, after a comma; "" for nothing."""
        text = ""
        if self.layers is not None:
            text += f", layers {', '.join(map(str, self.layers))}"
        on_experts = {"shared": "one adapter for all experts of a layer", "none": "none on experts"}
        if self.experts in on_experts:
            text += f", {on_experts[self.experts]}"
        if self.use_dora:
            text += ", DoRA"
        if self.saved_modules:
            text += f", {', '.join(self.saved_modules)} whole"
        if self.trained_tokens:
            text += f", the rows of {self.trained_tokens} tokens"
        return text

    def other_weights(self, model: ModelShape) -> int:
        """Return the weights of modules trained in full and of rows of tokens."""
        matrices = 1 if model.is_tied else 2
        rows = self.trained_tokens * matrices * model.hidden
        names = self.saved_names
        saved_matrices = bool(names & EMBEDDINGS) + bool(names & HEADS)
        rows += min(matrices, saved_matrices) * model.vocab * model.hidden  # tied: either is both
        sizes = {"norm": model.hidden}  # of all modules with a name, except embedding and head
        for name in LAYER_NORMS:
            sizes[name] = model.layers * model.hidden
        for kind in model.matrices:
            word = kind.name.rpartition(".")[2]
            sizes[word] = sizes.get(word, 0) + kind.weights
        return rows + sum(sizes.get(name, 0) for name in names)


PLAIN = Adapters()  # of the default rank on the linear layers of all blocks


@dataclass(frozen=True)
class StepSpec:
    """The computation of each rank; bytes, FLOPs and seconds follow from it and a Layout."""

    model: ModelShape
    mode: str  # lora, qlora, full
    compute_bytes: int  # per number: 2 for bfloat16 and float16, 4 for float32
    weight_bytes: int  # per unquantized base weight
    optim: str
    double_quant: bool
    is_fast: bool  # on fused kernels
    zero_stage: int  # 0 without DeepSpeed
    offload: bool  # of the optimizer's state, to the host
    is_gpu: bool
    eval_batch_size: int | None = None  # None: as many as `memory.evaluation_rows` allows
    generates: bool = False  # evaluations answer with a key-value cache
    offload_weights: bool = False  # ZeRO-3's or FSDP's, to the host
    adapters: Adapters = PLAIN
    offload_activations: bool = False  # inputs of checkpointed layers, to the host
    context_parallel: int = 1  # ranks that share each row
    keeps_attention: bool = False  # save outputs of attention in layers that are recomputed
    host_layers: int | None = None  # layers whose inputs fit into host memory; None: all
    fuses_loss: bool | None = None  # head and loss in chunks; None: as is_fast
    traced: TracedStep | None = None  # if the closed form has not been shown to fit
    untraced: str | None = None  # why such a model was not traced
    is_fsdp: bool = False  # FSDP shards the base weights across the ranks
    expert_ranks: int = 1  # ranks that share the experts of each layer
    fetching: Fetching = DEFAULT_FETCHING  # of ZeRO-3
    layers_by_gpu: tuple[int, ...] = ()  # for one model on the GPUs of one process; (): on one GPU
    is_float8: bool = False  # linear weights of the base in 8 bits, and GEMMs of 8-bit numbers
    offloaded_weight_layers: int = 0  # frozen, to the host
    kernels: FastPlan = UNKNOWN_KERNELS

    @property
    def memory_source(self) -> Literal["closed form", "traced", "guess"]:
        """The source of the bytes of a step's activations."""
        if self.traced is not None:
            return "traced"
        return "closed form" if self.untraced is None else "guess"

    @property
    def most_layers(self) -> int:
        """Number of layers on the fullest GPU if one model is placed on several, else 0."""
        return max(self.layers_by_gpu, default=0)

    def offloaded(self, checkpointed_layers: int) -> int:
        """Return how many checkpointed layers (the first ones) have their inputs on the host."""
        if not self.offload_activations:
            return 0
        room = self.model.layers if self.host_layers is None else self.host_layers
        return min(checkpointed_layers, room)

    def of_rank(self) -> "StepSpec":
        """Return the step as if one rank's experts were all experts."""
        if self.expert_ranks == 1:
            return self
        structure = self.model.counts.with_experts_of_rank(self.expert_ranks)
        return replace(self, model=replace(self.model, structure=structure))

    def without_experts(self) -> "StepSpec":
        """Return the step with only those adapters that are complete on every rank."""
        if self.expert_ranks == 1 or self.adapters.experts == "shared":
            return self
        return replace(self, adapters=replace(self.adapters, experts="none"))

    @cached_property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.mode == "full"

    @cached_property
    def casts_weights(self) -> bool:
        """Whether autocast computes with, and caches, 16-bit copies of float32 weights."""
        is_autocast = self.is_half and not self.zero_stage and not self.is_fsdp
        return is_autocast and self.is_full and self.weight_bytes == 4

    @property
    def is_quantized(self) -> bool:
        """Whether base weights are in 4 bits or in float8; they are read in full."""
        return self.mode == "qlora" or self.is_float8

    @cached_property
    def divides_training(self) -> bool:
        """Whether FSDP shards gradients and optimizer, too; adapters are complete on every rank."""
        return self.is_fsdp and self.is_full

    @property
    def offloads_training(self) -> bool:
        """Whether FSDP stores gradients and optimizer in host memory, too."""
        return self.divides_training and self.offload_weights

    @cached_property
    def is_half(self) -> bool:
        """Whether matrix multiplications are in 16 bits."""
        return self.compute_bytes == 2

    @cached_property
    def adapter_weights(self) -> int:
        """Weights trained on top of a frozen base, 0 if the base itself is trained."""
        if self.is_full:
            return 0
        return self.adapters.weights(self.model) + self.adapters.other_weights(self.model)

    @property
    def active_adapter_weights(self) -> int | None:
        """Adapter weights that a token is routed to, None if every weight is trained."""
        return None if self.is_full else self.adapters.weights(self.model, is_active=True)

    @cached_property
    def adapted_matrices(self) -> tuple[MatrixKind, ...]:
        """The matrices that have adapters."""
        return self.adapters.matrices(self.model)

    @property
    def has_adapted_experts(self) -> bool:
        """Whether experts stacked in one parameter have adapters."""
        return not self.is_full and any(kind.is_stacked for kind in self.adapted_matrices)

    @cached_property
    def has_fused_loss(self) -> bool:
        """Whether head and loss are computed in chunks, so that all logits never exist."""
        return self.is_fast if self.fuses_loss is None else self.fuses_loss

    @cached_property
    def trained_weights(self) -> int:
        if self.is_full:
            return self.model.parameters - self.model.counts.encoders
        return self.adapter_weights

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained weight and per its gradient; adapters are in float32."""
        return self.weight_bytes if self.is_full else 4

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state for all trained weights."""
        trained = self.trained_weights
        if self.optim in STATE_BYTES:
            if "8bit" in self.optim and self.is_full and not self.zero_stage:
                trained += 3 * self.model.vocab * self.model.hidden  # embeddings stay in 32 bits
            return STATE_BYTES[self.optim] * trained
        if self.optim == "adafactor":
            return 4 * self._factored_moments
        by_muon = 0  # one moment each; the others have two
        if self.optim == "muon":
            by_muon = sum(kind.weights for kind in self.model.matrices if not kind.is_stacked)
        return (4 if self.zero_stage else self.trained_bytes) * (2 * trained - by_muon)

    @property
    def _factored_moments(self) -> int:
        """Numbers of Adafactor's state: one for each row and column, and for each other weight.

        Next to adapters, modules that are trained in full are counted by their weights.
        """
        model, adapters = self.model, self.adapters
        if not self.is_full:
            of_rank_1 = replace(adapters, rank=1).weights(model)
            adapted = sum(kind.count * kind.experts for kind in self.adapted_matrices)
            return of_rank_1 + 2 * adapters.rank * adapted + adapters.other_weights(model)
        vocabularies = 1 if model.is_tied else 2
        sides = vocabularies * (model.vocab + model.hidden)
        for kind in model.matrices:
            sides += kind.count * kind.experts * (kind.inputs + kind.outputs)
        in_matrices = model.block_weights + vocabularies * model.vocab * model.hidden
        return sides + max(0, self.trained_weights - in_matrices)

    @property
    def master_bytes(self) -> int:
        """Bytes per trained weight of DeepSpeed's float32 copy."""
        return 4 if self.zero_stage else 0
