"""parity.jsonl of an export: prompts, their tokens, and how the evaluated model begins its answers.

Whatever serves an export is held to it (`commands.check_server`). Loads no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError
from sft_play.runs.files import write_text

NAME = "parity.jsonl"
MOST_TOKENS = 48  # of an answer


@dataclass(frozen=True)
class ParityRow:
    """A prompt, and the greedy answer of the evaluated model."""

    prompt: str  # the whole text, with its special tokens
    prompt_ids: list[int]
    answer: str  # without special tokens
    answer_ids: list[int]  # at most MOST_TOKENS; the last one is a stop where it has ended
    answer_ends: list[int]  # characters of the answer after each of its tokens
    margins: list[float]  # nats between each token and the second most likely one
    has_ended: bool
    messages: list[dict[str, Any]] | None = None  # that the chat template makes this prompt of

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


def write(rows: Sequence[ParityRow], folder: Path) -> None:
    """Write parity.jsonl into the folder of an export."""
    lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows]
    write_text(folder / NAME, "".join(lines))


def read(path: Path) -> list[ParityRow]:
    """Return the rows of a parity.jsonl. Raises: CheckpointError where it cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = [ParityRow(**json.loads(line)) for line in text.splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be used ({error}); make export RUN=name writes it"
        ) from None
    if not rows:
        raise CheckpointError(f"{path} has no rows; make export RUN=name writes it")
    return rows
