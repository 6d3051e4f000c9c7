"""All rows of the fault matrix."""

from faults import disks, files, front, kills, numbers, processes, sizes

FAULTS = (
    *files.ROWS,
    *numbers.ROWS,
    *disks.ROWS,
    *processes.ROWS,
    *kills.ROWS,
    *front.ROWS,
    *sizes.ROWS,
)
