"""`make serve`: an export behind vLLM, transformers' own server or that of llama-cpp-python.

It listens on the loopback interface, unless BIND names another. Loads no torch.
"""

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.commands import exports
from sft_play.config import loader
from sft_play.config.messages import refuse
from sft_play.config.schema import ModelSection
from sft_play.errors import EnvironmentFault
from sft_play.plan.launch import Launch, execute
from sft_play.reporting.card_facts import base_config, has_soft_caps

LOOPBACK = "127.0.0.1"
PORT = 8000
PORTS = 65535
SERVED = ("safetensors", "gguf")
NEEDED = ("fastapi", "uvicorn", "openai")  # by transformers serve
NEEDED_FOR_GGUF = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context")


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def read_address() -> Address:
    """Return what BIND and PORT say. Raises: ConfigError."""
    words = exports.words()
    port = words.whole_number("PORT", 1, PORTS)
    refuse(words.problems)
    return Address(words.text("BIND") or LOOPBACK, port or PORT)


def server_of(folder: Path, address: Address, device: str) -> Launch:
    """Return how a server of a folder is started: vLLM on a GPU where it is installed.

    Raises: EnvironmentFault where none is.
    """
    where = ("--host", address.host, "--port", str(address.port))
    files = sorted(folder.glob("*.gguf"))
    if files:
        require(NEEDED_FOR_GGUF, "'llama-cpp-python[server]'")
        words = ("-m", "llama_cpp.server", "--model", str(files[0]), "--n_gpu_layers", "-1")
        return Launch((sys.executable, *words, *where), {})
    vllm = shutil.which("vllm")
    if vllm is not None and device == "cuda":
        return Launch((vllm, "serve", str(folder), *where), {})
    require(NEEDED, " ".join(NEEDED))
    words = ("-m", "transformers.cli.transformers", "serve", str(folder))
    own = ("--device", device)
    config = base_config(ModelSection(name=str(folder)))
    if has_soft_caps(config):  # transformers' sdpa leaves it out without a word
        own += ("--attn-implementation", "eager")
    return Launch((sys.executable, *words, *where, *own), {})


def require(packages: Sequence[str], to_install: str) -> None:
    """Raise EnvironmentFault where a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"the server needs {', '.join(missing)}, which are not installed; type "
            f"{sys.executable} -m pip install {to_install}"
        )


def start(launch: Launch) -> None:
    """Become the server."""
    sys.stdout.flush()
    execute(launch, loader.environment())


def lines_of(folder: Path, address: Address, launch: Launch, run: str) -> Sequence[str]:
    """Return what is printed before the server takes over."""
    lines = [
        " ".join(launch.argv),
        f"serves {folder} at {address.url}/v1; make check-server RUN={run} URL={address.url} "
        f"SERVED_NAME={folder} checks it, Ctrl-C ends it",
    ]
    if address.host not in (LOOPBACK, "localhost", "::1"):
        lines.append(f"warning: BIND={address.host}: whoever reaches this machine may ask it")
    return lines
