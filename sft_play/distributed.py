"""What a training script or notebook asks of its processes and GPUs. Imports torch when called.

Under torchrun, accelerate launch or deepspeed each process has one GPU; in a notebook one process
has them all. `Accelerator()`, a Trainer's arguments or torch.distributed make the process group:
before that `get_world_size` is 1, while `is_main_process` knows the launcher's rank already.
"""

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sft_play.config import place as places
from sft_play.config.invocation import FORCE_SINGLE, is_single_process_forced
from sft_play.config.loader import environment
from sft_play.config.place import LaunchPlace
from sft_play.errors import ConfigError, DataError, EnvironmentFault
from sft_play.plan.devices import BF16_CAPABILITY
from sft_play.runs.report import RankMemory
from sft_play.training.memory_lines import MeasuredSpeed, lines_after, lines_before_training

if TYPE_CHECKING:
    import torch

    from sft_kernels.process import Process

# Printed by print_distributed_info if they are set; none of them is a secret
SHOWN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    FORCE_SINGLE,
)

DeviceMap = str | dict[str, int] | None
Rows = TypeVar("Rows")


@dataclass(frozen=True)
class Context:
    """This process among those of a launch, under the names of accelerate's Accelerator."""

    process_index: int
    local_process_index: int  # on this machine: its GPU
    num_processes: int
    backend: str | None = None  # of the process group; None if there is none yet

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0


def context() -> Context:
    """Return this process's place: of the process group, before there is one of the launcher.

    Raises: ConfigError if the launcher's variables contradict each other.
    """
    from torch import distributed

    place = _place()
    if _has_group():
        rank = distributed.get_rank()
        local_rank = place.local_rank if place else rank  # without variables: one machine
        return Context(rank, local_rank, distributed.get_world_size(), distributed.get_backend())
    if place is None:
        return Context(0, 0, 1)
    return Context(place.rank, place.local_rank, place.world_size)


def is_distributed_available() -> bool:
    """Return whether this torch can train in several processes. Starts nothing."""
    from torch import distributed

    return distributed.is_available()


def get_world_size() -> int:
    """Return the number of processes of the process group, 1 before there is one."""
    from torch import distributed

    return distributed.get_world_size() if _has_group() else 1


def get_rank() -> int:
    """Return this process's rank in the process group, 0 before there is one."""
    from torch import distributed

    return distributed.get_rank() if _has_group() else 0


def is_main_process() -> bool:
    """Return whether this process is the one that prints and saves, also before a group exists."""
    return context().is_main_process


def print_main(*values: object) -> None:
    """Print once for all processes."""
    if is_main_process():
        print(*values, flush=True)


def print_distributed_info() -> None:
    """Print what each process knows of itself: place, device, process group, NCCL, variables."""
    print("\n".join(distributed_info_lines()), flush=True)  # one write: ranks do not mix lines


def distributed_info_lines() -> list[str]:
    """Return the lines of `print_distributed_info`."""
    import torch

    here = context()
    environ = environment()
    variables = [f"{name}={environ[name]}" for name in SHOWN_VARIABLES if environ.get(name)]
    devices = [
        f"GPU {index} = {torch.cuda.get_device_name(index)}"
        for index in range(torch.cuda.device_count())
    ]
    return [
        f"Process {here.process_index}/{here.num_processes} (local {here.local_process_index}) "
        f"on {platform.node()}",
        f"Main process: {here.is_main_process}",
        f"Device: {_device(here)}",
        f"Process group: {here.backend or 'not initialized'}",
        f"NCCL: {_nccl_version()}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}: "
        f"{', '.join(devices) or 'no GPU'}",
        f"Environment: {' '.join(variables) or 'no variable of a launcher is set'}",
    ]


def choose_device_map() -> DeviceMap:
    """Return the device_map to load a model with, and print the mode.

    One process with several GPUs splits the model ("balanced"); under a launcher each process
    holds a whole model on its own GPU. One GPU, or none, needs no map.

    Raises: EnvironmentFault if a process has no GPU of its own; ConfigError if several
    processes run although UNSLOTH_FORCE_SINGLE_GPU=1.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    print_main(f"Detected {num_gpus} GPU(s)")
    place = _place()
    if num_gpus == 0:
        print_main("CPU mode - no device_map needed")
        return None
    if place is not None:
        if place.local_rank >= num_gpus:
            raise EnvironmentFault(
                f"LOCAL_RANK={place.local_rank} has no GPU: torch sees {num_gpus}; "
                f"start {num_gpus} processes, as with torchrun --nproc_per_node={num_gpus}"
            )
        print_main(f"{place.world_size} processes, one GPU each - the whole model on every GPU")
        return {"": place.local_rank}
    if is_single_process_forced(environment()):
        print_main(f"Single GPU mode - {FORCE_SINGLE}=1")
        return {"": 0}
    if num_gpus > 1:
        print_main(f"Using device_map='balanced' to split model across {num_gpus} GPUs")
        print_main("One batch at a time passes through all of them; for a batch on each, torchrun")
        return "balanced"
    print_main("Single GPU mode - no device_map needed")
    return None


def choose_dtype() -> "torch.dtype":
    """Return bfloat16 if every GPU here computes it (capability 8.0), else float16.

    Without a GPU it is float32.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return torch.float32
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    return torch.bfloat16 if min(capabilities) >= BF16_CAPABILITY else torch.float16


def broadcast_dataset(dataset: Rows | None) -> Rows:
    """Return the dataset of rank 0 on every rank; the others pass None, and every rank must call.

    A `datasets.Dataset` travels with its rows: the receiving rank needs none of its files.
    Anything else is pickled.

    Raises: EnvironmentFault if a launcher has started several processes and there is no process
    group yet; DataError if rank 0 has None.
    """
    place = _place()
    if place is not None and place.world_size > 1 and not _has_group():
        raise EnvironmentFault(
            f"broadcast_dataset: {place.world_size} processes and no process group; call "
            "Accelerator() or torch.distributed.init_process_group() before it"
        )
    is_sender = get_rank() == 0
    sent = _process().broadcast(_in_memory(dataset) if is_sender else None)
    if sent is None:
        raise DataError("broadcast_dataset: rank 0 has no dataset; load it there")
    return dataset if is_sender else sent


def print_memory_before_training() -> list[RankMemory]:
    """Print and return the memory of each GPU. Every rank must call it.

    `print_memory_after_training` takes what it returns.
    """
    ranks = _memory_of_all([])
    print_main("\n".join(lines_before_training(ranks)))
    return ranks


def print_memory_after_training(before: Sequence[RankMemory], metrics: Mapping[str, Any]) -> None:
    """Print the peaks of each GPU, the share of training in them, and the time it took.

    `metrics` are `trainer.train().metrics`. Every rank must call it.
    """
    ranks = _memory_of_all(before)
    rate = metrics.get("train_samples_per_second")
    speed = MeasuredSpeed(rate, "samples/s", "DDP") if rate else None
    lines = lines_after(ranks, metrics["train_runtime"], get_world_size(), speed)
    print_main("\n".join(lines))


def _place() -> LaunchPlace | None:
    """Return the place that a launcher gave this process. Raises ConfigError."""
    environ = environment()
    place = places.read_place(environ)
    if place is not None and place.world_size > 1 and is_single_process_forced(environ):
        raise ConfigError(
            f"{FORCE_SINGLE}=1, but a launcher has started {place.world_size} processes; "
            "start the script with python"
        )
    return place


def _has_group() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _process() -> "Process":
    """Return this process with its collectives."""
    from sft_kernels.process import Process

    here = context()
    return Process(get_rank(), here.local_process_index, get_world_size(), _device(here))


def _device(here: Context) -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if here.num_processes == 1:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", here.local_process_index)


def _memory_of_all(before: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the memory of each GPU, or of each process on a CPU; of all ranks.

    `before` says what was reserved earlier; without it that is what is reserved now.
    """
    own = _memory_of_this_process()
    ranks = [entry for entries in _process().gather(own) for entry in entries]
    earlier = [entry.peak_bytes for entry in before] or [entry.peak_bytes for entry in ranks]
    if len(earlier) != len(ranks):
        raise ConfigError(
            f"print_memory_after_training: {len(earlier)} GPUs before training, {len(ranks)} now; "
            "pass what print_memory_before_training returned"
        )
    pairs = zip(ranks, earlier, strict=True)
    return [dataclasses.replace(entry, before_bytes=bytes_) for entry, bytes_ in pairs]


def _memory_of_this_process() -> list[RankMemory]:
    import torch

    from sft_play.training.memory_lines import rank_memory, resident_peak_bytes

    here = context()
    device = _device(here)
    if device.type == "cpu":
        return [rank_memory(get_rank(), device, 0, resident_peak_bytes())]
    if get_world_size() > 1:
        return [rank_memory(get_rank(), device, 0, torch.cuda.max_memory_reserved(device))]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [rank_memory(gpu.index, gpu, 0, torch.cuda.max_memory_reserved(gpu)) for gpu in gpus]


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return "not available"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _in_memory(dataset: Any) -> Any:
    """Return what is pickled with its rows: a Dataset may be pickled as the names of its files."""
    from datasets import Dataset, DatasetDict, DatasetInfo

    if isinstance(dataset, DatasetDict):
        return DatasetDict({split: _in_memory(rows) for split, rows in dataset.items()})
    if not isinstance(dataset, Dataset):
        return dataset
    table = dataset.with_format("arrow")[:]
    return Dataset(table, info=DatasetInfo(features=dataset.features))
