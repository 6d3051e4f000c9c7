"""`make test-faults`: the matrix and the counts, then docs/evidence/reliability.md.

ROWS=kill,flip takes the rows with these words in their names alone; COUNT=5 counts up to 5.
"""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FILES = ("test_faults.py", "test_fault_counts.py", "test_fault_counts_resume.py")
sys.path.insert(0, str(TESTS.parent))


def main() -> int:
    """Run the tests, and write the page of what they saw."""
    from faults import page

    os.environ[page.VARIABLE] = "yes"
    os.environ["OMP_NUM_THREADS"] = "1"  # sums of as many parts everywhere
    files = [str(TESTS / name) for name in FILES]
    words = [word for word in os.environ.get("ROWS", "").split(",") if word]
    words += [word.replace("-", "_") for word in words if "-" in word]  # of a count
    options = ["-p", "no:xdist", "-rs"]
    if words:
        code = pytest.main([*options, *files, "-k", " or ".join(words)])
    else:
        code = pytest.main([*options, *files])
        others = [f"--ignore={name}" for name in files]
        code = pytest.main([*options, "-m", "faults", *others, str(TESTS)]) or code
    page.write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
