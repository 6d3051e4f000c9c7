"""How a rank that fails tells the others, so that they end too, and for its reason: they wait for it in a collective otherwise."""

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

KEY = "sft_play/alarm"
POLL_SECONDS = 1.0
HEARD_SECONDS = 5.0  # for all to hear it; one that is gone never does
LEAD_SECONDS = 1.0  # a rank that failed ends before those that follow it: launchers name the first as the cause


def listen(
    process: Process, follow: Callable[[int, ExitClass, str], None]
) -> "FailureBroadcast | None":
    """Return the alarm of the process group, None for a process that is alone. Every rank must call it, once the group is there."""
    if process.world_size == 1:
        return None
    return FailureBroadcast(
        distributed.distributed_c10d._get_default_store(), process.rank, process.world_size, follow
    )


class FailureBroadcast:
    """A word in the process group's store that ends every rank.

    A thread looks for it, since the main one may wait in C++ for a rank that is gone; both have a client of the store of their own,
    because a client is for one thread. `follow(rank, exit_class, cause)` is called in that thread when another rank has failed.
    """

    def __init__(
        self,
        store: distributed.Store,
        rank: int,
        world_size: int,
        follow: Callable[[int, ExitClass, str], None],
    ):
        self.rank, self.follow = rank, follow
        self._heard = [f"{KEY}/heard/{number}" for number in range(world_size)]
        self._store, self._stopped = store.clone(), threading.Event()
        self.thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="alarm", daemon=True
        )
        self.thread.start()

    def leave(self, exit_class: ExitClass, cause: str) -> NoReturn:
        """Tell the others, wait until they have heard or HEARD_SECONDS have passed, and end the process.

        At once, because taking the process group down would wait for the others. Of several ranks that fail, the first is heard,
        and its class is that of all.
        """
        try:
            _, exit_class, _ = json.loads(
                self._store.compare_set(KEY, "", json.dumps([self.rank, exit_class, cause]))
            )
            self._store.set(self._heard[self.rank], "1")
            deadline = time.monotonic() + HEARD_SECONDS
            while not self._store.check(self._heard) and time.monotonic() < deadline:
                time.sleep(0.1)
        except distributed.DistError as error:
            logger.warning("the rank that kept the store has ended: %s", error)
        os._exit(exit_class)

    def stop(self) -> None:
        """Look for it no longer: the run has ended well."""
        self._stopped.set()

    def _watch(self, store: distributed.Store) -> None:
        try:
            while not store.check([KEY]):
                if self._stopped.wait(POLL_SECONDS):
                    return
            rank, exit_class, cause = json.loads(store.get(KEY))
            if rank == self.rank:
                return
            self.follow(rank, ExitClass(exit_class), cause)
            store.set(self._heard[self.rank], "1")
        except distributed.DistError as error:  # who kept the store is gone: a collective fails of it, or the launcher ends this rank
            if not self._stopped.is_set():
                logger.warning("no alarm is heard any more: %s", error)
            return
        time.sleep(LEAD_SECONDS)
        os._exit(exit_class)
