"""Build data/: the corpus and the conversations (seconds) and the tiny Llama (minutes on a GPU)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.embedded.corpus import corpus_text
from tools.embedded.task import make_splits


def main() -> None:
    """Parse the command line and build the chosen parts."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded", description=__doc__)
    add = parser.add_argument
    add("--only", choices=("data", "model", "all"), default="all", help="default: all")
    add("--out", type=Path, default=Path("data"), help="folder to write to (default: data)")
    args = parser.parse_args()
    if args.only != "model":
        for name, text in data_files().items():
            (args.out / name).parent.mkdir(parents=True, exist_ok=True)
            (args.out / name).write_text(text, encoding="utf-8", newline="\n")
    if args.only != "data":
        from tools.embedded.model import build_model

        print(f"pretrain loss={build_model(args.out):.4f}")


def data_files() -> dict[str, str]:
    """Return {path under data/: text} of every generated text file."""
    files = {"corpus/town.txt": corpus_text()}
    for split, conversations in make_splits().items():
        rows = ({"messages": conversation.messages()} for conversation in conversations)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files[f"desk/{split}.jsonl"] = "".join(lines)
    return files


if __name__ == "__main__":
    main()
