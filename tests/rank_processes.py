"""Ranks and commands as forks of a process that has imported everything: they start in a moment.

For tests of what ranks do together, and of commands that would import a tokenizer first. A
launcher, which imports torch for each process, is started only where a test is about the launcher.
"""

import faulthandler
import gc
import multiprocessing
import os
import select
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sft_play.plan.launch import free_port
from sft_play.plan.run_plan import read_plan
from sft_play.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240  # the first run under DeepSpeed on a machine compiles one op
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "sft_play.training.worker",
        "sft_play.data.tokenize",
        "transformers.models.llama.modeling_llama",
        "peft",
        "bitsandbytes",
        "deepspeed",
        "torch.utils.tensorboard",
        "evaluate",
        "rouge_score.rouge_scorer",
    ]
)
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

Target = Callable[..., Any]


def begin_server(redirect: Callable[[], object]) -> None:
    """Make the fork server a fork of this process, which has imported nearly all that ranks do.

    `redirect()` points its output where that of its ranks is to go. It imports the rest when the
    first rank is started.
    """

    def fork(path: object, words: Sequence[str], descriptors: Sequence[int]) -> int:
        child = os.fork()
        if child == 0:
            try:
                redirect()
                _serve(words[-1], descriptors)
            except Exception:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        return child

    resource_tracker.ensure_running()  # which is spawned too
    with patch.dict(os.environ, QUIET | ON_CPU), patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def _serve(program: str, descriptors: Sequence[int]) -> None:
    """Be the fork server: `program` is what an interpreter would be started with."""
    faulthandler.disable()  # it writes to a file that is closed here
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
        os.dup2(2, descriptor)  # closed, a log handler would write to what gets its number
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (open to the end)
    listener, alive = descriptors[:2]
    if listener in select.select([listener, alive], [], [])[0]:
        exec(program)


def start_rank(
    target: Target,
    arguments: tuple[Any, ...],
    rank: int,
    port: int,
    output: Path | None = None,
    world_size: int = 2,
) -> BaseProcess:
    """Start one rank of `world_size`, which calls `target(*arguments)`; its result is the exit code.

    What it prints goes to the file `output`.
    """
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environ = QUIET | ON_CPU
    if world_size > 1:  # as without a launcher
        environ |= {name: str(value) for name, value in place.items()}
    process = FORKS.Process(target=_be_rank, args=(target, arguments, environ, output))
    # the first rank starts the fork server, which imports torch in this environment
    with patch.dict(os.environ, QUIET | ON_CPU):
        process.start()
    return process


def start_command(
    words: Sequence[str], environ: Mapping[str, str], output: Path, prepare: Target | None = None
) -> BaseProcess:
    """Start `python -m sft_play`, in a session of its own, with these words and no other variables.

    But that of tokenizers, whose threads no fork has. What it prints, on both streams, goes to the
    file `output`. `prepare()` comes first.
    """
    arguments = (tuple(words), dict(environ), output, prepare)
    process = FORKS.Process(target=_be_command, args=arguments)
    with patch.dict(os.environ, QUIET | ON_CPU):
        process.start()
    return process


def run_two(target: Target, *arguments: Any, output: Path | None = None) -> list[int]:
    """Return the exit codes of two ranks, each of which calls `target(*arguments)`."""
    port = free_port()
    ranks = [start_rank(target, arguments, rank, port, output) for rank in (0, 1)]
    return [wait_for(rank) for rank in ranks]


def run_ranks(folder: RunFolder, ranks: int) -> list[int]:
    """Run a planned run in processes of its own, as `work`; return their exit codes."""
    port, output = free_port(), folder.path / "output.txt"
    started = [
        start_rank(work, (folder.path,), rank, port, output, world_size=ranks)
        for rank in range(ranks)
    ]
    return [wait_for(rank) for rank in started]


def wait_for(rank: BaseProcess, seconds: float = SECONDS) -> int:
    """Return the exit code of a rank; one that does not end is killed."""
    rank.join(seconds)
    if rank.is_alive():
        rank.kill()
        rank.join()
        raise AssertionError(f"a rank did not end within {seconds} s")
    return rank.exitcode


def work(folder: Path, prepare: Target | None = None, *arguments: Any) -> int:
    """Be a rank of a planned run; `prepare(*arguments)` comes first. Returns the exit class."""
    from sft_play.training import entry

    uses_deepspeed = read_plan(RunFolder(folder)).deepspeed is not None
    os.environ["ACCELERATE_USE_CPU"] = str(not uses_deepspeed).lower()
    if prepare is not None:
        prepare(*arguments)
    return entry.run_worker(folder)


def run_two_workers(folder: RunFolder, prepare: Target | None = None, *arguments: Any) -> list[int]:
    """Run a planned run of two ranks, as `work`; return their exit codes."""
    return run_two(work, folder.path, prepare, *arguments, output=folder.path / "output.txt")


def train_on_two(folder: RunFolder, prepare: Target | None = None, *arguments: Any) -> None:
    """Run a planned run of two ranks to its end, which is a good one."""
    codes = run_two_workers(folder, prepare, *arguments)
    assert codes == [0, 0], (folder.path / "output.txt").read_text()[-3000:]


def _be_command(
    words: tuple[str, ...], environ: dict[str, str], output: Path, prepare: Target | None
) -> None:
    from sft_play import cli

    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environ)
    # the threads of tokenizers that were started while tests were collected are not here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if prepare is not None:
        prepare()
    sys.argv = ["sft_play", *words]
    cli.main()


def _be_rank(
    target: Target, arguments: tuple[Any, ...], environ: dict[str, str], output: Path | None
) -> None:
    gc.freeze()  # a run collects garbage, among all that the imports brought
    os.environ.update(environ)
    bin_folder = Path(sys.executable).parent  # of ninja, which compiles DeepSpeed's ops
    os.environ["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    if output is not None:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.exit(target(*arguments) or 0)
