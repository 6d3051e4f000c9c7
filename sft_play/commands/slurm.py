"""`make slurm`: the batch script of a plan. Loads no torch."""

import sys
from pathlib import Path

from sft_play.commands.call import Call, load_config, without_meeting
from sft_play.commands.plan import given_variables, override_variables, plan_for_display
from sft_play.commands.train import refuse_what_does_not_fit, run_stem
from sft_play.config.loader import PROJECT_ROOT
from sft_play.data.row_estimates import count_rows_or_reason
from sft_play.errors import ConfigError
from sft_play.plan import next_command
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.slurm import SlurmJob, script
from sft_play.plan.workload import workload
from sft_play.runs.files import write_text

# Set by the script on each machine
OF_SCRIPT = ("RUN", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TRAIN_RUN_NAME")
# What the targets of make run
TRAIN = {
    "train": "train",
    "train-distributed": "train --distributed",
    "train-deepspeed": "train --distributed --deepspeed",
}


def slurm(call: Call) -> str:
    """Write the script to OUT and return what to type next; without OUT return the script.

    Under DeepSpeed where DEEPSPEED_CONFIG is given, else by the fastest strategy that fits.
    Raises: OutOfMemory for a plan that does not fit, ConfigError where OUT cannot be written.
    """
    call = without_meeting(call)  # the script finds the address out
    use_deepspeed = call.invocation.deepspeed_config is not None
    planned = plan_for_display(call, use_deepspeed, use_deepspeed)
    if planned.plan.ranks.device == "cpu" and call.invocation.device != "cpu":
        raise ConfigError(
            "GPUS is not given and this host has no GPU, so the job would train on CPUs; name the "
            "GPUs of each machine, such as GPUS=8xH100, or set DEVICE=cpu"
        )
    refuse_what_does_not_fit(planned.plan)
    job = job_of(call, planned)
    text = script(job)
    if not call.environ.get("OUT"):
        return text.rstrip("\n")
    path = Path(call.environ["OUT"])
    try:
        job.output_dir.mkdir(parents=True, exist_ok=True)  # Slurm does not make it for its log
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            f"OUT={path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
    return (
        f"wrote {path}: {job.nodes} x {job.per_node} processes for {job.limit} "
        f"({job.limit_reason})\nsubmit it with: sbatch {path}"
    )


def job_of(call: Call, planned: PlannedRun) -> SlurmJob:
    """Return what the script of a plan asks for."""
    plan = planned.plan
    given, overrides = given_variables(call), override_variables(call)
    for variables in (given, overrides):
        for name in OF_SCRIPT:
            variables.pop(name, None)
    _, target, *words = next_command.start_command(plan, given, overrides)
    counted = count_rows_or_reason(planned.config)
    seconds = None
    if not isinstance(counted, str):
        seconds = workload(planned.config, plan, counted).seconds
    return SlurmJob(
        name=call.invocation.run or run_stem(load_config(call)),
        nodes=plan.ranks.nodes,
        per_node=plan.ranks.per_node,
        gpus_per_node=plan.ranks.gpus_per_node,
        device=plan.ranks.device,
        seconds=seconds,
        command=f'"{sys.executable}" -m sft_play {TRAIN[target]}',
        variables=words,
        project=PROJECT_ROOT,
        output_dir=Path(planned.config.train.output_dir).absolute(),
    )
