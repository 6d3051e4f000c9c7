"""The trackers of `train.report_to`: transformers' integrations, kept open for the last scores.

Importing an integration's package may take seconds, so only the main rank does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from transformers import TrainerCallback
from transformers.integrations import (
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from sft_play.errors import EnvironmentFault, first_line
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import SampleAnswer
from sft_play.runs.resumed import resumed_run
from sft_play.training.context import RunContext
from sft_play.training.events import LogDetails

logger = logging.getLogger(__name__)

REACH_RETRIES = 1  # of the first call to MLflow's server
IDS = "trackers.json"  # in the run folder: the ids of its runs in W&B and in MLflow
GONE = "run %s cannot be continued, so a new one begins: %s"
# The settings that get columns on the HPARAMS page; trackers get all settings in addition
HPARAMS = """
    model.name model.max_seq_len tuning.mode tuning.backend
    tuning.lora.r tuning.lora.alpha tuning.lora.dropout data.train_path train.seed
    train.epochs train.max_steps train.effective_batch_size train.learning_rate
    train.lr_scheduler_type train.lr_scheduler_kwargs train.warmup_steps train.weight_decay
    train.optim
""".split()


def open_trackers(context: RunContext) -> list[TrainerCallback]:
    """Return transformers' callbacks that report this run; an empty list on all ranks except 0.

    A run that resumes another one continues its tracker runs.
    Raises: EnvironmentFault when a tracker's package cannot be used.
    """
    if not context.process.is_main:
        return []
    train = context.config.train
    path = source = context.folder.path / IDS
    earlier = resumed_run(train.resume_from)
    if earlier and not path.exists() and not train.extend:  # train.extend makes another schedule
        source = earlier.path / IDS
    ids = read_json(source) if source.exists() else {}
    opened = [_open(name, context.folder, ids) for name in train.report_to]
    if ids:
        write_json(path, ids)
    return opened


def _open(name: str, folder: RunFolder, ids: dict[str, str]) -> TrainerCallback:
    """Return a tracker after contacting it: a wrong address or key ends a run at its start.

    `ids` contains the runs to continue, and receives the new ones.
    """
    if name == "tensorboard":
        return TensorBoardLog(SummaryWriter(log_dir=str(folder.tensorboard)))
    try:
        if name == "trackio":
            return TrackioCallback()
        tracker = WandbLog() if name == "wandb" else MlflowLog()
        run_id = tracker.start_run(folder, ids.get(name))
    except (ImportError, RuntimeError) as error:
        raise EnvironmentFault(f"train.report_to={name}: {first_line(error)}") from error
    if run_id == ids.get(name):
        until = tracker.last_step
        known = f"; logs before step {until}, which it has, are not sent again" if until else ""
        logger.info("%s continues run %s%s", name, run_id, known)
    ids[name] = run_id
    return tracker


class Continued(TrainerCallback):
    """A tracker whose run may have logs of an earlier launch, up to `last_step`.

    `end` sends the rest: a launcher may end this process as soon as another rank has ended.
    """

    last_step = 0
    end: Callable[[], object]

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Skip logs of steps that are trained again: a tracker would show them twice."""
        lead = state.global_step - self.last_step
        if lead > 0 or (lead == 0 and "loss" not in logs):
            super().on_log(args, state, control, logs=logs, **kwargs)


class WandbLog(Continued, WandbCallback):
    """transformers' callback, whose run has started; its files are in the run folder."""

    def start_run(self, folder: RunFolder, earlier: str | None) -> str:
        """Continue the run of WANDB_RUN_ID, else the earlier one, or start one; return its id."""
        import wandb

        given = wandb.setup().settings
        begin = partial(wandb.init, dir=str(folder.path))
        run = None
        try:
            if wanted := given.run_id or earlier:
                try:
                    run = begin(id=wanted, resume=given.resume or "allow")
                except wandb.errors.Error as error:
                    logger.warning(GONE, wanted, first_line(error))
            run = run or begin(name=folder.name)
        except wandb.errors.Error as error:
            raise EnvironmentFault(
                f"train.report_to=wandb: {first_line(error)}; type wandb login, or set "
                "WANDB_MODE=offline and send the run later with wandb sync"
            ) from error
        self.end = wandb.finish
        self.last_step = run.summary.get("train/global_step") or 0  # from the server: none offline
        return run.id


class MlflowLog(Continued, MLflowCallback):
    """transformers' callback, whose run has started."""

    def start_run(self, folder: RunFolder, earlier: str | None) -> str:
        """Continue the run of MLFLOW_RUN_ID, else the earlier one, or start one; return its id.

        If the tracking server, or the store on disk, does not answer, mlflow itself would retry for
        minutes.
        """
        import mlflow
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES
        from mlflow.environment_variables import MLFLOW_RUN_ID

        given = RETRIES.get_raw()
        if given is None:
            RETRIES.set(REACH_RETRIES)
        try:
            mlflow.search_experiments(max_results=1)
            if earlier and not MLFLOW_RUN_ID.get():
                try:
                    mlflow.start_run(run_id=earlier)
                except mlflow.exceptions.MlflowException as error:
                    logger.warning(GONE, earlier, first_line(error))
            run = mlflow.active_run() or mlflow.start_run(run_name=folder.name)
            logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        except mlflow.exceptions.MlflowException as error:
            raise EnvironmentFault(
                f"train.report_to=mlflow: MLFLOW_TRACKING_URI={mlflow.get_tracking_uri()}: "
                f"{first_line(error)}"
            ) from error
        finally:
            if given is None:
                RETRIES.unset()
        self.end = mlflow.end_run
        self.last_step = max((metric.step for metric in logged), default=0)
        self._has_settings = bool(run.data.params)
        return run.info.run_id

    def setup(self, args: Any, state: Any, model: Any) -> None:
        """Log the settings once: MLflow refuses different values within one run."""
        if self._has_settings:
            args, model = SimpleNamespace(run_name=args.run_name, to_dict=dict), None
        super().setup(args, state, model)


class TensorBoardLog(TensorBoardCallback):
    """transformers' callback, with our groups, sample answers, and settings with scores.

    A name with a slash, such as `gpu/0/util_percent`, is the complete name in TensorBoard.
    """

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float],
        details: LogDetails,
        **kwargs: Any,
    ) -> None:
        """Write a log: names with a slash unchanged, others grouped as in transformers."""
        if details.answers:
            text = answers_text(details.answers)
            self.tb_writer.add_text(f"samples/{details.rows}", text, state.global_step)
        others = dict(logs)
        for name in [name for name in others if "/" in name]:
            self.tb_writer.add_scalar(name, others.pop(name), state.global_step)
        super().on_log(args, state, control, logs=others, **kwargs)


def answers_text(answers: Sequence[SampleAnswer]) -> str:
    """Return answers as Markdown in which no text is interpreted as markup."""
    blocks = []
    for answer in answers:
        lines = [
            f"prompt:   {answer.prompt}",
            f"expected: {answer.expected}",
            f"answer:   {answer.answer}",
        ]
        text = "\n".join(lines).replace("\n", "\n    ")
        blocks.append(f"    {text}")
    return "\n\n---\n\n".join(blocks)


class Trackers(TrainerCallback):
    """Passes logs on to the trackers, with the values of each rank.

    An integration ends with training; these stay open until `close`, for the scores after it.
    """

    def __init__(self, trackers: Sequence[TrainerCallback]):
        self.trackers = trackers
        self._ends: list[Callable[[], None]] = []  # of the trackers, once training has ended

    @property
    def boards(self) -> list[TensorBoardLog]:
        """The trackers that show answers and settings."""
        return [tracker for tracker in self.trackers if isinstance(tracker, TensorBoardLog)]

    def on_train_begin(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            tracker.on_train_begin(*event, **facts)

    def on_log(
        self, *event: Any, logs: dict[str, float], details: LogDetails, **facts: Any
    ) -> None:
        """Pass a log to every tracker; a log of a loss includes the values of each rank."""
        for tracker in self.trackers:
            tracker.on_log(*event, logs=logs | details.by_rank, details=details, **facts)

    def on_save(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            tracker.on_save(*event, **facts)

    def on_train_end(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            self._ends.append(partial(tracker.on_train_end, *event, **facts))
            if isinstance(tracker, Continued):
                self._ends.append(tracker.end)

    def note_scores(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Write the settings and last scores of the run for TensorBoard's page HPARAMS."""
        # the page accepts numbers and texts
        given = {name: settings[name] for name in HPARAMS}
        shown = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in given.items()
        }
        for board in self.boards:
            for summary in hparams(shown, dict(scores)):
                board.tb_writer.file_writer.add_summary(summary)

    def close(self) -> None:
        """Close the trackers: nothing is logged afterwards."""
        for end in self._ends:
            end()
