"""Marks of single cases of a table."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Return a case that is marked `long`."""
    return pytest.param(*values, marks=pytest.mark.long)
