"""What `train.report_to` names: transformers' own integrations, kept open for the last scores.

Importing an integration's package may take seconds, so only the main rank does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from sft_play.errors import EnvironmentFault, first_line
from sft_play.runs.metrics import SampleAnswer
from sft_play.training.context import RunContext

logger = logging.getLogger(__name__)

REACH_RETRIES = 1  # of the first call to MLflow's server
# The settings that the page HPARAMS has columns for; trackers get all of them besides
HPARAMS = """
    model.name model.max_seq_len tuning.mode tuning.backend
    tuning.lora.r tuning.lora.alpha tuning.lora.dropout data.train_path train.seed
    train.epochs train.max_steps train.effective_batch_size train.learning_rate
    train.lr_scheduler_type train.lr_scheduler_kwargs train.warmup_steps train.weight_decay
    train.optim
""".split()


def open_trackers(context: RunContext) -> list[TrainerCallback]:
    """Return the callbacks of transformers that report this run; none on other ranks than 0.

    Raises: EnvironmentFault when a tracker's package cannot be used.
    """
    if not context.process.is_main:
        return []
    return [_open(name, context) for name in context.config.train.report_to]


def _open(name: str, context: RunContext) -> TrainerCallback:
    """Return a tracker that has been reached: a wrong address or key ends a run at its start."""
    if name == "tensorboard":
        return TensorBoardLog(SummaryWriter(log_dir=str(context.folder.tensorboard)))
    (integration,) = get_reporting_integration_callbacks(name)
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
    """Ask the tracking server, or the store on disk, for its experiments.

    By itself mlflow would try again for minutes.
    """
    import mlflow
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as RETRIES

    given = RETRIES.get_raw()
    if given is None:
        RETRIES.set(REACH_RETRIES)
    try:
        mlflow.search_experiments(max_results=1)
    except mlflow.exceptions.MlflowException as error:
        raise EnvironmentFault(
            f"train.report_to=mlflow: MLFLOW_TRACKING_URI={mlflow.get_tracking_uri()}: "
            f"{first_line(error)}"
        ) from error
    finally:
        if given is None:
            RETRIES.unset()


class TensorBoardLog(TensorBoardCallback):
    """transformers' callback, with groups of our own, sample answers, and settings with scores.

    A name with a slash, such as `gpu/0/util_percent`, is the whole name in TensorBoard.
    """

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        """Write a log: names with a slash as they are, others as transformers groups them."""
        others = dict(logs)
        for name in [name for name in others if "/" in name]:
            self.tb_writer.add_scalar(name, others.pop(name), state.global_step)
        super().on_log(args, state, control, logs=others, **kwargs)

    def note_answers(self, rows: str, answers: Sequence[SampleAnswer], step: int) -> None:
        """Write some answers of an evaluation as text; `rows` names its split."""
        self.tb_writer.add_text(f"samples/{rows}", answers_text(answers), step)

    def note_scores(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Write settings and last scores for the page HPARAMS."""
        for summary in hparams(dict(settings), dict(scores)):
            self.tb_writer.file_writer.add_summary(summary)


def answers_text(answers: Sequence[SampleAnswer]) -> str:
    """Return answers as Markdown in which nothing of a text is markup."""
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
    """Passes what is logged on to the trackers, with `more_values` of a log that has a loss.

    Trainer ends its integrations with the training; here they stay open until `close`, for the
    scores after it.
    """

    def __init__(
        self,
        trackers: Sequence[TrainerCallback],
        more_values: Callable[[], Mapping[str, float]] = dict,
    ):
        self.trackers = trackers
        self.more_values = more_values
        self._ends: list[Callable[[], None]] = []  # of the trackers, once training has ended

    @property
    def boards(self) -> list[TensorBoardLog]:
        """Those that show answers and settings."""
        return [tracker for tracker in self.trackers if isinstance(tracker, TensorBoardLog)]

    def on_train_begin(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            tracker.on_train_begin(*event, **facts)

    def on_log(self, *event: Any, logs: dict[str, float], **facts: Any) -> None:
        """Give every tracker a log, with the values of each rank."""
        reported = dict(logs)
        if "loss" in logs:
            reported |= self.more_values()
        for tracker in self.trackers:
            tracker.on_log(*event, logs=reported, **facts)

    def on_save(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            tracker.on_save(*event, **facts)

    def on_train_end(self, *event: Any, **facts: Any) -> None:
        for tracker in self.trackers:
            self._ends.append(partial(tracker.on_train_end, *event, **facts))

    def note_scores(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Pass the settings and last scores of the run on."""
        # the page takes numbers and texts
        given = {name: settings[name] for name in HPARAMS}
        shown = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in given.items()
        }
        for board in self.boards:
            board.note_scores(shown, scores)

    def close(self) -> None:
        """End the trackers: nothing is logged after it."""
        for end in self._ends:
            end()
