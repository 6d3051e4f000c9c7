"""Commands of the command line on a run: in this process, or in a pseudo-terminal."""

import json
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import torch
from typer.testing import CliRunner

from sft_play import cli

SECONDS = 20.0


def called(run: Path, *words: str, typed: str | None = None, **variables: object):
    """Run a command on a run, in this process."""
    environ = {"RUN": run, "DEVICE": "cpu", **variables}
    texts = {name: str(value) for name, value in environ.items()}
    return CliRunner().invoke(cli.app, list(words), input=typed, env=texts)


def lines_of(path: Path) -> list[dict]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Terminal:
    """A command of the command line in a process with a terminal of its own."""

    def __init__(
        self, words: list[str], environ: dict[str, str], prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.shown = ""
        self.pid, self.master = pty.fork()
        termios.tcsetwinsize(self.master if self.pid else 0, (24, 80))
        if self.pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)  # the threads of the parent are not here
                for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
                    setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update({"TERM": "dumb", **environ})
                prepare()
                cli.main(words)
            except SystemExit as done:
                code = done.code or 0
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait_for(self, text: str) -> str:
        """Return what was shown up to a text, and forget it."""
        until = time.monotonic() + SECONDS
        while text not in self.shown:
            assert time.monotonic() < until, f"no {text!r} in {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert text in self.shown, self.shown
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def exit_code(self, keys: str = "") -> int:
        """Return the exit code; `keys` are typed until the process ends.

        readline waits for a key where a signal comes just before it begins to wait.
        """
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            self.type(keys)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"it still runs, and shows {self.shown!r}")
