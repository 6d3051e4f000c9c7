"""Convert SFT-Play's settings to transformers.TrainingArguments."""

from dataclasses import fields
from functools import reduce
from operator import getitem
from typing import Any, ClassVar

import transformers
from transformers import TrainingArguments

from sft_play.config.schema import Config, TrainSection, settings
from sft_play.errors import EnvironmentFault
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.runs.folder import RunFolder

LOGGING_STEPS = 10  # between two logs
NEVER = 10**9  # steps: an interval that no run reaches
# Settings with the same name and value as the argument. warmup_steps below 1 is a fraction in both
UNCHANGED = """
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm
    adam_beta1 adam_beta2 adam_epsilon seed data_seed
    dataloader_pin_memory bf16 fp16
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_bucket_cap_mb ddp_timeout
    eval_strategy eval_do_concat_batches eval_accumulation_steps save_strategy save_total_limit
""".split()


# Optimizers by transformers' names; it has no Muon, which training.engine creates
OPTIMIZERS = {"adamw_8bit": "adamw_bnb_8bit", "lion": "lion_32bit", "muon": "adamw_torch_fused"}


class ReportedArguments(TrainingArguments):
    """Arguments that trackers show together with the run's settings."""

    settings: ClassVar[dict[str, Any]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, and the settings by their dotted names."""
        return {**super().to_dict(), **self.settings}


def plain_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run by dotted name, as plain values."""
    values = config.model_dump(mode="json")
    return {path: reduce(getitem, path.split("."), values) for path in settings()}


def training_arguments(planned: PlannedRun, folder: RunFolder) -> TrainingArguments:
    """Return the arguments that callbacks, accelerate and the optimizer read.

    Call it after `runtime.join_group`.

    Raises: EnvironmentFault if the size of the process group is not the planned one, or if the
    installed transformers lacks an argument.
    """
    train, plan = planned.config.train, planned.plan
    given = {name: getattr(train, name) for name in UNCHANGED}
    given |= _converted(train, plan)
    # training.trackers opens what train.report_to names
    given |= {"output_dir": str(folder.checkpoints), "run_name": folder.name, "report_to": "none"}
    unknown = sorted(given.keys() - {field.name for field in fields(TrainingArguments)})
    if unknown:
        raise EnvironmentFault(
            f"transformers {transformers.__version__} has no training argument {unknown[0]}; type "
            "make install, which goes back to the tested version"
        )
    arguments = ReportedArguments(**given)
    arguments.settings = plain_settings(planned.config)
    if arguments.world_size != plan.ranks.world_size:
        raise EnvironmentFault(
            f"the process group has {arguments.world_size} ranks, planned were "
            f"{plan.ranks.world_size}; try make doctor"
        )
    return arguments


def _converted(train: TrainSection, plan: RunPlan) -> dict[str, Any]:
    """Return the arguments whose name or value differs from the setting, or follows from the plan.

    They are in the order of the settings: optimizer, batches, engine, evaluation and saving.
    """
    is_cpu = plan.ranks.device == "cpu"
    uses_deepspeed = plan.deepspeed is not None
    return {
        "dataloader_num_workers": train.loader_processes,
        "optim": OPTIMIZERS.get(train.optim, train.optim),
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.eval_batch_size,
        "gradient_accumulation_steps": plan.layout.micro_batches,
        # with use_cpu accelerate would wrap the model in DDP, and DeepSpeed would never start
        "use_cpu": is_cpu and not uses_deepspeed,
        "deepspeed": plan.deepspeed.settings if uses_deepspeed else None,
        "accelerator_config": {
            "non_blocking": train.dataloader_pin_memory,
            "use_configured_state": plan.ranks.strategy != "single",
        },
        "logging_steps": LOGGING_STEPS if train.logging_steps == "auto" else train.logging_steps,
        "eval_steps": train.eval_steps if train.eval_strategy == "steps" else None,
        "save_steps": train.save_steps if train.save_strategy == "steps" else NEVER,
    }
