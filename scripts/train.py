"""A rank of a run: `train.py outputs/<run>`, or `train.py --config X` under any launcher.

`train.py --wait DESCRIPTOR PARENT` is one that is started early, and waits for its run folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def is_run_folder(words: list[str]) -> bool:
    """Return whether the front end has planned the run already, and started this rank of it."""
    return len(words) == 1 and not words[0].startswith("-")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--wait"]:
        from sft_play.training.entry import wait_for_folder

        words = [wait_for_folder(*map(int, words[1:]))]
    if is_run_folder(words):
        from sft_play.training.entry import run_worker

        sys.exit(run_worker(Path(words[0]), may_fork=True))
    from sft_play.cli import main_of_rank

    main_of_rank(words)
