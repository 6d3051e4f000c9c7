"""The run folder: what is on disk of one run. Loads no torch.

It is the only path between the front end and the worker. It shows how a run has ended.
"""

import difflib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from pydantic import ValidationError

from sft_play.config import yaml_source
from sft_play.config.schema import Config, TrainSection, settings
from sft_play.errors import FULL, ConfigError, EnvironmentFault, ExitClass, first_line
from sft_play.runs import lock
from sft_play.runs.files import (
    Json,
    entries,
    read_json,
    rename,
    write_bytes,
    write_json,
    write_text,
)
from sft_play.runs.report import GOING_ON, RunReport

RESERVE = ".reserve"  # file whose room run.json may take on a full disk
RESERVED_BYTES = 256 << 10
WEIGHTS = ("adapter", "model")  # folders of trained weights
TIME_IN_NAME = re.compile(r"-[0-9]{8}-[0-9]{6}(-[0-9]+)?$")

# Ends after which the newest checkpoint continues, once what they name is mended
GOES_ON = (ExitClass.UNEXPECTED, ExitClass.ENVIRONMENT, ExitClass.DISK_FULL, ExitClass.PEER_LOST)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun, which accelerate starts, too, reads causes


@dataclass(frozen=True)
class RunFolder:
    """outputs/<run>: config.yaml, plan.json, data.json by the front end, the rest by the worker."""

    path: Path
    moved_base: str | None = field(default=None, kw_only=True)  # where the base is now

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """The Chrome trace that train.profile_steps asks for."""
        return self.path / "profile" / "trace.json.gz"

    @property
    def quarantine(self) -> Path:
        """Rows that could not be used, if data.on_bad_row says to continue without them."""
        return self.path / "quarantine"

    @property
    def results(self) -> Path:
        """Where answers, chats and scores go that are asked of the weights."""
        return self.path

    @property
    def evaluation(self) -> Path:
        return self.results / "eval"

    def weights(self, mode: str) -> Path:
        """Return where the trained weights go: adapter/ for lora and qlora, model/ for full."""
        return self.path / ("model" if mode == "full" else "adapter")

    def read_input(self, name: str) -> str:
        """Return a file of the front end. Raises EnvironmentFault when this is no run folder."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise EnvironmentFault(
                f"{self.path} is no run folder: it has no {name}; `make runs` lists the runs"
            ) from None

    def read_config(self) -> Config:
        """Return the resolved config.

        Raises: EnvironmentFault when this is no run folder, or one of another version.
        """
        try:
            config = Config.of_run(yaml.safe_load(self.read_input("config.yaml")))
        except (yaml.YAMLError, ValidationError) as error:
            raise EnvironmentFault(
                f"{self.path / 'config.yaml'}: {first_fault(error)}; it was edited, or written "
                "by another version: train again"
            ) from None
        if self.moved_base is None:
            return config
        return config.changed({"model.name": self.moved_base})

    def write_config(self, config: Config) -> None:
        """Write config.yaml."""
        header = (
            "# Resolved: batch, precision and paths are no longer auto. "
            "Written by the front end, read by the worker.\n"
        )
        write_text(self.path / "config.yaml", header + yaml_source.dump(config.model_dump()))

    def read_data(self) -> Json:
        """Return data.json: where the tokenized rows are.

        Raises: EnvironmentFault when this is no run folder.
        """
        try:
            return json.loads(self.read_input("data.json"))
        except ValueError as error:
            raise EnvironmentFault(
                f"{self.path / 'data.json'}: cannot be read ({error}); train again"
            ) from None

    def write_data(self, facts: Json) -> None:
        """Write data.json."""
        write_json(self.path / "data.json", facts)

    def lacks_weights(self, names: Sequence[str] = WEIGHTS) -> str | None:
        """Return why the run has none of these folders of weights, None if it has one."""
        for name in names:  # stamped last: with its stamp a folder is complete
            if (self.path / name / "stamp.json").is_file():
                return None
        report = self.read_report()
        reason = f"{report.state}: {report.cause_line}" if report.cause else report.state
        return f"{self.path} has no {' or '.join(f'{name}/' for name in names)} ({reason})"

    def read_report(self) -> RunReport:
        """Return run.json, or a report that knows nothing if there is none, or a broken one."""
        path = self.path / "run.json"
        if not path.exists():
            return RunReport()
        try:
            report = RunReport.from_json(read_json(path))
        except (ValueError, TypeError, IsADirectoryError) as error:  # edited, or a disk has failed
            return RunReport(cause=f"{path} cannot be read: {first_line(error)}")
        is_gone = report.status in GOING_ON and not lock.is_alive(self.path)
        return replace(report, is_gone=is_gone)

    def write_report(self, report: RunReport) -> None:
        """Replace run.json. While the run continues, room for its last one is kept on the disk."""
        reserve = self.path / RESERVE
        try:
            write_json(self.path / "run.json", report.to_json())
        except OSError as error:
            if error.errno not in FULL or not reserve.exists():
                raise
            reserve.unlink()
            write_json(self.path / "run.json", report.to_json())
        if report.status not in GOING_ON:
            reserve.unlink(missing_ok=True)
        elif not reserve.exists():
            write_bytes(reserve, os.urandom(RESERVED_BYTES))  # zeros take no room on some disks


def create(output_dir: Path, run_name: str | None, stem: str) -> RunFolder:
    """Make a new run folder, `<stem>-<time>` if the run has no name.

    Raises: ConfigError when the name is taken, or cannot be a folder's.
    """
    if run_name:  # RUN= comes here unchecked, and `../x` or `a/b` would leave the output folder
        try:
            TrainSection(run_name=run_name)
        except ValidationError:
            allowed = settings()["train.run_name"].json_schema_extra["write"]
            raise ConfigError(
                f"RUN={run_name} is no name for a run's folder; write {allowed}"
            ) from None
    output_dir.mkdir(parents=True, exist_ok=True)
    if run_name:
        path = output_dir / run_name
        try:
            path.mkdir()
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):  # its lock says whose it is
                return RunFolder(path)
            raise ConfigError(
                f"RUN={run_name}: {path} exists already; choose another name, or continue from it "
                f"with TRAIN_RESUME_FROM={path}"
            ) from None
        return RunFolder(path)
    name = base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(2, 1000):
        try:
            (output_dir / name).mkdir()
            return RunFolder(output_dir / name)
        except FileExistsError:  # another run started in the same second
            name = f"{base}-{number}"
    raise EnvironmentFault(
        f"{output_dir}: a thousand runs named {base}; give this one a name with RUN="
    )


def give_up_name(output_dir: Path, run_name: str) -> RunFolder | None:
    """Rename the run of this name if it has ended and kept nothing, so that it can be used.

    Returns the folder under its new name, None if the name is free or stays taken.
    """
    run = RunFolder(output_dir / run_name)
    path = run.path
    has_ended = run.read_report().state in ("failed", "stopped", "died")
    if not (path / "run.json").is_file():
        has_ended = lock.is_abandoned(path)
    if not has_ended or any((path / name).exists() for name in WEIGHTS) or entries(run.checkpoints):
        return None
    free = (output_dir / f"{run_name}-untrained-{number}" for number in range(1, 1000))
    aside = next((place for place in free if not place.exists()), None)
    with lock.claimed(path) as is_ours:
        if aside is None or not is_ours:
            return None
        rename(path, aside)
    return RunFolder(aside)


def stem_of(source: Path) -> str:
    """Return the start of an unnamed run's name: its config's, or that of the run that it repeats.

    `source` may be the config.yaml of a run folder; the time in that folder's name is left out.
    """
    if source.name == "config.yaml" and (source.parent / "plan.json").exists():
        return TIME_IN_NAME.sub("", source.absolute().parent.name)
    return source.stem


def find(output_dir: Path, run: str | None, variable: str = "RUN") -> RunFolder:
    """Return the run that a variable names (a name or a path), or the latest.

    Raises: EnvironmentFault when there is none.
    """
    if run:
        named = named_run(output_dir, run)
        if named is not None:
            return named
        if Path(run).is_dir():
            raise EnvironmentFault(
                f"{variable}={run}: that folder has no plan.json, so it is not a run. `make runs` "
                "lists the runs; make eval, infer and chat also accept a model folder or an adapter"
            )
        near = difflib.get_close_matches(
            run, [folder.name for folder in list_runs(output_dir)], n=1
        )
        hint = f"did you mean {near[0]}?" if near else "`make runs` lists the runs"
        raise EnvironmentFault(f"{variable}={run}: no such run in {output_dir}; {hint}")
    return _some_runs(output_dir)[-1]


def named_run(output_dir: Path, run: str) -> RunFolder | None:
    """Return the run of a name or a path, None if there is none."""
    for path in (output_dir / run, Path(run)):
        if (path / "plan.json").exists():
            return RunFolder(path)
    return None


def latest_with_weights(
    output_dir: Path, names: Sequence[str] = WEIGHTS
) -> tuple[RunFolder, list[str]]:
    """Return the latest run that has one of these folders of weights, and why newer ones have not.

    Raises: EnvironmentFault when there is none.
    """
    skipped: list[str] = []
    for folder in reversed(_some_runs(output_dir)):
        lack = folder.lacks_weights(names)
        if lack is None:
            return folder, skipped
        skipped.append(lack)
    raise EnvironmentFault(
        f"no run has saved weights; the latest: {skipped[0]}; `make runs` lists the runs"
    )


def list_runs(output_dir: Path) -> list[RunFolder]:
    """Return all runs, oldest first."""
    plans = [folder / "plan.json" for folder in entries(output_dir)]
    found = [plan for plan in plans if plan.is_file()]
    found.sort(key=lambda plan: plan.stat().st_mtime)
    return [RunFolder(plan.parent) for plan in found]


def _some_runs(output_dir: Path) -> list[RunFolder]:
    """Return all runs, oldest first. Raises: EnvironmentFault if there is none."""
    found = list_runs(output_dir)
    if not found:
        raise EnvironmentFault(f"{output_dir} has no run yet; `make train` makes one")
    return found


def first_fault(error: yaml.YAMLError | ValidationError) -> str:
    """Return the first thing that is wrong with a config, and where it is."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        return f"{place}: {first['msg']}"
    return str(error).splitlines()[0]


def next_line(exit_class: ExitClass, cause: str, command: str | None) -> str:
    """Return the line with what to type next, '' if the cause says it or nothing is kept."""
    if exit_class not in GOES_ON or command is None or "RESUME" in cause:
        return ""
    return f"\ngo on with {command}"


def last_words(folder: RunFolder) -> str | None:
    """Return why a run did not end well, and what to type; None if it did, or says nothing."""
    report = folder.read_report()
    if report.status not in ("failed", "stopped") or not report.exit_class or not report.cause:
        return None
    exit_class = ExitClass(report.exit_class)
    place = f"exit class {int(exit_class)} ({exit_class.name.lower()}), {folder.path}"
    return f"{report.cause}\n{place}{next_line(exit_class, report.cause, report.next)}"


def write_for_torchrun(environ: Mapping[str, str], cause: str) -> None:
    """Write why this process ends if torchrun reads it, for the table that it prints last."""
    path = environ.get(ERROR_FILE)
    if path:
        when = {"timestamp": str(int(time.time()))}
        write_json(Path(path), {"message": {"message": cause, "extraInfo": when}})


def cache_folder(config: Config) -> Path:
    """Return the folder of the cache."""
    default = Path(config.train.output_dir) / ".data"
    return Path(config.data.cache_dir or default).resolve()
