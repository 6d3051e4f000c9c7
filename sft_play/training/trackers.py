"""What `train.report_to` names: transformers' own integrations, kept open for the last scores.

Importing an integration's package may take seconds, so only the main rank does.
"""

import logging
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from sft_play.errors import EnvironmentFault, first_line
from sft_play.plan.devices import GIB
from sft_play.training.context import RunContext

logger = logging.getLogger(__name__)


def open_trackers(context: RunContext) -> list[TrainerCallback]:
    """Return the callbacks of transformers that report this run; none on other ranks than 0.

    Raises: EnvironmentFault when a tracker's package cannot be used.
    """
    if not context.process.is_main:
        return []
    return [_open(name, context) for name in context.config.train.report_to]


def _open(name: str, context: RunContext) -> TrainerCallback:
    """Return a tracker that has been reached: a wrong address or key ends a run at its start."""
    (integration,) = get_reporting_integration_callbacks(name)
    if name == "tensorboard":
        return integration(SummaryWriter(log_dir=str(context.folder.tensorboard)))
    try:
        if name == "wandb":
            _begin_wandb(context)
        elif name == "mlflow":
            _reach_mlflow()
        return integration()
    except (ImportError, RuntimeError) as error:
        raise EnvironmentFault(f"train.report_to={name}: {first_line(error)}") from error


def _begin_wandb(context: RunContext) -> None:
    """Begin the run that transformers' callback then finds; its files go to the run folder."""
    import wandb

    try:
        wandb.init(name=context.folder.name, dir=str(context.folder.path))
    except wandb.errors.Error as error:
        raise EnvironmentFault(
            f"train.report_to=wandb: {first_line(error)}; type wandb login, or set "
            "WANDB_MODE=offline and send the run later with wandb sync"
        ) from error


def _reach_mlflow() -> None:
    """Ask the tracking server, or the store on disk, for its experiments."""
    import mlflow

    try:
        mlflow.search_experiments(max_results=1)
    except mlflow.exceptions.MlflowException as error:
        raise EnvironmentFault(
            f"train.report_to=mlflow: MLFLOW_TRACKING_URI={mlflow.get_tracking_uri()}: "
            f"{first_line(error)}"
        ) from error


class Trackers(TrainerCallback):
    """Passes what is logged on to the trackers, with the memory that the main rank holds then.

    Trainer ends its integrations with the training; here they stay open until `close`, for the
    scores after it.
    """

    def __init__(self, trackers: Sequence[TrainerCallback], device: torch.device):
        self.trackers = trackers
        self.device = device
        self._last_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for tracker in self.trackers:
            tracker.on_train_begin(args, state, control, **kwargs)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        reported = dict(logs or {})
        if "loss" in reported:
            reported |= memory_in_gib(self.device)
        for tracker in self.trackers:
            tracker.on_log(args, state, control, logs=reported, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for tracker in self.trackers:
            tracker.on_save(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_call = ((args, state, control), kwargs)

    def close(self) -> None:
        """End the trackers: nothing is logged after it."""
        if self._last_call is None:
            return
        arguments, keywords = self._last_call
        for tracker in self.trackers:
            tracker.on_train_end(*arguments, **keywords)


def memory_in_gib(device: torch.device) -> dict[str, float]:
    """Return the memory that this process holds now; on a CPU what is resident."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.memory_reserved(device) / GIB,
        }
    return {"memory_rss_gib": psutil.Process().memory_info().rss / GIB}
