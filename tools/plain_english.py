"""Finds words that plain English replaces, in documents, comments, docstrings and messages.

`make lint` runs it. Each line of WORDS has a pattern, and what to write instead.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    r"\bbeside\b": "next to, together with",
    r"\banew\b": "again",
    r"\bgo(?:es)? on\b": "continue, resume",
    r"\ball the same\b": "anyway",
    r"\bis (?:told|said)\b": "is passed, is reported",
    r"\b(?:is|are) held to\b": "is compared with",
    r"\b(?:quant|token|initial|recogn|serial|normal)is(?:e|ed|es|ing)\b": "-ize",
    r"\b(?:colour|behaviour)": "American spelling",
    r"\b(?:None|Raises?:? \w+|refused|auto) where\b": "if",
}
PATTERN = re.compile("|".join(f"({word})" for word in WORDS), re.IGNORECASE)
PARTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and texts of a file that a person reads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PARTS:
            yield from enumerate(token.string.splitlines(), token.start[0])


def main() -> None:
    """Print each line with such a word; exit with 1 if there is one."""
    listed = subprocess.run(["git", "ls-files", *sys.argv[1:]], capture_output=True, text=True)
    found = 0
    for name in listed.stdout.split():
        for number, line in prose(Path(name)):
            for match in PATTERN.finditer(line):
                found += 1
                better = list(WORDS.values())[match.lastindex - 1] if match.lastindex else ""
                print(f"{name}:{number}: {match[0]!r}; write: {better}")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
