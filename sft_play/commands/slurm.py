"""`make slurm`: the batch script of a plan. Loads no torch."""

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.commands.call import Call, load_config, without_meeting, write_out
from sft_play.commands.plan import (
    given_variables,
    plan_for_display,
    refuse_what_does_not_fit,
    run_stem,
    work_or_reason,
)
from sft_play.config.loader import INSTALLED, PROJECT_ROOT
from sft_play.errors import ConfigError
from sft_play.plan import next_command
from sft_play.plan.run_plan import PlannedRun

MARGIN = 1.5  # of the planned training, for evaluations, answers and checkpoints
START_SECONDS = 15 * 60  # to load packages, rows and weights
STEP_SECONDS = 5 * 60  # the limit is rounded up to a multiple of this
NOTICE_SECONDS = 300  # before the time limit, to finish a step and save a checkpoint
UNKNOWN_HOURS = 24
CPUS_PER_GPU = 8


TEMPLATE = """#!/bin/bash
# Written by make slurm. Partition and account: sbatch --partition=... --account=... THIS_FILE
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --cpus-per-task={cpus}
# {job.limit_reason}
#SBATCH --time={job.limit}
# Before the time limit every process gets USR1: the run saves a checkpoint and ends with exit class
# 75, and the job is queued again to continue from it.
#SBATCH --signal=USR1@{notice}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={pattern}/slurm-%j.log
set -uo pipefail
cd {project} || exit 13
outputs={outputs}

{exports}export NNODES="$SLURM_NNODES"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-{cpus}}}"

# A job that is queued again is a new run, which resumes the last one that has a checkpoint.
restart=${{SLURM_RESTART_COUNT:-0}}
export RUN="{job.name}-$SLURM_JOB_ID-$restart"
for ((earlier = restart - 1; earlier >= 0; earlier--)); do
  folder="$outputs/{job.name}-$SLURM_JOB_ID-$earlier"
  if compgen -G "$folder/checkpoints/checkpoint-*[0-9]/MANIFEST.json" > /dev/null; then
    export TRAIN_RESUME_FROM="$folder"
    break
  fi
done

# One agent a machine starts its processes. These handle USR1, and launchers, which would end, do
# not hear it; make would let them hear it.
srun --kill-on-bad-exit=1 bash -c '
  trap "" USR1
  export NODE_RANK="$SLURM_NODEID"
  exec {job.command}
'
status=$?

# launchers say 1 for every failure; run.json has the exit class
report="$outputs/$RUN/run.json"
if [ -f "$report" ]; then
  ln -sf "$outputs/slurm-$SLURM_JOB_ID.log" "$outputs/$RUN/logs/slurm.log"
  class=$(sed -n 's/^  "exit_class": \\([0-9]*\\),*$/\\1/p' "$report")
  [ -n "$class" ] && status=$class
fi
if [ "$status" = 75 ]; then
  echo "stopped with a checkpoint; queued again to continue from it"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True)
class SlurmJob:
    """The script's request to Slurm, and the command that each machine runs."""

    name: str  # of the job, and the start of its runs' names
    nodes: int
    per_node: int  # processes of a machine
    gpus_per_node: int  # one per process, except under model.device_map
    device: str
    seconds: float | None  # of training by the plan; None: not known
    command: str  # quoted for a shell, without an apostrophe
    variables: Sequence[str]  # variables read by the command, as `NAME=value`, quoted for a shell
    project: Path
    output_dir: Path

    @property
    def limit(self) -> str:
        """The time limit as hours:minutes:seconds."""
        if self.seconds is None:
            return f"{UNKNOWN_HOURS}:00:00"
        wanted = START_SECONDS + NOTICE_SECONDS + MARGIN * self.seconds
        minutes = math.ceil(wanted / STEP_SECONDS) * STEP_SECONDS // 60
        return f"{minutes // 60}:{minutes % 60:02}:00"

    @property
    def limit_reason(self) -> str:
        if self.seconds is None:
            return "unknown: the plan knows no speed here; set what your queue allows"
        return (
            f"{self.seconds / 3600:.2f} hours of training by the plan, x {MARGIN:g}, and the start"
        )


def script(job: SlurmJob) -> str:
    """Return the script. It is submitted with `sbatch FILE`."""
    is_gpu = job.device == "cuda"
    return TEMPLATE.format(
        job=job,
        gpus=f"#SBATCH --gpus-per-node={job.gpus_per_node}\n" if is_gpu else "",
        cpus=job.gpus_per_node * CPUS_PER_GPU if is_gpu else job.per_node,
        exports="".join(f"export {words}\n" for words in job.variables),
        notice=NOTICE_SECONDS,
        pattern=str(job.output_dir).replace("%", "%%"),  # % starts Slurm's placeholders
        project=shlex.quote(str(job.project)),
        outputs=shlex.quote(str(job.output_dir)),
    )


# Set by the script on each machine
OF_SCRIPT = "RUN NNODES NODE_RANK MASTER_ADDR MASTER_PORT TRAIN_RUN_NAME".split()


def slurm(call: Call) -> str:
    """Write the script to OUT and return what to type next; without OUT return the script.

    Uses DeepSpeed if DEEPSPEED_CONFIG is given, otherwise the fastest strategy that fits.
    Raises: OutOfMemory for a plan that does not fit, EnvironmentFault if OUT cannot be written.
    """
    call = without_meeting(call)  # the script determines the address
    use_deepspeed = call.invocation.deepspeed_config is not None
    planned = plan_for_display(call, use_deepspeed, use_deepspeed)
    if planned.plan.ranks.device == "cpu" and call.invocation.device != "cpu":
        raise ConfigError(
            "GPUS is not set and this host has no GPU, so the job would train on CPUs. Write the "
            "GPUs of each machine, such as GPUS=8xH100, or DEVICE=cpu"
        )
    refuse_what_does_not_fit(planned.plan)
    job = job_of(call, planned)
    text = script(job)
    if not call.environ.get("OUT"):
        return text.rstrip("\n")
    path = Path(call.environ["OUT"])
    write_out(path, text, call.overwrites)
    job.output_dir.mkdir(parents=True, exist_ok=True)  # Slurm does not create it for its log
    return (
        f"wrote {path}: {job.nodes} x {job.per_node} processes for {job.limit} "
        f"({job.limit_reason})\nsubmit it with: sbatch {path}"
    )


def job_of(call: Call, planned: PlannedRun) -> SlurmJob:
    """Return the request of a plan's script."""
    plan = planned.plan
    given = given_variables(call, *OF_SCRIPT)
    _, target, *words = next_command.start_command(plan, given)
    work = work_or_reason(planned)
    return SlurmJob(
        name=call.invocation.run or run_stem(load_config(call)),
        nodes=plan.ranks.nodes,
        per_node=plan.ranks.per_node,
        gpus_per_node=plan.ranks.gpus_per_node,
        device=plan.ranks.device,
        seconds=None if isinstance(work, str) else work.seconds,
        command=f'"{sys.executable}" -m sft_play {target}',
        variables=words,
        project=Path.cwd() if PROJECT_ROOT == INSTALLED else PROJECT_ROOT,
        output_dir=Path(planned.config.train.output_dir).absolute(),
    )
