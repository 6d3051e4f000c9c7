"""Save a checkpoint or the trained weights whole: in a staging folder, checked, sealed, renamed.

Every rank must call each of these functions. A rank that fails raises, and the failure's broadcast
ends the others: none passes the barrier before the folder is published.
"""

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sft_play.errors import SftPlayError
from sft_play.process import Process
from sft_play.runs import checkpoints, stamp
from sft_play.runs.checkpoints import STAGING
from sft_play.runs.files import share
from sft_play.training.best import best_step
from sft_play.training.checks import check_finite, check_finite_optimizer

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)


def save_sealed(trainer: "SftTrainer", save: Callable[[], None]) -> None:
    """Publish what `save` writes into the staging folder as checkpoint-N, and remove old ones."""
    step = trainer.state.global_step
    check_finite(trainer.model, step)
    check_finite_optimizer(trainer.optimizer, step)
    folder = Path(trainer.args.output_dir)
    limit = trainer.args.save_total_limit
    trainer.args.save_total_limit = None  # Trainer would count what is staged
    facts = {**trainer.stamp, "global_step": step}
    try:
        with published(folder / f"checkpoint-{step}", trainer.process, facts):
            save()
    finally:
        trainer.args.save_total_limit = limit
    if trainer.args.should_save:
        checkpoints.rotate(folder, limit, best_step(trainer.state.log_history, trainer.best_metric))
    trainer.process.gather(None)  # no rank goes on before it can be resumed from


def save_now(trainer: "SftTrainer") -> None:
    """Save a checkpoint of this step, unless there is one. Every rank must call it."""
    target = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    if trainer.process.min(int(target.is_dir())) == 0:
        trainer._save_checkpoint(trainer.model_wrapped, None)


@contextmanager
def published(
    target: Path, process: Process, facts: stamp.Stamp, keeps_refused: bool = False
) -> Iterator[Path]:
    """Yield the staging folder of `target`, which is stamped, sealed and published afterwards.

    With `keeps_refused` what a check inside refuses stays, under the name `<target>.refused`.
    On machines that do not share the main rank's disk, the first rank publishes its own part.
    """
    staged = target.parent / STAGING / target.name
    mark = staged / f".{secrets.token_hex(8)}"
    try:
        staged.mkdir(parents=True, exist_ok=True)
        if process.is_main:
            mark.touch()
        yield staged
        places = process.gather(mark)  # every rank has written
        is_publisher = process.is_main
        if process.local_rank == 0 and not places[0].exists():
            is_publisher = True
        process.gather(None)  # every rank has looked
        if process.is_main:
            mark.unlink()
        if is_publisher:
            share(staged)
            stamp.write(staged, facts)
            checkpoints.publish(staged, target)
    except SftPlayError:  # of a check, which the user may judge otherwise
        if process.is_main and keeps_refused:
            refused = target.with_name(f"{target.name}.refused")
            shutil.rmtree(refused, ignore_errors=True)
            staged.rename(refused)
            logger.warning("what was refused is in %s", refused)
        shutil.rmtree(staged, ignore_errors=True)
        raise
    except Exception:
        # it cannot be used, and on a full disk run.json needs the space
        shutil.rmtree(staged, ignore_errors=True)
        raise


def dtypes_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the types of trained and of frozen weights, as torch names them."""
    found: dict[str, set[str]] = {"trained": set(), "frozen": set()}
    for parameter in model.parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        found[kind].add(str(parameter.dtype).removeprefix("torch."))
    return {kind: sorted(names) for kind, names in found.items()}
