"""What data.json of a run holds. The front end writes it, every rank reads it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from sft_play.data.ledger import PaddedTokens
from sft_play.data.tokenized import TokenizedSource, TokenizedSplits


@dataclass(frozen=True)
class DataFacts:
    """Where the tokenized samples of a run are, and what an epoch of them computes."""

    sources: TokenizedSplits
    padding: PaddedTokens

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        splits = self.sources.items()
        return {
            "sources": {split: [asdict(source) for source in sources] for split, sources in splits},
            "padding": asdict(self.padding),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """Return the facts that `to_json` gave. Raises DataError when samples are no longer there."""
        splits: TokenizedSplits = {}
        for split, sources in facts["sources"].items():
            splits[split] = tuple(TokenizedSource.from_json(source) for source in sources)
        return cls(splits, PaddedTokens(**facts["padding"]))
