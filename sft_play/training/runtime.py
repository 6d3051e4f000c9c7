"""Set up a worker process from its launcher's environment: rank, device, process group, logs.

It is the only module of the worker that reads os.environ.
"""

import contextlib
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
from accelerate import PartialState

from sft_kernels.process import DTYPES, Process
from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.models.proofs import ProofStore
from sft_play.plan.ranks import Ranks, config_precision
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.progress import OWN_LOGGERS, VisibleFormatter
from sft_play.runs.files import open_in_place
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.training.peers import rank


def start_process(planned: PlannedRun, folder: RunFolder) -> Process:
    """Set up logging and return this process.

    Raises: EnvironmentFault when the launcher started another number of ranks than was planned, or
    a GPU is missing.
    """
    plan = planned.plan
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    _log_to(folder, rank())
    if world_size != plan.ranks.world_size:
        raise EnvironmentFault(
            f"the launcher started {world_size} processes, planned were {plan.ranks.world_size}; "
            f"start runs with make, or run again with NUM_GPUS={world_size}"
        )
    return Process(
        rank(),
        local_rank,
        world_size,
        _device(plan.ranks, local_rank),
        compute_dtype=DTYPES[config_precision(planned.config)],
        timeout=timedelta(seconds=planned.config.train.ddp_timeout),
        gpus=plan.ranks.gpus_per_process,
    )


def join_group(plan: RunPlan, timeout: timedelta) -> None:
    """Start the process group of the planned backend; collectives fail after `timeout`.

    accelerate gets the settings explicitly: on a CPU TrainingArguments would drop the timeout, and
    start DDP instead of DeepSpeed.
    """
    if plan.ranks.strategy == "single":
        return
    uses_deepspeed = plan.ranks.strategy == "deepspeed"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(uses_deepspeed).lower()
    if uses_deepspeed:
        _compile_nothing_for_inference()
    backend = plan.ranks.collective_backend
    if plan.ranks.device == "cuda" and plan.step.offloads_training:
        backend = "cuda:nccl,cpu:gloo"  # the gradient norm is summed in host memory
    state = PartialState(
        cpu=plan.ranks.device == "cpu" and not uses_deepspeed, backend=backend, timeout=timeout
    )
    if plan.ranks.device == "cpu":
        # accelerate sets cpu:0, which torch does not consider equal to a CPU tensor's device.
        # torch.load only restores to "cpu".
        state.device = torch.device("cpu")


def _compile_nothing_for_inference() -> None:
    """Keep DeepSpeed from compiling its all-reduce for inference on CPUs, unused in training.

    On every new machine it would use all cores for half a minute. A process killed meanwhile leaves
    a lock, and the next run would wait for it forever.
    """
    from deepspeed import ops  # takes seconds, so only for DeepSpeed

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def allow_tf32(process: Process) -> None:
    """Allow TF32 (10 bits of mantissa) for float32 matrix multiplications on a GPU in a 16-bit run.

    It affects the GEMMs that autocast leaves in float32, except for the angles of positions
    (`positions.keep_angles_exact`). A run in float32 keeps full precision. A CPU would round to
    bfloat16 or gain nothing.
    """
    if process.is_gpu and process.compute_dtype != torch.float32:
        torch.set_float32_matmul_precision("high")


def proofs_of(config: Config) -> ProofStore:
    """Return where proofs of fused kernels are stored, with what may choose other kernels."""
    return ProofStore(cache_folder(config) / "proofs", os.environ)


def _device(ranks: Ranks, local_rank: int) -> torch.device:
    if ranks.device == "cpu":
        return torch.device("cpu")
    last = local_rank + ranks.gpus_per_process - 1
    if not torch.cuda.is_available() or last >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"cuda:{last} was planned and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs; try make doctor, or DEVICE=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


class LogFile(logging.FileHandler):
    """A log file that warns once if it cannot be written (e.g. full disk): the run continues."""

    cannot_be_written = False

    def _open(self) -> TextIO:
        return open_in_place(Path(self.baseFilename), self.mode)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.cannot_be_written:
            self.cannot_be_written = True
            sys.stderr.write(f"warning: {self.baseFilename} cannot be written: {error.strerror}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # ignore earlier lines that could not be written
            super().close()


def _log_to(folder: RunFolder, rank: int) -> None:
    """Log everything to logs/rank-K.log; on the main rank also our INFO to the terminal.

    The main rank's terminal shows libraries' errors too. What libraries print on other ranks goes
    to their log files: the terminal would show it once for each rank.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    file = LogFile(folder.logs / f"rank-{rank}.log", encoding="utf-8")
    file.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [file]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(VisibleFormatter("%(message)s"))
        terminal.addFilter(
            lambda record: record.name.startswith(OWN_LOGGERS) or record.levelno >= logging.ERROR
        )
        root.addHandler(terminal)
    else:
        os.dup2(file.stream.fileno(), sys.stdout.fileno())
