"""The exit classes of a run and the errors that carry them. Imports nothing of the project."""

from enum import IntEnum


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
    """The loss or the gradient norm became NaN or infinite."""

    exit_class = ExitClass.DIVERGED


class OutOfMemory(SftPlayError):
    """A GPU or the host ran out of memory."""

    exit_class = ExitClass.OUT_OF_MEMORY


class StoppedOnRequest(SftPlayError):
    """The user stopped a command that goes on when it is typed again."""

    exit_class = ExitClass.STOPPED


def of_class(exit_class: int | None, text: str) -> SftPlayError:
    """Return the error of an exit class; of one without an error of its own, the general one."""
    kinds = {kind.exit_class: kind for kind in SftPlayError.__subclasses__()}
    error = kinds.get(exit_class, SftPlayError)(text)
    if exit_class is not None:
        error.exit_class = ExitClass(exit_class)
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error that says something, else the error's type."""
    lines = map(str.strip, str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
