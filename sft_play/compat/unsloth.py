"""UnslothTrainer and UnslothTrainingArguments as the multi-GPU guides write them, over TRL.

If Unsloth is loaded already, as in its notebooks, its own classes are extended. What a script
says under an argument's old name is passed on under the new one, with a printed line.
"""

import copy
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from sft_play.config.invocation import FORCE_SINGLE, is_single_process_forced
from sft_play.config.loader import environment
from sft_play.distributed import choose_dtype, context, print_main
from sft_play.errors import ConfigError, EnvironmentFault

try:
    import trl
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise EnvironmentFault(
        "sft_play.compat.unsloth needs trl; install it with "
        ".venv/bin/python -m pip install trl==1.15.0"
    ) from None

# By today's name in TRL or transformers
RENAMED_ARGUMENTS = {
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",  # a fraction below 1 is the ratio
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
# What no longer is an argument, and what happens instead
DROPPED_ARGUMENTS = {
    "save_safetensors": "weights are always saved as safetensors",
    "overwrite_output_dir": "files in output_dir are always overwritten",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
    "fp16_backend": "torch's autocast is the only one",
}
SAMPLING = "train_sampling_strategy"
# Of SFTTrainer once, of its arguments now
MOVED_TO_ARGUMENTS = (
    "dataset_text_field",
    "max_seq_length",
    "packing",
    "eval_packing",
    "dataset_num_proc",
    "dataset_kwargs",
    "neftune_noise_alpha",
)


UNSLOTH = sys.modules.get("unsloth.trainer")
BaseArguments: Any = UNSLOTH.UnslothTrainingArguments if UNSLOTH else trl.SFTConfig
BaseTrainer: Any = UNSLOTH.UnslothTrainer if UNSLOTH else trl.SFTTrainer


@dataclasses.dataclass(init=False)
class UnslothTrainingArguments(BaseArguments):
    """Arguments of a trainer: TRL's SFTConfig, with the guides' two for several GPUs."""

    enable_distributed_training: bool | None = dataclasses.field(
        default=None,
        metadata={
            "help": "False refuses to be one of several processes; unset or true does as the "
            "launcher says."
        },
    )
    distributed_backend: str | None = dataclasses.field(
        default=None,
        metadata={"help": "nccl for GPUs, gloo for CPUs; unset chooses by the device."},
    )

    def __init__(
        self,
        *positional: Any,
        enable_distributed_training: bool | None = None,
        distributed_backend: str | None = None,
        **named: Any,
    ) -> None:
        """Take the base's arguments too, also under the names that they had in earlier versions.

        Raises: ConfigError for several processes that were not wanted, and for NCCL without GPUs.
        """
        processes = context().num_processes
        has_gpus = torch.cuda.is_available()
        if enable_distributed_training is False and processes > 1:
            raise ConfigError(
                f"enable_distributed_training=False, but a launcher has started {processes} "
                "processes; start the script with python, or leave the argument out"
            )
        if distributed_backend not in (None, "nccl", "gloo"):
            raise ConfigError(
                f"distributed_backend={distributed_backend} is not valid; write nccl for GPUs or "
                "gloo for CPUs"
            )
        if distributed_backend == "nccl" and processes > 1 and not has_gpus:
            raise ConfigError(
                "distributed_backend=nccl needs GPUs, and torch sees none; write gloo"
            )
        self.enable_distributed_training = enable_distributed_training
        self.distributed_backend = distributed_backend
        arguments = today(named)
        if processes > 1:  # one process has no group, whatever its backend
            arguments.setdefault("ddp_backend", distributed_backend)
            if not has_gpus:
                # accelerate would make a group, and every process would train alone anyway
                arguments.setdefault("use_cpu", True)
        super().__init__(*positional, **_with_precision(arguments))


class UnslothTrainer(BaseTrainer):
    """TRL's SFTTrainer, which also takes what its earlier versions took."""

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **named: Any) -> None:
        """Take SFTTrainer's arguments; `tokenizer`, `max_seq_length` and their like are moved.

        Says how the GPUs are used, and how many samples an update trains.
        """
        named = _with_tokenizer(named)
        args = _with_moved(args, named)
        _refuse_lonely(args)
        _limit_data_parallel(args, model)
        super().__init__(model, args, *positional, **named)
        print_main("\n".join(mode_lines(self)))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """Return the loss; on a CPU that of the model, because TRL's is a kernel for GPUs."""
        if self.args.device.type != "cpu":
            return super().compute_loss(model, inputs, *rest, **named)
        if self.args.loss_type != "nll":
            raise ConfigError(
                f"loss_type={self.args.loss_type} needs a GPU; leave it out to train on a CPU"
            )
        return transformers.Trainer.compute_loss(self, model, inputs, *rest, **named)


# The names in Unsloth's notebooks, whose calls are of TRL's earlier versions
SFTConfig = UnslothTrainingArguments
SFTTrainer = UnslothTrainer


def today(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under the names that they have today; a line is printed for each change."""
    arguments = dict(named)
    for old, new in RENAMED_ARGUMENTS.items():
        if old in arguments:
            value = arguments.pop(old)
            # earlier versions took the steps if both were given
            if not (new == "warmup_steps" and arguments.get(new)):
                arguments[new] = value
            print_main(f"{old} is called {new} now: {new}={arguments[new]}")
    for old, why in DROPPED_ARGUMENTS.items():
        if old in arguments:
            print_main(f"{old}={arguments.pop(old)} is no argument any more: {why}")
    if "report_to" in arguments and arguments["report_to"] is None:
        arguments["report_to"] = "none"  # None is not read as none there
    if "group_by_length" in arguments:
        is_grouped = arguments.pop("group_by_length")
        arguments[SAMPLING] = "group_by_length" if is_grouped else "random"
        print_main(f"group_by_length is {SAMPLING} now: {SAMPLING}={arguments[SAMPLING]}")
    return arguments


def mode_lines(trainer: Any) -> list[str]:
    """Return how the GPUs share the work, and the arithmetic of the effective batch size."""
    arguments = trainer.args
    here = context()
    copies = here.num_processes * max(1, arguments.n_gpu)
    of_gpus = "GPUs" if arguments.n_gpu else "processes"
    if here.num_processes > 1:
        mode = f"DDP: {here.num_processes} {of_gpus}, each with a whole model and its own batches"
    elif trainer.is_model_parallel:
        mode = "one process: the model is split across GPUs, and one batch passes through them"
    elif arguments.n_gpu > 1:
        mode = f"one process: DataParallel over {arguments.n_gpu} GPUs; torchrun is faster"
    else:
        mode = f"one process on {arguments.device}"
    per_device = arguments.per_device_train_batch_size
    accumulation = arguments.gradient_accumulation_steps
    samples = per_device * copies * accumulation
    return [
        f"Mode: {mode}",
        f"Effective batch size: {per_device} x {copies} x {accumulation} = {samples} "
        "samples per update",
    ]


def _with_precision(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with one number type of matrix products: as asked, else as the GPUs can."""
    is_on_gpu = torch.cuda.is_available() and not arguments.get("use_cpu")
    dtype = choose_dtype() if is_on_gpu else torch.float32
    bf16, fp16 = arguments.get("bf16"), arguments.get("fp16")
    if bf16 and fp16:
        fp16 = False
        print_main("bf16=True and fp16=True: bfloat16 is used")
    elif fp16 and not is_on_gpu:
        fp16 = False
        print_main("fp16=True needs a GPU: computing in float32")
    if bf16 is None:
        bf16 = dtype == torch.bfloat16 and not fp16
    if fp16 is None:
        fp16 = dtype == torch.float16 and not bf16
    return {**arguments, "bf16": bool(bf16), "fp16": bool(fp16)}


def _with_tokenizer(named: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(named)
    if "tokenizer" in named:
        if named.get("processing_class") is not None:
            raise ConfigError("tokenizer= and processing_class= are the same; leave tokenizer out")
        named["processing_class"] = named.pop("tokenizer")
        print_main("tokenizer= is called processing_class= now")
    return named


def _with_moved(arguments: Any, named: dict[str, Any]) -> Any:
    """Return the trainer's arguments with those that were SFTTrainer's; they leave `named`."""
    moved = {}
    for name in MOVED_TO_ARGUMENTS:
        if name in named:
            new = RENAMED_ARGUMENTS.get(name, name)
            moved[new] = named.pop(name)
            print_main(f"{name} of the trainer is {new} of its args now: {new}={moved[new]}")
    if arguments is None:
        return UnslothTrainingArguments(**moved)
    changed = copy.copy(arguments)
    for name, value in moved.items():
        if not hasattr(changed, name):
            raise ConfigError(f"{name} is an argument of SFTConfig; pass args=SFTConfig(...)")
        setattr(changed, name, value)
    return changed


def _refuse_lonely(arguments: Any) -> None:
    """Raise ConfigError if a launcher's processes would each train a model of their own."""
    processes = context().num_processes
    if processes > 1 and arguments.parallel_mode.value != "distributed":
        raise ConfigError(
            f"each of the {processes} processes would train alone; on a CPU write use_cpu=True in "
            "the arguments, or use UnslothTrainingArguments"
        )


def _limit_data_parallel(arguments: Any, model: Any) -> None:
    """Keep one process from copying a model to all GPUs if that fails or is not wanted."""
    if arguments.n_gpu <= 1:
        return
    if is_single_process_forced(environment()):
        arguments._n_gpu = 1
        print_main(f"{FORCE_SINGLE}=1: training on {arguments.device} alone")
    elif getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        arguments._n_gpu = 1
        print_main(
            f"a quantized model cannot be copied to the {arguments.n_gpu} GPUs of one process: "
            f"training on {arguments.device}; start with torchrun to use all"
        )
