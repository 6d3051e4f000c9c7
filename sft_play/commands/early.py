"""Start the only rank of a run while its rows are read. Loads no torch.

A rank's imports take seconds, and so do planning and tokenizing: they run in parallel.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from sft_play import stops
from sft_play.config.backends import backend_of
from sft_play.config.invocation import Invocation
from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.schema import Config
from sft_play.errors import SftPlayError
from sft_play.plan.devices import Hardware
from sft_play.plan.launch import OF_RUN_FOLDER, WORKER, Launch, rank_command, rank_environment
from sft_play.plan.ranks import plan_ranks

RELAY = PROJECT_ROOT / "scripts" / "relay.py"


class EarlyRank:
    """A rank that imports its libraries, and waits for a run folder on a pipe.

    It ends with this process, and when the pipe is closed. It hears no signal before it has a run.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, env: Mapping[str, str]):
        self.process = process
        self._pipe = pipe
        self._env = env

    @classmethod
    def of(
        cls, config: Config, invocation: Invocation, hardware: Hardware, environ: Mapping[str, str]
    ) -> Self | None:
        """Start the only rank of a run; None if it has several, or cannot be started yet."""
        if backend_of(config).patches_transformers or config.model.device_map is not None:
            return None
        try:
            ranks = plan_ranks(invocation, hardware, environ, False, False)
        except SftPlayError:  # the plan will report it
            return None
        if ranks.strategy != "single":
            return None
        return cls.start(rank_command(ranks, Path(config.train.output_dir), environ), environ)

    @classmethod
    def start(cls, launch: Launch, environ: Mapping[str, str]) -> Self:
        """Start it in the environment of `launch`, whose run folder is not known yet."""
        reading, writing = os.pipe()
        env = rank_environment(launch, environ)
        words = [sys.executable, str(WORKER), "--wait", str(reading), str(os.getpid())]
        with stops.held():
            process = subprocess.Popen(words, env=env, pass_fds=[reading])
        os.close(reading)
        return cls(process, writing, env)

    def begin(self, launch: Launch, folder: Path, environ: Mapping[str, str]) -> Launch | None:
        """Make it the rank of `launch`; return the command that this process becomes meanwhile.

        None if it is not the process that `launch` would start, or if it has ended.
        """
        asked = rank_environment(launch, environ)
        changed = {name for name, _ in asked.items() ^ self._env.items()} - {OF_RUN_FOLDER}
        is_rank = launch.argv[:2] == (sys.executable, str(WORKER))  # and not a launcher of one rank
        if is_rank and not changed and self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                os.write(self._pipe, f"{folder.absolute()}\n".encode())
                return Launch((sys.executable, "-S", str(RELAY), str(self.process.pid)), launch.env)
        self.end()
        return None

    def end(self) -> None:
        """End it: the run has other ranks."""
        self.process.kill()
        self.process.wait()
        os.close(self._pipe)
