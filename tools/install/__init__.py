"""`make install`: makes and mends .venv. Standard library only, as nothing else is there yet."""
