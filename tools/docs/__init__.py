"""Pages of docs/ that are written from the code: `python -m tools.docs`."""
