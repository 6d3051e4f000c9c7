"""SFT-Play: supervised fine-tuning, from a YAML file to a checked adapter.

    from sft_play import train, plan, preview, report

are the commands of make for notebooks and programs (sft_play.api). Importing this loads none of it.
"""

import logging
from types import ModuleType
from typing import Any

from sft_play import plan

__version__ = "0.1.0"

# On some CPUs bitsandbytes warns at its import that it will not download code from the hub
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

CALLS = ("train", "preview", "report")


class _CallablePackage(ModuleType):
    """The package sft_play.plan, which is also the call of this name."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Return what a run would do: sft_play.api.plan."""
        from sft_play import api

        return api.plan(*arguments, **settings)


plan.__class__ = _CallablePackage


def __dir__() -> list[str]:
    return sorted([*globals(), *CALLS])


def __getattr__(name: str) -> Any:
    if name in CALLS:
        from sft_play import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
