"""The launch command as data, and the only code that executes it."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.place import is_of_launcher
from sft_play.errors import EnvironmentFault
from sft_play.plan.ranks import Ranks
from sft_play.runs.files import write_text

WORKER = PROJECT_ROOT / "scripts" / "train.py"
LAUNCHER = PROJECT_ROOT / "scripts" / "launch.py"
DEFAULT_PORT = 29500  # the port at which several machines meet, as in torchrun
OF_RUN_FOLDER = "UNSLOTH_COMPILE_LOCATION"  # else its code goes into the working folder


@dataclass(frozen=True)
class Launch:
    """How a run is started: `argv`, and the environment variables `env` to add."""

    argv: tuple[str, ...]
    env: dict[str, str]


def launch_command(ranks: Ranks, run_folder: Path, environ: Mapping[str, str]) -> Launch:
    """Return the command that starts this node's ranks on a run folder."""
    port = ranks.master_port or (DEFAULT_PORT if ranks.nodes > 1 else 0)
    words = _launcher(ranks, run_folder, port)
    argv = (sys.executable, *words, str(WORKER), str(run_folder))
    return Launch(argv, _environment(ranks, run_folder, environ))


def rank_command(ranks: Ranks, run_folder: Path, environ: Mapping[str, str]) -> Launch:
    """Return the command of one rank, for processes that the user's launcher has started."""
    argv = (sys.executable, str(WORKER), str(run_folder))
    return Launch(argv, _environment(ranks, run_folder, environ))


def recorded(command: Launch, run_folder: Path) -> Launch:
    """Return a launcher's command, wrapped so that a signal during the start is recorded."""
    python, minus_m, *words = command.argv
    assert minus_m == "-m", "the worker itself records signals"
    return Launch((python, str(LAUNCHER), str(run_folder), *words), command.env)


def _launcher(ranks: Ranks, run_folder: Path, port: int) -> list[str]:
    """Return the words between Python and the worker's script."""
    if ranks.strategy == "single":
        return []
    if ranks.strategy in ("ddp", "fsdp", "ep"):
        # as DDP: the worker shards the weights itself. Port 0: accelerate finds a free port when it
        # starts; a port chosen here may be taken while rows are tokenized
        config = ["--config_file", str(run_folder / "accelerate.yaml")]
        return ["-m", "accelerate.commands.launch", *config, "--main_process_port", str(port)]
    # deepspeed's launcher does not forward signals and kills saves that take more than 30 seconds
    node = ["--nnodes", str(ranks.nodes), "--node_rank", str(ranks.node_rank)]
    node += ["--nproc_per_node", str(ranks.per_node), "--master_addr", ranks.master_addr]
    return ["-m", "torch.distributed.run", *node, "--master_port", str(port or free_port())]


def accelerate_config(ranks: Ranks, mixed_precision: str) -> dict[str, object]:
    """Return accelerate's config for these ranks.

    It is always passed: otherwise accelerate merges a config file of the machine.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        # With use_cpu this starts N processes on a CPU; `--cpu --num_processes N` starts one
        "distributed_type": "MULTI_GPU",
        "use_cpu": ranks.device == "cpu",
        "num_machines": ranks.nodes,
        "num_processes": ranks.world_size,
        "machine_rank": ranks.node_rank,
        "main_process_ip": ranks.master_addr,
        "main_process_port": ranks.master_port or DEFAULT_PORT,
        "mixed_precision": mixed_precision,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "downcast_bf16": "no",
        "debug": False,
    }


def write_accelerate_config(path: Path, config: Mapping[str, object], header: str) -> None:
    """Write a complete accelerate config file."""
    write_text(path, f"# {header}\n" + yaml.safe_dump(dict(config), sort_keys=True))


def execute(launch: Launch, environ: Mapping[str, str]) -> None:
    """Replace this process with the launcher. Raises EnvironmentFault when it cannot be started."""
    try:
        os.execvpe(launch.argv[0], list(launch.argv), rank_environment(launch, environ))
    except OSError as error:
        raise EnvironmentFault(
            f"{launch.argv[0]} cannot be started: {error.strerror}; try make install"
        ) from None


def rank_environment(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of a launch."""
    kept = {name: value for name, value in environ.items() if not is_of_launcher(name)}
    return {**kept, **launch.env}


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def interface_to(address: str) -> str | None:
    """Return the network interface through which this host reaches an address.

    None for the host itself by a loopback address, and for an address that cannot be reached.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # a datagram socket sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and any(found.address.partition("%")[0] == own for found in addresses):
            return name
    return None


def _environment(ranks: Ranks, run_folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks need in addition to the user's environment.

    Except for the device, the user's values take precedence.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the data loader's fork
        "OMP_NUM_THREADS": str(max(1, ranks.cpu_count // ranks.per_node)),
        # stops.pass_on handles the others; by default torchrun overrides nohup's handling of HUP
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }
    if ranks.device == "cuda":
        # one process that sees two GPUs would be wrapped in DataParallel
        device = {"CUDA_VISIBLE_DEVICES": ",".join(ranks.visible)}
        defaults |= _gpu_defaults(run_folder, environ)
    else:
        # ACCELERATE_USE_CPU also means "no DeepSpeed" to accelerate
        use_cpu = str(ranks.strategy != "deepspeed").lower()
        device = {
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": use_cpu,
            "DS_ACCELERATOR": "cpu",
        }
        if "OMP_WAIT_POLICY" not in environ:
            # Threads that spin for long slow others down on a busy machine. Short spinning stays,
            # because it is faster on an idle one.
            defaults["GOMP_SPINCOUNT"] = "20000"
    if ranks.nodes > 1 and (interface := interface_to(ranks.master_addr)):
        # gloo uses the address of the host's name, which on many clusters is a loopback address
        defaults["GLOO_SOCKET_IFNAME"] = interface
    given = {name for name in environ if not is_of_launcher(name)}
    env = {name: value for name, value in defaults.items() if name not in given} | device
    bin_folder = str(Path(sys.executable).parent)
    if bin_folder not in environ.get("PATH", "").split(os.pathsep):
        # ninja, which compiles DeepSpeed's ops, is in this folder
        env["PATH"] = f"{bin_folder}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return env


def allocator_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let tensors of other lengths reuse the memory of earlier ones.

    Torch reads them when it first allocates on a GPU.
    """
    # torch reads both names, from 2.9 on
    if "PYTORCH_CUDA_ALLOC_CONF" in environ or "PYTORCH_ALLOC_CONF" in environ:
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _gpu_defaults(run_folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    defaults = {OF_RUN_FOLDER: str(run_folder.absolute() / "unsloth")}
    defaults |= allocator_defaults(environ)
    # torch asks NVML whether there are GPUs instead of CUDA, which no fork could use afterwards
    defaults["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if "NCCL_ASYNC_ERROR_HANDLING" in environ:
        # the name that torch reads
        defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = environ["NCCL_ASYNC_ERROR_HANDLING"]
    return defaults
