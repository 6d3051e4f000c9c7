"""`train`, `plan`, `preview` and `report` for notebooks and Python programs. Loads no torch.

Settings are those of make: a config, sections as keywords (`train={"batch_size": 2}`), dotted names
(`**{"train.batch_size": 2}`), and make's variables in small letters (`num_gpus=2`). Common words
such as `model="x"`, `data="rows.jsonl"` and `lr=1e-4` name the setting that they stand for.

A command runs in a process of its own, as under make, and its error is raised here as it is there.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from sft_play.commands.ask import CommandReply, CommandRequest, run_command
from sft_play.commands.runs import verdict_lines
from sft_play.config.invocation import Invocation
from sft_play.config.schema import is_structured, settings
from sft_play.config.targets import READS, SETTING_OF, suggest_variable
from sft_play.errors import error_of_class
from sft_play.reporting.page import report_page
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import folder as run_folders
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

VARIABLES = frozenset(field.name for field in fields(Invocation)) - {"config", "exact"}
PAGE_PIXELS = 640


@dataclass(frozen=True)
class Run:
    """A run that has ended; a notebook shows its report, a terminal its verdict."""

    path: Path

    @property
    def report(self) -> RunReport:
        """What run.json says: status, metrics, seconds, memory."""
        return RunFolder(self.path).read_report()

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The scores of the held-out rows, by `before` and `after`."""
        return self.report.metrics or {}

    def __repr__(self) -> str:
        return "\n".join(verdict_lines(RunFacts.read(RunFolder(self.path))))

    def _repr_html_(self) -> str:
        return _framed(report_page(RunFacts.read(RunFolder(self.path))))


@dataclass(frozen=True, repr=False)
class Plan:
    """What a run would do: the text of `make plan`, and the values of `plan --json`."""

    text: str
    fits: bool
    values: Json

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True, repr=False)
class Preview:
    """Training samples token by token, those with loss marked."""

    text: str
    page: Path

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _framed(self.page.read_text(encoding="utf-8"))


def train(
    config: str | os.PathLike[str] | None = None,
    *,
    distributed: bool = False,
    deepspeed: bool = False,
    backend: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Fine-tune as `make train` does, and return the run once it has ended.

    Its lines are printed while it continues, unless `quiet`. An interrupt (the stop button, Ctrl-C)
    stops it with a checkpoint; a second one kills it.

    Raises: the error of the run, such as ConfigError, DataError, OutOfMemory or StoppedOnRequest.
    """
    options = {"distributed": distributed, "deepspeed": deepspeed, "backend": backend}
    answer = _ask("train", config, settings, quiet, **options)
    run = Run(Path(answer.path))
    report = run.report
    if report.state == "done":
        return run
    error = error_of_class(report.exit_class, report.cause or f"{run.path} {report.state}")
    error.add_note(f"run {run.path}")
    raise error


def plan(
    config: str | os.PathLike[str] | None = None,
    *,
    distributed: bool = False,
    deepspeed: bool = False,
    **settings: Any,
) -> Plan:
    """Return what a run would do here, or with `gpus="2xH200"` elsewhere. Raises: as `train`."""
    answer = _ask("plan", config, settings, False, distributed=distributed, deepspeed=deepspeed)
    return Plan(answer.text, answer.fits, answer.values)


def preview(
    config: str | os.PathLike[str] | None = None, *, rows: int = 3, **settings: Any
) -> Preview:
    """Return what the model sees of training rows, as `make preview` does. Raises: as `train`."""
    answer = _ask("preview", config, settings, False, rows=rows)
    return Preview(answer.text, Path(answer.path))


def report(run: str | os.PathLike[str] | None = None, output_dir: str = "outputs") -> Run:
    """Return a run by its name or folder, by default the latest. Raises: EnvironmentFault."""
    return Run(run_folders.find(Path(output_dir), None if run is None else os.fspath(run)).path)


@dataclass(frozen=True)
class Given:
    """Keywords as the command line takes them."""

    overrides: tuple[str, ...]  # words of --set
    variables: dict[str, str]  # of the environment


def read_settings(given: Mapping[str, Any]) -> Given:
    """Return keywords as words of --set and as make's variables.

    A name that is neither becomes a word too: the config then says what it most likely means.
    """
    words: list[str] = []
    variables: dict[str, str] = {}
    for name, value in given.items():
        if name in VARIABLES:
            if value is not None:
                variables[name.upper()] = _word(name, value)
        else:
            words.extend(_words(_setting_of(name, value), value))
    return Given(tuple(words), variables)


def _setting_of(name: str, value: Any) -> str:
    """Return the setting that `lr` or `model="x"` stands for, else the keyword itself."""
    is_section = any(path.startswith(f"{name}.") for path in settings())
    if name in settings() or (is_section and isinstance(value, Mapping)):
        return name
    meant = suggest_variable(name, READS["train"])
    return name if meant.is_guess else SETTING_OF.get(meant.name, name)


def _words(path: str, value: Any) -> Iterator[str]:
    """Yield a word for each setting of a section, which may hold others."""
    known = settings()
    is_section = path not in known and any(name.startswith(f"{path}.") for name in known)
    if is_section and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _words(f"{path}.{name}", inner)
    else:
        yield f"{path}={_word(path, value)}"


def _word(path: str, value: Any) -> str:
    """Return a value as it is typed in a shell."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    is_plain_list = isinstance(value, list | tuple) and not any(
        isinstance(part, Mapping) for part in value
    )
    if is_plain_list and not (path in settings() and is_structured(path)):
        return ",".join(_word("", part) for part in value)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=os.fspath)
    return str(value)


def _ask(
    command: str,
    config: str | os.PathLike[str] | None,
    given: Mapping[str, Any],
    quiet: bool,
    **options: Any,
) -> CommandReply:
    """Return the answer of a command. Raises: its error."""
    asked = read_settings(given)
    path = None if config is None else os.fspath(config)
    request = CommandRequest(command, path, asked.overrides, **options)
    found = run_command(request, asked.variables, quiet)
    if found.error is not None:
        raise error_of_class(found.exit_class, found.error)
    return found


def _framed(page: str) -> str:
    """Return a whole page for a cell's output, with its style kept to itself."""
    style = f"width: 100%; height: {PAGE_PIXELS}px; border: 0"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}"></iframe>'
