"""The place of a process among those of a launcher that the user started himself. Pure.

torchrun, accelerate launch and deepspeed say it in RANK, WORLD_SIZE, LOCAL_RANK and their like, and
so may the user, by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sft_play.config.invocation import PORTS, Words
from sft_play.config.messages import refuse, word
from sft_play.errors import ConfigError

# Where processes meet whose RANK was set by hand, without MASTER_ADDR and MASTER_PORT
DEFAULT_ADDRESS = "localhost"
DEFAULT_PORT = 12355
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

# What launchers set, and what they read like options: the plan decides all of it
# again. Left to the ranks, accelerate's number type would win, and torchrun would wait for nodes.
OF_LAUNCHERS = frozenset(
    """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE GROUP_RANK
    GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME PYTHON_EXEC NPROC FORK_LAUNCHED
    XLA_USE_BF16 XLA_DOWNCAST_BF16 TORCH_ELASTIC_WORKER_IDENTICAL TORCH_DIST_INIT_BARRIER
    DEEPSPEED_TIMEOUT DEEPSPEED_USE_HPU DS_ACCELERATOR DS_ALLOW_DEPRECATED_FP16 DS_ENV_FILE
    """.split()
)
PREFIXES_OF_LAUNCHERS = tuple(
    """
    ACCELERATE_ FSDP_ PARALLELISM_CONFIG_ MEGATRON_LM_ PET_ TORCHELASTIC_ OMPI_COMM_WORLD_
    MV2_COMM_WORLD_ PMI_ PMIX_RANK MPI_LOCAL PALS_LOCAL DS_SDMA_ MORI_ENABLE_SDMA
    """.split()
)
OF_TORCHRUN = "TORCHELASTIC_"  # what its ranks need: who keeps the store, where causes are read
MEETING_POINT = frozenset({"MASTER_ADDR", "MASTER_PORT"})  # make's too, for several machines


@dataclass(frozen=True)
class LaunchPlace:
    """One process among those of a launch."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this machine
    local_world_size: int
    master_addr: str
    master_port: int
    uses_deepspeed: bool = False
    deepspeed_config: str | None = None
    uses_fsdp: bool = False

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    def variables(self) -> dict[str, str]:
        """Return the variables by which torch finds this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def make_variables(self) -> dict[str, str]:
        """Return the variables with which make would start as many processes."""
        variables = {"NUM_GPUS": str(self.local_world_size)}
        if self.nodes > 1:
            found = self.variables()
            variables |= {name: found[name] for name in sorted(MEETING_POINT)}
            variables |= {"NNODES": str(self.nodes), "NODE_RANK": str(self.node_rank)}
        if self.deepspeed_config:
            variables["DEEPSPEED_CONFIG"] = self.deepspeed_config
        if self.uses_fsdp:
            variables["TRAIN_STRATEGY"] = "fsdp"
        return variables


def read_place(environ: Mapping[str, str]) -> LaunchPlace | None:
    """Return the place of this process, None if no other process belongs to it.

    Raises: ConfigError that lists every variable that is missing or wrong.
    """
    words = Words({**environ, **_derive(environ)})
    rank, world_size = _pair(words, "RANK", "WORLD_SIZE")
    size_name = "LOCAL_SIZE" if words.text("LOCAL_SIZE") else "LOCAL_WORLD_SIZE"  # deepspeed's
    local_rank, local_world_size = _pair(words, "LOCAL_RANK", size_name)
    address = words.text("MASTER_ADDR") or DEFAULT_ADDRESS
    port = words.whole_number("MASTER_PORT", 1, PORTS) or DEFAULT_PORT
    refuse(words.problems)
    if rank is None or world_size is None:
        return None
    if local_rank is None or local_world_size is None:
        if world_size > 1 and address not in THIS_MACHINE:
            raise ConfigError(
                f"MASTER_ADDR={word(address)} without LOCAL_RANK and LOCAL_WORLD_SIZE: set them to "
                "this process's number on its machine and how many run there (0 and 1 if each "
                "machine runs one)"
            )
        local_rank, local_world_size = rank, world_size
    place = LaunchPlace(
        rank,
        world_size,
        local_rank,
        local_world_size,
        address,
        port,
        bool(words.text("CROSS_SIZE")) or words.is_on("ACCELERATE_USE_DEEPSPEED"),
        words.text("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        words.is_on("ACCELERATE_USE_FSDP"),
    )
    _refuse_impossible(place)
    return place if world_size > 1 or place.uses_deepspeed else None


def without_launcher(environ: Mapping[str, str], place: LaunchPlace | None) -> dict[str, str]:
    """Return the environment without what a launcher has set; torchrun's ranks need some of it."""
    names = MEETING_POINT if place is not None else frozenset()
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(OF_TORCHRUN) or not (name in names or is_of_launcher(name))
    }


def is_of_launcher(name: str) -> bool:
    """Return whether a variable says to a launcher or its ranks what the plan decides."""
    is_named = name in OF_LAUNCHERS or name.startswith(PREFIXES_OF_LAUNCHERS)
    return is_named and name != "TORCHELASTIC_ERROR_FILE"  # only if a cause is read


def _derive(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what follows from a LOCAL_RANK that was set by hand, if one machine is certain."""
    words = Words(environ)
    rank, size, local_rank = map(words.text, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if local_rank is None or words.text("LOCAL_WORLD_SIZE") or words.text("LOCAL_SIZE"):
        return {}
    if rank is size is None and local_rank == "0":
        return {"LOCAL_RANK": ""}
    is_here = size == "1" or (words.text("MASTER_ADDR") or DEFAULT_ADDRESS) in THIS_MACHINE
    return {"LOCAL_WORLD_SIZE": size} if size and rank == local_rank and is_here else {}


def as_for_make(environ: Mapping[str, str], place: LaunchPlace) -> dict[str, str]:
    """Return the environment, without what a launcher has set, in which make starts the same run.

    Raises: ConfigError if NUM_GPUS says otherwise than the launcher did.
    """
    variables = place.make_variables()
    asked = Words(environ).text("NUM_GPUS")
    if asked not in (None, variables["NUM_GPUS"]):
        raise ConfigError(
            f"NUM_GPUS={word(asked)}: the launcher has started {place.local_world_size} "
            "processes on this machine; leave NUM_GPUS out"
        )
    strategy = Words(environ).text("TRAIN_STRATEGY")
    if place.uses_fsdp and strategy not in (None, "auto", "fsdp"):
        raise ConfigError(
            f"TRAIN_STRATEGY={word(strategy)}: accelerate launch --use_fsdp asks for fsdp; "
            "leave one of them out"
        )
    if environ.get("DEEPSPEED_CONFIG"):
        variables.pop("DEEPSPEED_CONFIG", None)
    return {**environ, **variables}


def remarks(environ: Mapping[str, str], place: LaunchPlace | None) -> list[str]:
    """Return a sentence for what was derived, and for what launchers were told and is dropped.

    At a place, the launcher itself has set most of these variables, and read the others.
    """
    sentences = []
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        sentences.append(
            f"accelerate's mixed precision {precision} does not count here: train.bf16 and "
            "train.fp16 do, which are auto unless set"
        )
    dropped = [name for name in sorted(environ) if is_of_launcher(name) and environ[name]]
    if place is None and dropped:
        sentences.append(
            f"{', '.join(dropped)} of the environment: the ranks are started without, because the "
            "plan decides what launchers read there; settings, NUM_GPUS, NNODES, NODE_RANK, "
            "MASTER_ADDR and MASTER_PORT say it to the plan"
        )
    derived = _derive(environ).get("LOCAL_WORLD_SIZE")
    if place is not None and derived:
        sentences.append(
            f"LOCAL_WORLD_SIZE={derived} follows from WORLD_SIZE: RANK and LOCAL_RANK are equal, "
            "so all processes run on this machine"
        )
    return sentences


def _pair(words: Words, rank_name: str, size_name: str) -> tuple[int | None, int | None]:
    """Return a rank and of how many; only one of them is a problem."""
    given = [name for name in (rank_name, size_name) if words.text(name)]
    if len(given) == 1:
        missing = size_name if given == [rank_name] else rank_name
        words.problems.append(
            f"{given[0]}={word(words.text(given[0]))} without {missing}: set both, as torchrun "
            "does, or neither"
        )
    return words.whole_number(rank_name, 0), words.whole_number(size_name, 1)


def _refuse_impossible(place: LaunchPlace) -> None:
    """Refuse numbers that no launch has. Raises ConfigError."""
    problems = []
    for name, rank, size in (
        ("RANK", place.rank, place.world_size),
        ("LOCAL_RANK", place.local_rank, place.local_world_size),
    ):
        if rank >= size:
            problems.append(f"{name}={rank}: write a number from 0 to {size - 1}")
    of_whole = place.world_size % place.local_world_size
    if of_whole or place.rank % place.local_world_size != place.local_rank:
        problems.append(
            f"RANK={place.rank} WORLD_SIZE={place.world_size} LOCAL_RANK={place.local_rank} "
            f"LOCAL_WORLD_SIZE={place.local_world_size}: every machine must run as many processes, "
            "numbered one machine after the other"
        )
    refuse(problems)
