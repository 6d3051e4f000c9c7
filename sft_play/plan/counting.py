"""What only torch can count of a model, from a process of its own, once. Loads no torch.

The answers are kept in the cache folder under a digest of all that they depend on.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sft_play.runs.files import read_json, write_json

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
# Their versions change the answers
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "fla-core",
    "flash-linear-attention",
)
SECONDS = 600  # after which a process that answers nothing is ended


class Uncounted(Exception):
    """Raised with the reason why there is no answer."""


def answer(
    module: str,
    request: Mapping[str, Any],
    told: str,
    folder: Path,
    environ: Mapping[str, str],
) -> Any:
    """Return what `python -m module` answers to a request, from the cache if it is there.

    `told` is one line about the work, which is said where there was nothing in the cache. What a
    model's code refuses is kept too, as it would be refused again.

    Raises: Uncounted with the reason why there is no answer.
    """
    path = folder / f"{_digest(module, request)}.json"
    kept = _read(path)
    if kept is None:
        logger.warning("%s", told)
        kept = _ask(module, request, environ)
        write_json(path, kept)
    if "refused" in kept:
        raise Uncounted(kept["refused"])
    return kept["answer"]


def _ask(module: str, request: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return {"answer": ...} or {"refused": reason} of a process that sees no GPU."""
    paths = [str(PACKAGE.parent)]
    if environ.get("PYTHONPATH"):  # packages may be installed there alone
        paths.append(environ["PYTHONPATH"])
    env = {**environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            env=env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Uncounted(f"the process that counts took more than {SECONDS} seconds") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Uncounted(f"the process that counts ended with {done.returncode}: {last}")
    return json.loads(lines[-1])


def _read(path: Path) -> dict[str, Any] | None:
    """Return what was kept, None where nothing was or where its file is damaged."""
    try:
        kept = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s: cannot be read (%s); counting anew", path, error)
        return None
    return kept if isinstance(kept, dict) and kept.keys() & {"answer", "refused"} else None


def _digest(module: str, request: Mapping[str, Any]) -> str:
    text = json.dumps([module, request, _versions()], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _versions() -> list[str]:
    """Return the versions of the libraries, and a digest of the code that counts."""
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(name)
    return [*found, _digest_of_code()]


def _digest_of_code() -> str:
    total = hashlib.sha256()
    for path in sorted((PACKAGE / "models").rglob("*.py")):
        text = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE)}:{len(text)}:".encode() + text)
    return total.hexdigest()
