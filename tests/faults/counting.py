"""Faults that are counted: how many of each, and where what was seen is noted."""

import os

from faults import page
from faults.bench import Fault
from faults.table import FAULTS

MOST = int(os.environ.get("COUNT") or 10**6)


def up_to(target: int) -> range:
    return range(min(target, MOST))


def noted(name: str, counted: str, target: str, seen: str) -> None:
    page.note("counts", name, counted=counted, target=target, seen=seen)


def row(name: str) -> Fault:
    (found,) = (fault for fault in FAULTS if fault.name == name)
    return found
