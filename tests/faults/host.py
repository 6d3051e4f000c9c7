"""Faults of what is around a run: the folder of the call, names of files, shared memory, HOME."""

import errno
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from unittest.mock import patch

import markdown
from jinja2 import Environment
from report_folders import run_folder
from run_files import held_by_another

from faults.bench import EVERY_STEP, Bench, Fault, Guard, Outcome
from faults.disks import command_line, disk, make_read_only
from faults.files import flip, nothing, refused
from sft_play.commands.exports import Address
from sft_play.config.schema import Config
from sft_play.errors import ExitClass
from sft_play.reporting import page
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import checkpoints
from sft_play.runs.exports import SavedStops
from sft_play.runs.report import RunReport
from sft_play.training.classify import classify

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = page._environment()


def from_elsewhere(bench: Bench) -> Outcome:
    """`make -f` names the Makefile from another folder."""
    path = ROOT / "Makefile"
    if bench.guard is not None:
        text = path.read_text().replace("help: .guard ", "help: ")
        path = bench.folder / "Makefile"
        path.write_text(text)
    command = ["make", "-f", str(path), "help"]
    done = subprocess.run(command, cwd=bench.folder.parent, capture_output=True, text=True)
    return Outcome(0, done.stderr)


def without_code_spans() -> Environment:
    """Return the templates' environment, which writes names into Markdown as they are."""
    environment = TEMPLATES.overlay()
    environment.filters = dict(TEMPLATES.filters)
    environment.filters["code"] = str
    return environment


def hostile_names(bench: Bench) -> Outcome:
    """Rows, a base, its licence and a stop whose names hold HTML, Markdown and the end of a cell."""
    name = "<img src=x onerror=alert(1)> ![](http://a.b/c) | ` .jsonl"
    base = bench.folder / name
    base.mkdir(parents=True)
    (base / "README.md").write_text(f"---\nlicense: {name}\n---\n")
    config = {"model": {"name": str(base), "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
    rows = {"rows_in": 1, "rows_used": 1, "tokens": 1, "trained_tokens": 1}
    report = RunReport(run="a", data={"train": {**rows, "sources": [{"name": name}]}})
    folder = run_folder(bench.folder / "run", report, "", "", (f"model.name={name}",))
    stops = SavedStops((name,), (7,))
    facts = RunFacts.read(folder)
    text = card_text(facts, Config.model_validate(config), stops, bench.folder)
    html = markdown.markdown(text, extensions=["tables", "fenced_code"])
    obeyed = re.findall("<img|<a ", html)
    return Outcome(len(obeyed), f"{len(obeyed)} of {html.count('onerror')} names were obeyed")


# as torch's data loader and NCCL say it
FULL = (
    "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.",
    "NCCL error: Error while creating shared memory segment /dev/shm/nccl-a (size 9): No space",
)


def no_shared_memory(_: Bench) -> Outcome:
    """What libraries say of a full /dev/shm, and a lock, whose error names no file."""
    errors: list[BaseException] = [RuntimeError(text) for text in FULL]
    errors.append(OSError(errno.ENOSPC, "No space left on device"))
    full = shutil.disk_usage("/")._replace(free=0)
    with patch("shutil.disk_usage", lambda _: full):
        found = {classify(error).exit_class: classify(error).cause for error in errors}
    gpu = classify(RuntimeError("out of resource: shared memory, Required: 147456"))
    assert "/dev/shm" not in gpu.cause, "that of a GPU"
    (exit_class,) = found
    return Outcome(exit_class, found[exit_class])


def damaged_while_it_trains(bench: Bench) -> Outcome:
    """A run is to continue from another one, which trains and has a damaged checkpoint."""
    run = bench.copy()
    newest = run.checkpoints / "checkpoint-3"
    flip(newest / "optimizer.pt")
    said: list[str] = []
    with held_by_another(run.path):
        chosen = checkpoints.choose_checkpoint(run.path, said.append)
    assert newest.is_dir(), "another run's checkpoint is renamed"
    return Outcome(0, "; ".join(said), 3, checkpoints.step_of(chosen))


def port_taken(bench: Bench) -> Outcome:
    """`make serve` on a port on which another program listens."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        address = Address("::1", other.getsockname()[1])
        assert address.url.startswith("http://[::1]:")
        return refused(address.refuse_taken)


def long_warm_up(bench: Bench) -> Outcome:
    """`make plan` of a run that ends within its warm-up."""
    environ = {"CONFIG": "configs/tiny.yaml", "TRAIN_WARMUP_STEPS": "1000", "DEVICE": "cpu"}
    outcome = command_line(bench, ["plan"], {**environ, "TRAIN_LR_SCHEDULER_TYPE": "linear"})
    _, _, said = outcome.said.partition("train.warmup_steps=1000 ")
    return Outcome(outcome.exit_class, " ".join(said.split())[:200])


def live_in(folder: Path) -> None:
    """Have a home, where torch keeps what it compiles."""
    os.environ["HOME"] = str(folder)
    os.environ.pop("TORCH_EXTENSIONS_DIR", None)


def home_read_only(bench: Bench) -> Outcome:
    """Two ranks under DeepSpeed have a HOME that nobody can write."""
    settings = {**EVERY_STEP, "train.max_steps": 2, "train.packing": False}
    run = bench.plan(settings, num_gpus=2, deepspeed_config="configs/deepspeed_zero2.json")
    with disk(bench.folder / "home", 1) as home:
        make_read_only(home)
        bench.inject_now()
        (code,) = set(bench.ends(bench.start(run, 2, live_in, home)))
    return bench.outcome(run, code, "")


ROWS = (
    Fault(
        "home-read-only",
        "HOME is read-only, as in many containers, and DeepSpeed compiles",
        home_read_only,
        ExitClass.ENVIRONMENT,
        ("Read-only file system", "set TORCH_EXTENSIONS_DIR to a folder that can be written"),
        Guard("sft_play.training.deepspeed_start:EnvironmentFault", RuntimeError),
        60,
    ),
    Fault(
        "long-warm-up",
        "the warm-up is longer than the run, whose steps follow from its rows; make plan is typed",
        long_warm_up,
        ExitClass.DONE,
        ("steps: the run ends at", "lower TRAIN_WARMUP_STEPS"),
        Guard("sft_play.plan.workload:schedule_warning", nothing),
        10,
        None,
        True,
    ),
    Fault(
        "damaged-while-it-trains",
        "a checkpoint of another run, which trains, is damaged; this run is to continue from that one",
        damaged_while_it_trains,
        ExitClass.DONE,
        ("it is skipped, as its run continues", "the next older one is taken"),
        Guard("sft_play.runs.lock:refuse_if_held", nothing),
        10,
        1,
        True,
    ),
    Fault(
        "port-taken",
        "another program listens on the PORT of make serve",
        port_taken,
        ExitClass.ENVIRONMENT,
        ("Address already in use", "set another PORT"),
        Guard("sft_play.commands.exports:EnvironmentFault", RuntimeError),
        5,
        None,
        True,
    ),
    Fault(
        "full-shared-memory",
        "/dev/shm, 64 MiB in a container, is full: a data loader, NCCL and a lock fail",
        no_shared_memory,
        ExitClass.ENVIRONMENT,
        ("/dev/shm has no room", "--shm-size=8g", "TRAIN_DATALOADER_NUM_WORKERS=0"),
        Guard(
            "sft_play.training.classify:lacks_shared_memory",
            lambda _: False,
            Guard("sft_play.errors:lacks_shared_memory", lambda _: False),
        ),
        5,
        None,
        True,
    ),
    Fault(
        "other-folder",
        "make -f names the Makefile from another folder",
        from_elsewhere,
        ExitClass.DONE,
        ("this is not the folder of the Makefile: type make -C '",),
        Guard("sft_play.config.targets:refuse_unread", nothing),
        10,
        None,
        True,
    ),
    Fault(
        "html-in-names",
        "names of rows, base, licence and stop hold HTML and Markdown; the model card has them",
        hostile_names,
        ExitClass.DONE,
        ("0 of ", " names were obeyed"),
        Guard("sft_play.reporting.page:_environment", without_code_spans),
        10,
        None,
        True,
    ),
)
