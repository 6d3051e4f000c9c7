"""The exports of a run: what was asked for, and where they are. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

from sft_play.runs import seal
from sft_play.runs.folder import RunFolder

FORMATS = ("safetensors", "gguf", "adapter")
EXPORTS = "export"  # the folder of a run's exports


@dataclass(frozen=True)
class ExportAsked:
    """What `make export` was asked for."""

    format: str
    out: Path | None = None  # None: in the run's folder
    dtype: str | None = None  # of the weights; None: as they were trained or merged
    quantizations: tuple[str, ...] = ()  # of gguf files, in llama.cpp's words
    llama_cpp: Path | None = None  # a checkout or a source distribution that has the converter
    pre_tokenizer: str | None = None  # llama.cpp's name of how text is split before it is encoded

    def target(self, run: RunFolder) -> Path:
        """Return the folder of the export."""
        return self.out or run.path / EXPORTS / self.format


def exports_of(run: RunFolder) -> list[Path]:
    """Return the folders of a run's exports, the latest first."""
    found = [path.parent for path in (run.path / EXPORTS).glob(f"*/{seal.NAME}")]
    return sorted(found, key=lambda path: -(path / seal.NAME).stat().st_mtime)
