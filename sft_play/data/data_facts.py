"""What data.json of a run holds. The front end writes it, every rank reads it."""

from dataclasses import asdict, dataclass
from typing import Self

from sft_play.data.ledger import PaddedTokens
from sft_play.data.rows import Json
from sft_play.data.tokenized import TokenizedSource, TokenizedSplits


@dataclass(frozen=True)
class DataFacts:
    """Where the tokenized samples of a run are, and what an epoch of them computes."""

    sources: TokenizedSplits
    padding: PaddedTokens

    def to_json(self) -> Json:
        """Return the facts as plain data."""
        sources = {}
        for split, tokenized in self.sources.items():
            sources[split] = [asdict(source) for source in tokenized]
        return {"sources": sources, "padding": asdict(self.padding)}

    @classmethod
    def from_json(cls, facts: Json) -> Self:
        """Return the facts that `to_json` gave. Raises DataError when their samples are gone."""
        splits: TokenizedSplits = {}
        for split, sources in facts["sources"].items():
            splits[split] = tuple(TokenizedSource.from_json(source) for source in sources)
        return cls(splits, PaddedTokens(**facts["padding"]))
