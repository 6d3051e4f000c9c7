"""The ranks of a run as a group: join, watch and leave.

A rank that fails ends the others and passes its cause; otherwise they would wait for it in a
collective. Each rank also watches for ranks that have ended or hang, itself included. Otherwise a
rank would wait for a stopped one until the process group's timeout, and forever under DeepSpeed.
"""

import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import distributed

from sft_kernels.process import Process
from sft_play import stops
from sft_play.errors import ExitClass
from sft_play.process_id import ProcessId
from sft_play.progress import EVERY_SECONDS
from sft_play.runs.files import open_in_place
from sft_play.training import peers, runtime
from sft_play.training.context import RunContext
from sft_play.training.preflight import deadline
from sft_play.training.recorder import RunRecorder
from sft_play.training.state import Control, State

logger = logging.getLogger(__name__)

FAILURE_KEY = "sft_play/failure"
POLL_SECONDS = 1.0
ACKNOWLEDGE_SECONDS = 5.0  # for all ranks to answer; a rank that is gone never does
# The rank that failed exits this long before the ranks that follow it: launchers report the first
# exit as the cause.
LEAD_SECONDS = 1.0
WATCH_KEY = "sft_play/watch"
TICK_SECONDS = 1.0
GONE_SECONDS = 4.0  # in which the failure broadcast reports a rank that failed
SLOW_STEPS = 20.0  # a step that takes more than so many times the slowest one is considered hung
SLOW_LINE = 2  # times the slowest step, from which on a line says how long it lasts
SHOW_STACKS = signal.SIGUSR2  # a rank that gets it writes the stack of each of its threads


class FailureBroadcast:
    """A key in the process group's store that ends every rank once it is set.

    A thread polls the key, since the main thread may wait in C++ for a rank that is gone. Each of
    the two threads has its own client of the store, because clients are not thread-safe. The
    polling thread calls `follow(rank, exit_class, cause)` when another rank has failed.
    """

    def __init__(self, process: Process, follow: Callable[[int, ExitClass, str], None]):
        """Start listening. Every rank must call it, after the process group was joined."""
        self.rank = process.rank
        self.follow = follow
        ranks = range(process.world_size)
        self._acknowledged = [f"{FAILURE_KEY}/acknowledged/{rank}" for rank in ranks]
        store = distributed.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._listen, args=(store.clone(),), name="failure broadcast", daemon=True
        )
        self.thread.start()

    def announce(self, exit_class: ExitClass, cause: str) -> NoReturn:
        """Announce a failure and end the process.

        First wait until all ranks have answered, for ACKNOWLEDGE_SECONDS at most. The process ends
        without destroying the process group, which would wait for the other ranks. If several ranks
        fail, all exit with the class of the first one. If the machine of the store is cut off,
        asking it would take until TCP gives up, so the process ends without an answer.
        """
        last = threading.Timer(2 * ACKNOWLEDGE_SECONDS, os._exit, (exit_class,))
        last.daemon = True
        last.start()
        try:
            own = json.dumps([self.rank, exit_class, cause])
            _, exit_class, _ = json.loads(self._store.compare_set(FAILURE_KEY, "", own))
            self._store.set(self._acknowledged[self.rank], "1")
            deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
            while not self._store.check(self._acknowledged) and time.monotonic() < deadline:
                time.sleep(0.1)
        except distributed.DistError as error:
            logger.warning("the rank that kept the store has ended: %s", error)
        os._exit(exit_class)

    def stop(self) -> None:
        """Stop listening: the run has ended without an error."""
        self._stopped.set()

    def _listen(self, store: distributed.Store) -> None:
        try:
            while not store.check([FAILURE_KEY]):
                if self._stopped.wait(POLL_SECONDS):
                    return
            rank, exit_class, cause = json.loads(store.get(FAILURE_KEY))
            if rank == self.rank:
                return
            self.follow(rank, ExitClass(exit_class), cause)
            store.set(self._acknowledged[self.rank], "1")
        except distributed.DistError as error:
            # the rank that hosts the store has ended: a collective fails because of that, or
            # the launcher ends this rank
            if not self._stopped.is_set():
                logger.warning("failures of other ranks are not heard any more: %s", error)
            return
        time.sleep(LEAD_SECONDS)
        os._exit(exit_class)


class Peer(NamedTuple):
    """Location of another rank."""

    rank: int
    process: ProcessId

    def is_gone(self) -> bool:
        """Return whether its process has ended; False if this cannot be determined."""
        return self.process.is_alive() is False


class RankWatch:
    """Calls `give_up(cause)` in a thread if a rank has ended, sends no heartbeat or hangs.

    One thread increments this rank's key in the process group's store and reads the other
    keys. Another thread checks them, so a store that does not answer is detected, too. Seconds
    are counted in ticks of this thread, so a machine that sleeps or a suspended job does not
    count as silent. A rank that runs but makes no progress detects this itself: while it waits
    for the rows of a step, and within the step. The first step compiles, and evaluations and
    saves may take any time.
    """

    def __init__(
        self,
        process: Process,
        logs: Path,
        hang_seconds: float | None,
        give_up: Callable[[str], None],
    ) -> None:
        """Start watching. Each of several ranks must call it, after they joined their group."""
        self.hang_seconds = hang_seconds
        self.give_up = give_up
        self.rank = process.rank
        own = Peer(process.rank, ProcessId.read())
        self.peers = [peer for peer in map(Peer._make, process.gather(own)) if peer != own]
        self._silent = dict.fromkeys((peer.rank for peer in self.peers), 0.0)
        self._gone = dict(self._silent)
        self._is_in_step = False
        self._in_step = 0.0  # seconds since its last micro-batch
        self._slowest_step = 0.0
        self._step_began: float | None = None
        self._closed = threading.Event()
        # the file to which this process writes its stacks on SHOW_STACKS
        self._stacks = open_in_place(logs / f"rank-{process.rank}.stacks", "w")
        faulthandler.register(SHOW_STACKS, self._stacks, all_threads=True)
        tasks = [(self._check, ())]
        if self.peers:
            store = distributed.distributed_c10d._get_default_store().clone()
            store.set(f"{WATCH_KEY}/{self.rank}", "0")
            process.gather(None)  # every rank has a sign of life
            tasks.append((self._talk, (store,)))
        for task, argument in tasks:
            threading.Thread(target=task, args=argument, name="rank watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching: the run has ended without an error."""
        self._closed.set()

    def find_gone(self) -> list[int]:
        """Return the ranks of this machine that have ended, after a collective missed one."""
        deadline = time.monotonic() + GONE_SECONDS / 2
        gone: list[int] = []
        while not gone and time.monotonic() < deadline:
            gone = [peer.rank for peer in self.peers if peer.is_gone()]
            time.sleep(0.1)
        return gone

    def _talk(self, store: distributed.Store) -> None:
        """Send heartbeats, and record those of the others."""
        keys = [f"{WATCH_KEY}/{peer.rank}" for peer in self.peers]
        before: list[bytes | None] = [None] * len(keys)
        count = 0
        try:
            while not self._closed.wait(TICK_SECONDS):
                count += 1
                store.set(f"{WATCH_KEY}/{self.rank}", str(count))
                now = store.multi_get(keys)
                for peer, last, sign in zip(self.peers, before, now, strict=True):
                    if sign != last:
                        self._silent[peer.rank] = 0.0
                before = now
        except distributed.DistError as error:
            # the store's process has ended: a launcher, which ends this rank, or a detected rank
            if not self._closed.is_set():
                logger.warning("signs of life of other ranks are not heard any more: %s", error)
            self.hang_seconds = None

    def _check(self) -> None:
        """Give up if another rank has ended or is silent, or if this rank hangs."""
        while not self._closed.wait(TICK_SECONDS):
            for peer in self.peers:
                self._silent[peer.rank] += TICK_SECONDS
                self._gone[peer.rank] += TICK_SECONDS if peer.is_gone() else 0.0
            self._in_step += TICK_SECONDS
            is_slow = self._is_in_step and self._in_step > SLOW_LINE * self._slowest_step
            if is_slow and self._in_step % EVERY_SECONDS == 0:
                logger.info("no micro-batch has ended for %.0f s", self._in_step)
            cause = self._cause()
            if cause is not None and not self._closed.is_set():
                self.give_up(cause)

    def _cause(self) -> str | None:
        gone = [rank for rank, seconds in self._gone.items() if seconds >= GONE_SECONDS]
        if gone:
            return peers.describe_missing_ranks(gone)
        if self.hang_seconds is None:
            return None
        silent = [peer for peer in self.peers if self._silent[peer.rank] > self.hang_seconds]
        if silent:
            self._show_stacks()
            names = ", ".join(f"rank {peer.rank} ({peer.process})" for peer in silent)
            return (
                f"{names} gave no sign of life for {self.hang_seconds:.0f} s (train.hang_timeout): "
                "stopped, or cut off; logs/rank-*.stacks say where each one is; resume, or wait "
                "longer with TRAIN_HANG_TIMEOUT"
            )
        limit = max(self.hang_seconds, SLOW_STEPS * self._slowest_step)
        if self._is_in_step and self._in_step > limit:
            self._show_stacks()
            what = "a process that loads rows, a disk or the GPU hangs"
            if self.peers:
                what = "no rank is gone, so one of them hangs"
            return (
                f"rank {self.rank} has finished no micro-batch for {limit:.0f} s "
                f"(train.hang_timeout={self.hang_seconds:.0f}): {what}; logs/rank-*.stacks say "
                "where each one is; resume, or wait longer with TRAIN_HANG_TIMEOUT"
            )
        return None

    def _show_stacks(self) -> None:
        """Write the stacks of each rank of this machine; a stopped rank must continue for that."""
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        for peer in self.peers:
            if peer.process.is_alive():
                os.kill(peer.process.pid, SHOW_STACKS)
                os.kill(peer.process.pid, signal.SIGCONT)

    def on_step_begin(self, *_: Any) -> None:
        """Start the clock of a step, which first waits for its rows."""
        self._in_step = 0.0
        self._is_in_step = self._step_began is not None  # not in the first step, which compiles
        self._step_began = time.monotonic()

    def on_substep_end(self, *_: Any) -> None:
        self._in_step = 0.0

    def on_step_end(self, state: State, control: Control) -> None:
        if self._is_in_step:
            seconds = time.monotonic() - self._step_began
            self._slowest_step = max(self._slowest_step, seconds)
            self._is_in_step = control.should_log  # logging waits for the rest of the GPU's work

    def on_log(self, *_: Any, **__: Any) -> None:
        self._is_in_step = False


@dataclass(frozen=True)
class RankGroup:
    """This rank's connections to the others, and what watches them and this rank."""

    broadcast: FailureBroadcast | None  # None for a single rank
    watch: RankWatch

    @classmethod
    def join(cls, context: RunContext, recorder: RunRecorder) -> Self:
        """Join the other ranks; from then on fail together. Give up if they do not join in time."""
        process = context.process
        with deadline(process, recorder.abandon, is_joining=True):
            runtime.join_group(context.plan, process.timeout)
        broadcast = None
        if process.world_size > 1:
            broadcast = FailureBroadcast(process, recorder.follow)
            recorder.announce, recorder.await_follow = broadcast.announce, broadcast.thread.join
        seconds = context.config.train.hang_timeout
        watch = RankWatch(process, context.folder.logs, seconds, recorder.abandon)
        recorder.find_gone = watch.find_gone
        return cls(broadcast, watch)

    def leave(self) -> None:
        """Wait for the other ranks, if any, and destroy the process group."""
        if not torch.distributed.is_initialized():
            self.watch.close()
            return
        # launchers end the other ranks as soon as the first rank of a stopped run exits with 75
        torch.distributed.barrier()
        stops.ignore()
        self.watch.close()
        if self.broadcast is not None:
            self.broadcast.stop()
        torch.distributed.destroy_process_group()
