"""One rank of a run: `train.py outputs/<run>`. Started by python, accelerate, deepspeed or torchrun."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sft_play.training.entry import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--local_rank", "--local-rank", help="what the deepspeed launcher adds; LOCAL_RANK says the same")
    sys.exit(main(parser.parse_args().run_folder))
