"""Before weights load, check that all ranks agree, reach each other, and have enough memory.

Every rank gathers the same facts and gets the same result, so all of them end together, with
the name of the faulty machine and rank. The first all-reduce must be correct.
"""

import logging
import platform
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from torch import distributed

from sft_kernels.process import Process
from sft_play.errors import (
    MORE_SHARED_MEMORY,
    SHARED_MEMORY,
    ConfigError,
    DataError,
    EnvironmentFault,
    SftPlayError,
)
from sft_play.plan.devices import GIB
from sft_play.plan.probe_fit import digest_of_step
from sft_play.plan.workload import run_bytes
from sft_play.runs import stamp
from sft_play.training.arguments import plain_settings
from sft_play.training.context import RunContext
from sft_play.training.deepspeed_start import prepare_deepspeed
from sft_play.training.recorder import RunRecorder

logger = logging.getLogger(__name__)

# Paths of files, which may differ between machines: the contents of the files are compared.
PLACES = ("train.output_dir", "train.run_name", "train.resume_from", "data.cache_dir")
DATA_PLACES = ("data.train_path", "data.val_path", "data.test_path", "data.image_folder")
ROOM = 0.97  # of the planned peak: an estimate should not stop a run for a small shortage
FIRST_SECONDS = 180.0  # for ranks that have joined; some read the base model's files slowly
JOIN_SECONDS = 15.0  # beyond the group's timeout, whose error is more precise
PREFETCHED = 2  # batches of a worker, torch's default
BYTES_PER_TOKEN = 40  # ids, labels, positions and masks
SAME_VERSIONS = "install the same on all machines (make install), of the same commit"
SAME_FILES = "all machines need the same files; copy them, or read them from a shared disk"
SAME_SETTINGS = (
    "start all machines with the same command and config; numbers that are auto follow from "
    "each machine's GPUs, so set them if GPUs differ"
)
# How the names of values that must agree start: a cause precedes its consequences
DIFFERENCES: tuple[tuple[str | tuple[str, ...], type[SftPlayError], str], ...] = (
    ("version of ", EnvironmentFault, SAME_VERSIONS),
    ("strategy", ConfigError, SAME_SETTINGS),
    ("device", ConfigError, SAME_SETTINGS),
    ("base_digest", EnvironmentFault, SAME_FILES),
    ("tokenizer_digest", ConfigError, SAME_FILES),
    ("template_digest", ConfigError, SAME_FILES),
    ("data_digest", DataError, SAME_FILES),
    ("training rows", DataError, SAME_FILES),
    (("checkpoint", "data.", "model.", "train.", "tuning."), ConfigError, SAME_SETTINGS),
    ("layout.", ConfigError, SAME_SETTINGS),
)


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank's environment."""

    rank: int
    host: str
    node: int
    device: str  # the GPU's name, or CPU
    free_bytes: int | None  # of the GPU, for this rank; None on a CPU
    free_disk_bytes: int  # of the run folder
    has_main_folder: bool  # whether it sees the file that rank 0 wrote into its run folder

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def preflight(
    context: RunContext,
    run_stamp: stamp.Stamp,
    checkpoint: Path | None,
    rows: int,
    recorder: RunRecorder,
) -> None:
    """Check that the ranks agree and have enough resources, and log one line per machine.

    `rows` is the number of training rows. DeepSpeed compiles its ops here. Every rank must
    call it after the process group was joined. Raises: ConfigError, DataError or EnvironmentFault,
    the same on every rank.
    """
    process = context.process
    own = {**must_agree(context, run_stamp, checkpoint), "training rows": rows}
    with deadline(process, recorder.abandon, is_joining=False):
        ranks = gather_facts(context)
        if process.world_size > 1:
            with recorder.check("all ranks have the same versions, settings and rows"):
                refuse_differences(ranks, process.gather(own))
            with recorder.check("sums over the ranks are right"):
                check_sum(process)
    refuse_little_memory(ranks, context)
    refuse_little_shared_memory(context)
    refuse_little_disk(ranks, run_bytes(context.plan.step, context.config.train, rows))
    if process.is_main and process.world_size > 1:
        logger.info("%s", "\n".join(machine_lines(ranks)))
    if context.plan.deepspeed is not None:
        prepare_deepspeed(context.plan, process)


def gather_facts(context: RunContext) -> list[RankFacts]:
    """Return the facts of all ranks, by rank. Every rank must call it."""
    process = context.process
    # a file of rank 0, which the machines that share its disk see
    mark = context.folder.path.absolute() / f".preflight-{secrets.token_hex(8)}"
    if process.is_main:
        mark.touch()
    ranks = process.gather(_own_facts(context, process.gather(mark)[0]))
    if process.is_main:
        mark.unlink()
    return ranks


def must_agree(
    context: RunContext, run_stamp: stamp.Stamp, checkpoint: Path | None
) -> dict[str, Any]:
    """Return all that must be the same on every rank, by name."""
    found = plain_settings(context.config)
    for path in PLACES + DATA_PLACES:
        del found[path]
    if run_stamp.base_digest is not None:
        del found["model.name"]
    for fact in ("base_digest", "tokenizer_digest", "template_digest", "data_digest"):
        found[fact] = getattr(run_stamp, fact)
    found |= {f"layout.{name}": value for name, value in asdict(context.plan.layout).items()}
    found["strategy"] = context.plan.ranks.strategy
    found["device"] = context.plan.ranks.device
    found["checkpoint to resume"] = checkpoint and checkpoint.name
    found |= {f"version of {name}": version for name, version in stamp.versions().items()}
    found["version of Python"] = platform.python_version()
    found["version of SFT-Play"] = digest_of_step()[:12]
    return found


def refuse_differences(ranks: Sequence[RankFacts], values: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error for the first value that differs between ranks, with both values."""
    differing = [pair for pair in zip(ranks, values, strict=True) if pair[1] != values[0]]
    if not differing:
        return
    first, other = differing[0]
    names = [name for name in {**values[0], **other} if values[0].get(name) != other.get(name)]
    name = min(names, key=_find_difference)
    _, error, remedy = DIFFERENCES[_find_difference(name)]
    if name == "layout.fullest_step":
        error = DataError  # it follows from the rows
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise error(
        f"{first}: {name} is {_word(other.get(name))}, and {_word(values[0].get(name))} for "
        f"{ranks[0]}{more}; {remedy}"
    )


def refuse_little_memory(ranks: Sequence[RankFacts], context: RunContext) -> None:
    """Raise EnvironmentFault if a GPU no longer has enough memory for the planned step."""
    plan = context.plan
    chooses_again = context.config.train.probe and not plan.is_batch_explicit
    if not plan.fits or chooses_again:
        return  # the plan has reported it, or the probe finds what fits
    needed = ROOM * (plan.memory.predicted_peak - plan.memory.peak.context)
    for facts in ranks:
        if facts.free_bytes is not None and facts.free_bytes < needed:
            raise EnvironmentFault(
                f"{facts}: its GPU has {facts.free_bytes / GIB:.1f} GiB free, and the plan needs "
                f"{needed / GIB:.1f}: another program has begun to use it; nvidia-smi shows which"
            )


def refuse_little_shared_memory(context: RunContext) -> None:
    """Raise EnvironmentFault if the batches of data loader workers do not fit into /dev/shm.

    torch drops a batch that does not fit, and the rank would wait for it forever.
    """
    workers = context.config.train.loader_processes * context.plan.ranks.per_node
    if not workers or not SHARED_MEMORY.is_dir():
        return
    needed = workers * PREFETCHED * context.plan.layout.tokens * BYTES_PER_TOKEN
    free = min(context.process.gather(shutil.disk_usage(SHARED_MEMORY).free))
    if free < needed:
        raise EnvironmentFault(
            f"{free / 2**20:.1f} MiB of /dev/shm are free, and batches of {workers} workers take "
            f"up to {needed / 2**20:.1f}: {MORE_SHARED_MEMORY}"
        )


def check_sum(process: Process) -> None:
    """Raise EnvironmentFault unless a sum over all ranks is right in every element."""
    positions = torch.arange(4096, dtype=torch.float32, device=process.device)
    summed = positions + process.rank
    distributed.all_reduce(summed)
    ranks = process.world_size
    # all are integers below 2^24, so float32 is exact
    right = positions * ranks + ranks * (ranks - 1) // 2
    wrong = process.gather(int((summed != right).sum()))
    for rank, count in enumerate(wrong):
        if count:
            raise EnvironmentFault(
                f"rank {rank}: {count} of {len(right)} elements of a sum over {ranks} ranks are "
                "wrong; try NCCL_P2P_DISABLE=1, and make doctor"
            )


def refuse_little_disk(ranks: Sequence[RankFacts], needed: int) -> None:
    """Raise EnvironmentFault if the disk of a run folder that is written has too little space.

    Rank 0 writes checkpoints; ranks that see its folder share its disk.
    """
    main = ranks[0]
    if main.free_disk_bytes < needed:
        raise EnvironmentFault(
            f"{main}: {main.free_disk_bytes / GIB:.1f} GiB are free on the disk of its run folder, "
            f"and the run writes up to {needed / GIB:.1f}; free some, set TRAIN_OUTPUT_DIR to "
            "another disk, or TRAIN_SAVE_TOTAL_LIMIT=1 to keep fewer checkpoints"
        )


def machine_lines(ranks: Sequence[RankFacts]) -> list[str]:
    """Return a line for each machine."""
    lines = []
    for node in sorted({facts.node for facts in ranks}):
        own = [facts for facts in ranks if facts.node == node]
        words = [f"machine {node} host={own[0].host} ranks={len(own)} device={own[0].device}"]
        free = [facts.free_bytes for facts in own if facts.free_bytes is not None]
        if free:
            words.append(f"free={min(free) / GIB:.1f}GiB")
        words.append(f"disk={own[0].free_disk_bytes / GIB:.1f}GiB")
        if node:
            words.append("shared" if own[0].has_main_folder else "of its own")
        lines.append(" ".join(words))
    return lines


def _own_facts(context: RunContext, mark: Path) -> RankFacts:
    process = context.process
    is_gpu = process.is_gpu
    return RankFacts(
        rank=process.rank,
        host=socket.gethostname(),
        node=process.rank // context.plan.ranks.per_node,
        device=torch.cuda.get_device_name(process.device) if is_gpu else "CPU",
        free_bytes=context.memory.allocatable_bytes() if is_gpu else None,
        free_disk_bytes=shutil.disk_usage(context.folder.path).free,
        has_main_folder=mark.exists(),
    )


def _find_difference(name: str) -> int:
    """Return the index in DIFFERENCES for the name of a value."""
    starts = [start for start, _, _ in DIFFERENCES]
    return next(number for number, start in enumerate(starts) if name.startswith(start))


def _word(value: Any) -> str:
    return "missing" if value is None else str(value)


@contextmanager
def deadline(process: Process, give_up: Callable[[str], None], is_joining: bool) -> Iterator[None]:
    """Call `give_up(cause)` in a thread if the collectives inside do not end in time.

    While ranks join, the limit is the group's timeout, which gloo ignores if addresses are wrong;
    machines may start minutes apart. Afterwards all ranks are present.
    """
    seconds = process.timeout.total_seconds()
    missing = "the other ranks did not come, or cannot be reached,"
    if is_joining:
        seconds += JOIN_SECONDS
    else:
        seconds = min(FIRST_SECONDS, seconds)
        missing = "the ranks have met, and their first collectives did not end"
    cause = (
        f"rank {process.rank} on {socket.gethostname()}: {missing} within {seconds:.0f} s; between "
        "machines, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that joins them "
        "(make doctor lists them), and look at logs/rank-*.log of the run on each"
    )
    timer = Timer(seconds, give_up, (cause,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
