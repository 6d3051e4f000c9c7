"""One rank of a run, `train.py outputs/<run>`: by python, accelerate, deepspeed or torchrun."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.training.entry import main

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/train.py outputs/<run>, a folder that `make train` wrote")
    sys.exit(main(Path(sys.argv[1])))
