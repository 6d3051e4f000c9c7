"""Build data/: the corpus and the conversations (seconds) and the tiny Llama (minutes on a GPU)."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.embedded import build


def main() -> None:
    """Parse the command line and build the chosen parts."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded", description=__doc__)
    parser.add_argument(
        "--only",
        choices=("data", "model", "all"),
        default="all",
        help="what to build (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("data"), help="folder to write to (default: data)"
    )
    args = parser.parse_args()
    if args.only in ("data", "all"):
        build.build_data(args.out)
    if args.only in ("model", "all"):
        print(f"pretrain loss={build.build_model(args.out):.4f}")


if __name__ == "__main__":
    main()
