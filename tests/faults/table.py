"""All rows of the fault matrix."""

from faults import disks, files, front, host, kills, numbers, processes

FAULTS = (
    *files.ROWS,
    *numbers.ROWS,
    *disks.ROWS,
    *processes.ROWS,
    *kills.ROWS,
    *front.ROWS,
    *host.ROWS,
)
