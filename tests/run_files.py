"""The files of a run as they stand on disk."""

import json
from typing import Any

from sft_play.runs.folder import RunFolder


def run_json(folder: RunFolder) -> dict[str, Any]:
    """Return run.json."""
    return json.loads((folder.path / "run.json").read_text())


def plan_json(folder: RunFolder) -> dict[str, Any]:
    """Return plan.json."""
    return json.loads((folder.path / "plan.json").read_text())
