"""`make export` and `make serve`: read their variables. Loads no torch.

A server listens on the loopback interface, unless BIND names another.
"""

import importlib.util
import json
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.commands import use
from sft_play.commands.call import Call
from sft_play.config.invocation import PORTS
from sft_play.config.messages import refuse
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.plan.launch import Launch, execute
from sft_play.runs import exports
from sft_play.runs.exports import (
    ADAPTERS,
    COMPRESSED,
    FORMATS,
    LEAST_GAIN,
    ExportAsked,
    ParityRow,
    exports_of,
)
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import find_model

QUANTIZATION = "Q8_0"  # closest to the scored model at half the size of 16 bits
# Variables that only some formats use
OF_FORMATS = {
    "QUANT": ("gguf",),
    "LLAMA_CPP": ("gguf",),
    "PRE_TOKENIZER": ("gguf",),
    "EXPORT_MIN_GAIN": COMPRESSED,
}
LOOPBACK = "127.0.0.1"
PORT = 8000
SERVED = ("safetensors", "gguf", *COMPRESSED)
CHECKED = ("safetensors", "gguf", *ADAPTERS)  # whose answers are those of the evaluated model
NEEDED_FOR_GGUF = "llama_cpp fastapi uvicorn sse_starlette starlette_context".split()


def read_export(call: Call, run: RunFolder) -> ExportAsked:
    """Return the request in the variables of `make export`. Raises: ConfigError."""
    given = call.words
    kind = given.choice("FORMAT", FORMATS) or FORMATS[0]
    dtype = use.asked_dtype(call, run, "export")
    least_gain = given.number("EXPORT_MIN_GAIN", lambda share: 0 <= share <= 1, "from 0 to 1")
    for name, formats in OF_FORMATS.items():
        if kind not in formats and given.text(name):
            those = " or ".join(formats)
            given.problems.append(f"{name}: FORMAT={kind} does not read it; set FORMAT={those}")
    if kind in ADAPTERS and dtype is not None:
        given.problems.append(f"MODEL_DTYPE={dtype}: FORMAT={kind} does not read it")
    refuse(given.problems)
    out, llama_cpp = given.text("OUT"), given.text("LLAMA_CPP")
    quantizations = (given.text("QUANT") or QUANTIZATION).replace(",", " ").upper().split()
    return ExportAsked(
        format=kind,
        out=Path(out) if out else None,
        dtype=dtype,
        quantizations=tuple(dict.fromkeys(quantizations)),
        llama_cpp=Path(llama_cpp) if llama_cpp else None,
        least_gain=LEAST_GAIN if least_gain is None else least_gain,
        pre_tokenizer=given.text("PRE_TOKENIZER"),
    )


def chosen_export(call: Call, run: RunFolder, formats: tuple[str, ...] = FORMATS) -> Path:
    """Return the export that FORMAT names, or the latest of these formats.

    Raises: ConfigError if there is none.
    """
    given = call.words
    wanted = given.choice("FORMAT", formats)
    refuse(given.problems)
    for path in exports_of(run):
        if path.name == wanted or (wanted is None and path.name in formats):
            return path
    raise ConfigError(
        f"{run.path} has no export of format {wanted or ' or '.join(formats)}; "
        f"make export RUN={run.name} FORMAT={wanted or formats[0]} writes it"
    )


def read_parity_rows(call: Call) -> list[ParityRow]:
    """Return the rows of the parity.jsonl that PARITY names, or of the run's latest export."""
    given = call.words.text("PARITY")
    if given:
        path = Path(given)
    else:
        run = use.chosen_run(call)
        delivered = run.read_config().train.deliver_as
        path = chosen_export(call, run, CHECKED if delivered is None else (*CHECKED, delivered))
    return exports.read_parity(path / exports.PARITY if path.is_dir() else path)


@dataclass(frozen=True)
class Address:
    """A server's address."""

    host: str
    port: int

    @classmethod
    def read(cls, call: Call) -> "Address":
        """Return the address in BIND and PORT. Raises: ConfigError."""
        words = call.words
        port = words.whole_number("PORT", 1, PORTS)
        refuse(words.problems)
        return cls(words.text("BIND") or LOOPBACK, port or PORT)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        return f"http://{host}:{self.port}"

    def refuse_taken(self) -> None:
        """Raise EnvironmentFault if the port is taken: a server reports this only after loading."""
        try:
            family, *_, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            raise EnvironmentFault(
                f"BIND={self.host} PORT={self.port}: {error.strerror}; set another PORT, or as "
                "BIND an address of this machine"
            ) from None


def serve(call: Call) -> None:
    """Become a server of a run's export: vLLM, llama-cpp-python's, or this one."""
    run = use.chosen_run(call)
    folder = chosen_export(call, run, SERVED)
    address = Address.read(call)
    launch = server_of(folder, run.name, address, call.machine.kind)
    address.refuse_taken()
    print("\n".join(server_lines(folder, address, run.name)), flush=True)
    if launch:
        print(*launch.argv, flush=True)
        execute(launch, call.environ)
    model = find_model(str(folder), call.output_dir)
    # other servers read special tokens in a message as tokens, too
    allowed = {"data.special_tokens_in_text": "allow"}
    config = use.settings_with_given(call, model, "serve").config.changed(allowed)
    from sft_play.inference import load, server

    trained = load.load_run(model, call.machine.kind, config)
    server.serve_model(trained, run.name, address.host, address.port)


def server_lines(folder: Path, address: Address, run: str) -> list[str]:
    """Return the lines to print before the server starts."""
    url = address.url
    request = {"model": run, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    body = shlex.quote(json.dumps(request, ensure_ascii=False))
    lines = [
        f"serves {folder} at {url}/v1 as model {run}; Ctrl-C ends it, make check-server RUN={run} "
        f"URL={url} checks it; once the server is ready, this line asks it:",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {body}",
    ]
    if address.host not in (LOOPBACK, "localhost", "::1"):
        lines.append(f"warning: BIND={address.host}: whoever reaches this machine may ask it")
    return lines


def server_of(folder: Path, name: str, address: Address, device: str) -> Launch | None:
    """Return the command that serves a folder: vLLM on a GPU if it is installed.

    None is the server of this project. Raises: EnvironmentFault if that of gguf is not installed.
    """
    where = ("--host", address.host, "--port", str(address.port))
    files = sorted(folder.glob("*.gguf"))
    if files:
        require_package(NEEDED_FOR_GGUF, "'llama-cpp-python[server]'")
        words = ("--model", str(files[0]), "--model_alias", name, "--n_gpu_layers", "-1")
        return Launch((sys.executable, "-m", "llama_cpp.server", *words, *where), {})
    vllm = shutil.which("vllm")
    if vllm is not None and device == "cuda":
        return Launch((vllm, "serve", str(folder), "--served-model-name", name, *where), {})
    return None


def require_package(packages: Sequence[str], to_install: str, by: str = "the server") -> None:
    """Raise EnvironmentFault if a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"{by} needs {', '.join(missing)}, which are not installed; type "
            f"{sys.executable} -m pip install {to_install}"
        )
