"""The launch command as data, and the one place that hands the process over to it. Loads no torch."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from sft_play.errors import EnvironmentFault
from sft_play.runs.files import write_text

PROJECT_ROOT = Path(__file__).resolve().parents[2]
WORKER = PROJECT_ROOT / "scripts" / "train.py"
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)  # a launcher's to set; left in a shell they would place a single process


@dataclass(frozen=True)
class Launch:
    """How a run is started: `argv`, and what `env` adds to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class Ranks:
    """The processes of a run and how they find each other."""

    strategy: str  # single, ddp, deepspeed
    device: str  # cuda, cpu
    per_node: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int | None  # None: a free port, chosen when the run starts; not for several nodes
    visible: tuple[str, ...]  # entries of CUDA_VISIBLE_DEVICES for this node's ranks
    cpu_count: int

    @property
    def world_size(self) -> int:
        return self.per_node * self.nodes


def launch_command(ranks: Ranks, run_folder: Path, environ: Mapping[str, str]) -> Launch:
    """Return the command that starts this node's ranks on a run folder."""
    port = ranks.master_port or (29500 if ranks.nodes > 1 else free_port())
    script = (str(WORKER), str(run_folder))
    if ranks.strategy == "single":
        argv = (sys.executable, *script)
    elif ranks.strategy == "ddp":
        config = str(run_folder / "accelerate.yaml")
        argv = (
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            config,
            "--main_process_port",
            str(port),
            *script,
        )
    elif ranks.nodes > 1 or not all(entry.isdigit() for entry in ranks.visible):
        # deepspeed's launcher reaches other nodes by ssh and knows GPUs by number alone; torchrun starts the same worker
        argv = (
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(ranks.nodes), "--node_rank", str(ranks.node_rank), "--nproc_per_node", str(ranks.per_node),
            "--master_addr", ranks.master_addr, "--master_port", str(port), *script,
        )  # fmt: skip
    else:
        which = (
            ("--include", f"localhost:{','.join(ranks.visible)}")
            if ranks.device == "cuda"
            else ("--num_gpus", str(ranks.per_node))
        )
        argv = (
            sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull,  # not the cluster's /job/hostfile, if there is one
            *which, "--master_port", str(port), "--no_local_rank", "--quiet", *script,
        )  # fmt: skip
    return Launch(argv, _environment(ranks, run_folder, environ))


def accelerate_config(ranks: Ranks, mixed_precision: str) -> dict[str, object]:
    """Return accelerate's config for these ranks. Ours is always passed: without one accelerate merges a machine-wide file."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        # MULTI_GPU with use_cpu starts N processes on a CPU; `--cpu --num_processes N` would start one
        "distributed_type": "MULTI_GPU",
        "use_cpu": ranks.device == "cpu",
        "num_machines": ranks.nodes,
        "num_processes": ranks.world_size,
        "machine_rank": ranks.node_rank,
        "main_process_ip": ranks.master_addr,
        "main_process_port": ranks.master_port or 29500,
        "mixed_precision": mixed_precision,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "downcast_bf16": "no",
        "debug": False,
    }


def write_accelerate_config(path: Path, config: Mapping[str, object], header: str) -> None:
    """Write an accelerate config file whole."""
    write_text(path, f"# {header}\n" + yaml.safe_dump(dict(config), sort_keys=True))


def execute(launch: Launch, environ: Mapping[str, str]) -> None:
    """Replace this process with the launcher. Raises EnvironmentFault when it cannot be started."""
    kept = {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    try:
        os.execvpe(launch.argv[0], list(launch.argv), {**kept, **launch.env})
    except OSError as error:
        raise EnvironmentFault(
            f"{launch.argv[0]} cannot be started: {error.strerror}; try make install"
        ) from None


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(ranks: Ranks, run_folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks need beside the user's environment; what the user set himself stands."""
    bin_folder = str(Path(sys.executable).parent)
    env = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the data loader's fork
        "OMP_NUM_THREADS": str(max(1, ranks.cpu_count // ranks.per_node)),
    }
    if ranks.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(
            ranks.visible
        )  # one process that sees two GPUs would be wrapped in DataParallel
        if (
            "PYTORCH_CUDA_ALLOC_CONF" not in environ and "PYTORCH_ALLOC_CONF" not in environ
        ):  # torch reads both names, from 2.9 on
            env["PYTORCH_CUDA_ALLOC_CONF"] = (
                "expandable_segments:True"  # steps of other lengths find the memory of those before
            )
        env["UNSLOTH_COMPILE_LOCATION"] = str(
            run_folder.absolute() / "unsloth"
        )  # the code that it writes, by itself into the working folder
        if "NCCL_ASYNC_ERROR_HANDLING" in environ:
            env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = environ[
                "NCCL_ASYNC_ERROR_HANDLING"
            ]  # the name that torch reads
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["ACCELERATE_USE_CPU"] = str(
            ranks.strategy != "deepspeed"
        ).lower()  # accelerate takes it for "no DeepSpeed"
        if "OMP_WAIT_POLICY" not in environ:
            env["GOMP_SPINCOUNT"] = (
                "20000"  # then sleep: endless spinning slowed generation 60-fold beside another busy program
            )
        env["DS_ACCELERATOR"] = "cpu"
    env = {
        name: value
        for name, value in env.items()
        if name not in environ
        or name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "DS_ACCELERATOR")
    }
    if bin_folder not in environ.get("PATH", "").split(os.pathsep):
        env["PATH"] = (
            f"{bin_folder}{os.pathsep}{environ.get('PATH', os.defpath)}"  # ninja, which compiles DeepSpeed's ops
        )
    return env


def visible_entries(visible: str | None, count: int) -> tuple[str, ...]:
    """Return what CUDA_VISIBLE_DEVICES must say for the first `count` of the GPUs that it shows now.

    Where it names fewer than `count`, the plan is for another machine's GPUs, which count from 0.
    """
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    return tuple(entries[:count]) if len(entries) >= count else tuple(map(str, range(count)))
