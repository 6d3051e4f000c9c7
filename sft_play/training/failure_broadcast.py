"""A rank that fails ends the other ranks, with its own cause.

Otherwise they would wait for it in a collective.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from torch import distributed

from sft_play.errors import ExitClass
from sft_play.process import Process

logger = logging.getLogger(__name__)

KEY = "sft_play/failure"
POLL_SECONDS = 1.0
ACKNOWLEDGE_SECONDS = 5.0  # for all ranks to answer; a rank that is gone never does
# The rank that failed exits this long before those that follow it: launchers report the first exit
# as the cause.
LEAD_SECONDS = 1.0


class FailureBroadcast:
    """A key in the process group's store that ends every rank once it is set.

    A thread polls the key, since the main thread may wait in C++ for a rank that is gone. Each of
    the two threads has its own client of the store, because clients are not thread-safe. The
    polling thread calls `follow(rank, exit_class, cause)` when another rank has failed.
    """

    def __init__(
        self,
        store: distributed.Store,
        rank: int,
        world_size: int,
        follow: Callable[[int, ExitClass, str], None],
    ):
        self.rank = rank
        self.follow = follow
        self._acknowledged = [f"{KEY}/acknowledged/{number}" for number in range(world_size)]
        self._store = store.clone()
        self._stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._listen, args=(store.clone(),), name="failure broadcast", daemon=True
        )
        self.thread.start()

    @classmethod
    def start(
        cls, process: Process, follow: Callable[[int, ExitClass, str], None]
    ) -> "FailureBroadcast | None":
        """Return a broadcast over the process group, None if the world size is 1.

        Call it after `runtime.join_group`. Every rank must call it.
        """
        if process.world_size == 1:
            return None
        store = distributed.distributed_c10d._get_default_store()
        return cls(store, process.rank, process.world_size, follow)

    def announce(self, exit_class: ExitClass, cause: str) -> NoReturn:
        """Announce a failure and end the process.

        First wait until all ranks have answered, for ACKNOWLEDGE_SECONDS at most. The process ends
        without destroying the process group, which would wait for the other ranks. If several ranks
        fail, all exit with the class of the first one. Where the machine of the store is cut off,
        asking it would take until TCP gives up, so the process ends without an answer.
        """
        last = threading.Timer(2 * ACKNOWLEDGE_SECONDS, os._exit, (exit_class,))
        last.daemon = True
        last.start()
        try:
            own = json.dumps([self.rank, exit_class, cause])
            _, exit_class, _ = json.loads(self._store.compare_set(KEY, "", own))
            self._store.set(self._acknowledged[self.rank], "1")
            deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
            while not self._store.check(self._acknowledged) and time.monotonic() < deadline:
                time.sleep(0.1)
        except distributed.DistError as error:
            logger.warning("the rank that kept the store has ended: %s", error)
        os._exit(exit_class)

    def stop(self) -> None:
        """Stop listening: the run has ended well."""
        self._stopped.set()

    def _listen(self, store: distributed.Store) -> None:
        try:
            while not store.check([KEY]):
                if self._stopped.wait(POLL_SECONDS):
                    return
            rank, exit_class, cause = json.loads(store.get(KEY))
            if rank == self.rank:
                return
            self.follow(rank, ExitClass(exit_class), cause)
            store.set(self._acknowledged[self.rank], "1")
        except distributed.DistError as error:
            # the rank that hosts the store is gone: a collective fails because of that, or the
            # launcher ends this rank
            if not self._stopped.is_set():
                logger.warning("failures of other ranks are not heard any more: %s", error)
            return
        time.sleep(LEAD_SECONDS)
        os._exit(exit_class)
