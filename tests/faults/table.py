"""All rows of the fault matrix."""

from faults import (
    disks,
    files,
    front,
    host,
    hostile,
    kills,
    numbers,
    others,
    processes,
    records,
    sizes,
)

FAULTS = (
    *files.ROWS,
    *numbers.ROWS,
    *disks.ROWS,
    *processes.ROWS,
    *kills.ROWS,
    *front.ROWS,
    *others.ROWS,
    *sizes.ROWS,
    *records.ROWS,
    *hostile.ROWS,
    *host.ROWS,
)
