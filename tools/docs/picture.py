"""The picture of a run in README.md: `python -m tools.docs.picture RUN > docs/run.svg`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sft_play.monitor.watch import frame
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs.folder import RunFolder

WIDTH = 118  # characters
FONT_OF_ANOTHER_HOST = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def svg(run: Path) -> str:
    """Return what `make watch` shows of a run, as a picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for line in frame(RunFacts.read(RunFolder(run))):
        console.print(Text(line, no_wrap=True, overflow="ellipsis"))
    drawn = console.export_svg(title="make watch", unique_id="run")
    return FONT_OF_ANOTHER_HOST.sub("", drawn)


if __name__ == "__main__":
    print(svg(Path(sys.argv[1])))
