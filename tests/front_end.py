"""The command line in processes of its own that share one start: forks of one that has imported it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import json, os, sys
from sft_play import cli

for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update(call["environ"])
        for descriptor, name in enumerate((os.devnull, call["stdout"], call["stderr"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
        sys.argv = ["sft_play", *call["words"]]
        try:
            cli.main()
        finally:
            assert "torch" not in sys.modules
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """What a call ended with."""

    returncode: int
    stdout: str
    stderr: str


class FrontEnd:
    """Calls `python -m sft_play`, each in a process of its own."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, words: Sequence[str], environ: Mapping[str, str]) -> Done:
        """Return what a command line printed in an environment, and its exit code."""
        outputs = {name: self.folder / name for name in ("stdout", "stderr")}
        for path in outputs.values():
            path.unlink(missing_ok=True)
        files = {name: str(path) for name, path in outputs.items()}
        request = {"words": list(words), "environ": dict(environ), **files}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        return Done(code, *(path.read_text() for path in outputs.values()))

    def close(self) -> None:
        """End the process that all calls are forks of."""
        self.server.stdin.close()
        self.server.wait()
