"""All rows of the fault matrix."""

from faults import disks, files, front, numbers, processes

FAULTS = (*files.ROWS, *numbers.ROWS, *disks.ROWS, *processes.ROWS, *front.ROWS)
