"""Faults of processes: signals, kills, ranks that fail, are gone, or differ."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rank_processes import wait_for

from faults.bench import LONG, QUIET, SECONDS, Bench, Fault, Guard, Outcome, newest
from faults.files import nothing
from faults.numbers import poison
from sft_play.errors import DataError, ExitClass
from sft_play.stops import REPEAT_SECONDS
from sft_play.training import loop
from sft_play.training.loop import TrainingLoop

ZERO_2 = "configs/deepspeed_zero2.json"
TOO_MUCH = 2**50  # bytes, which no host has
MANY = {**LONG, "train.max_steps": 80}
TWO = {**MANY, "train.packing": False}


# What a rank does


def run_out() -> None:
    """Ask for more memory than any host has."""
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def find_no_row() -> None:
    """Fail otherwise."""
    raise DataError("row 7 is no row")


def fail_in_step_3(rank: int, fault: Callable[[], None]) -> None:
    """Make the forward pass of step 3 fail on one rank."""
    compute_loss = TrainingLoop.compute_loss

    def fail(self, *arguments, **options):
        if self.state.global_step == 2 and self.process.rank == rank:
            fault()
        return compute_loss(self, *arguments, **options)

    TrainingLoop.compute_loss = fail


def spoil_one_weight() -> None:
    """Make rank 1 change a trained weight of its own after the last step."""
    from sft_play.training import worker

    look = worker.check_weights

    def spoil(context, trainer, *others):
        if context.process.rank == 1:
            trained = [p for p in trainer.engine.model.parameters() if p.requires_grad]
            trained[-1].data.flatten()[0] += 1e-6
        look(context, trainer, *others)

    worker.check_weights = spoil


def have_another_peft() -> None:
    """Let rank 1 have another version of a package."""
    from sft_play.training import preflight

    if os.environ["RANK"] == "1":
        versions = preflight.stamp.versions
        preflight.stamp.versions = lambda: {**versions(), "peft": "0.1.0"}


def be_on_a_terminal() -> None:
    """Hear that the terminal is closed, also where these tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def take_long_for_step_3() -> None:
    """Make the forward pass of step 3 take longer than a user waits."""
    compute_loss = TrainingLoop.compute_loss

    def slowly(self, *arguments, **options):
        if self.state.global_step == 2:
            time.sleep(2 * REPEAT_SECONDS)
        return compute_loss(self, *arguments, **options)

    TrainingLoop.compute_loss = slowly


def hang_in_the_loader(path: Path) -> None:
    """Make the process that loads batches hang with the first one, and name itself in a file."""

    def hang(*_, **__):
        path.write_text(str(os.getpid()))
        time.sleep(10 * SECONDS)

    load_as_a_launched_rank()
    loop.collate_for_step = hang


# What is injected


def hanging_loader(number: int) -> Callable[[Bench], Outcome]:
    """Return an injection: a rank gets a signal while the process that loads its batches hangs."""

    def inject(bench):
        path = bench.folder / "loader"
        folder = bench.plan({**MANY, "train.dataloader_num_workers": 1})
        (rank,) = bench.start(folder, 1, hang_in_the_loader, path)
        deadline = time.monotonic() + SECONDS
        while not (path.exists() and path.read_text()):
            assert rank.is_alive() and time.monotonic() < deadline
            time.sleep(0.02)
        loader = psutil.Process(int(path.read_text()))
        bench.inject_now()
        os.kill(rank.pid, number)
        code = wait_for(rank, 15)
        gone, _ = psutil.wait_procs([loader], timeout=3)
        if not gone:
            loader.kill()
        said = "the loader is gone" if gone else "the loader hangs on"
        if number == signal.SIGKILL:
            return Outcome(0, said)
        assert gone, said
        return bench.outcome(folder, code, "")

    return inject


def signalled_loader(number: int, ranks: int) -> Callable[[Bench], Outcome]:
    """Return an injection: the process that loads the batches of the last rank gets a signal."""

    def inject(bench):
        few = TWO if ranks > 1 else MANY
        settings = {**few, "train.hang_timeout": 8, "train.dataloader_num_workers": 1}
        folder = bench.plan(settings, num_gpus=ranks)
        started = bench.start(folder, ranks, load_as_a_launched_rank)
        bench.wait_for(folder, "step 2/", started)
        (loader,) = psutil.Process(started[-1].pid).children()
        bench.inject_now()
        loader.send_signal(number)
        codes = bench.ends(started)
        if loader.is_running():
            loader.kill()
        return bench.outcome(folder, codes[0], (folder.path / "output.txt").read_text())

    return inject


def signalled(
    number: int,
    to: Sequence[int] = (0,),
    ranks: int = 1,
    at: str = "step 2/",
    prepare: Callable[[], None] | None = None,
    waits: Sequence[float] = (0,),
    deepspeed: str | None = None,
    **changes: Any,
) -> Callable[[Bench], Outcome]:
    """Return an injection: ranks get a signal once the log has a text, as often as there are waits."""

    def inject(bench):
        settings = {**(TWO if ranks > 1 else MANY), **changes}
        folder = bench.plan(settings, num_gpus=ranks, deepspeed_config=deepspeed)
        started = bench.start(folder, ranks, prepare)
        bench.wait_for(folder, at, started)
        bench.inject_now()
        for wait in waits:
            time.sleep(wait)
            for rank in to:
                os.kill(started[rank].pid, number)
        if number == signal.SIGSTOP:
            codes = bench.ends(started[:1])
            started[1].kill()
        codes = bench.ends(started)
        lasting = next(code for rank, code in enumerate(codes) if rank not in to or ranks == 1)
        outcome = bench.outcome(folder, lasting, (folder.path / "output.txt").read_text())
        assert (outcome.reached or 0) < settings["train.max_steps"], "it has gone on to its end"
        return outcome

    return inject


def failing(prepare: Callable[..., None], *words: Any) -> Callable[[Bench], Outcome]:
    """Return an injection: something happens to one of two ranks, and both end with one class."""

    def inject(bench):
        changes = {**TWO, "train.max_steps": 5}
        folder = bench.plan(changes, num_gpus=2)
        codes = bench.ends(bench.start(folder, 2, prepare, *words))
        assert len(set(codes)) == 1, codes
        return bench.outcome(folder, codes[0], "")

    return inject


def loading_to_the_end(bench: Bench) -> Outcome:
    """A run whose batches are loaded by a process of their own comes to its end."""
    run = bench.plan({**MANY, "train.max_steps": 2, "train.dataloader_num_workers": 1})
    (rank,) = bench.start(run, 1, load_as_a_launched_rank)
    return bench.outcome(run, wait_for(rank, 40), "")


def load_as_a_launched_rank() -> None:
    """Fork the processes that load batches, which a rank of the fork server would not."""
    multiprocessing.set_start_method("fork", force=True)


def skipped_by_both(bench: Bench) -> Outcome:
    """A loss of rank 1 is NaN, and both leave the step out."""
    changes = {**TWO, "train.max_steps": 5, "train.on_nonfinite": "skip", **QUIET}
    folder = bench.plan(changes, num_gpus=2)
    codes = bench.ends(bench.start(folder, 2, poison, {3}, float("nan"), 1))
    assert codes[0] == codes[1], codes
    log = (folder.logs / "rank-0.log").read_text()
    lines = [line for line in log.splitlines() if "it is left out" in line]
    report = folder.read_report()
    assert report.skipped_steps == [3], report.skipped_steps
    return Outcome(codes[0], lines[0], report.global_step, newest(folder))


def never(self: Any) -> bool:
    """Hear no signal."""
    return False


def announce_nothing(*_: Any) -> None:
    """Let the other ranks wait for one that fails."""


TO_GO_ON = ("stopped on request at step", "continue with ")
AGREED = Guard("sft_play.training.stop:StopOnSignal._agreed", never)


def killed(name: str, injected: str, rank: int, **how: Any) -> Fault:
    """Return a row: a rank is killed, and the other one ends with it."""
    return Fault(
        name,
        injected,
        signalled(signal.SIGKILL, ranks=2, to=(rank,), **how),
        ExitClass.PEER_LOST,
        (f"rank {rank} ended without a word", f"the end of logs/rank-{rank}.log"),
        Guard("sft_play.training.classify:_is_peer_lost", nothing),
        10,
        loses=1,
    )


def stopped(name: str, injected: str, **how: Any) -> Fault:
    """Return a row: a rank is stopped, and the other one notices."""
    return Fault(
        name,
        injected,
        signalled(signal.SIGSTOP, ranks=2, to=(1,), **{"train.hang_timeout": 8}, **how),
        ExitClass.PEER_LOST,
        ("gave no sign of life for 8 s (train.hang_timeout)", "resume, or wait longer"),
        Guard("sft_play.training.ranks:RankWatch._cause", nothing),
        30,
        loses=1,
    )


ALONE = Guard("sft_play.training.ranks:FailureBroadcast.announce", announce_nothing)


def stops(number: signal.Signals, words: str, **more: Any) -> Fault:
    name = f"{number.name.lower()}{'-' + more.pop('name') if 'name' in more else ''}"
    inject = signalled(number, **more)
    return Fault(name, words, inject, ExitClass.STOPPED, TO_GO_ON, AGREED, 15, loses=0)


ROWS = (
    stops(signal.SIGTERM, "SIGTERM while it trains"),
    stops(signal.SIGINT, "Ctrl-C while it trains"),
    stops(signal.SIGHUP, "the terminal or the ssh is closed", prepare=be_on_a_terminal),
    stops(signal.SIGUSR1, "a batch system says that time is up"),
    stops(signal.SIGTERM, "SIGTERM to one of two ranks", name="one-rank", ranks=2, to=(1,)),
    Fault(
        "sigterm-early",
        "SIGTERM before the first step",
        signalled(signal.SIGTERM, at="data train rows="),
        ExitClass.STOPPED,
        ("stopped on request before a first step", "nothing is kept of its training"),
        Guard(
            "sft_play.training.stop:StopOnSignal._obey",
            nothing,
            also=Guard("sft_play.training.stop:StopOnSignal.follow", nothing),
        ),
        15,
    ),
    Fault(
        "sigterm-hanging-loader",
        "SIGTERM while the process that loads the first batch hangs",
        hanging_loader(signal.SIGTERM),
        ExitClass.STOPPED,
        ("stopped on request before a first step", "nothing is kept of its training"),
        Guard("sft_play.training.stop:end_children", nothing),
        10,
    ),
    Fault(
        "sigkill-hanging-loader",
        "SIGKILL of a rank while the process that loads its batches hangs",
        hanging_loader(signal.SIGKILL),
        ExitClass.DONE,
        ("the loader is gone",),
        Guard("sft_play.stops:end_with_parent", nothing),
        10,
    ),
    Fault(
        "loader-at-the-end",
        "a run ends while the process that loads its batches waits for more",
        loading_to_the_end,
        ExitClass.DONE,
        (),
        Guard("sft_play.training.stop:end_children", nothing),
        40,
        loses=0,
    ),
    Fault(
        "ctrl-c-twice",
        "Ctrl-C, and once more while a long step continues",
        signalled(signal.SIGINT, prepare=take_long_for_step_3, waits=(0.3, REPEAT_SECONDS + 0.3)),
        ExitClass.STOPPED,
        ("stopped at once on a second signal", "its newest checkpoint is "),
        Guard("sft_play.training.recorder:RunRecorder.leave", nothing),
        15,
        loses=1,
    ),
    killed("kill-a-rank", "SIGKILL of one of two ranks", 1),
    killed("kill-the-main-rank", "SIGKILL of the main rank of two", 0),
    stopped("stopped-rank", "SIGSTOP of one of two ranks, with train.hang_timeout: 8"),
    Fault(
        "stopped-loader",
        "SIGSTOP of the process that loads the batches of one of two ranks, with "
        "train.hang_timeout: 8",
        signalled_loader(signal.SIGSTOP, 2),
        ExitClass.PEER_LOST,
        ("finished no micro-batch for", "(train.hang_timeout=8)", "resume, or wait longer"),
        Guard("sft_play.training.ranks:RankWatch.on_step_begin", nothing),
        60,
        loses=3,
    ),
    Fault(
        "stopped-loader-of-one-rank",
        "SIGSTOP of the process that loads the batches of the only rank, with "
        "train.hang_timeout: 8",
        signalled_loader(signal.SIGSTOP, 1),
        ExitClass.PEER_LOST,
        ("finished no micro-batch for", "a process that loads rows", "resume, or wait longer"),
        Guard("sft_play.training.ranks:RankWatch.on_step_begin", nothing),
        60,
        loses=3,
    ),
    Fault(
        "killed-loader",
        "SIGKILL of the process that loads the batches, as the kernel does if memory is short",
        signalled_loader(signal.SIGKILL, 1),
        ExitClass.OUT_OF_MEMORY,
        ("a process that loads rows has ended (DataLoader worker", "=0, then resume"),
        Guard("sft_play.training.classify:LOADER_GONE", re.compile("never")),
        30,
        loses=3,
    ),
    stopped(
        "stopped-rank-deepspeed",
        "the same under DeepSpeed, whose collectives know no timeout",
        deepspeed=ZERO_2,
    ),
    killed(
        "kill-a-rank-deepspeed", "SIGKILL of one of two ranks under DeepSpeed", 1, deepspeed=ZERO_2
    ),
    Fault(
        "memory-of-a-rank",
        "one of two ranks asks for more memory than there is",
        failing(fail_in_step_3, 1, run_out),
        ExitClass.OUT_OF_MEMORY,
        ("rank 1 ran out of memory on the host in forward at step 3", "TRAIN_BATCH_SIZE=1"),
        ALONE,
        60,
        loses=0,
    ),
    Fault(
        "failing-rank",
        "one of two ranks fails",
        failing(fail_in_step_3, 1, find_no_row),
        ExitClass.DATA,
        ("row 7 is no row",),
        ALONE,
        60,
        loses=0,
    ),
    Fault(
        "drifting-rank",
        "a weight of one rank is another after the last step",
        failing(spoil_one_weight),
        ExitClass.ENVIRONMENT,
        ("trained tensors of rank 1 are not those of rank 0",),
        Guard("sft_play.training.worker:check_equal_ranks", nothing),
        60,
        loses=0,
    ),
    Fault(
        "other-package",
        "one of two ranks has another version of a package",
        failing(have_another_peft),
        ExitClass.ENVIRONMENT,
        ("version of peft is 0.1.0",),
        Guard("sft_play.training.preflight:refuse_differences", nothing),
        60,
    ),
    Fault(
        "nan-on-one-rank",
        "a loss of one of two ranks is NaN, under on_nonfinite: skip",
        skipped_by_both,
        ExitClass.DONE,
        ("loss=nan at step 3: it is left out, and no weight has changed",),
        Guard("sft_play.training.guards:StepGuard._handle", nothing),
        60,
        loses=0,
    ),
)
