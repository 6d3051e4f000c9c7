"""Load models with Unsloth. Imported only for tuning.backend=unsloth.

Unsloth patches transformers when it is imported, so it must be imported before transformers.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from sft_kernels.boundaries import DOCUMENTS
from sft_kernels.process import Process
from sft_play.config.backends import UNSLOTH
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def import_first() -> None:
    """Import unsloth. Call it before anything imports transformers.

    Raises: EnvironmentFault unless it is installed and there is a GPU.
    """
    if importlib.util.find_spec("unsloth") is None:
        raise EnvironmentFault(
            "tuning.backend=unsloth: unsloth is not installed; on a GPU host run "
            f"{UNSLOTH.install_command}, or set TUNING_BACKEND=bnb"
        )
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "tuning.backend=unsloth: needs an NVIDIA GPU and none is usable; set TUNING_BACKEND=bnb"
        )
    importlib.import_module("unsloth")


def load_with_unsloth(config: Config, process: Process) -> "PreTrainedModel":
    """Return Unsloth's model on this rank's GPU, with adapters unless the mode is full.

    It uses SFT-Play's fused loss if possible.
    """
    from unsloth import FastLanguageModel

    is_full = config.tuning.mode == "full"
    model, _ = FastLanguageModel.from_pretrained(
        model_name=config.model.name,
        revision=config.model.revision,
        max_seq_length=config.model.max_seq_len,
        dtype=process.compute_dtype,
        load_in_4bit=config.tuning.mode == "qlora",
        full_finetuning=is_full,
        float32_mixed_precision=is_full and config.model.dtype in ("auto", "float32"),
        trust_remote_code=config.model.trust_remote_code,
        device_map={"": process.device.index or 0},
        use_gradient_checkpointing=_checkpointing(config),
    )
    if not is_full:
        model = _add_adapters(model, config)
    _install_kernels(model, takes_packed=not is_full)
    return model


def _checkpointing(config: Config) -> str | bool:
    """Return Unsloth's name for its activation checkpointing, or False."""
    return "unsloth" if config.train.gradient_checkpointing is True else False


def _add_adapters(model: "PreTrainedModel", config: Config) -> "PreTrainedModel":
    from unsloth import FastLanguageModel

    lora = config.tuning.lora
    targets = lora.target_modules
    return FastLanguageModel.get_peft_model(
        model,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(ALL_LINEARS) if targets == "all-linear" else targets,
        use_rslora=lora.use_rslora,
        bias="none",
        use_gradient_checkpointing=_checkpointing(config),
        random_state=config.train.seed,
    )


def _install_kernels(model: "PreTrainedModel", takes_packed: bool) -> None:
    """Pass packed batches to Unsloth's attention, and install SFT-Play's fused loss on the head.

    Unsloth's loss computes all tokens of a row, labeled or not. At 1B, with 8192 tokens per step of
    which a fifth is labeled, SFT-Play's loss trains 91.9k tokens/s on an H200. Unsloth's trains
    82.4k.
    """
    from sft_kernels.install import FusedKernels, record_fused_kernels
    from sft_kernels.loss.head import fuse_loss, why_loss_not_fusable

    on = {"kernels of Unsloth": 1}
    off = {}
    reason = why_loss_not_fusable(model)
    if takes_packed:
        PackedBatchHooks().attach(model)
        on["attention"] = 1
    if reason:
        off["loss"] = reason
    else:
        fuse_loss(model)
        on["loss"] = 1
    record_fused_kernels(model, FusedKernels(on, off, in_one_row=takes_packed))


class PackedBatchHooks:
    """Forward hooks that convert packed batches to Unsloth's format, and logits back.

    Unsloth expects all documents of a micro-batch in one row, with the length of each document. The
    rest of the run uses the original rows.

    Legend: B rows, T tokens per row, N documents, V vocabulary.
    """

    def __init__(self) -> None:
        self.rows: int | None = None  # of the current batch, None if it is not packed

    def attach(self, model: torch.nn.Module) -> None:
        """Make `model` accept batches of a `PackCollator` with documents."""
        model.register_forward_pre_hook(self.flatten_inputs, with_kwargs=True)
        model.register_forward_hook(self.restore_logits)

    def flatten_inputs(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs with input_ids and position_ids (B, T) reshaped to (1, B * T).

        Boundaries (N + 1,) become packed_seq_lengths (N,) int32.
        """
        flat = {name: value for name, value in kwargs.items() if name != DOCUMENTS}
        self.rows = None
        if DOCUMENTS in kwargs:
            self.rows = len(kwargs["input_ids"])
            flat["input_ids"] = kwargs["input_ids"].reshape(1, -1)
            flat["position_ids"] = kwargs["position_ids"].reshape(1, -1)
            flat["packed_seq_lengths"] = kwargs[DOCUMENTS].boundaries.diff()
        return args, flat

    def restore_logits(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return logits (B, T, V) of logits (1, B * T, V). A fused head's output is not changed."""
        if self.rows is not None and output.logits.shape[1] > 1:
            output.logits = output.logits.reshape(self.rows, -1, output.logits.shape[-1])
        return output
