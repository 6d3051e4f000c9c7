"""What is trained how: model, mode, number types, optimizer. Pure: no torch, no I/O."""

from dataclasses import dataclass, replace
from typing import Literal

from sft_play.config.deepspeed_json import DEFAULT_FETCHING, Fetching
from sft_play.plan.adapters import PLAIN, AdapterOptions
from sft_play.plan.model_shape import ModelShape
from sft_play.plan.traced import TracedStep


@dataclass(frozen=True)
class StepSpec:
    """What each rank computes; bytes, operations and seconds follow from it and a Layout."""

    model: ModelShape
    mode: str  # lora, qlora, full
    compute_bytes: int  # of a number: 2 for bfloat16 and float16, 4 for float32
    weight_bytes: int  # of an unquantised base weight
    lora_rank: int
    lora_targets: str | tuple[str, ...]
    optim: str
    double_quant: bool
    is_fast: bool  # fused kernels: see plan.fast
    zero_stage: int  # 0 without DeepSpeed
    offload: bool  # of the optimizer's state, to the host
    is_gpu: bool
    eval_batch_size: int | None = None  # None: as many as `memory.evaluation_rows` allows
    generates: bool = False  # evaluations answer with a key-value cache
    offload_weights: bool = False  # ZeRO-3's or FSDP's, to the host
    adapter_options: AdapterOptions = PLAIN
    offload_activations: bool = False  # inputs of checkpointed layers, to the host
    fuses_loss: bool | None = None  # head and loss in chunks; None: as is_fast
    traced: TracedStep | None = None  # where the closed form has not been shown to fit
    untraced: str | None = None  # why such a model was not traced
    is_fsdp: bool = False  # base weights are divided among the ranks by FSDP
    fetching: Fetching = DEFAULT_FETCHING  # of ZeRO-3
    layers_by_gpu: tuple[int, ...] = ()  # of one model on the GPUs of one process; (): on one
    is_float8: bool = False  # linear weights of the base in 8 bits, and products of 8-bit numbers
    records_graphs: bool = False  # layers are CUDA graphs where none is recomputed: plan.graphs

    def with_trace(self, traced: TracedStep) -> "StepSpec":
        """Return the step with what a trace found of it."""
        is_fast = self.is_gpu and self.is_half and traced.is_fused
        fuses_loss = self.is_gpu and self.is_half and "loss" in traced.on
        return replace(self, traced=traced, is_fast=is_fast, fuses_loss=fuses_loss)

    @property
    def memory_source(self) -> Literal["closed form", "traced", "guess"]:
        """Where the bytes of a step's activations come from."""
        if self.traced is not None:
            return "traced"
        return "closed form" if self.untraced is None else "guess"

    @property
    def most_layers(self) -> int:
        """Layers of the fullest GPU where one model is placed on several, else 0."""
        return max(self.layers_by_gpu, default=0)

    @property
    def is_full(self) -> bool:
        """Whether every weight is trained."""
        return self.mode == "full"

    @property
    def is_quantised(self) -> bool:
        """Whether base weights are in 4 bits or in float8; they are read whole."""
        return self.mode == "qlora" or self.is_float8

    @property
    def divides_training(self) -> bool:
        """Whether FSDP divides gradients and optimizer too; adapters are whole on every rank."""
        return self.is_fsdp and self.is_full

    @property
    def offloads_training(self) -> bool:
        """Whether FSDP keeps gradients and optimizer in host memory too."""
        return self.divides_training and self.offload_weights

    @property
    def is_half(self) -> bool:
        """Whether matrix products are in 16 bits."""
        return self.compute_bytes == 2

    @property
    def adapter_weights(self) -> int:
        """Weights trained beside a frozen base, 0 where the base itself is trained."""
        if self.is_full:
            return 0
        return self.linear_adapter_weights + self.adapter_options.other_weights(self.model)

    @property
    def linear_adapter_weights(self) -> int:
        """Weights of the adapters on linear layers and experts."""
        return self.adapter_options.adapter_weights(self.model, self.lora_rank, self.lora_targets)

    @property
    def active_adapter_weights(self) -> int:
        """Those of the linear adapters' weights that a token meets."""
        options = self.adapter_options
        return options.active_adapter_weights(self.model, self.lora_rank, self.lora_targets)

    @property
    def has_fused_loss(self) -> bool:
        """Whether head and loss are computed in chunks, so that all logits never exist."""
        return self.is_fast if self.fuses_loss is None else self.fuses_loss

    @property
    def trained_weights(self) -> int:
        if self.is_full:
            return self.model.parameters - self.model.towers
        return self.adapter_weights

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight and of its gradient; adapters are in float32."""
        return self.weight_bytes if self.is_full else 4
