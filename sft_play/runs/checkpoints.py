"""Checkpoints of a run: published complete, found newest first, rotated by step. Loads no torch.

A checkpoint is written into STAGING, sealed there (runs.seal) and renamed to checkpoint-N, so what
has that name was complete when it got it. Age is the step in the name: clocks go back.
"""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from sft_play.errors import CheckpointError, EnvironmentFault
from sft_play.runs import lock, seal
from sft_play.runs.files import entries, rename, sync

STAGING = ".staging"  # folder next to what is published
ASIDE = ".corrupt"  # ending of a checkpoint that was found damaged
NAME = re.compile(r"checkpoint-([0-9]{1,12})")
TRAINER_STATE = "trainer_state.json"
# What says that a file is gone or its disk has lost it; any other refusal may be over tomorrow
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)

Say = Callable[[str], None]


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name, None for another name."""
    found = NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest step first; damaged ones, too."""
    found = [path for path in entries(folder) if step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def folder_of(path: Path) -> Path:
    """Return the folder of checkpoints of a run's folder, or the folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has a checkpoint, without reading it."""
    return any(map(seal.is_sealed, list_checkpoints(folder_of(path))))


def publish(staged: Path, target: Path, kind: str | None = None) -> None:
    """Seal a staged folder and give it its name, in place of an older folder of that name."""
    seal.seal(staged, kind)
    if target.exists():
        older = staged.with_name(f"{staged.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        rename(target, older)
    rename(staged, target)
    sync(target.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def rotate(folder: Path, limit: int | None, best_step: int | None = None) -> list[Path]:
    """Remove the oldest checkpoints over `limit`, and return them.

    The newest, the best and those with a file `pinned` always stay; `limit` counts the first two.
    """
    if limit is None:
        return []
    sealed = filter(seal.is_sealed, list_checkpoints(folder))
    found = [path for path in sealed if not (path / seal.PIN).exists()]
    kept = {path for path in found if step_of(path) == best_step} | set(found[:1])
    for path in found:
        if len(kept) < limit:
            kept.add(path)
    removed = [path for path in found if path not in kept]
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    for path in removed:
        rename(path, staging / path.name)  # what is half removed has no checkpoint's place
    shutil.rmtree(staging)
    return removed


def remove_leftovers(folder: Path, say: Say) -> None:
    """Remove what a run that was killed while it saved has left in a folder of checkpoints."""
    staging = folder / STAGING
    leftovers = sorted(staging.iterdir()) if staging.is_dir() else []
    for path in leftovers:
        say(f"{path} was half written, or half removed, when its run was killed; it is removed now")
    shutil.rmtree(staging, ignore_errors=True)


def choose_checkpoint(path: Path, say: Say, reads_all: bool = True) -> Path:
    """Return the checkpoint that `train.resume_from` means: undamaged, the newest of a run.

    A damaged one is set aside, which `say` reports, and the next older one is taken; one that was
    named itself is refused. Without `reads_all` large files are only measured.
    Raises: CheckpointError when there is none; OSError for one that cannot be read here or now.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"train.resume_from={path}: no such folder; RESUME and TRAIN_RESUME_FROM name that of "
            "a run (`make runs` lists them) or of a checkpoint"
        )
    is_named = step_of(path) is not None
    if is_named or seal.is_sealed(path) or (path / TRAINER_STATE).exists():
        return _checked(path, say, reads_all)
    for checkpoint in list_checkpoints(folder_of(path)):
        damage = _damage(checkpoint, reads_all)
        if damage is None:
            return checkpoint
        say(f"{checkpoint}: {damage}; {_set_aside(checkpoint)}, and the next older one is taken")
    raise CheckpointError(
        f"train.resume_from={path}: has no complete checkpoint (checkpoint-N/{seal.NAME}); "
        "choose another run or start again"
    )


def _checked(checkpoint: Path, say: Say, reads_all: bool) -> Path:
    """Return a checkpoint that was named. Raises CheckpointError if it is not complete, OSError."""
    damage = _damage(checkpoint, reads_all)
    if damage is None:
        return checkpoint
    aside = _set_aside(checkpoint) if step_of(checkpoint) is not None else "it is left as it is"
    others = list_checkpoints(checkpoint.parent)
    advice = f"continue with TRAIN_RESUME_FROM={others[0]}" if others else "there is no other one"
    raise CheckpointError(f"{checkpoint}: {damage}; {aside}; {advice}")


def _damage(checkpoint: Path, reads_all: bool) -> str | None:
    """Return what is damaged, None if nothing is.

    Raises: OSError if it may be complete, and only cannot be read here or now.
    """
    try:
        return seal.find_difference(checkpoint, reads_all)
    except OSError as error:
        if error.errno not in LOST:
            raise
        return seal.unreadable(error)


def _set_aside(checkpoint: Path) -> str:
    """Rename a damaged checkpoint; nothing is deleted. Returns what became of it, in words."""
    try:
        lock.refuse_if_held(checkpoint.parent.parent)
    except EnvironmentFault:
        return "it is skipped, as its run continues"
    for number in range(1, 1000):
        ending = ASIDE if number == 1 else f"{ASIDE}-{number}"
        target = checkpoint.with_name(checkpoint.name + ending)
        if target.exists():
            continue
        try:
            rename(checkpoint, target)
        except FileNotFoundError:
            break  # another process has just done so
        except OSError as error:
            return f"it cannot be renamed ({error.strerror}) and is skipped"
        return f"it is {target.name} now"
    return "it is skipped"
