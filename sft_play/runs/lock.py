"""run.lock: one run folder, one run. Loads no torch.

The kernel keeps a lock (flock) on it for the life of the run: the front end takes it, becomes the
launcher with the same process id, and every rank of the machine shares it. A folder is renamed, or
something in it removed, only under its lock. What it says, the holder's identity, counts if a
file system has no locks, and if the holder ran under another kernel.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from sft_play.errors import EnvironmentFault
from sft_play.process_id import ProcessId
from sft_play.runs.files import is_local, open_descriptor, sync

NAME = "run.lock"
# What the front end writes before run.json
EARLY = {NAME, "config.yaml", "plan.json", "asked.json"}
# A run writes a line to metrics.jsonl every 5 s; before training it may load for long
SIGNS = (NAME, "metrics.jsonl", "run.json", "logs", "logs/rank-0.log")
SILENT_SECONDS = 900.0
# The ranks of a launcher that was killed save a last checkpoint
ORPHAN_SECONDS = 120.0
# EBADF: NFS gives locks only to who may write
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)
ATTEMPTS = 5  # another command looks at a lock for less than a millisecond
WAIT_SECONDS = 0.005

_held: dict[int, Path] = {}  # run folders whose locks this process has, by descriptor


def take(folder: Path, say: Callable[[str], None], has_ended: bool = False) -> None:
    """Make a run folder this process's own until it ends, also if its former owner is gone.

    Of a run that has ended as it should (`has_ended`) no former holder is named.
    Raises: EnvironmentFault if another process has it.
    """
    if folder in _held.values():
        return
    descriptor = _open(folder)
    with contextlib.ExitStack() as on_error:
        on_error.callback(os.close, descriptor)
        has_lock = _lock(descriptor, fcntl.LOCK_EX)
        holder = read_holder(folder)
        own = ProcessId.read()
        if holder != own and _goes_on(folder, holder, has_lock):
            raise _refusal(folder, holder)
        if holder not in (None, own) and not has_ended:
            say(f"{folder / NAME} was {holder}'s, which is gone; this run takes it over")
        if has_lock is None:
            say(
                f"{folder}: its file system has no locks (flock), so do not start a run twice at "
                "the same moment; set TRAIN_OUTPUT_DIR to a local disk for that"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, (json.dumps(asdict(own), sort_keys=True) + "\n").encode())
        sync(folder / NAME)
        if _lock(descriptor, fcntl.LOCK_SH) is False:  # another one came in between
            raise _refusal(folder, read_holder(folder))
        on_error.pop_all()
    os.set_inheritable(descriptor, True)  # by the launcher that this process becomes
    _held[descriptor] = folder


def release(folder: Path) -> None:
    """Give up this process's locks of a run folder, whose run has ended."""
    for descriptor in [number for number, path in _held.items() if path == folder]:
        del _held[descriptor]
        os.close(descriptor)


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Keep the lock of a run folder as one of its ranks."""
    descriptor = _find_inherited(folder)
    if descriptor is None:
        descriptor = _open(folder)
        _lock(descriptor, fcntl.LOCK_SH)
    _held[descriptor] = folder
    try:
        yield
    finally:
        del _held[descriptor]
        os.close(descriptor)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Keep others out of a run folder, to rename or remove it; yields False if a run uses it."""
    try:
        descriptor = open_descriptor(folder / NAME, os.O_RDWR)
    except FileNotFoundError:
        yield _silent_seconds(folder) > SILENT_SECONDS
        return
    except OSError:  # another user's, or on a disk that is read-only
        yield not _goes_on(folder, read_holder(folder), None)
        return
    try:
        yield not _goes_on(folder, read_holder(folder), _lock(descriptor, fcntl.LOCK_EX))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def keeping_lock(folder: Path) -> Iterator[None]:
    """Keep the lock of a run folder while a command writes to it.

    Raises: EnvironmentFault while a run or another such command has it.
    """
    os.close(_open(folder))
    with claimed(folder) as is_free:
        if not is_free:
            raise EnvironmentFault(
                f"{folder}: a run or another command (merge, export, push) uses it. Type the same "
                "again when that has ended."
            )
        yield


@contextlib.contextmanager
def working_folder(path: Path, of: Path) -> Iterator[None]:
    """Make an empty folder to write `of` in, and lock it; it is removed at the end.

    What a killed command has left in it is removed first.
    Raises: EnvironmentFault while another command has it.
    """
    for _ in range(ATTEMPTS):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            has_lock = _lock(descriptor, fcntl.LOCK_EX)
            if has_lock is False or (has_lock is None and any(path.iterdir())):
                advice = "type the same again when that has ended, or name another OUT="
                if has_lock is None:  # nobody can tell
                    advice += f". If no other command does: rm -r {path}"
                raise EnvironmentFault(f"{of}: another command writes it now; {advice}")
            if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
                continue  # that of a command which has just ended
            try:
                for leftover in path.iterdir():
                    shutil.rmtree(leftover)
                yield
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return
        finally:
            os.close(descriptor)
    raise EnvironmentFault(f"{of}: other commands write it now; type the same again")


def is_alive(folder: Path) -> bool:
    """Return whether a run continues in a folder."""
    with claimed(folder) as is_free:
        return not is_free


def refuse_if_held(folder: Path) -> None:
    """Raise EnvironmentFault if a run of another process uses a folder."""
    holder = read_holder(folder)
    own = {path.resolve() for path in _held.values()}
    is_own = folder.resolve() in own or holder == ProcessId.read()
    if not is_own and (folder / NAME).exists() and is_alive(folder):
        raise _refusal(folder, holder)


def is_abandoned(folder: Path) -> bool:
    """Return whether the front end of a run was killed before it had written run.json."""
    if not (folder / NAME).is_file():
        return False
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    return names <= EARLY and not is_alive(folder)


def read_holder(folder: Path) -> ProcessId | None:
    """Return the process that a lock names, None if there is none, or it was cut off."""
    try:
        return ProcessId.from_json(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _goes_on(folder: Path, holder: ProcessId | None, has_lock: bool | None) -> bool:
    """Return whether a run continues.

    `has_lock` says whether its lock could be had, None if there are none. A lock that can be
    had under the kernel of its holder, or on a local disk, says that it is gone: before a reboot.
    Another kernel may not know of it.
    """
    if has_lock is False:
        return True
    if holder is None:
        return False
    if has_lock and (holder.is_of_this_boot or (holder.boot and is_local(folder))):
        return False
    lives = holder.is_alive()
    return lives or _silent_seconds(folder) < (SILENT_SECONDS if lives is None else ORPHAN_SECONDS)


def _silent_seconds(folder: Path) -> float:
    """Return the time since the last sign of life of a run."""
    found = [path.stat().st_mtime for path in (folder / name for name in SIGNS) if path.exists()]
    return time.time() - max(found, default=0.0)


def _refusal(folder: Path, holder: ProcessId | None) -> EnvironmentFault:
    """Return the error of a folder in which a run continues."""
    lives = holder.is_alive() if holder else False
    advice = f"make watch RUN={folder} follows it"
    if lives:
        advice += f", kill {holder.pid} stops it"
    elif lives is None:
        advice += (
            ". Its process cannot be seen from here (another machine, container or user): stop it "
            "there"
        )
        if not holder.is_of_this_boot:
            advice += f"; if it is gone for good, rm {folder / NAME}"
    else:
        advice += "; its launcher is gone, and its ranks save a last checkpoint: wait for them"
    return EnvironmentFault(f"{folder}: {holder or 'a process'} trains in it; {advice}")


def _open(folder: Path) -> int:
    return open_descriptor(folder / NAME, os.O_RDWR | os.O_CREAT)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Return whether this process has got a lock; None on a file system without locks."""
    for _ in range(ATTEMPTS):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(WAIT_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return None
    return False


def _find_inherited(folder: Path) -> int | None:
    """Return the descriptor of a lock that this process has from before it was a rank."""
    for name in os.listdir("/dev/fd"):
        try:
            found = os.stat(int(name))
            if int(name) not in _held and os.path.samestat(found, os.stat(folder / NAME)):
                return int(name)
        except OSError:  # that of the listing itself is closed
            continue
    return None


def _close_in_child() -> None:
    """Close the locks in a fork, such as a data loader's, which may outlive its run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
