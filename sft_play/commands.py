"""What each command does, told in calls to the rooms. Loads no torch until a command needs it."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sft_play import preparation
from sft_play.config import invocation as invocations
from sft_play.config import loader
from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.schema import env_name, settings
from sft_play.config.yaml_source import Located
from sft_play.errors import ConfigError, EnvironmentFault, ExitClass, SftPlayError
from sft_play.plan import accuracy, devices, launch, report
from sft_play.plan.resolve import Plan, fastest, precision, resolve, short_of_memory
from sft_play.plan.workload import Workload, workload
from sft_play.runs import folder as run_folders
from sft_play.runs import stamp
from sft_play.runs.files import write_json

ACCELERATE_FILE = PROJECT_ROOT / ".accelerate.yaml"
DEFAULT_OF_BACKEND = {"bnb": "run_bnb", "unsloth": "run_unsloth"}
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
    """How a command was called: variables, the environment they came from, and the words of --set."""

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
    """Return the merged config of a call; `backend` is what a target such as train-unsloth implies."""
    target = {"tuning.backend": Located(backend, f"make train-{backend}")} if backend else None
    path = call.invocation.config or (DEFAULT_OF_BACKEND[backend] if backend else None)
    return loader.load(path, call.environ, call.overrides, target)


def make_plan(
    call: Call, distributed: bool, use_deepspeed: bool, backend: str | None = None
) -> tuple[LoadedConfig, Plan]:
    """Return the config and the plan for this machine, or for the hardware that GPUS names."""
    loaded = load_config(call, backend)
    return loaded, resolve(
        loaded,
        call.invocation,
        hardware_of(call),
        call.environ,
        distributed or bool(call.invocation.gpus),
        use_deepspeed,
    )


def best_plan(call: Call) -> Plan:
    """Return the plan of the fastest strategy that fits on all GPUs, here or of GPUS."""
    return fastest(load_config(call), call.invocation, hardware_of(call), call.environ)


def hardware_of(call: Call) -> devices.Hardware:
    """Return what GPUS names, or this machine."""
    return (
        devices.parse(call.invocation.gpus)
        if call.invocation.gpus
        else devices.detect(call.invocation.device, call.environ)
    )


def plan_json(plan: Plan, command: launch.Launch, trained: Workload | str) -> dict[str, Any]:
    """Return plan.json as `plan --json` prints it, with the command that a run named <run> would start and what it would train."""
    return {
        **plan.as_json(),
        "argv": list(command.argv),
        "env": command.env,
        "workload": None if isinstance(trained, str) else trained.as_json(),
    }


def show_plan(
    call: Call, distributed: bool, use_deepspeed: bool, with_trace: bool, as_json: bool
) -> tuple[str, Plan]:
    """Return the text of `make plan`, or its JSON, and the plan: of the fastest strategy that fits, unless one is asked for."""
    plan = (
        make_plan(call, distributed, use_deepspeed)[1]
        if distributed or use_deepspeed
        else best_plan(call)
    )
    command = launch.launch_command(plan.ranks, Path("outputs/<run>"), call.environ)
    counted = preparation.counted(plan.config)
    trained, near = counted if isinstance(counted, str) else workload(plan, counted), past(plan)
    exact, table = trace_plan(plan) if with_trace or call.invocation.exact else (None, [])
    if as_json:
        return as_text(
            {**plan_json(plan, command, trained), "accuracy": near.as_json(), "exact": exact}
        ), plan
    return "\n".join(
        [
            *report.lines(plan, command, make_words(call, plan), trained),
            *accuracy.lines(near),
            *table,
        ]
    ), plan


def past(plan: Plan) -> accuracy.Accuracy:
    """Return how near the plans of earlier runs on the same kind of device were."""
    return accuracy.of_runs(Path(plan.config.train.output_dir), plan.ranks.device, plan.gpu)


def make_words(call: Call, plan: Plan) -> list[str]:
    """Return the make command that starts a plan: its target and every variable that this call was given."""
    target = {"single": "train", "ddp": "train-distributed", "deepspeed": "train-deepspeed"}[
        plan.ranks.strategy
    ]
    names = [*LAUNCH_VARIABLES, *sorted(env_name(path) for path in settings())]
    given = {name: call.environ[name] for name in names if call.environ.get(name)}
    if plan.ranks.strategy == "deepspeed" and plan.deepspeed_source:
        given["DEEPSPEED_CONFIG"] = os.path.relpath(plan.deepspeed_source)
    if plan.ranks.strategy != "single":
        given["NUM_GPUS"] = str(plan.ranks.per_node)
    given |= {
        env_name(path.strip()): value.strip()
        for path, _, value in (override.partition("=") for override in call.overrides)
    }
    return ["make", target, *(f"{name}={shlex.quote(value)}" for name, value in given.items())]


def train(
    call: Call,
    distributed: bool,
    use_deepspeed: bool,
    with_tensorboard: bool,
    backend: str | None = None,
) -> None:
    """Plan a run, write its folder and hand the process over to its launcher; returns only by raising."""
    if call.invocation.gpus:
        raise ConfigError(
            f"GPUS={call.invocation.gpus} plans for hardware that is not here, with make plan; a run takes NUM_GPUS=N of what is"
        )
    call = with_project_ranks(call, distributed)
    loaded, plan = make_plan(call, distributed, use_deepspeed, backend)
    require_room(plan)
    for warning in plan.warnings:
        print(f"warning: {warning}")
    check_resume(plan)
    folder = new_run(call, loaded, plan)
    command = launch.launch_command(plan.ranks, folder.path, call.environ)
    run_folders.fill(
        folder, plan.config, {**plan.as_json(), "argv": list(command.argv), "env": command.env}
    )
    print(plan.line())
    print(f"run {folder.path}")
    with recorded(folder):
        plan = preparation.tokenise(folder, plan)
    if plan.packing:  # known now: how many micro-batches make a step
        run_folders.fill(
            folder, plan.config, {**plan.as_json(), "argv": list(command.argv), "env": command.env}
        )
        print(packing_line(plan))
    if plan.ranks.strategy == "ddp":
        config = launch.accelerate_config(plan.ranks, mixed_precision(plan))
        launch.write_accelerate_config(
            folder.path / "accelerate.yaml",
            config,
            "Written for this run; accelerate reads no other file.",
        )
    if plan.deepspeed is not None:
        write_json(folder.path / "deepspeed.json", plan.deepspeed)
    if with_tensorboard:
        print(start_tensorboard(call, folder.tensorboard))
    sys.stdout.flush()
    launch.execute(command, call.environ)


def require_room(plan: Plan) -> None:
    """Raise OutOfMemory for a plan that is not expected to fit, unless its micro-batch is the user's own: then warn."""
    if plan.fits:
        return
    error = short_of_memory(plan)
    if not plan.is_batch_explicit:
        raise error
    print(f"warning: {error}")


@contextlib.contextmanager
def recorded(folder: run_folders.RunFolder) -> Iterator[None]:
    """Write down in run.json why a run ends before its launch."""
    try:
        yield
    except SftPlayError as error:
        folder.write_report(
            {
                **folder.read_report(),
                "status": "failed",
                "exit_class": int(error.exit_class),
                "cause": str(error),
            }
        )
        raise
    except KeyboardInterrupt:
        stopped, cause = (
            ExitClass.STOPPED,
            "stopped on request while rows were tokenised; nothing was trained",
        )
        folder.write_report(
            {
                **folder.read_report(),
                "status": "stopped",
                "exit_class": int(stopped),
                "cause": cause,
            }
        )
        raise


def packing_line(plan: Plan) -> str:
    """Return how a packed run makes its steps, as a line of facts."""
    c, sequence = plan.chosen, plan.config.model.max_seq_len
    at_most = f"at most {plan.sequences} sequences of {sequence} tokens, predicted_peak={plan.memory.predicted_peak / devices.GIB:.2f}GiB"
    return f"packing rows={c.effective_batch} a step in micro_batches={plan.micro_batches} of each rank, {at_most}; without packing {c.grad_accum}"


def with_project_ranks(call: Call, distributed: bool) -> Call:
    """Return the call with NUM_GPUS from the file of `make setup-accelerate`, where there is one and the user said nothing."""
    if not distributed or call.invocation.num_gpus is not None or not ACCELERATE_FILE.exists():
        return call
    found = yaml.safe_load(ACCELERATE_FILE.read_text(encoding="utf-8"))
    same_device = bool(found.get("use_cpu")) == (
        devices.detect(call.invocation.device, call.environ).kind == "cpu"
    )
    if not same_device:
        return call  # the file was written for another device; NUM_GPUS is counted anew
    number = found["num_processes"] // max(1, found.get("num_machines", 1))
    return dataclasses.replace(
        call, invocation=dataclasses.replace(call.invocation, num_gpus=number)
    )


def mixed_precision(plan: Plan) -> str:
    """Return the compute type as accelerate names it."""
    name = precision(plan.config)
    return "no" if name == "float32" else name


def check_resume(plan: Plan) -> None:
    """Refuse a checkpoint that this run may not go on from, before a run folder is made."""
    train = plan.config.train
    if train.resume_from is not None:
        checkpoint = stamp.latest_checkpoint(Path(train.resume_from))
        stamp.refuse_mismatch(checkpoint, stamp.wanted(plan.config), train.allow_backend_change)


def new_run(call: Call, loaded: LoadedConfig, plan: Plan) -> run_folders.RunFolder:
    """Make the run's folder on a disk with room. Raises EnvironmentFault, ConfigError."""
    output = Path(plan.config.train.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output).free
    except OSError as error:
        raise EnvironmentFault(
            f"train.output_dir={output}: {error.strerror}; set TRAIN_OUTPUT_DIR to a folder that can be written"
        ) from None
    if free < FREE_BYTES_FOR_A_RUN:
        raise EnvironmentFault(
            f"train.output_dir={output}: {free / 2**30:.2f} GiB are free on its disk, a run needs 1; set TRAIN_OUTPUT_DIR to another disk"
        )
    return run_folders.create(
        output, call.invocation.run or plan.config.train.run_name, loaded.source.stem
    )


def setup_accelerate(call: Call) -> list[str]:
    """Write the project's accelerate file for this machine, without a question; the same call writes the same file."""
    hardware = devices.detect(call.invocation.device, call.environ)
    _, plan = make_plan(call, distributed=True, use_deepspeed=False)
    config = launch.accelerate_config(plan.ranks, mixed_precision(plan))
    header = "Written by make setup-accelerate for this machine; NUM_GPUS=N make setup-accelerate changes the number."
    launch.write_accelerate_config(ACCELERATE_FILE, config, header)
    return [
        f"wrote {ACCELERATE_FILE.name}: {config['num_processes']} processes on {hardware.kind}, mixed precision {config['mixed_precision']}",
        "make train-distributed uses it; NUM_GPUS=N on its command line wins over it",
    ]


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


def run_lines(call: Call) -> list[str]:
    """Return a line a run, oldest first."""
    folders = run_folders.listing(call.output_dir)
    if not folders:
        return [f"{call.output_dir} holds no run yet; make train makes one"]
    width = max(len(folder.name) for folder in folders)
    return [run_line(folder, width) for folder in folders]


def run_line(folder: run_folders.RunFolder, width: int) -> str:
    """Return name, status, steps and scores of a run."""
    report = folder.read_report()
    after = report.get("metrics", {}).get("after", {})
    scores = " ".join(
        f"{name}={after[name]:.4f}" for name in ("eval_loss", "rougeL") if name in after
    )
    status = report.get("status", "unknown")
    if status == "running" and not run_folders.is_alive(report):
        status = "died"  # killed before it could say so
    mode = f"{report.get('mode', '-')}/{report.get('backend', '-')}"
    cause = str(report.get("cause") or "").splitlines()
    facts = f"world={report.get('world_size', '-')} step={report.get('global_step', 0)} {scores} {cause[0] if cause else ''}"
    return f"{folder.name:<{width}}  {status:<8} {mode:<13} {facts}".rstrip()


def as_text(value: Any) -> str:
    """Return plain data as JSON for --json."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def trace_plan(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return the bytes that the real model has without its weights, as JSON and as a table beside the closed form."""
    from sft_play.models import trace  # torch: seconds

    traced = trace.trace(trace.step_of(plan))
    exact = traced.phases(plan.memory)
    return {**traced.as_json(), "phases": exact.phases_json()}, trace.table(exact, plan.memory)


def chosen_run() -> run_folders.RunFolder:
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
