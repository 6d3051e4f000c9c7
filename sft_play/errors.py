"""The exit classes of a run and the errors that carry them. Imports nothing of the project."""

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

NO_PERMISSION = (
    "let this user read and write it (ls -ld, lsattr -d), or set TRAIN_OUTPUT_DIR and "
    "DATA_CACHE_DIR to other folders"
)
OTHER_DISK = (
    "its disk cannot do that (FUSE, CIFS): set TRAIN_OUTPUT_DIR and DATA_CACHE_DIR to folders of "
    "another"
)
IN_THE_WAY = "something of this name is there: end what writes it, or move it away"
UNREACHABLE = "the server of its disk does not answer: mount it again, then resume"
# What to do if the system refuses a path, by its reason
OF_PATH = {
    errno.EROFS: (
        "make its disk writable again (dmesg shows what happened), or set TRAIN_OUTPUT_DIR "
        "and DATA_CACHE_DIR to folders on another"
    ),
    errno.EACCES: NO_PERMISSION,
    errno.EPERM: NO_PERMISSION,
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ELOOP: "it is a link, or links point at each other: put the file or folder itself there",
    errno.EISDIR: "a folder is in the place of a file: move it away",
    errno.ENOTDIR: "a file is in the place of a folder: move it away, or name another path",
    errno.ETXTBSY: "another program uses it: wait, or name another path",
    errno.EMFILE: "this shell allows no more: raise it with ulimit -n 65536, and start again",
    errno.ENFILE: "this machine allows no more: end other programs, and start again",
    errno.EFBIG: "this shell or the disk allows no larger file: `ulimit -f` prints the limit",
    errno.EIO: "the disk does not answer: dmesg shows why; resume once it does, or elsewhere",
    errno.ESTALE: "the disk was unmounted or exported again: mount it again, then resume",
    errno.ENODEV: "the disk is gone: mount it again, then resume",
    errno.ENXIO: "the disk is gone: mount it again, then resume",
    errno.ENOLCK: "its disk keeps no locks: mount it with locks, or set TRAIN_OUTPUT_DIR elsewhere",
    errno.ENOTSUP: OTHER_DISK,
    errno.EINVAL: OTHER_DISK,
    errno.ENOSYS: OTHER_DISK,
    errno.EXDEV: (
        "these are on two disks: mount none inside the folder of a run, or set TRAIN_OUTPUT_DIR "
        "to a folder of one disk"
    ),
    errno.ENOTEMPTY: IN_THE_WAY,
    errno.EEXIST: IN_THE_WAY,
    errno.EOVERFLOW: "its size or date is beyond what this program can read: copy it",
    errno.EMLINK: "a folder of its disk can hold no more: remove old runs, or name another",
    errno.EBUSY: "another program holds it (lsof names it): end that, then resume",
    errno.EAGAIN: "this machine is short of processes, threads or memory: wait, then resume",
    errno.ETIMEDOUT: UNREACHABLE,
    errno.ENOTCONN: UNREACHABLE,
    errno.EREMOTEIO: UNREACHABLE,
    errno.EHOSTDOWN: UNREACHABLE,
    errno.ECONNABORTED: UNREACHABLE,
}
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk
# Of these an error without a path is one of a socket, or of a wrong call
NEEDS_PATH = {number for number, said in OF_PATH.items() if said in (OTHER_DISK, UNREACHABLE)}
# RuntimeErrors of torch's allocators, and of CUDA and its libraries outside of them
NO_HOST_MEMORY = re.compile(r"can't allocate memory", re.IGNORECASE)
NO_DEVICE_MEMORY = re.compile(r"OutOfMemoryError|out of memory|_ALLOC_FAILED", re.IGNORECASE)
SHARED_MEMORY = Path("/dev/shm")
# of torch's data loader and of NCCL; Triton's "shared memory" is a GPU's
NO_SHARED_MEMORY = re.compile(r"shared memory ?\(shm\)|out of shared memory|/dev/shm")
MORE_SHARED_MEMORY = (
    "/dev/shm has no room for what processes pass on: start the container with --shm-size=8g or "
    "--ipc=host, or set TRAIN_DATALOADER_NUM_WORKERS=0"
)
SHOWN_PATH = 100  # characters of a path in a message


class ExitClass(IntEnum):
    """What became of a run; written to run.json because make and torchrun flatten process codes."""

    DONE = 0
    UNEXPECTED = 1
    CONFIG = 10
    DATA = 11
    CHECKPOINT = 12
    ENVIRONMENT = 13
    DIVERGED = 14
    OUT_OF_MEMORY = 15
    DISK_FULL = 16
    PEER_LOST = 17
    STOPPED = 75


class SftPlayError(Exception):
    """An error with one exit class; its text says what, which value, and what to type next."""

    exit_class = ExitClass.UNEXPECTED


class ConfigError(SftPlayError, ValueError):
    """A setting that the user gave is wrong."""

    exit_class = ExitClass.CONFIG


class DataError(SftPlayError, ValueError):
    """A row, a data file or the split of them is wrong."""

    exit_class = ExitClass.DATA


class CheckpointError(SftPlayError):
    """A checkpoint or adapter is corrupt, or belongs to another kind of run."""

    exit_class = ExitClass.CHECKPOINT


class EnvironmentFault(SftPlayError):
    """The machine lacks something: a GPU, a port, a package, a model, room on the disk."""

    exit_class = ExitClass.ENVIRONMENT


class DivergedError(SftPlayError):
    """The loss is not finite or as bad as a guess, or an adapter does not learn."""

    exit_class = ExitClass.DIVERGED


class OutOfMemory(SftPlayError):
    """A GPU or the host ran out of memory."""

    exit_class = ExitClass.OUT_OF_MEMORY


class StoppedOnRequest(SftPlayError):
    """The user stopped a command that continues when it is typed again."""

    exit_class = ExitClass.STOPPED


def error_of_class(exit_class: int | None, text: str) -> SftPlayError:
    """Return the error of an exit class; of one without an error of its own, the general one."""
    kinds = {kind.exit_class: kind for kind in SftPlayError.__subclasses__()}
    error = kinds.get(exit_class, SftPlayError)(text)
    if exit_class is not None:
        error.exit_class = ExitClass(exit_class)
    return error


def of_os_error(error: OSError) -> SftPlayError | None:
    """Return what a disk has refused, in words; None for an error of another kind."""
    path = str(error.filename or "a file of the run")
    paths = [str(each) for each in (path, error.filename2) if each]  # the second, of a rename
    place = " to ".join(
        each if len(each) <= SHOWN_PATH else f"{each[:SHOWN_PATH]}..." for each in paths
    )
    if lacks_shared_memory(error):
        return EnvironmentFault(f"{error.strerror}: {MORE_SHARED_MEMORY}")
    if error.errno == errno.ENOMEM:
        return OutOfMemory(f"{error.strerror}: {place}; make memory-check shows what holds it")
    if error.errno in FULL:
        text = f"{error.strerror}: {place}; free some space, then resume"
        return error_of_class(ExitClass.DISK_FULL, text)
    if error.errno in OF_PATH and (error.filename or error.errno not in NEEDS_PATH):
        return EnvironmentFault(f"{error.strerror}: {place}; {OF_PATH[error.errno]}")
    if error.errno == errno.ENOENT and not Path(path).parent.exists():
        return EnvironmentFault(
            f"{error.strerror}: {place}; its folder was removed meanwhile: start the run again"
        )
    return None


def lacks_shared_memory(error: BaseException) -> bool:
    """Return whether /dev/shm is full: its errors say so, or name no file, as those of locks."""
    if NO_SHARED_MEMORY.search(str(error)):
        return True
    is_nameless = isinstance(error, OSError) and not error.filename
    if not is_nameless or error.errno != errno.ENOSPC or not SHARED_MEMORY.exists():
        return False
    return shutil.disk_usage(SHARED_MEMORY).free == 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a device ran out of memory."""
    return isinstance(error, MemoryError) or _says(error, NO_HOST_MEMORY, NO_DEVICE_MEMORY)


def _says(error: BaseException, *patterns: re.Pattern[str]) -> bool:
    """Return whether a RuntimeError has a name or text like one of the patterns."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, RuntimeError) and any(each.search(text) for each in patterns)


@contextlib.contextmanager
def memory_errors_in_words() -> Iterator[None]:
    """Raise what runs out of memory inside this context as an error with its class."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advice = "make memory-check shows what holds it: free some"
        if _says(error, NO_DEVICE_MEMORY):
            advice += ", or take DEVICE=cpu, which is slower"
        raise OutOfMemory(f"out of memory: {first_line(error)}; {advice}") from error


@contextlib.contextmanager
def disk_errors_in_words() -> Iterator[None]:
    """Raise what a disk refuses inside this context as an error with its class."""
    try:
        yield
    except OSError as error:
        known = of_os_error(error)
        if known is None:
            raise
        raise known from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error that says something, else the error's type."""
    lines = map(str.strip, str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
