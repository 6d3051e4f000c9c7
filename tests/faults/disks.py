"""Faults of disks: full ones, read-only ones, folders that are gone. They need root, for mounts."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from faults.bench import EVERY_STEP, Bench, Fault, Guard, Outcome
from faults.files import nothing
from sft_play import cli
from sft_play.errors import ExitClass
from sft_play.plan import launch
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport
from sft_play.training.classify import Failure
from sft_play.training.loop import TrainingLoop


@contextlib.contextmanager
def disk(folder: Path, mebibytes: int, options: str = "") -> Iterator[Path]:
    """Mount a small disk at a new folder."""
    folder.mkdir()
    size = f"size={mebibytes}m{options}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def fill(folder: Path, free: int) -> None:
    """Leave a disk no more than some bytes that are free."""
    usage = shutil.disk_usage(folder)
    size = f"remount,size={(usage.used + free) >> 10}k"
    subprocess.run(["mount", "-o", size, str(folder)], check=True)


def full_in_a_save(free: int) -> Callable[[Bench], Outcome]:
    """Return an injection: the disk is full, but for some bytes, when step 3 is saved."""

    def inject(bench):
        save = TrainingLoop.save_checkpoint
        with disk(bench.folder / "small", 1200) as small:

            def filled(self, *args):
                if self.state.global_step == 3:
                    bench.inject_now()
                    fill(small, free)
                save(self, *args)

            with patch.object(TrainingLoop, "save_checkpoint", filled):
                return bench.run({"train.output_dir": small, "train.max_steps": 5})

    return inject


def full_of_rows(bench: Bench) -> Outcome:
    """The disk of the cache is full when rows are tokenized."""
    with disk(bench.folder / "small", 1) as small:
        fill(small, 8 << 10)
        return called(bench, {"data.cache_dir": small})


def command_line(
    bench: Bench,
    words: list[str],
    environ: dict[str, str],
    prepare: Callable[[], None] = lambda: None,
) -> Outcome:
    """Call the command line in a fork of this process, without the guard where that is away.

    Nothing is launched: a call that gets as far as that ends with 0. `prepare` is called before.
    """
    bench.inject_now()
    child = start_command_line(bench, words, environ, prepare)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = [(bench.folder / name).read_text() for name in ("stdout", "stderr")]
    return Outcome(code, (said[1] or said[0]).partition("\nexit class")[0])


def start_command_line(
    bench: Bench,
    words: list[str],
    environ: dict[str, str],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Start what `command_line` says; return its process id."""
    child = os.fork()
    if child == 0:
        for number, name in enumerate(("stdout", "stderr"), start=1):
            how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(bench.folder / name, how), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
        os.environ |= {**environ, "TOKENIZERS_PARALLELISM": "false"}
        sys.argv = ["sft_play", *words]
        launch.execute = lambda *_: os._exit(0)
        code = None
        try:
            prepare()
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            if code is None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if code is None else code)
    return child


def in_child(bench: Bench, call: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a call in a fork of this process, which the system may end."""
    child = os.fork()
    if child == 0:
        outcome = call()
        (bench.folder / "said").write_text(outcome.said)
        os._exit(outcome.exit_class)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = bench.folder / "said"
    return Outcome(code, said.read_text() if said.exists() else "")


def called(bench: Bench, changes: dict[str, object]) -> Outcome:
    """Return what `train` says on the command line, up to its launch."""
    return command_line(bench, train_words(bench, changes), NAMED)


def train_words(bench: Bench, changes: dict[str, object]) -> list[str]:
    """Return the words of `train` with the settings of a quick run."""
    settings = {**bench.settings, **EVERY_STEP, "train.output_dir": bench.folder / "out", **changes}
    return [
        "train",
        *(w for name, value in settings.items() for w in ("--set", plain(name, value))),
    ]


NAMED = {"DEVICE": "cpu", "RUN": "run", "CONFIG": "tests/fixtures/empty.yaml"}


def plain(name: str, value: object) -> str:
    return f"{name}={'null' if value is None else value}"


def read_only(setting: str) -> Callable[[Bench], Outcome]:
    """Return an injection: a folder that the run is to write lies on a read-only disk."""

    def inject(bench):
        with disk(bench.folder / "still", 1) as still:
            make_read_only(still)
            return called(bench, {setting: still / "x"})

    return inject


@contextlib.contextmanager
def still_mount(folder: Path) -> Iterator[None]:
    """Have a folder read-only, though files in it are open: a mount over itself."""
    done = subprocess.run(
        ["mount", "--bind", str(folder), str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Let nobody, not even root, make or remove a file in a folder."""
    done = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a folder cannot be made immutable here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


def closed_while_training(
    how: Callable[[Path], contextlib.AbstractContextManager], which: Callable[[Bench], Path]
) -> Callable[[Bench], Outcome]:
    """Return an injection: while a run is at step 3, a folder of it can be written no more."""

    def inject(bench):
        compute = TrainingLoop.compute_loss
        with contextlib.ExitStack() as stack:

            def closed(self, *args, **kwargs):
                if self.state.global_step == 2:
                    bench.inject_now()
                    stack.enter_context(how(which(bench)))
                return compute(self, *args, **kwargs)

            stack.enter_context(patch.object(TrainingLoop, "compute_loss", closed))
            return bench.run({"train.max_steps": 5, "train.grad_accum": 1})

    return inject


def removed(which: Callable[[Bench], Path], step: int = 2) -> Callable[[Bench], Outcome]:
    """Return an injection: a folder is removed while the run is at a step."""

    def inject(bench):
        compute = TrainingLoop.compute_loss

        def gone(self, *args, **kwargs):
            if self.state.global_step == step:
                bench.inject_now()
                shutil.rmtree(which(bench), ignore_errors=True)
            return compute(self, *args, **kwargs)

        with patch.object(TrainingLoop, "compute_loss", gone):
            return bench.run({"train.max_steps": 5})

    return inject


def removed_before(setting: str) -> Callable[[Bench], Outcome]:
    """Return an injection: what a setting names is removed between the plan and the worker."""

    def inject(bench):
        path = bench.folder / "mine"
        if setting == "data.cache_dir":
            path.mkdir()
        elif setting == "model.name":
            shutil.copytree(bench.settings[setting], path)
        else:
            shutil.copy(bench.settings[setting], path := path.with_suffix(".jsonl"))
        bench.before_work = lambda: shutil.rmtree(path) if path.is_dir() else os.unlink(path)
        return bench.run({setting: path, "train.max_steps": 2})

    return inject


def little_room(bench: Bench) -> Outcome:
    """The disk of the run is too small for what it is to write: said before the first step."""
    with disk(bench.folder / "small", 2) as small:
        return called(bench, {"train.output_dir": small})


def last_report_on_a_full_disk(bench: Bench) -> Outcome:
    """Another program fills the disk to the last byte, and then the run ends."""
    with disk(bench.folder / "small", 4) as small:
        folder = RunFolder(small / "run")
        folder.write_report(RunReport(status="running"))
        fill(small, 0)
        ended = RunReport(status="failed", exit_class=int(ExitClass.DISK_FULL), cause="x" * 9000)
        with contextlib.suppress(OSError):
            folder.write_report(ended)
        found = folder.read_report()
        assert not [path for path in folder.path.iterdir() if path.name != "run.json"]
        return Outcome(found.exit_class or 0, f"{found.status}: {found.cause}"[:200])


def refused_rename(number: int) -> Callable[[Bench], Outcome]:
    """Return an injection: the system refuses to rename a checkpoint, by a number of errno."""

    def inject(bench):
        replace = os.replace

        def refuse(source, target):
            if Path(target).name == "checkpoint-2":
                raise OSError(number, os.strerror(number), str(source), None, str(target))
            replace(source, target)

        with patch.object(os, "replace", refuse):
            return bench.run({"train.max_steps": 3})

    return inject


def unclassified(error: BaseException) -> Failure:
    return Failure(ExitClass.UNEXPECTED, repr(error))


CLASSES = Guard("sft_play.training.classify:classify", unclassified)
ROWS = (
    *(
        Fault(
            f"rename-{errno.errorcode[number]}",
            f"renaming a checkpoint ends with {errno.errorcode[number]}",
            refused_rename(number),
            ExitClass.ENVIRONMENT,
            (os.strerror(number), ".staging/checkpoint-2 to ", says),
            Guard("sft_play.errors:OF_PATH", {}),
            loses=1,
        )
        for number, says in (
            (errno.EXDEV, "on two disks: mount none inside the folder of a run"),
            (errno.ENOTEMPTY, "end what writes it, or move it away"),
            (errno.EEXIST, "end what writes it, or move it away"),
        )
    ),
    Fault(
        "full-disk",
        "the disk (a tmpfs) fills while a checkpoint is saved",
        full_in_a_save(free=200 << 10),
        ExitClass.DISK_FULL,
        ("free some space, then resume",),
        CLASSES,
        loses=1,
    ),
    Fault(
        "full-disk-to-the-last-byte",
        "the same, and not even run.json has room",
        full_in_a_save(free=0),
        ExitClass.DISK_FULL,
        ("free some space, then resume",),
        CLASSES,
        loses=1,
    ),
    Fault(
        "full-disk-run.json",
        "another program fills the disk to the last byte before the run writes why it ends",
        last_report_on_a_full_disk,
        ExitClass.DISK_FULL,
        ("failed: xxx",),
        Guard("sft_play.runs.folder:RESERVED_BYTES", 0),
        5,
    ),
    Fault(
        "full-cache",
        "the disk of the cache is full when rows are tokenized",
        full_of_rows,
        ExitClass.DISK_FULL,
        ("No space left on device", "free some space"),
        Guard("sft_play.errors:of_os_error", nothing),
    ),
    Fault(
        "read-only-output",
        "train.output_dir lies on a read-only disk",
        read_only("train.output_dir"),
        ExitClass.ENVIRONMENT,
        ("Read-only file system", "TRAIN_OUTPUT_DIR"),
        Guard("sft_play.commands.train:EnvironmentFault", RuntimeError),
    ),
    Fault(
        "read-only-cache",
        "data.cache_dir lies on a read-only disk",
        read_only("data.cache_dir"),
        ExitClass.ENVIRONMENT,
        ("Read-only file system", "DATA_CACHE_DIR"),
        Guard("sft_play.data.cache:EnvironmentFault", RuntimeError),
    ),
    Fault(
        "little-room",
        "the disk is too small for the weights and checkpoints of the run",
        little_room,
        ExitClass.ENVIRONMENT,
        ("GiB are free on its disk, a run needs 1", "set TRAIN_OUTPUT_DIR to another disk"),
        Guard("sft_play.commands.train:FREE_BYTES_FOR_A_RUN", 0),
    ),
    Fault(
        "run-read-only",
        "the disk of the run becomes read-only while it trains, so that run.json cannot be written",
        closed_while_training(still_mount, lambda bench: bench.last.path),
        ExitClass.ENVIRONMENT,
        ("Read-only file system", "TRAIN_OUTPUT_DIR"),
        CLASSES,
        loses=1,
    ),
    Fault(
        "checkpoints-immutable",
        "nothing may be written to the folder of checkpoints any more while it trains (chattr +i)",
        closed_while_training(immutable, lambda bench: bench.last.checkpoints),
        ExitClass.ENVIRONMENT,
        ("Operation not permitted", "TRAIN_OUTPUT_DIR"),
        CLASSES,
        loses=1,
    ),
    Fault(
        "run-removed",
        "the run's folder is removed while it trains",
        removed(lambda bench: bench.last.path),
        ExitClass.ENVIRONMENT,
        ("its folder was removed meanwhile", "start the run again"),
        CLASSES,
    ),
    Fault(
        "checkpoints-removed",
        "the folder of checkpoints is removed while it trains",
        removed(lambda bench: bench.last.checkpoints),
        ExitClass.DONE,
        (),
        Guard("pathlib:Path.mkdir", nothing),
        loses=0,
    ),
    Fault(
        "base-removed",
        "the base model is removed before the ranks load it",
        removed_before("model.name"),
        ExitClass.ENVIRONMENT,
        ("model.name=",),
        CLASSES,
    ),
    Fault(
        "cache-removed",
        "the tokenized rows are removed before the ranks read them",
        removed_before("data.cache_dir"),
        ExitClass.DATA,
        ("start the run again, which makes new ones",),
        CLASSES,
    ),
    Fault(
        "rows-removed",
        "the file of rows is removed after it was tokenized",
        removed_before("data.train_path"),
        ExitClass.DONE,
        (),
        Guard("sft_play.training.worker:DataFacts.from_json", nothing),
        loses=0,
    ),
)
