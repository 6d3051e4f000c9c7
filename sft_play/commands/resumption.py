"""RESUME: whether a train command resumes the run of its name, and whether it may. No torch."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from sft_play.commands.call import Call, load_config
from sft_play.config.layers import defaults, displayed
from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import word
from sft_play.config.on_resume import OnResume, settings_of_class
from sft_play.config.schema import env_name
from sft_play.errors import CheckpointError, ConfigError
from sft_play.plan.ranks import config_precision
from sft_play.plan.run_plan import PlannedRun, RunPlan, read_plan
from sft_play.runs import checkpoints, lock, stamp
from sft_play.runs.checkpoints import has_checkpoint
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.resumed import (
    AskedRun,
    Resumed,
    check_resumable,
    refuse_other_steps,
    resumed_run,
)

RESUME_FROM = "train.resume_from"
ELASTIC = "train.elastic"


class Resumption(NamedTuple):
    """How a command starts."""

    call: Call  # with train.resume_from, if it continues
    finished: str | None = None  # why there is nothing to do


def resumption(call: Call) -> Resumption:
    """Return the call with RESUME applied.

    auto, the default, resumes the run of the same name if it has a checkpoint; never does not
    resume; anything else is a value of train.resume_from.
    Raises: ConfigError for contradictions; EnvironmentFault if the run continues elsewhere.
    """
    if call.invocation.elastic:
        call = _with(call, ELASTIC, "true")
    asked = call.invocation.resume
    given = call.given(RESUME_FROM)
    if asked is not None and given is not None:
        raise ConfigError(
            f"RESUME={asked} and {env_name(RESUME_FROM)}={given} both select what to resume; "
            "leave one out"
        )
    if asked not in (None, "auto", "never"):
        return Resumption(_with(call, RESUME_FROM, Path(asked)))
    folder = run_of_name(call)
    if folder is None and asked == "auto":
        raise ConfigError(
            "RESUME=auto continues with the run of a name: set RUN=<name>, or RESUME=outputs/<run>"
        )
    if asked == "never" or given is not None or folder is None:
        return Resumption(call)
    return _going_on(call, folder)


def run_of_name(call: Call) -> RunFolder | None:
    """Return the folder of the run that the call names, None without a name."""
    name = call.invocation.run or call.given("train.run_name")
    if not name:
        return None
    output_dir = call.given("train.output_dir") or defaults()["train.output_dir"].value
    return RunFolder(Path(str(output_dir)) / name)


def is_in_place(folder: Path, resume_from: str | None) -> bool:
    """Return whether a run continues in its previous folder instead of a new one."""
    run = resumed_run(resume_from)
    return run is not None and run.path.resolve() == folder.resolve()


def _going_on(call: Call, folder: RunFolder) -> Resumption:
    if not (folder.path / "plan.json").exists():
        return Resumption(call)
    if call.invocation.node_rank == 0:  # another machine has a separate folder next to it
        lock.refuse_if_held(folder.path)
    report = folder.read_report()
    if report.state == "done" and folder.lacks_weights() is None:
        refuse_other_run(call, folder)
        return Resumption(
            call,
            f"run {folder.path} is finished at step {report.global_step}: nothing to do. make eval "
            f"RUN={folder.name} scores it; under another RUN, TRAIN_RESUME_FROM={folder.path} "
            "TRAIN_EXTEND=true with more TRAIN_EPOCHS trains longer",
        )
    if not has_checkpoint(folder.path):
        return Resumption(call)
    print(f"run {folder.path} continues; another RUN starts a new run")
    return Resumption(_with(call, RESUME_FROM, folder.path))


def refuse_other_run(call: Call, folder: RunFolder) -> None:
    """Refuse settings and rows that differ from a finished run's: they would have no effect.

    Raises: ConfigError with a line for each; DataError for files that cannot be read.
    """
    loaded = load_config(_with(call, RESUME_FROM, folder.path))
    settings = _other_settings(loaded, folder)
    rows = changed_rows(loaded, folder)
    if not settings and not rows:
        return
    what = " and ".join(name for name, found in (("settings", settings), ("rows", rows)) if found)
    instead = "leave them out" if not rows else "give it what it was trained with"
    head = f"run {folder.path} is finished, with other {what} than these:"
    advice = f"choose another RUN to train with them, or {instead}"
    raise ConfigError("\n".join([head, *settings, *rows, advice]))


def _other_settings(loaded: LoadedConfig, folder: RunFolder) -> list[str]:
    """Return a line for each given setting that a finished run was not trained with."""
    trained = folder.read_config()
    asked = AskedRun.read(folder)
    own = f"{displayed(folder.path / 'config.yaml')}:"
    problems = []
    for path in settings_of_class(OnResume.MUST_MATCH):
        if loaded.origin[path].startswith(own) or not loaded.is_set(path):
            continue
        before = (asked.settings[path].value, word(attrgetter(path)(trained)))
        if word(loaded.value(path)) not in before:
            problems.append(f"{loaded.described(path)}, and it was trained with {before[0]}")
    return problems


def changed_rows(loaded: LoadedConfig, folder: RunFolder) -> list[str]:
    """Return a line for each data setting whose files differ from those of a finished run."""
    from sft_play.data.sources import changed_sources

    lines = []
    for setting, reasons in changed_sources(folder.read_data(), loaded.config).items():
        lines.append(f"{loaded.described(setting)}: {'; '.join(reasons)}")
    return lines


def _with(call: Call, path: str, value: object) -> Call:
    return replace(call, environ={**call.environ, env_name(path): str(value)})


def plan_of_resumed(resume_from: str | None) -> RunPlan | None:
    """Return the plan of the run that is resumed, None if no run is resumed."""
    run = resumed_run(resume_from)
    return read_plan(run) if run else None


def check_resume(planned: PlannedRun, loaded: LoadedConfig) -> None:
    """Refuse a checkpoint that a run may not resume, before its folder is made.

    Raises: CheckpointError.
    """
    train = planned.config.train
    if train.resume_from is None:
        return
    # the worker also reads large files before it loads a checkpoint
    checkpoint = checkpoints.choose_checkpoint(Path(train.resume_from), print, reads_all=False)
    resumed = Resumed(checkpoint, stamp.read_stamp(checkpoint))
    resumed.refuse_changes(planned.config, loaded.origin)
    now = replace(stamp.wanted_stamp(planned.config), precision=config_precision(planned.config))
    saved = stamp.refuse_mismatch(checkpoint, now, train.allow_backend_change)
    ranks = planned.plan.ranks
    check_resumable(checkpoint, saved, ranks.strategy, ranks.world_size, train.elastic)
    run = resumed_run(train.resume_from)
    if run is not None:
        with lock.claimed(run.path) as is_ours:
            if is_ours:
                checkpoints.remove_leftovers(run.checkpoints, print)
    print(f"resume {checkpoint}")
    if saved.world_size != ranks.world_size:
        print(
            f"resume {saved.world_size} processes are {ranks.world_size} now: every row is "
            "trained once, as before; sums round otherwise, and dropout draws other numbers"
        )
    for change in resumed.changes(planned.config):
        if attrgetter(change.path)(loaded.config) == "auto":
            continue  # its number may follow from the rows, and from a probe
        print(f"resume {change.path} was {word(change.then)} and is {word(change.now)}")


def check_resumed_rows(folder: RunFolder, planned: PlannedRun, before: Json | None) -> None:
    """Refuse to resume on other rows, once they are tokenized.

    `before` is data.json of the resumed run, None if there is none. Raises: CheckpointError.
    """
    from sft_play.data.assemble import DataFacts
    from sft_play.data.sources import changed_sources

    if planned.config.train.resume_from is None:
        return
    checkpoint = checkpoints.choose_checkpoint(
        Path(planned.config.train.resume_from), print, reads_all=False
    )
    sources = DataFacts.from_json(folder.read_data()).sources
    digests = [source.digest for split in sources.values() for source in split]
    data_digest = stamp.digest_of_text(*digests)
    rows_per_step = planned.plan.layout.rows_per_step
    try:
        refuse_other_steps(checkpoint, stamp.read_stamp(checkpoint), data_digest, rows_per_step)
    except CheckpointError as error:
        if before is None:
            raise
        if is_in_place(folder.path, planned.config.train.resume_from):
            folder.write_data(before)
        changed = changed_sources(before, planned.config).items()
        lines = [f"  {setting}: {'; '.join(reasons)}" for setting, reasons in changed]
        raise CheckpointError("\n".join([str(error), *lines])) from error


def data_of_resumed(resume_from: str | None) -> Json | None:
    """Return data.json of the run that is resumed, None if there is none."""
    run = resumed_run(resume_from)
    return run.read_data() if run is not None and (run.path / "data.json").is_file() else None
