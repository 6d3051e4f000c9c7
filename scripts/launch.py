"""`launch.py outputs/<run> MODULE WORDS...`: `python -m MODULE WORDS...`, stopped as the run is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from sft_play.commands.train import run_launcher

    run_launcher(*sys.argv[1:])
