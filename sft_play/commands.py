"""What each command does, told in calls to the rooms. Loads no torch until a command needs it."""

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft_play.config import invocation as invocations
from sft_play.config import loader
from sft_play.config.backends import BACKENDS
from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.schema import Config, env_name, settings
from sft_play.config.yaml_source import Located
from sft_play.data.row_counts import count_rows_or_reason
from sft_play.errors import ConfigError, EnvironmentFault, ExitClass, SftPlayError
from sft_play.plan import accuracy, devices, launch, next_command, report
from sft_play.plan.devices import GIB
from sft_play.plan.precision import precision
from sft_play.plan.resolve import fastest, resolve
from sft_play.plan.run_plan import PlannedRun, RunPlan
from sft_play.plan.workload import workload
from sft_play.runs import folder as run_folders
from sft_play.runs import stamp
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport

ACCELERATE_FILE = PROJECT_ROOT / ".accelerate.yaml"
LAUNCH_VARIABLES = (
    "CONFIG",
    "NUM_GPUS",
    "DEVICE",
    "DEEPSPEED_CONFIG",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
FREE_BYTES_FOR_A_RUN = 1 << 30


@dataclass(frozen=True)
class Call:
    """How a command was called: variables, their environment, and the words of --set."""

    invocation: invocations.Invocation
    environ: Mapping[str, str]
    overrides: tuple[str, ...]

    @property
    def output_dir(self) -> Path:
        """Folder of the run folders, for commands that need no config."""
        return Path(self.environ.get("TRAIN_OUTPUT_DIR") or "outputs")


def call(config: str | None, overrides: Iterable[str], gpus: str | None = None) -> Call:
    """Return this process's call; options of the command line win over variables."""
    environ = loader.environment()
    if config:
        environ["CONFIG"] = config
    if gpus:
        environ["GPUS"] = gpus
    return Call(invocations.read(environ), environ, tuple(overrides))


def load_config(call: Call, backend: str | None = None) -> LoadedConfig:
    """Return the merged config of a call; `backend` is what a target such as train-unsloth sets."""
    path = call.invocation.config
    target = None
    if backend:
        target = {"tuning.backend": Located(backend, f"make train-{backend}")}
        path = path or BACKENDS[backend].default_config
    return loader.load(path, call.environ, call.overrides, target)


def plan_run(
    call: Call, loaded: LoadedConfig, distributed: bool = False, use_deepspeed: bool = False
) -> PlannedRun:
    """Return the plan for this machine, or for the hardware that GPUS names."""
    distributed = distributed or bool(call.invocation.gpus)
    hardware = hardware_of(call)
    return resolve(loaded, call.invocation, hardware, call.environ, distributed, use_deepspeed)


def hardware_of(call: Call) -> devices.Hardware:
    """Return what GPUS names, or this machine."""
    if call.invocation.gpus:
        return devices.parse(call.invocation.gpus)
    return devices.detect(call.invocation.device, call.environ)


def plan_for_display(call: Call, distributed: bool, use_deepspeed: bool) -> PlannedRun:
    """Return the plan of `make plan`: the fastest strategy that fits, unless one is asked for."""
    loaded = load_config(call)
    if distributed or use_deepspeed:
        return plan_run(call, loaded, distributed, use_deepspeed)
    return fastest(loaded, call.invocation, hardware_of(call), call.environ)


def plan_text(call: Call, planned: PlannedRun, with_trace: bool, as_json: bool) -> str:
    """Return the text of `make plan`, or its JSON."""
    plan = planned.plan
    command = launch.launch_command(plan.ranks, Path("outputs/<run>"), call.environ)
    counted = count_rows_or_reason(planned.config)
    trained = counted if isinstance(counted, str) else workload(planned.config, plan, counted)
    output_dir = Path(planned.config.train.output_dir)
    near = accuracy.of_runs(output_dir, plan.ranks.device, plan.gpu)
    traced = None
    if with_trace or call.invocation.exact:
        from sft_play.models import trace  # torch: seconds

        traced = trace.trace_step(trace.setup_of(planned))
    if as_json:
        exact = None
        if traced is not None:
            exact = {**traced.as_json(), "phases": report.phases_json(traced.phases(plan.memory))}
        counts = None if isinstance(trained, str) else trained
        facts = report.plan_json(plan, command, counts)
        return as_text({**facts, "accuracy": dataclasses.asdict(near), "exact": exact})
    words = next_command.start_command(plan, given_variables(call), override_variables(call))
    lines = report.lines(planned, command, words, trained) + accuracy.lines(near)
    if traced is not None:
        lines += report.trace_lines(traced.phases(plan.memory), plan.memory)
    return "\n".join(lines)


def given_variables(call: Call) -> dict[str, str]:
    """Return every variable of the environment that means something to a run."""
    names = [*LAUNCH_VARIABLES, *sorted(env_name(path) for path in settings())]
    return {name: call.environ[name] for name in names if call.environ.get(name)}


def override_variables(call: Call) -> dict[str, str]:
    """Return the words of --set as variables."""
    variables = {}
    for override in call.overrides:
        path, _, value = override.partition("=")
        variables[env_name(path.strip())] = value.strip()
    return variables


def train(
    call: Call,
    distributed: bool,
    use_deepspeed: bool,
    with_tensorboard: bool,
    backend: str | None = None,
) -> None:
    """Plan a run, write its folder and hand the process over to its launcher.

    Returns only by raising.
    """
    if call.invocation.gpus:
        raise ConfigError(
            f"GPUS={call.invocation.gpus} plans for hardware that is not here, with make plan; "
            "a run takes NUM_GPUS=N of what is"
        )
    call = with_project_ranks(call, distributed)
    loaded = load_config(call, backend)
    planned = plan_run(call, loaded, distributed, use_deepspeed)
    refuse_what_does_not_fit(planned.plan)
    for warning in planned.plan.warnings:
        print(f"warning: {warning}")
    check_resume(planned.config)
    folder = new_run(call, loaded, planned.config)
    command = launch.launch_command(planned.plan.ranks, folder.path, call.environ)
    planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, launch=command))
    planned.write(folder)
    folder.write_report(planned_report(folder))
    print(report.plan_line(planned))
    print(f"run {folder.path}")
    with failure_recorded(folder):
        from sft_play.data.pipeline import tokenize_run

        planned = tokenize_run(folder, planned)
    if planned.plan.packing:  # known now: how many micro-batches make a step
        planned.write(folder)
        print(report.packing_line(planned.plan))
    write_launcher_files(folder, planned)
    if with_tensorboard:
        print(start_tensorboard(call, folder.tensorboard))
    sys.stdout.flush()
    launch.execute(command, call.environ)


def planned_report(folder: RunFolder) -> RunReport:
    """Return the run.json of a run that has not started."""
    return RunReport(run=folder.name, status="planned")


def write_launcher_files(folder: RunFolder, planned: PlannedRun) -> None:
    """Write what accelerate and DeepSpeed read."""
    plan = planned.plan
    if plan.ranks.strategy == "ddp":
        config = launch.accelerate_config(plan.ranks, mixed_precision(planned.config))
        header = "Written for this run; accelerate reads no other file."
        launch.write_accelerate_config(folder.path / "accelerate.yaml", config, header)
    if plan.deepspeed is not None:
        write_json(folder.path / "deepspeed.json", plan.deepspeed.settings)


def refuse_what_does_not_fit(plan: RunPlan) -> None:
    """Raise OutOfMemory for a plan that is not expected to fit.

    Where the micro-batch is the user's own, warn.
    """
    if plan.fits:
        return
    error = next_command.does_not_fit(plan)
    if not plan.is_batch_explicit:
        raise error
    print(f"warning: {error}")


@contextlib.contextmanager
def failure_recorded(folder: RunFolder) -> Iterator[None]:
    """Note in run.json why a run ends before its launch."""
    try:
        yield
    except SftPlayError as error:
        _record_end(folder, "failed", error.exit_class, str(error))
        raise
    except KeyboardInterrupt:
        cause = "stopped on request while rows were tokenised; nothing was trained"
        _record_end(folder, "stopped", ExitClass.STOPPED, cause)
        raise


def _record_end(folder: RunFolder, status: str, exit_class: ExitClass, cause: str) -> None:
    before = folder.read_report()
    folder.write_report(
        dataclasses.replace(before, status=status, exit_class=int(exit_class), cause=cause)
    )


def with_project_ranks(call: Call, distributed: bool) -> Call:
    """Return the call with NUM_GPUS from the file of `make setup-accelerate`.

    The user's own number wins, and a file that was written for another device does not count.
    """
    if not distributed or call.invocation.num_gpus is not None or not ACCELERATE_FILE.exists():
        return call
    found = yaml.safe_load(ACCELERATE_FILE.read_text(encoding="utf-8"))
    is_cpu = devices.detect(call.invocation.device, call.environ).kind == "cpu"
    if bool(found.get("use_cpu")) != is_cpu:
        return call
    number = found["num_processes"] // max(1, found.get("num_machines", 1))
    invocation = dataclasses.replace(call.invocation, num_gpus=number)
    return dataclasses.replace(call, invocation=invocation)


def mixed_precision(config: Config) -> str:
    """Return the compute type as accelerate names it."""
    name = precision(config)
    return "no" if name == "float32" else name


def check_resume(config: Config) -> None:
    """Refuse a checkpoint that a run may not go on from, before its folder is made."""
    train = config.train
    if train.resume_from is not None:
        checkpoint = stamp.latest_checkpoint(Path(train.resume_from))
        stamp.refuse_mismatch(checkpoint, stamp.wanted(config), train.allow_backend_change)


def new_run(call: Call, loaded: LoadedConfig, config: Config) -> RunFolder:
    """Make the run's folder on a disk with room. Raises EnvironmentFault, ConfigError."""
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
    run_name = call.invocation.run or config.train.run_name
    return run_folders.create(output_dir, run_name, loaded.source.stem)


def setup_accelerate(call: Call) -> list[str]:
    """Write the project's accelerate file for this machine; the same call writes the same file."""
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


def preview(
    planned: PlannedRun, source: Path, first: int, page: str | None, no_color: bool
) -> None:
    """Print what the model sees of some training samples, and write it as a page.

    `source` is the config file; the `first` samples are among those shown.
    Raises: EnvironmentFault when the page cannot be written.
    """
    from sft_play.data.pipeline import fullest_step, prepare_run_data
    from sft_play.data.preview import first_packed_sequence, preview_sequences
    from sft_play.data.preview_page import render_page
    from sft_play.data.preview_text import print_sequences
    from sft_play.data.tokenizer import load_tokenizer

    config = planned.config
    data = prepare_run_data(config)
    packed: list[int] = []
    if planned.plan.packing:
        layout = planned.plan.layout.packed(fullest_step(planned, data))
        packed = first_packed_sequence(data.train.lengths, layout, config.train.order_seed)
    tokenizer = load_tokenizer(config)
    sequences = preview_sequences(data, tokenizer, first, config.data.too_long, packed)
    print_sequences(sequences, no_color)
    path = Path(page or Path(config.train.output_dir) / "preview.html")
    facts = {
        "config": str(source),
        "model": config.model.name,
        "train_on": config.data.train_on,
        "packing": "on" if planned.plan.packing else "off",
    }
    try:
        write_text(path, render_page(facts, data.ledger, sequences))
    except OSError as error:
        raise EnvironmentFault(
            f"--page {path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
    print(path)


def start_tensorboard(call: Call, logdir: Path) -> str:
    """Start TensorBoard beside a run; return the line that says where it is."""
    from sft_play.monitor import tensorboard

    started = tensorboard.start(
        logdir, call.invocation.tb_port, sys.executable, call.environ, pid_file(call)
    )
    return f"{started.message}; make tb-stop ends it"


def pid_file(call: Call) -> Path:
    """Return where the TensorBoard of this project notes its process."""
    return call.output_dir / ".tensorboard.json"


def as_text(value: Any) -> str:
    """Return plain data as JSON for --json."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def chosen_run() -> RunFolder:
    """Return the run that RUN names, or the latest."""
    called = call(None, ())
    return run_folders.find(called.output_dir, called.invocation.run)


def inference_device() -> str:
    """Return cuda or cpu, as DEVICE and the machine say."""
    called = call(None, ())
    return devices.detect(called.invocation.device, called.environ).kind


def prompts(given: str | None) -> Iterable[str]:
    """Return the questions of `infer`: the argument, PROMPT, or the lines of standard input."""
    asked = given or loader.environment().get("PROMPT")
    return [asked] if asked else (line.strip() for line in sys.stdin if line.strip())
