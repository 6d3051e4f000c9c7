"""Log DeepSpeed's config and compile what it needs, before weights load.

Offloaded optimizers step on the CPU. Their code is compiled at its first use on a machine, which
takes minutes without any output. torch caches extensions with a lock file. A process that is killed
while it compiles leaves this file, and all others would wait for it silently.
"""

import fcntl
import json
import logging
import os
import sys
from pathlib import Path

from torch.utils import cpp_extension

from sft_kernels.process import Process
from sft_play.errors import EnvironmentFault, first_line
from sft_play.plan.run_plan import RunPlan
from sft_play.progress import Stage, watched_stage
from sft_play.runs.files import is_local

logger = logging.getLogger(__name__)

CPU_ADAM = "cpu_adam"


def prepare_deepspeed(plan: RunPlan, process: Process) -> None:
    """Log the JSON config once, and compile what it needs. Every rank must call it.

    Raises: EnvironmentFault.
    """
    if process.is_main:
        given = plan.deepspeed
        words = json.dumps(given.settings, sort_keys=True)
        logger.info("deepspeed json=%s digest=%s %s", given.source, given.source_digest, words)
    if process.local_rank == 0:
        free_locks(_build_folder().parent)
    process.gather(None)  # no rank compiles before
    if plan.step.offload:
        compile_cpu_adam(process)


def compile_cpu_adam(process: Process) -> None:
    """Compile the CPU optimizer on one rank of each machine, if it is not compiled yet.

    Every rank must call it. Raises: EnvironmentFault if it cannot be compiled.
    """
    failure = None
    if process.local_rank == 0:
        stage = Stage(f"DeepSpeed compiles {CPU_ADAM} in {_build_folder()}, once on a machine")
        with watched_stage(stage, process.is_main):
            failure = _compile()
    failures = process.gather(failure)
    for rank, message in enumerate(failures):
        if message is not None:
            raise EnvironmentFault(
                f"rank {rank}: DeepSpeed cannot compile {CPU_ADAM}, which steps an offloaded "
                f"optimizer: {message}; see make doctor, or leave offload_optimizer out"
            )


def _build_folder() -> Path:
    """Return torch's folder of compiled extensions; create it. Raises: EnvironmentFault."""
    try:
        return Path(cpp_extension._get_build_directory(CPU_ADAM, verbose=False))
    except OSError as error:
        raise EnvironmentFault(
            f"{error.strerror}: {error.filename}, where DeepSpeed keeps what it compiles; set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error


def free_locks(extensions: Path) -> None:
    """Remove stale locks of all extensions: an optimizer may compile another one on a GPU."""
    for lock in sorted(extensions.glob("*/lock")):
        free_lock(lock)


def free_lock(lock: Path) -> None:
    """Remove the lock of a compilation that has ended without removing it.

    A process that compiles has the file open, perhaps as another user or on another machine.
    """
    if not lock.exists():
        return
    is_others = lock.stat().st_uid != os.getuid() or not is_local(lock)
    if is_others or sys.platform != "linux" or _is_open(lock):
        logger.warning(
            "%s says that another process, container or machine compiles; waiting for it. If none "
            "does, an earlier run was killed: rm %s",
            lock,
            lock,
        )
    else:
        logger.warning("%s was left by a run that was killed while it compiled; removed", lock)
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    """Return whether any process of this kernel has a file open; True if the kernel cannot tell.

    The kernel leases a file only if no other process has it open. This includes processes in other
    containers, which /proc does not show.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _compile() -> str | None:
    """Compile and load the optimizer; return the first line of the error, if any."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # takes seconds, so only if needed

    try:
        CPUAdamBuilder().load(verbose=False)
    except (OSError, RuntimeError) as error:
        logging.getLogger("traceback").warning("while %s was compiled", CPU_ADAM, exc_info=error)
        return first_line(error)
    return None
