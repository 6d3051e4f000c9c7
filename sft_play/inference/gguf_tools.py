"""Find and call llama.cpp's converter, quantizer and Python bindings."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.inference import convert_gguf
from sft_play.models.export import read_stops

CONVERTER = "convert_hf_to_gguf.py"
INSTALLED = Path(sys.prefix) / "share" / "llama.cpp"  # where make install-gguf puts the converter
WITHIN = ("", "vendor/llama.cpp")  # the second one in the source distribution of llama-cpp-python
QUANTIZERS = ("build/bin/llama-quantize", "bin/llama-quantize", "llama-quantize")
IN_16_BITS = ("F16", "BF16")  # types that the converter writes itself
UNKNOWN_PRE_TOKENIZER = "BPE pre-tokenizer was not recognized"
HOW_TO_GET = (
    "make install-gguf builds llama-cpp-python and brings the converter (tens of minutes), or "
    "LLAMA_CPP=/path/to/llama.cpp names a checkout"
)


class UnknownPreTokenizer(Exception):
    """The converter does not know how the tokenizer splits text."""


@dataclass(frozen=True)
class LlamaCpp:
    """The paths of llama.cpp."""

    folder: Path  # of its converter
    quantizer: Path | None  # None: the bindings quantize

    @classmethod
    def find(cls, asked: Path | None) -> "LlamaCpp":
        """Return the one that LLAMA_CPP names, or the installed one.

        Raises: EnvironmentFault if there is none.
        """
        folders = [(asked or INSTALLED) / inner for inner in WITHIN]
        folder = next((path for path in folders if (path / CONVERTER).is_file()), None)
        if folder is None:
            raise EnvironmentFault(
                f"FORMAT=gguf: {asked or INSTALLED} has no {CONVERTER} of llama.cpp; {HOW_TO_GET}"
            )
        quantizers = [folder / name for name in QUANTIZERS]
        quantizers.append(Path(shutil.which("llama-quantize") or folder))
        return cls(folder.resolve(), next((path for path in quantizers if path.is_file()), None))

    def require(self, kinds: Sequence[str]) -> None:
        """Raise EnvironmentFault if quantization is not available, before an hour is spent."""
        if self.quantizer is None and not set(kinds) <= set(IN_16_BITS):
            require_bindings()

    def convert(self, source: Path, target: Path, kind: str, pre_tokenizer: str | None) -> None:
        """Write a gguf file of 16 bits.

        Raises: UnknownPreTokenizer; CheckpointError with the converter's output.
        """
        words = [str(source), "--outfile", str(target), "--outtype", kind.lower()]
        script = [sys.executable, "-P", convert_gguf.__file__, str(self.folder)]
        command = [*script, pre_tokenizer or "-", json.dumps(read_stops(source)), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and target.is_file():
            return
        if UNKNOWN_PRE_TOKENIZER in done.stderr:
            raise UnknownPreTokenizer
        if "ModuleNotFoundError" in done.stderr:
            raise EnvironmentFault(
                f"llama.cpp's converter needs more: {_last_line(done)}; make install-gguf brings it"
            )
        raise CheckpointError(
            f"llama.cpp's converter in {self.folder} does not take the model: "
            f"{_last_line(done)}; a newer llama.cpp may (LLAMA_CPP=/path/to/llama.cpp), and "
            "FORMAT=safetensors exports the model for other servers"
        )

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Write a gguf file of fewer bits. Raises: ConfigError, CheckpointError."""
        if self.quantizer is not None:
            command = [str(self.quantizer), str(source), str(target), kind]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0 and target.is_file():
                return
            raise CheckpointError(f"{self.quantizer} cannot write {kind}: {_last_line(done)}")
        library = require_bindings()
        number = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
        if number is None:
            raise ConfigError(
                f"QUANT={kind}: llama.cpp has no such type; write F16, BF16, Q8_0 or Q4_K_M"
            )
        params = library.llama_model_quantize_default_params()
        params.ftype = number
        silence(library)
        failed = library.llama_model_quantize(str(source).encode(), str(target).encode(), params)
        if failed:
            raise CheckpointError(f"llama.cpp cannot write {source.name} in {kind}")


def bindings() -> Any | None:
    """Return llama-cpp-python, None if it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    return importlib.import_module("llama_cpp")


def require_bindings() -> Any:
    """Return llama-cpp-python. Raises: EnvironmentFault if it is not installed."""
    library = bindings()
    if library is None:
        raise EnvironmentFault(f"llama-cpp-python is not installed; {HOW_TO_GET}")
    return library


def open_gguf(path: Path, **options: Any) -> Any:
    """Return a gguf file opened by llama-cpp-python; the caller must close it.

    Raises: EnvironmentFault if that is not installed; CheckpointError if it cannot open it.
    """
    library = require_bindings()
    silence(library)
    try:
        return library.Llama(str(path), verbose=False, **options)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name}: llama-cpp-python {library.__version__} cannot open it ({error}); a "
            "newer one may, or FORMAT=safetensors exports the model for other servers"
        ) from None


@cache  # keeps the function that llama.cpp calls later
def silence(library: Any) -> Any:
    """Hide llama.cpp's output from now on; return the function that it calls instead."""
    silent = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(silent, None)
    return silent


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR:hf-to-gguf:") if lines else f"exit {done.returncode}"
