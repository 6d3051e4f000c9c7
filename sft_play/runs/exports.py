"""The exports of a run: what was asked for, where they are, and their parity.jsonl. Loads no torch.

parity.jsonl has prompts, their tokens, and how the evaluated model begins its answers: whatever
serves an export is compared with it (`commands.check_server`).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from sft_play.config.sections.train import Delivered
from sft_play.errors import CheckpointError
from sft_play.runs import seal
from sft_play.runs.files import Json, json_line, write_text
from sft_play.runs.folder import RunFolder

COMPRESSED: tuple[str, ...] = get_args(Delivered)
ADAPTERS = ("adapter", "vllm-adapter")  # the second: experts as lists of linear layers
FORMATS = ("safetensors", "gguf", *ADAPTERS, *COMPRESSED)
LEAST_GAIN = 0.95  # share of the run's gain in loss that quantized files must keep
EXPORTS = "export"  # the folder of a run's exports

PARITY = "parity.jsonl"
MOST_TOKENS = 48  # of an answer


@dataclass(frozen=True)
class ExportAsked:
    """What `make export` was asked for."""

    format: str
    out: Path | None = None  # None: in the run's folder
    dtype: str | None = None  # of the weights; None: as they were trained or merged
    quantizations: tuple[str, ...] = ()  # of gguf files, in llama.cpp's words
    llama_cpp: Path | None = None  # a checkout or a source distribution that has the converter
    least_gain: float = LEAST_GAIN
    pre_tokenizer: str | None = None  # llama.cpp's name of how text is split before it is encoded

    def target(self, run: RunFolder) -> Path:
        """Return the folder of the export."""
        return self.out or run.path / EXPORTS / self.format


def exports_of(run: RunFolder) -> list[Path]:
    """Return the folders of a run's exports, the latest first."""
    found = [path.parent for path in (run.path / EXPORTS).glob(f"*/{seal.NAME}")]
    return sorted(found, key=lambda path: -(path / seal.NAME).stat().st_mtime)


@dataclass(frozen=True)
class SavedStops:
    """The tokens that end an answer, the trained one first, and their ids."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ParityRow:
    """A prompt, and the greedy answer of the evaluated model."""

    prompt: str  # the complete text, with its special tokens
    prompt_ids: list[int]
    answer: str  # without special tokens
    answer_ids: list[int]  # at most MOST_TOKENS; the last one is a stop if it has ended
    answer_ends: list[int]  # characters of the answer after each of its tokens
    margins: list[float]  # nats between each token and the second most likely one
    has_ended: bool
    messages: list[Json] | None = None  # that the chat template makes this prompt of

    @property
    def finish_reason(self) -> str:
        """What an OpenAI-compatible server says of this answer."""
        return "stop" if self.has_ended else "length"

    def margin_at(self, character: int) -> float:
        """Return the margin of the token that a character of the answer belongs to."""
        for end, margin in zip(self.answer_ends, self.margins, strict=True):
            if character < end:
                return margin
        return self.margins[-1]


def write_parity(rows: Sequence[ParityRow], folder: Path) -> None:
    """Write parity.jsonl into the folder of an export."""
    lines = [json_line(asdict(row)) for row in rows]
    write_text(folder / PARITY, "".join(lines))


def read_parity(path: Path) -> list[ParityRow]:
    """Return the rows of a parity.jsonl. Raises: CheckpointError if it cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = [ParityRow(**json.loads(line)) for line in text.splitlines()]
        if not rows:
            raise ValueError("it has no rows")
        return rows
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be used ({error}); make export RUN=name writes it"
        ) from None
