"""Let a run's machines meet before their launchers start, while stops and limits still work.

A launcher waits for the others inside C++, silently and without handling signals. Machine 0 listens
at its launcher's future port, and releases all machines once each has come. Loads no torch.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sft_play.errors import EnvironmentFault, ExitClass, error_of_class

SAY_SECONDS = 10.0
POLL_SECONDS = 0.2
GO = "go"  # sent instead of the numbers of missing machines


@dataclass
class Wait:
    """How long one machine waits for the others; it reports which ones are missing."""

    node: int
    nodes: int
    address: str
    port: int
    seconds: float
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    began: float = field(default_factory=time.monotonic)
    _said: float = 0.0  # seconds after the start

    def pause(self, awaited: list[int]) -> None:
        """Report every 10 s which machines are missing. Raises: class 17 at the limit."""
        passed = time.monotonic() - self.began
        names = f"machine {', '.join(map(str, awaited))} of {self.nodes} (from 0)"
        if passed > self.seconds:
            raise error_of_class(
                ExitClass.PEER_LOST,
                f"{names} did not come to {self.address}:{self.port} within {self.seconds:.0f} s "
                "(train.rendezvous_timeout). Start the same command there with its NODE_RANK, or "
                "set NNODES to the number of machines. A firewall may also block the port.",
            )
        if passed - self._said >= SAY_SECONDS:
            self._said = passed
            self.say(
                f"machine {self.node} waits for {names} at {self.address}:{self.port}, "
                f"{passed:.0f} of {self.seconds:.0f} s (TRAIN_RENDEZVOUS_TIMEOUT); Ctrl-C stops it"
            )


def meet(wait: Wait) -> None:
    """Return once all machines of a run have come.

    Raises: an error of class 17 at the limit, EnvironmentFault if the port is taken.
    """
    if wait.node == 0:
        _gather(wait)
        return
    while not _report(wait):
        time.sleep(POLL_SECONDS)
        wait.pause([0])


def _gather(wait: Wait) -> None:
    """Collect all other machines, and release them."""
    arrived: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server(("", wait.port)))
        except OSError as error:
            raise EnvironmentFault(
                f"MASTER_PORT={wait.port}: {error.strerror}; set another, the same on every machine"
            ) from None
        listener.settimeout(POLL_SECONDS)
        while awaited := sorted(set(range(1, wait.nodes)) - set(arrived)):
            with contextlib.suppress(
                OSError, ValueError, KeyError, TypeError
            ):  # from a stranger, or empty
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(POLL_SECONDS)
                arrived[json.loads(connection.recv(64))["machine"]] = connection
            for node, connection in list(arrived.items()):
                if not _send(connection, json.dumps(awaited)):
                    del arrived[node]  # it was stopped meanwhile
            wait.pause(awaited)
        for connection in arrived.values():
            _send(connection, json.dumps(GO))
        for connection in arrived.values():  # the end that closes first keeps the port busy
            with contextlib.suppress(OSError):
                connection.recv(1)


def _report(wait: Wait) -> bool:
    """Report to machine 0 and wait for the others; return False if it is not reachable."""
    try:
        connection = socket.create_connection((wait.address, wait.port), timeout=POLL_SECONDS * 5)
    except OSError:
        return False
    awaited = [0]
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(POLL_SECONDS)
        connection.sendall(json.dumps({"machine": wait.node}).encode())
        lines = b""
        while True:
            with contextlib.suppress(TimeoutError):
                received = connection.recv(4096)
                if not received:
                    return False
                lines += received
            *complete, lines = lines.split(b"\n")
            for line in complete:
                awaited = json.loads(line)
                if awaited == GO:
                    return True
            wait.pause([node for node in awaited if node != wait.node] or [0])
    return False


def _send(connection: socket.socket, text: str) -> bool:
    """Return whether the other end accepts a line."""
    try:
        connection.sendall(f"{text}\n".encode())
    except OSError:
        return False
    return True
