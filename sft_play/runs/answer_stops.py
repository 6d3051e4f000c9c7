"""The tokens that end an answer, as what is saved names them. Imports nothing of the project."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedStops:
    """The tokens that end an answer, the trained one first, and their ids."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
