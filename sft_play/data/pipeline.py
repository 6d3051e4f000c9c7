"""The way of the rows in one call: find, tokenize, assemble. Loads no torch.

The front end goes it once, before any process group. Every rank then reads data.json (`data_facts`)
and only assembles.
"""

from typing import Any

from sft_play.config.schema import Config
from sft_play.data.assemble import RunData, assemble
from sft_play.data.sources import find_sources
from sft_play.data.tokenize import tokenize_sources


def build_run_data(config: Config, tokenizer: Any) -> RunData:
    """Return the data of a run; rows are tokenized now if the cache has none. Raises DataError,
    OutOfMemory.
    """
    sources = find_sources(config)
    tokenized = tokenize_sources(config, sources, tokenizer)
    return assemble(config, tokenized)
