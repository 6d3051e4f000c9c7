"""`make sweep`: a run for each combination of settings, in parallel if there are GPUs.

Every run is a separate `python -m sft_play train`. Its name follows from its settings, so the
same command resumes stopped runs. Loads no torch.
"""

import hashlib
import itertools
import json
import math
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from sft_play.commands.call import Call, load_config, plan_run
from sft_play.commands.resumption import other_rows
from sft_play.config.targets import GIVEN, GOALS
from sft_play.errors import ConfigError, EnvironmentFault, StoppedOnRequest
from sft_play.reporting.answers import title_of
from sft_play.runs.checkpoints import has_checkpoint
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import GOING_ON, score_names
from sft_play.runs.resumed import AskedRun
from sft_play.runs.tables import aligned
from sft_play.stops import StopSignals

EXAMPLE = 'OVER="train.learning_rate=1e-4,2e-4 tuning.lora.r=8,16"'
COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside a list or a mapping
MAX_RUNS = 1000
NOT_SWEPT = ("train.run_name", "train.output_dir", "train.resume_from", "train.stop_after")


def grid(over: str) -> list[tuple[str, ...]]:
    """Return every combination of OVER's values, the last setting changing first.

    Each contains its settings as written after --set, e.g. train.learning_rate=1e-4.
    Raises: ConfigError for words that are not `setting=value,value`.
    """
    axes: dict[str, list[str]] = {}
    for word in over.split():
        path, equals, text = word.partition("=")
        values = [value for value in COMMA.split(text) if value]
        if not equals or not values:
            raise ConfigError(f"OVER: {word} names no values; write {EXAMPLE}")
        if path in axes:
            raise ConfigError(f"OVER: {path} appears twice; write all its values in one word")
        if path in NOT_SWEPT:
            raise ConfigError(f"OVER: {path} cannot be swept; leave it out")
        axes[path] = [f"{path}={value}" for value in dict.fromkeys(values)]
    if not axes:
        raise ConfigError(f"a sweep needs settings with values; write make sweep {EXAMPLE}")
    count = math.prod(map(len, axes.values()))
    if count > MAX_RUNS:
        raise ConfigError(
            f"OVER: {' x '.join(str(len(values)) for values in axes.values())} values are {count} "
            f"runs; a sweep has at most {MAX_RUNS}. Leave out settings or values."
        )
    return list(itertools.product(*axes.values()))


def name_of(prefix: str, settings: Mapping[str, object]) -> str:
    """Return the name of the run with these settings; equal settings give the same name."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


NOT_PASSED_ON = (GIVEN, GOALS, "OVER", "RUN")  # variables of this command, not of its runs


@dataclass(frozen=True)
class Trial:
    """A combination of settings, and the folder of its run, which may not exist yet."""

    words: tuple[str, ...]  # the settings as they are written after --set
    folder: RunFolder

    @property
    def settings(self) -> str:
        return " ".join(self.words)

    @property
    def is_done(self) -> bool:
        """Whether the run was trained to its end."""
        return self.folder.read_report().state == "done"

    @property
    def loss(self) -> float | None:
        """The held-out loss, None without a score."""
        return self.folder.read_report().scores("after").get("eval_loss")


class Sweep(StopSignals):
    """The processes of the runs. Inside this context a signal stops them.

    A training run then saves a checkpoint and ends; no further run starts.
    """

    def __init__(self, call: Call, slots: Sequence[str | None]) -> None:
        """`slots` are the values of CUDA_VISIBLE_DEVICES for parallel runs."""
        super().__init__()
        self.call = call
        self.slots = slots
        self.on_first = lambda number: self._stop()
        self.at_once = self._stop
        self._processes: list[subprocess.Popen[bytes]] = []

    def _stop(self) -> None:
        for process in self._processes.copy():
            process.send_signal(signal.SIGINT)

    def run(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        """Run a command to its end; its output goes to `log`."""
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it only once, through this process
            )
            self._processes.append(process)
            if self.requested:  # the signal came while the process was starting
                process.send_signal(signal.SIGINT)
            process.wait()
            self._processes.remove(process)


def sweep(call: Call, over: str) -> list[str]:
    """Train every combination of `over` that is not done, and return the lines of the table.

    Raises: ConfigError for a combination that is not valid, before the first run; EnvironmentFault
    when none of the runs has scores; StoppedOnRequest with the table after a signal.
    """
    trials = plan_trials(call, over)
    one = with_words(call, trials[0].words)
    ranks = plan_run(one, load_config(one), distributed=True).plan.ranks
    slots = list(ranks.visible) if ranks.device == "cuda" else [None]
    done = [trial for trial in trials if trial.is_done]
    refuse_other_rows(call, done)
    print(f"sweep {len(trials)} runs, {len(done)} done, {len(slots)} at a time", flush=True)
    with Sweep(call, slots) as running:
        train_all(running, [trial for trial in trials if trial not in done])
    lines = table(trials)
    if running.requested:
        lines.append("stopped on request; the same command continues from the checkpoints")
        raise StoppedOnRequest("\n".join(lines))
    best = best_of(trials)
    if best is None:
        lines.append(f"no run has scores; the reason is in {log_of(trials[0].folder)}")
        raise EnvironmentFault("\n".join(lines))
    return lines + lines_of_best(best)


def plan_trials(call: Call, over: str) -> list[Trial]:
    """Return a trial for each combination; every one of them is checked.

    Raises: ConfigError, also while a run of the same sweep is active.
    """
    trials = []
    for words in grid(over):
        config = load_config(with_words(call, words)).config
        if config.train.stop_after is not None:
            raise ConfigError(
                f"train.stop_after={config.train.stop_after}: a sweep trains its runs to their "
                "end. Leave TRAIN_STOP_AFTER out."
            )
        name = name_of(call.invocation.run or "sweep", config.model_dump(mode="json"))
        folder = RunFolder(Path(config.train.output_dir) / name)
        if folder.read_report().state in GOING_ON:
            raise ConfigError(f"{folder.path} is running; wait for the sweep that started it")
        trials.append(Trial(words, folder))
    return trials


def refuse_other_rows(call: Call, done: Sequence[Trial]) -> None:
    """Refuse to count runs as done if their data files have changed: others would use new files.

    Raises: ConfigError.
    """
    compared = set()  # a sweep's runs usually have the same files, which may be large
    for trial in done:
        run = trial.folder
        loaded = load_config(with_words(call, trial.words))
        data = loaded.config.data.model_dump(mode="json")
        sources = json.dumps([run.read_data()["sources"], data])
        lines = other_rows(loaded, run) if sources not in compared else []
        compared.add(sources)
        if lines:
            head = f"run {run.path} of this sweep is finished, with other rows than these:"
            advice = "write another RUN for a new sweep, or use the rows that it was trained on"
            raise ConfigError("\n".join([head, *lines, advice]))


def with_words(call: Call, words: tuple[str, ...]) -> Call:
    """Return the call of one combination."""
    return replace(call, overrides=call.overrides + words)


def train_all(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Run the trials, one per slot at a time, until a signal stops them."""
    free: queue.Queue[str | None] = queue.Queue()
    for slot in sweep.slots:
        free.put(slot)

    def run(trial: Trial) -> None:
        if sweep.requested:
            return
        slot = free.get()
        try:
            train_one(sweep, trial, slot)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(sweep.slots)) as pool:
        for future in [pool.submit(run, trial) for trial in trials]:
            future.result()


def train_one(sweep: Sweep, trial: Trial, slot: str | None) -> None:
    """Train one trial to its end, from its checkpoint if it has one; the output goes to a log."""
    folder = trial.folder
    log = log_of(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    place = "" if slot is None else f" on GPU {slot}"
    origin = ", from its checkpoint" if has_checkpoint(folder.path) else ""
    print(f"start {folder.name}{place}: {trial.settings}{origin}", flush=True)
    environ = {
        name: value for name, value in sweep.call.environ.items() if name not in NOT_PASSED_ON
    }
    environ["RUN"] = folder.name
    if slot is not None:
        environ |= {"CUDA_VISIBLE_DEVICES": slot, "NUM_GPUS": "1"}
    words = [f"--set={word}" for word in sweep.call.overrides + trial.words]
    sweep.run([sys.executable, "-m", "sft_play", "train", *words], environ, log)
    if not folder.path.exists():
        print(f"end   {folder.name}: did not start; {log} has the reason", flush=True)
        return
    shown = "no scores" if trial.loss is None else f"held-out loss {trial.loss:.4f}"
    print(f"end   {folder.name}: {folder.read_report().state}, {shown}", flush=True)


def log_of(folder: RunFolder) -> Path:
    """Return the file with the output of a sweep's run."""
    return folder.path.parent / ".sweep" / f"{folder.name}.log"


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the finished trial with the lowest held-out loss, None if no trial has a score."""
    done = [trial for trial in trials if trial.is_done]
    scored = [trial for trial in done if trial.loss is not None and math.isfinite(trial.loss)]
    return min(scored, key=attrgetter("loss"), default=None)


def table(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each trial: settings, held-out scores, last step, minutes and status."""
    reports = [trial.folder.read_report() for trial in trials]
    found = [name for report in reports for name in score_names(report.scores("after"))]
    names = dict.fromkeys(["rougeL", *found])
    titles = [title_of(name) for name in names]
    rows = [["settings", "loss", *titles, "step", "minutes", "status"]]
    for trial, report in zip(trials, reports, strict=True):
        scores = report.scores("after")
        seconds = report.total_seconds
        cells = [trial.settings, as_cell(scores.get("eval_loss"), 4)]
        cells += [as_cell(scores.get(name), 3) for name in names]
        cells.append(as_cell(report.global_step, 0))
        cells.append(as_cell(seconds / 60 if seconds else None, 1))
        cells.append(f"{report.state} {trial.folder.name} {report.cause_line}")
        rows.append(cells)
    return aligned(rows, left=(0, len(rows[0]) - 1))


def as_cell(number: float | None, digits: int) -> str:
    """Return a number of the table, a dash if there is none."""
    return "-" if number is None else f"{number:.{digits}f}"


def lines_of_best(best: Trial) -> list[str]:
    """Return what to type to use the best run."""
    name = best.folder.name
    return [
        f"best {name}: {best.settings}",
        f"  the same again: {AskedRun.read(best.folder).command}",
        f"  use it: make chat RUN={name}",
    ]
