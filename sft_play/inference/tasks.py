"""Score weights on tasks of lm-eval: `make eval TASKS=hellaswag,arc_easy`."""

import difflib
import fnmatch
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sft_play.config.invocation import TasksAsked
from sft_play.config.loader import LoadedConfig
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.inference.load import TrainedModel, base_of, joined, load_run
from sft_play.reporting.bootstrap import Estimate, estimate
from sft_play.runs.answer_file import Place
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

import torch
from lm_eval.models.huggingface import HFLM

from sft_play.process import Process

DEVIATIONS = 1.96  # standard errors, for the middle 95 % of a normal distribution
NAME = "tasks"  # of the scores in eval/

MOST_AT_ONCE = 64  # questions, where lm-eval finds out how many the memory holds


class TaskScores(NamedTuple):
    """The scores of one task."""

    task: str
    version: Any
    rows: int
    scores: dict[str, Estimate]  # by metric, with its filter where that is not the usual one

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        scores = " ".join(f"{metric}={found.words(3)}" for metric, found in self.scores.items())
        return f"{name} {self.task} {scores} rows={self.rows}"

    def facts(self, asked: TasksAsked) -> dict[str, Any]:
        """Return what eval/tasks.json says of it."""
        values: dict[str, float] = {}
        for metric, found in self.scores.items():
            values |= found.values(metric)
        settings = {"limit": asked.limit, "fewshot": asked.fewshot, "template": asked.has_template}
        return {**values, "rows": self.rows, "settings": settings, "version": self.version}


def score_tasks(
    folder: RunFolder,
    device: str,
    loaded: LoadedConfig,
    asked: TasksAsked,
    place: Place | None = None,
    compares: bool = False,
) -> list[str]:
    """Score weights on tasks and add them to eval/tasks.json; return the lines to print.

    With `compares` the base is asked, too, into eval/tasks.base.json. Processes with a `place`
    share the questions.

    Raises: EnvironmentFault where the rows of a task are not there; ConfigError for a task
    that lm-eval does not know, or that runs what the model writes.
    """
    with _quiet_lm_eval():
        manager = _task_manager(asked)
        trained = joined(load_run(folder, device, loaded.config), place)
        batch_size = None
        if loaded.is_set("train.eval_batch_size"):
            batch_size = loaded.config.train.eval_batch_size
        found = _asked(trained, manager, asked, batch_size)
        lines = _written(folder.evaluation / f"{NAME}.json", folder.name, found, asked)
        if compares:
            base, is_used = base_of(trained)
            with is_used():
                found = _asked(base, manager, asked, batch_size)
            lines += _written(folder.evaluation / f"{NAME}.base.json", "base", found, asked)
    return [*lines, f"scores {folder.evaluation / f'{NAME}.json'}"]


def _task_manager(asked: TasksAsked) -> "TaskManager":
    """Return lm-eval's manager with the tasks loaded, before any weight is.

    Raises: ConfigError, EnvironmentFault.
    """
    from lm_eval.tasks import TaskManager

    class Loaded(TaskManager):
        """Loads the rows of tasks once, also where two models are asked."""

        def load(self, task_list: Any) -> Any:
            if not hasattr(self, "_tasks_of_call"):
                self._tasks_of_call = super().load(task_list)
            return self._tasks_of_call

    manager = Loaded()
    names = _known_names(asked.names, manager.all_tasks)
    try:
        tasks = manager.load(names)["tasks"]
    except Exception as error:  # of the hub, of a data set's files, or of a task's own code
        raise EnvironmentFault(
            f"TASKS={','.join(names)}: their rows cannot be read ({first_line(error)}); without a "
            "network HF_HOME has to hold the data sets, or name a YAML file of a task whose rows "
            "are files here"
        ) from error
    unsafe = sorted(name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False))
    if unsafe:
        raise ConfigError(
            f"TASKS={unsafe[0]}: runs the programs that the model writes; leave it out, and run "
            "lm-eval by itself in a container, with --confirm_run_unsafe_code, on an export"
        )
    return manager


def _known_names(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names of tasks that patterns stand for. Raises ConfigError for an unknown one."""
    found: list[str] = []
    for name in names:
        if Path(name).suffix in (".yaml", ".yml") and Path(name).is_file():
            found.append(name)
            continue
        matching = fnmatch.filter(known, name)
        if not matching:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(
                f"TASKS={name}: lm-eval has no such task, and there is no such YAML file{hint}"
            )
        found += matching
    return list(dict.fromkeys(found))


def _asked(
    trained: TrainedModel, manager: "TaskManager", asked: TasksAsked, batch_size: int | None
) -> list[TaskScores]:
    """Return the scores of all tasks, [] on all processes but the first."""
    from lm_eval import simple_evaluate

    if trained.stops:
        trained.model.generation_config.eos_token_id = list(trained.stops)
    results = simple_evaluate(
        TaskModel(trained, batch_size),
        tasks=list(asked.names),  # loaded by the manager already
        num_fewshot=asked.fewshot,
        limit=asked.limit,
        apply_chat_template=asked.has_template,
        task_manager=manager,
        bootstrap_iters=1000,  # of metrics that are no mean of rows
    )
    if results is None:
        return []
    found = []
    for task, values in results["results"].items():
        rows = int(results["n-samples"].get(task, {}).get("effective", 0))  # none of a group
        version = results["versions"].get(task)
        scores = scores_of(values, results["samples"].get(task, []))
        found.append(TaskScores(task, version, rows, scores))
    return found


def scores_of(
    values: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Estimate]:
    """Return lm-eval's scores of a task by metric; `acc,none` is acc, `acc,strict` acc(strict).

    The interval is that of all metrics here, over rows, where the score is their mean; else it
    follows from lm-eval's standard error.
    """
    found: dict[str, Estimate] = {}
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        of_rows = [row.get(metric) for row in samples if row["filter"] == kind]
        error = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric}({kind})"
        found[name] = _estimate(float(value), of_rows, error)
    return found


def _estimate(score: float, of_rows: Sequence[Any], error: Any) -> Estimate:
    if of_rows and all(isinstance(value, int | float) for value in of_rows):
        found = estimate(of_rows)
        if math.isclose(found.mean, score, abs_tol=1e-9):
            return found
    if not isinstance(error, int | float) or math.isnan(error):  # lm-eval writes N/A, too
        return Estimate(score, len(of_rows))
    half = DEVIATIONS * error
    return Estimate(score, len(of_rows), score - half, score + half)


def _written(path: Path, name: str, found: Sequence[TaskScores], asked: TasksAsked) -> list[str]:
    """Add scores to those of other tasks in a file; return their lines."""
    if not found:
        return []
    earlier = read_json(path) if path.exists() else {}
    write_json(path, {**earlier, **{scores.task: scores.facts(asked) for scores in found}})
    return [scores.line(name) for scores in found]


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Keep what lm-eval tells of its own work out of the scores; its warnings are shown."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class TaskModel(HFLM):
    """lm-eval's model over weights that are loaded already, on each of several processes.

    It computes as evaluations do: in the run's type, with the run's stops.
    """

    def __init__(self, trained: TrainedModel, batch_size: int | None) -> None:
        """Take the model; `batch_size` is of questions, None lets lm-eval find it on a GPU."""
        process = trained.process
        on_cpu = process.device.type == "cpu"
        is_half = process.compute_dtype != torch.float32
        with _tied_as_it_is(trained.model):
            super().__init__(
                pretrained=trained.model,
                tokenizer=trained.tokenizer,
                backend="causal",
                batch_size=batch_size or (8 if on_cpu else "auto"),
                max_batch_size=MOST_AT_ONCE,
                mixed_precision_dtype=process.compute_dtype if is_half else None,
                softmax_dtype=torch.float32,
            )
        self.process: Process = process
        self._rank = process.rank
        self._world_size = process.world_size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, one behind the other; numbers as (processes,)."""
        found = self.process.gather(tensor.cpu())
        return torch.cat([torch.atleast_1d(each) for each in found])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all processes on process `dst`, None on the others."""
        found = self.process.gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all processes."""
        self.process.sum(0)


@contextmanager
def _tied_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Keep lm-eval from tying weights: it would undo an adapter that trained embeddings or head."""
    model.__dict__["tie_weights"] = lambda: None
    try:
        yield
    finally:
        del model.__dict__["tie_weights"]
