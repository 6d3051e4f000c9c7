"""`make sweep`: a run for each combination of settings, side by side where there are GPUs.

Every run is a `python -m sft_play train` of its own. Its name follows from its settings, so the
same command goes on where it was stopped. Loads no torch.
"""

import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sft_play.commands.call import Call, load_config, plan_run
from sft_play.config.targets import GIVEN, GOALS
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.sweep import Point, grid, name_of
from sft_play.runs.asked import AskedRun
from sft_play.runs.folder import RunFolder

ATTEMPTS = 100  # of one combination
NOT_PASSED_ON = (GIVEN, GOALS, "OVER", "RUN")  # of this command, not of its runs


@dataclass(frozen=True)
class Trial:
    """A combination of settings, and the folder of its run, which may not be there yet."""

    point: Point
    folder: RunFolder

    @property
    def held_out(self) -> dict[str, float]:
        """The scores after training, {} where the run has none."""
        return (self.folder.read_report().metrics or {}).get("after", {})


def sweep(call: Call, over: str) -> list[str]:
    """Train every combination of `over` that is not done, and return the lines of the table.

    Raises: ConfigError for a combination that is not valid, before the first run; EnvironmentFault
    when none of the runs has scores.
    """
    trials = plan_trials(call, over)
    waiting = [trial for trial in trials if trial.folder.read_report().state != "done"]
    slots = gpu_slots(call, trials[0].point)
    print(f"sweep {len(trials)} runs, {len(trials) - len(waiting)} done, {len(slots)} at a time")
    train_all(call, waiting, slots)
    best = best_of(trials)
    if best is None:
        log = log_of(trials[0].folder)
        raise EnvironmentFault("\n".join([*table(trials), f"no run has scores; {log} says why"]))
    return [*table(trials), *lines_of_best(best)]


def plan_trials(call: Call, over: str) -> list[Trial]:
    """Return a trial for each combination; every one of them is checked."""
    trials = []
    for point in grid(over):
        one = Call(call.invocation, call.environ, (*call.overrides, *point.words))
        config = load_config(one).config
        output_dir = Path(config.train.output_dir)
        name = name_of(call.invocation.run or "sweep", config.model_dump(mode="json"))
        trials.append(Trial(point, free_or_done(output_dir, name)))
    return trials


def free_or_done(output_dir: Path, name: str) -> RunFolder:
    """Return the finished run of this name, or else the folder that the next attempt makes.

    Raises: ConfigError while a run of this name is going on.
    """
    for number in range(1, ATTEMPTS):
        folder = RunFolder(output_dir / (name if number == 1 else f"{name}-{number}"))
        if not folder.path.exists():
            return folder
        report = folder.read_report()
        if report.state == "done":
            return folder
        if report.state in ("planned", "running"):
            raise ConfigError(f"{folder.path} is running; wait for the sweep that started it")
    raise ConfigError(f"{output_dir / name}: {ATTEMPTS} runs with these settings failed")


def gpu_slots(call: Call, point: Point) -> list[str | None]:
    """Return an entry of CUDA_VISIBLE_DEVICES for each run at a time; [None] without a GPU."""
    one = Call(call.invocation, call.environ, (*call.overrides, *point.words))
    ranks = plan_run(one, load_config(one), distributed=True).plan.ranks
    return list(ranks.visible) if ranks.device == "cuda" else [None]


def train_all(call: Call, trials: Sequence[Trial], slots: Sequence[str | None]) -> None:
    """Run the trials, one on each slot at a time. Ctrl-C ends those that run and starts no more."""
    free: queue.Queue[str | None] = queue.Queue()
    for slot in slots:
        free.put(slot)

    def run(trial: Trial) -> None:
        slot = free.get()
        try:
            train_one(call, trial, slot)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(slots)) as pool:
        started = [pool.submit(run, trial) for trial in trials]
        try:
            for future in started:
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_one(call: Call, trial: Trial, slot: str | None) -> None:
    """Train one trial to its end; what it prints goes to a file beside its folder."""
    place = "" if slot is None else f" on GPU {slot}"
    print(f"start {trial.folder.name}{place}: {trial.point}", flush=True)
    environ = {name: value for name, value in call.environ.items() if name not in NOT_PASSED_ON}
    environ["RUN"] = trial.folder.name
    if slot is not None:
        environ |= {"CUDA_VISIBLE_DEVICES": slot, "NUM_GPUS": "1"}
    words = [f"--set={word}" for word in (*call.overrides, *trial.point.words)]
    command = [sys.executable, "-m", "sft_play", "train", *words]
    log = log_of(trial.folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    loss = trial.held_out.get("eval_loss")
    shown = "no scores" if loss is None else f"held-out loss {loss:.4f}"
    print(f"end   {trial.folder.name}: {trial.folder.read_report().state}, {shown}", flush=True)


def log_of(folder: RunFolder) -> Path:
    """Return the file with what a run of a sweep prints."""
    return folder.path.parent / ".sweep" / f"{folder.name}.log"


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the lowest held-out loss, None where none has a score."""
    scored = [trial for trial in trials if "eval_loss" in trial.held_out]
    return min(scored, key=lambda trial: trial.held_out["eval_loss"], default=None)


def table(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each trial: settings, held-out scores, minutes and status."""
    width = max(len(str(trial.point)) for trial in trials)
    lines = [f"{'settings':<{width}}  {'loss':>8}  {'ROUGE-L':>7}  {'minutes':>7}  status"]
    for trial in trials:
        report = trial.folder.read_report()
        cause = (report.cause or "").partition("\n")[0]
        numbers = [
            as_cell(trial.held_out.get("eval_loss"), 8, 4),
            as_cell(trial.held_out.get("rougeL"), 7, 3),
            as_cell(minutes_of(report.seconds), 7, 1),
        ]
        status = f"{report.state} {trial.folder.name} {cause}".rstrip()
        lines.append("  ".join([f"{trial.point!s:<{width}}", *numbers, status]))
    return lines


def as_cell(number: float | None, width: int, digits: int) -> str:
    """Return a number of the table, right-aligned; a dash where there is none."""
    return f"{'-':>{width}}" if number is None else f"{number:>{width}.{digits}f}"


def minutes_of(seconds: dict[str, float] | None) -> float | None:
    """Return how long a whole run took."""
    total = (seconds or {}).get("total")
    return None if total is None else total / 60


def lines_of_best(best: Trial) -> list[str]:
    """Return what to type with the best run."""
    asked = AskedRun.read(best.folder)
    lines = [f"best {best.folder.name}: {best.point}"]
    if asked is not None:
        lines.append(f"  the same again: {asked.command}")
    return [*lines, f"  use it: make chat RUN={best.folder.name}"]
