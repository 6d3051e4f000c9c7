"""Make processes that the user's launcher has started the ranks of one run. Loads no torch.

The first process of each machine plans the run and writes its folder, as `make train` does; then
all processes of the machine become workers of it. The others wait at a socket instead of a file:
an earlier launch leaves no answer there, and it closes if the first process is killed.
"""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Self

from sft_play import stops
from sft_play.commands.nodes import Wait, meet
from sft_play.config import loader
from sft_play.config import place as places
from sft_play.config.invocation import is_single_process_forced
from sft_play.config.place import LaunchPlace
from sft_play.config.targets import GOALS
from sft_play.errors import EnvironmentFault, ExitClass
from sft_play.plan import devices, launch
from sft_play.plan.launch import Launch
from sft_play.plan.run_plan import read_plan
from sft_play.runs import folder
from sft_play.runs.folder import RunFolder

ARRIVAL_SECONDS = 300.0  # for all processes of a launch to start
FAREWELL_SECONDS = 5.0  # for present processes to learn that there is no run
RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class Launched:
    """How this process was started."""

    environ: Mapping[str, str]  # without the variables that a launcher has set
    place: LaunchPlace | None  # None: there are no other processes
    is_surplus: bool = False  # another process trains instead
    warnings: tuple[str, ...] = ()
    meeting: "Meeting | None" = None  # of the first process of a machine


@dataclass(frozen=True)
class LeaderMessage:
    """What the first process of a machine tells the others: its run, or how it has ended."""

    folder: str | None = None
    exit_code: int | str | None = None


def read_launch(environ: Mapping[str, str]) -> Launched:
    """Return how this process was started. Raises: ConfigError for an impossible place."""
    place = places.read_place(environ)
    is_surplus = False
    if is_single_process_forced(environ):
        is_surplus = place is not None and place.rank > 0
        place = None
    own = places.without_launcher(environ, place)
    return Launched(own, place, is_surplus, tuple(places.remarks(environ, place)))


def is_placed(environ: Mapping[str, str]) -> bool:
    """Return whether this process is one of several; under make none is."""
    return bool(environ.get("WORLD_SIZE", "").strip()) and GOALS not in environ


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words after the script's name, without the rank that some launchers add."""
    return [word for word in words if not word.startswith(("--local_rank", "--local-rank"))]


def named_json(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words without the JSON after --deepspeed, and the variable that passes it to us.

    Scripts of transformers accept it there: `--deepspeed ds.json`, or `--deepspeed=ds.json`.
    """
    left: list[str] = []
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if left and left[-1] == "--deepspeed" and word.endswith(".json"):
            found = {"DEEPSPEED_CONFIG": word}
        elif name == "--deepspeed" and equals:
            left.append(name)
            found = {"DEEPSPEED_CONFIG": value}
        else:
            left.append(word)
    return left, found


def follow(launched: Launched) -> NoReturn:
    """Wait for the first process of this machine, and become a worker of its run.

    Exits as that process does if it has no run. Raises: EnvironmentFault when it does not come.
    """
    answer = _wait_for_answer(launched.place)
    if answer is None:
        raise EnvironmentFault(
            "the first process of this machine ended before it had planned the run; its output, "
            "or the kernel's log (dmesg), has the reason"
        )
    if answer.folder is None:
        tell_launcher("the first process of this machine has no run to train; it prints why")
        raise SystemExit(answer.exit_code)
    become_worker(launched, read_plan(RunFolder(Path(answer.folder))).launch)


def tell_launcher(cause: str) -> None:
    """Make the user's torchrun, if there is one, print why this process has no run to train."""
    folder.write_for_torchrun(loader.environment(), cause)


def lead(launched: Launched, meeting: "Meeting") -> Launched:
    """Return the first process of a machine, with the environment in which make starts the run.

    Raises: ConfigError if NUM_GPUS contradicts the launcher.
    """
    environ = places.as_for_make(launched.environ, launched.place)
    if devices.detect(_device(environ), environ).kind == "cpu":
        environ["DEVICE"] = "cpu"  # on a CPU, make starts several processes only if it is named
    return replace(launched, environ=environ, meeting=meeting)


def start_ranks(launched: Launched, folder: RunFolder, command: Launch) -> NoReturn:
    """Announce the run to the other processes of this machine, and become a worker of it.

    Machines whose processes the user started by hand meet first; agents of torchrun have met.
    """
    place = launched.place
    if place.nodes > 1 and f"{places.OF_TORCHRUN}RUN_ID" not in launched.environ:
        seconds = folder.read_config().train.rendezvous_timeout
        meet(Wait(place.node_rank, place.nodes, place.master_addr, place.master_port, seconds))
    launched.meeting.announce(folder)
    become_worker(launched, command)


def become_worker(launched: Launched, command: Launch) -> NoReturn:
    """Replace this process with a worker at its place."""
    own = launched.environ.items()
    variables = {name: value for name, value in own if name.startswith(places.OF_TORCHRUN)}
    variables |= launched.place.variables()
    command = replace(command, env={**command.env, **variables})
    stops.hold()
    launch.execute(command, launched.environ)
    raise AssertionError("execute does not return")


class Meeting:
    """The point at which this machine's other processes wait for the first one."""

    def __init__(self, place: LaunchPlace) -> None:
        """Open it. Raises: EnvironmentFault if another launch meets here."""
        self.expected = place.local_world_size - 1
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.bind(_address(place))
        except OSError as error:
            raise EnvironmentFault(
                f"MASTER_PORT={place.master_port}: another launch on this machine uses it "
                f"({error.strerror}); set another MASTER_PORT"
            ) from None
        self.socket.listen(max(1, self.expected))

    def announce(self, folder: RunFolder) -> None:
        """Announce the run to all others. Raises: EnvironmentFault if one is missing."""
        missing = self._tell(LeaderMessage(str(folder.path.absolute())), ARRIVAL_SECONDS)
        if missing:
            raise EnvironmentFault(
                f"{missing} of {self.expected + 1} processes of this machine did not start within "
                f"{ARRIVAL_SECONDS:.0f} s; start as many as LOCAL_WORLD_SIZE says"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, end: BaseException | None, __: object) -> None:
        """Tell the others how this process ended, if it did not become a worker."""
        if end is not None:
            code = end.code if isinstance(end, SystemExit) else int(ExitClass.UNEXPECTED)
            self._tell(LeaderMessage(exit_code=code), FAREWELL_SECONDS)
        self.socket.close()

    def _tell(self, answer: LeaderMessage, seconds: float) -> int:
        """Send an answer to each waiting process; return how many have not come."""
        deadline = time.monotonic() + seconds
        while self.expected:
            self.socket.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
            try:
                connection, _ = self.socket.accept()
            except TimeoutError:
                break
            with connection, contextlib.suppress(OSError):
                connection.sendall(json.dumps(vars(answer)).encode())
            self.expected -= 1
        return self.expected


def _device(environ: Mapping[str, str]) -> str:
    device = environ.get("DEVICE", "").strip()
    return device if device in ("cpu", "cuda") else "auto"  # a wrong word is refused with others


def _address(place: LaunchPlace) -> str:
    """Return the name of a meeting: one of Linux's abstract sockets, which need no file.

    Launches that share a machine differ in the port of their first process.
    """
    where = f"{place.master_addr}:{place.master_port}-{place.node_rank}"
    return f"\0sft_play-{os.getuid()}-{where}"


def _wait_for_answer(place: LaunchPlace) -> LeaderMessage | None:
    """Return the first process's answer, None if it ends without one."""
    deadline = time.monotonic() + ARRIVAL_SECONDS
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(_address(place)) != 0:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"LOCAL_RANK={place.local_rank}: no process with LOCAL_RANK=0 came to "
                    f"MASTER_PORT={place.master_port} within {ARRIVAL_SECONDS:.0f} s"
                )
            time.sleep(RETRY_SECONDS)
        _refuse_other_user(connection)
        with contextlib.suppress(ConnectionResetError):
            text = b"".join(iter(lambda: connection.recv(4096), b""))
            return LeaderMessage(**json.loads(text)) if text else None
    return None


def _refuse_other_user(connection: socket.socket) -> None:
    """Raise EnvironmentFault unless the other end is our process: its answer is executed."""
    owner = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", owner)
    if user != os.getuid():
        raise EnvironmentFault(
            f"the launch is answered by another user (uid {user}); set another MASTER_PORT"
        )
