"""What the launcher gave this process.

Rank, device, log file, signals. The only module of the worker that reads os.environ.
"""

import logging
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
from accelerate import PartialState

from sft_play.errors import EnvironmentFault, ExitClass
from sft_play.plan.precision import precision
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.process import DTYPES, Process
from sft_play.runs.folder import RunFolder

ORPHAN_SECONDS = 120  # for a last checkpoint, once the launcher is gone


def rank() -> int:
    """Return the global rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def start(planned: PlannedRun, folder: RunFolder) -> Process:
    """Return this process's place in the run, with logging set up.

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
    if world_size > 1:
        _die_with_launcher()
    return Process(
        rank(),
        local_rank,
        world_size,
        _device(plan.ranks.device, local_rank),
        compute_dtype=DTYPES[precision(planned.config)],
        timeout=timedelta(seconds=planned.config.train.ddp_timeout),
    )


def join_group(plan: RunPlan, timeout: timedelta) -> None:
    """Start the process group of the planned backend.

    A collective that takes longer than `timeout` fails.

    accelerate is told explicitly: by itself Trainer drops the timeout on a CPU, and starts DDP
    instead of DeepSpeed there.
    """
    if plan.ranks.strategy == "single":
        return
    uses_deepspeed = plan.ranks.strategy == "deepspeed"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(uses_deepspeed).lower()
    PartialState(
        cpu=plan.ranks.device == "cpu" and not uses_deepspeed,
        backend=plan.ranks.collective_backend,
        timeout=timeout,
    )


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's generators, on the CPU and all GPUs.

    Equal on all ranks so that adapters start equal.
    """
    random.seed(seed)
    torch.manual_seed(seed)


def allow_tf32(process: Process) -> None:
    """Let a GPU round float32 factors to 10 bits of mantissa in a run of 16 bits.

    It concerns the matrix products that autocast leaves in float32. A run in float32 asked for
    float32, and a CPU would round to bfloat16 or gain nothing.
    """
    if process.device.type == "cuda" and process.compute_dtype != torch.float32:
        torch.set_float32_matmul_precision("high")


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"cuda:{local_rank} was planned and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs; try make doctor, or DEVICE=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _die_with_launcher() -> None:
    """Stop this rank when its launcher is killed, and end it if it cannot stop.

    Otherwise it would hold its GPU for ever. A rank that waits for another one, in C++, does not
    see a signal: hence the second step.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(ExitClass.PEER_LOST)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _log_to(folder: RunFolder, rank: int) -> None:
    """Log everything to logs/rank-K.log, and on the main rank's terminal our INFO and libraries' errors.

    What a library prints on another rank goes to its log file too: the terminal would show it once
    a rank.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder.logs / f"rank-{rank}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [file]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(logging.Formatter("%(message)s"))
        terminal.addFilter(
            lambda record: record.name.startswith("sft_play") or record.levelno >= logging.ERROR
        )
        root.addHandler(terminal)
    else:
        os.dup2(file.stream.fileno(), sys.stdout.fileno())
