"""What export, serve, push and check-server are asked by variables. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from sft_play.commands import use
from sft_play.commands.call import read_call
from sft_play.config.invocation import Words
from sft_play.config.messages import refuse
from sft_play.errors import ConfigError
from sft_play.runs import exports
from sft_play.runs.exports import FORMATS, ExportAsked, ParityRow, exports_of
from sft_play.runs.folder import RunFolder

QUANTIZATION = "Q8_0"  # nearest to what was scored at half the size of 16 bits
OF_GGUF = ("QUANT", "LLAMA_CPP", "PRE_TOKENIZER")


def words() -> Words:
    """Return the variables of this call."""
    return Words(read_call(None, ()).environ)


def read_export(run: RunFolder, overrides: Sequence[str] | None) -> ExportAsked:
    """Return what the variables of `make export` ask for. Raises: ConfigError."""
    given = words()
    kind = given.choice("FORMAT", FORMATS) or FORMATS[0]
    dtype = use.asked_dtype(run, overrides, "export")
    if kind != "gguf":
        for name in filter(given.text, OF_GGUF):
            given.problems.append(f"{name}: FORMAT={kind} does not read it; set FORMAT=gguf")
    if kind == "adapter" and dtype is not None:
        given.problems.append(f"MODEL_DTYPE={dtype}: FORMAT=adapter does not read it")
    refuse(given.problems)
    out, llama_cpp = given.text("OUT"), given.text("LLAMA_CPP")
    quantizations = (given.text("QUANT") or QUANTIZATION).replace(",", " ").upper().split()
    return ExportAsked(
        format=kind,
        out=Path(out) if out else None,
        dtype=dtype,
        quantizations=tuple(dict.fromkeys(quantizations)),
        llama_cpp=Path(llama_cpp) if llama_cpp else None,
        pre_tokenizer=given.text("PRE_TOKENIZER"),
    )


def chosen_export(run: RunFolder, formats: tuple[str, ...] = FORMATS) -> Path:
    """Return the export that FORMAT names, or the latest of these formats.

    Raises: ConfigError where there is none.
    """
    given = words()
    wanted = given.choice("FORMAT", formats)
    refuse(given.problems)
    for path in exports_of(run):
        if path.name == wanted or (wanted is None and path.name in formats):
            return path
    raise ConfigError(
        f"{run.path} has no export of format {wanted or ' or '.join(formats)}; "
        f"make export RUN={run.name} FORMAT={wanted or formats[0]} writes it"
    )


def parity_rows() -> list[ParityRow]:
    """Return the rows of the exports.jsonl that PARITY names, or of the run's latest export."""
    given = words().text("PARITY")
    path = Path(given) if given else chosen_export(use.chosen_run())
    return exports.read_parity(path / exports.PARITY if path.is_dir() else path)
