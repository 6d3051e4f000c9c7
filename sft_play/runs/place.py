"""The place of a process among those of one command that share its rows. Loads nothing."""

from collections.abc import Mapping
from typing import NamedTuple

PLACE = "SFT_PLAY_PLACE"  # of a process: "1/4:29500"


class Place(NamedTuple):
    """A process among those of a command, and the port where they meet."""

    number: int
    of: int
    port: int

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> "Place | None":
        """Return that of this process, None where it is the one that the user started."""
        if PLACE not in environ:
            return None
        place, _, port = environ[PLACE].partition(":")
        number, _, of = place.partition("/")
        return cls(int(number), int(of), int(port))
