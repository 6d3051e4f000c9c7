"""The train targets: plan a run, write its folder, start its ranks, and prepare for them.

Loads no torch.
"""

import atexit
import contextlib
import importlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import yaml

from sft_play import stops, timeline
from sft_play.commands.call import Call, load_config, plan_run
from sft_play.commands.early import EarlyRank
from sft_play.commands.launched import Launched, start_ranks
from sft_play.commands.nodes import Wait, meet
from sft_play.commands.plan import given_variables, refuse_what_does_not_fit, run_stem
from sft_play.commands.resumption import (
    check_resume,
    check_resumed_rows,
    data_of_resumed,
    is_in_place,
    plan_of_resumed,
    resumption,
)
from sft_play.config import place as places
from sft_play.config.backends import BACKENDS
from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config, env_name
from sft_play.errors import (
    ConfigError,
    EnvironmentFault,
    ExitClass,
    SftPlayError,
    disk_errors_in_words,
)
from sft_play.monitor import packages
from sft_play.plan import launch, next_command, report
from sft_play.plan.base_model import refuse_missing_weights
from sft_play.plan.devices import GIB
from sft_play.plan.launch import DEFAULT_PORT
from sft_play.plan.ranks import config_precision
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.progress import go_on_without_output, visible
from sft_play.runs import folder as run_folders
from sft_play.runs import lock
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder, last_words
from sft_play.runs.model_folder import refuse_unsafe_base
from sft_play.runs.report import STARTED_AT, RunReport
from sft_play.runs.resumed import AskedRun

ACCELERATE_FILE = Path(".accelerate.yaml")  # in the current folder, like outputs/
FREE_BYTES_FOR_A_RUN = 1 << 30
NOT_BEGUN = "stopped on request before training began; nothing was trained"


def train(
    call: Call,
    distributed: bool,
    use_deepspeed: bool,
    with_tensorboard: bool,
    backend: str | None = None,
    launched: Launched | None = None,
) -> None:
    """Plan a run, write its folder and replace the process with its launcher.

    If a launcher has already started this process, as one of several, it becomes a worker.
    Never returns. Raises: StoppedOnRequest after a signal.
    """
    stops.end_with_make()
    go_on_without_output()
    is_rank = launched is not None and launched.place is not None
    with stops.stopped_with(NOT_BEGUN):
        for sentence in [] if launched else places.remarks(call.environ, None):
            print(f"warning: {sentence}")
        if call.invocation.gpus:
            raise ConfigError(
                f"GPUS={call.invocation.gpus} works only with make plan; type NUM_GPUS=N to train "
                "on N GPUs of this machine"
            )
        begin = resumption(call)
        if begin.finished is not None:
            print(begin.finished)
            raise SystemExit(int(ExitClass.DONE))
        call = begin.call
        if is_rank:
            use_deepspeed = use_deepspeed or launched.place.uses_deepspeed
        folder, planned, early = prepare_run(
            call, distributed, use_deepspeed, backend, with_tensorboard, is_rank
        )
        if with_tensorboard:
            print(start_tensorboard(call, folder.path.parent))  # every run with its name
        sys.stdout.flush()
        with failure_recorded(folder):
            if is_rank:
                start_ranks(launched, folder, planned.plan.launch)
            hand_over(folder, planned, call, early)


def hand_over(
    folder: RunFolder, planned: PlannedRun, call: Call, early: EarlyRank | None
) -> NoReturn:
    """Become the launcher of a run, or its only rank, once all its machines have come.

    If its only rank has already been started, this process forwards signals to it.
    """
    command = planned.plan.launch
    ranks = planned.plan.ranks
    if ranks.nodes > 1:
        port = ranks.master_port or DEFAULT_PORT
        seconds = planned.config.train.rendezvous_timeout
        meet(Wait(ranks.node_rank, ranks.nodes, ranks.master_addr, port, seconds))
    if ranks.strategy != "single":
        command = launch.recorded(command, folder.path)
    folder.write_report(replace(folder.read_report(), timeline=timeline.spans))
    stops.hold()
    if early is not None:
        command = early.begin(command, folder.path, call.environ) or command
    launch.execute(command, call.environ)
    raise AssertionError("execute does not return")


def prepare_run(
    call: Call,
    distributed: bool,
    use_deepspeed: bool,
    backend: str | None = None,
    with_tensorboard: bool = False,
    is_rank: bool = False,
) -> tuple[RunFolder, PlannedRun, EarlyRank | None]:
    """Do everything before the launch: plan, make the run's folder, tokenize its rows.

    `is_rank` is True if the ranks are already started and this process is one of them.
    """
    call = with_project_ranks(call, distributed)
    loaded = load_config(call, backend)
    # before a rank exists, whose GPU memory would be attributed to another program
    hardware = call.hardware
    early = None
    if not (is_rank or distributed or use_deepspeed):
        early = EarlyRank.of(loaded.config, call.invocation, hardware, call.environ)
    refuse_unsafe_base(loaded.config)
    planned = plan_run(call, loaded, distributed, use_deepspeed, hardware)
    refuse_missing_weights(planned.config.model.name)
    refuse_what_does_not_fit(planned.plan)
    for warning in planned.plan.warnings:
        print(f"warning: {warning}")
    for sentence in planned.plan.recipe:
        print(f"recipe {sentence}")
    check_resume(planned, loaded)
    check_trackers(planned.config, with_tensorboard)
    earlier = plan_of_resumed(planned.config.train.resume_from)  # its folder may be this run's
    timeline.note("config and plan")
    folder = new_run(call, loaded, planned.config)
    lock.take(folder.path, print, folder.read_report().status == "stopped")
    command_of = launch.rank_command if is_rank else launch.launch_command
    command = command_of(planned.plan.ranks, folder.path, call.environ)
    planned = replace(planned, plan=replace(planned.plan, launch=command))
    AskedRun.of(loaded, repeating_command(call, planned.plan, backend)).write(folder)
    planned.write(folder)  # plan.json identifies a run folder
    folder.write_report(planned_report(folder))
    print(report.plan_line(planned))
    print(f"run {folder.path}")
    print(f"watch it from another terminal: make watch RUN={folder.path}")
    with failure_recorded(folder), timeline.span("rows are tokenized"):
        return folder, with_rows(folder, planned, earlier), early


def with_rows(folder: RunFolder, planned: PlannedRun, earlier: RunPlan | None) -> PlannedRun:
    """Tokenize the rows of a run, and write the files that its ranks read.

    `earlier` is the plan of the resumed run, None for a new run.
    """
    from sft_play.data.pipeline import tokenize_run

    unpacked = planned.plan.layout.micro_batches
    before = data_of_resumed(planned.config.train.resume_from)  # its folder may be this run's
    planned = tokenize_run(folder, planned)
    if earlier is not None:
        planned = planned.as_before(earlier)
    check_resumed_rows(folder, planned, before)
    planned.write(folder)  # now known: micro-batches of a packed step, the longest answer
    if planned.plan.packing:
        print(report.packing_line(planned.plan, unpacked))
    write_launcher_files(folder, planned)
    return planned


def planned_report(folder: RunFolder) -> RunReport:
    """Return the run.json of a run that has not started; this process will be its launcher."""
    earlier = folder.read_report()  # of the launch that is resumed
    before = earlier.scores("before")
    return RunReport(
        run=folder.name,
        run_id=earlier.run_id or secrets.token_hex(8),
        metrics={"before": before} if before else None,
        checkpoint=earlier.checkpoint,
        next=earlier.next,
        status="planned",
        host=socket.gethostname(),
        launcher_pid=os.getpid(),
        started_at=time.strftime(STARTED_AT),
    )


def repeating_command(call: Call, plan: RunPlan, backend: str | None) -> str:
    """Return the make command that starts the same run again with a new name."""
    given = given_variables(call, env_name("train.run_name"))  # the name is now taken
    if backend:  # that of a target such as train-unsloth, which may have a config of its own
        if env_name("train.resume_from") not in given:
            given.setdefault("CONFIG", BACKENDS[backend].default_config)
        given[env_name("tuning.backend")] = backend
    return " ".join(next_command.start_command(plan, given))


def write_launcher_files(folder: RunFolder, planned: PlannedRun) -> None:
    """Write the files for accelerate and DeepSpeed."""
    plan = planned.plan
    if plan.ranks.strategy in ("ddp", "fsdp", "ep"):
        config = launch.accelerate_config(plan.ranks, mixed_precision(planned.config))
        header = "Written for this run; accelerate reads no other file."
        launch.write_accelerate_config(folder.path / "accelerate.yaml", config, header)
    if plan.deepspeed is not None:
        write_json(folder.path / "deepspeed.json", plan.deepspeed.settings)


@contextlib.contextmanager
def failure_recorded(folder: RunFolder) -> Iterator[None]:
    """Record in run.json and report.html why a run ends before its launch."""
    try:
        with disk_errors_in_words():
            yield
    except SftPlayError as error:
        _record_end(folder, "failed", error.exit_class, str(error))
        raise
    except KeyboardInterrupt:
        _record_end(folder, "stopped", ExitClass.STOPPED, NOT_BEGUN)
        raise


def _record_end(folder: RunFolder, status: str, exit_class: ExitClass, cause: str) -> None:
    report = replace(folder.read_report(), status=status, exit_class=int(exit_class), cause=cause)
    try:
        folder.write_report(report)
    except OSError as error:  # it must not hide the cause
        print(f"{folder.path / 'run.json'} cannot be written: {error.strerror}")
    lock.release(folder.path)
    from sft_play.reporting.page import write_report_or_warn  # its templates take a while

    write_report_or_warn(folder)


def with_project_ranks(call: Call, distributed: bool) -> Call:
    """Return the call with NUM_GPUS from the file of `make setup-accelerate`.

    The user's number takes precedence, and a file for another device is ignored.
    """
    if not distributed or call.invocation.num_gpus is not None or not ACCELERATE_FILE.exists():
        return call
    found = yaml.safe_load(ACCELERATE_FILE.read_text(encoding="utf-8"))
    is_cpu = call.machine.kind == "cpu"
    if bool(found.get("use_cpu")) != is_cpu:
        return call
    number = found["num_processes"] // max(1, found.get("num_machines", 1))
    device = "cpu" if is_cpu else call.invocation.device  # the file was written for it
    invocation = replace(call.invocation, num_gpus=number, device=device)
    return replace(call, invocation=invocation)


def check_trackers(config: Config, with_tensorboard: bool) -> None:
    """Refuse trackers that cannot be used, before anything is tokenized or loaded."""
    names = config.train.report_to
    packages.require_trackers(names)
    if with_tensorboard and "tensorboard" not in names:
        raise ConfigError(
            f"train.report_to={','.join(names) or 'none'} writes nothing that TensorBoard shows; "
            "leave out -tb, or add tensorboard"
        )


def new_run(call: Call, loaded: LoadedConfig, config: Config) -> RunFolder:
    """Make the run's folder on a disk with enough space. Raises EnvironmentFault, ConfigError."""
    output_dir = Path(config.train.output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(output_dir).free
    except OSError as error:
        raise EnvironmentFault(
            f"train.output_dir={output_dir}: {error.strerror}; "
            "set TRAIN_OUTPUT_DIR to a folder that can be written"
        ) from None
    if free_bytes < FREE_BYTES_FOR_A_RUN:
        raise EnvironmentFault(
            f"train.output_dir={output_dir}: {free_bytes / GIB:.2f} GiB are free on its disk, "
            "a run needs 1; set TRAIN_OUTPUT_DIR to another disk"
        )
    # every machine of a run writes a separate folder, on a disk that they may share
    node_rank = call.invocation.node_rank
    of_node = f"-node{node_rank}" if node_rank else ""
    run_name = call.invocation.run or config.train.run_name
    if run_name:
        run_name += of_node
        if is_in_place(output_dir / run_name, config.train.resume_from):
            return RunFolder(output_dir / run_name)
        given_up = run_folders.give_up_name(output_dir, run_name)
        if given_up is not None:
            print(f"an earlier run {run_name} kept nothing; it is {given_up.path} now")
    return run_folders.create(output_dir, run_name, run_stem(loaded) + of_node)


def mixed_precision(config: Config) -> str:
    """Return the compute type as accelerate names it."""
    name = config_precision(config)
    return "no" if name == "float32" else name


def setup_accelerate(call: Call) -> list[str]:
    """Write the project's accelerate file for this machine; repeated calls write the same file."""
    planned = plan_run(call, load_config(call), distributed=True)
    config = launch.accelerate_config(planned.plan.ranks, mixed_precision(planned.config))
    header = (
        "Written by make setup-accelerate for this machine; "
        "NUM_GPUS=N make setup-accelerate changes the number."
    )
    launch.write_accelerate_config(ACCELERATE_FILE, config, header)
    device = planned.plan.ranks.device
    return [
        f"wrote {ACCELERATE_FILE.name}: {config['num_processes']} processes on {device}, "
        f"mixed precision {config['mixed_precision']}",
        "make train-distributed uses it; NUM_GPUS=N on its command line wins over it",
    ]


def start_tensorboard(call: Call, logdir: Path) -> str:
    """Start TensorBoard with a run; return the line with its address."""
    from sft_play.monitor import tensorboard

    _, message = tensorboard.start_tensorboard(
        logdir, call.invocation.tb_port, sys.executable, call.environ, call.pid_file
    )
    return f"{message}; make tb-stop ends it"


def run_launcher(folder: str, module: str, *words: str) -> None:
    """Run the `main` of a launcher's module, and forward signals to the ranks that it starts.

    Its output about a failed rank has neither the reason nor what to type, so the run's message
    follows it: at the exit, because Python prints an exception just before.
    """
    sys.argv = [module, *words]
    run = RunFolder(Path(folder))

    def say_last_words() -> None:
        """Print why the run has ended, if it ended with an error."""
        words = last_words(run)
        if words is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                sys.stderr.write(f"\n{visible(words)}\n")
                sys.stderr.flush()

    def end() -> None:
        """End before a rank exists."""
        _record_end(run, "stopped", ExitClass.STOPPED, NOT_BEGUN)
        say_last_words()
        stops.leave()

    atexit.register(say_last_words)
    begin = stops.pass_on(end)
    with failure_recorded(run):
        launcher = importlib.import_module(module)  # takes seconds
        begin()
        try:
            launcher.main()
        finally:
            if run.read_report().exit_class == ExitClass.STOPPED:
                sys.exit(int(ExitClass.STOPPED))  # the ranks' class, which launchers replace with 1
