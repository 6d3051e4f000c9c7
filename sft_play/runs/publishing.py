"""What a command may replace: only what an earlier call of it wrote. Loads no torch.

A folder is published from a working folder next to it. Its MANIFEST.json lists the files and says
which command wrote them. Anything else that is at the target stays, and the command is refused.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import CheckpointError, ConfigError
from sft_play.runs import lock, seal
from sft_play.runs.checkpoints import publish
from sft_play.runs.files import entries, free_name, rename

FILES = "files"  # the part of a working folder that is published

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A folder that a command is to publish."""

    path: Path
    kind: str  # what its manifest says of it: "merged", "export adapter"
    is_named: bool = False  # by the user in OUT; otherwise it is the command's place in a run

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a working folder; its FILES are sealed and replace the target if nothing is raised.

        Raises: ConfigError for a target that contains something else; EnvironmentFault while
        another command writes it; CheckpointError if a file was removed meanwhile.
        """
        self.refuse_other_contents()
        path = self.path.resolve()  # where a link leads
        work = path.with_name(f".{path.name}-staging")
        with lock.working_folder(work, self.path):
            yield work
            self.refuse_other_contents()  # hours may have passed
            if seal.is_sealed(path) and seal.find_damage(path, reads_all=False):
                kept = free_name(path)
                rename(path, kept)
                logger.warning("%s was changed after it was written: it is %s now", path, kept)
            publish(work / FILES, path, self.kind)
        damage = seal.find_damage(path, reads_all=False)
        if damage is not None:
            raise CheckpointError(f"{path}: {damage}; type the same again")

    def refuse_other_contents(self) -> None:
        """Raise ConfigError for anything at the target that this command has not written."""
        found = self._other_contents()
        if found is not None:
            free = free_name(self.path if self.path.name not in ("", "..") else Path("export"))
            remedy = f"OUT={free} is free" if self.is_named else f"type mv {self.path} {free}"
            said = "OUT=" if self.is_named else ""
            raise ConfigError(f"{said}{self.path} {found}. Nothing was written; {remedy}")

    def _other_contents(self) -> str | None:
        """Return what is at the target and not of an earlier call, None if nothing is."""
        path = self.path.resolve()
        if Path.cwd().is_relative_to(path):
            return "is the current folder, or contains it"
        if not path.is_dir():
            return "is a file" if os.path.lexists(path) else None
        if not seal.is_sealed(path):
            first = next(iter(entries(path)), None)
            return first and f"contains {first.name}, which no {seal.NAME} names"
        try:
            manifest = seal.Manifest.read(path)
        except (ValueError, KeyError, TypeError) as error:
            return f"has a {seal.NAME} that cannot be used ({error})"
        if manifest.kind != self.kind and (self.is_named or manifest.kind):
            writer = manifest.kind or "a run or an earlier version"
            return f"was written by {writer}, not by this command ({self.kind})"
        known = {seal.NAME, *manifest.entries}
        known.update(str(parent) for name in manifest.entries for parent in Path(name).parents)
        for each in sorted(path.rglob("*")):
            if str(each.relative_to(path)) not in known:
                return f"contains {each.relative_to(path)}, which its {seal.NAME} does not name"
        return None
