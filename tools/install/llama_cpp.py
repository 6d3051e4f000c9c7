"""The converter of llama.cpp, out of the source distribution of the installed llama-cpp-python.

    python -m tools.install.llama_cpp [SOURCE.tar.gz]

It goes to share/llama.cpp of this Python's environment, where `make export FORMAT=gguf` looks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

PACKAGE = "llama-cpp-python"
WITHIN = "vendor/llama.cpp/"
# Of llama.cpp: the converter, the package of its models, gguf, templates of published models that
# the tests read, and what its licences ask for
PARTS = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/", "models/templates/")
PARTS += ("LICENSE", "licenses/")


def main(words: list[str]) -> int:
    """Unpack the converter; return the exit code."""
    target = Path(sys.prefix) / "share" / "llama.cpp"
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(words[0]) if words else downloaded(Path(temporary))
        count = unpack(source, target)
    print(f"llama.cpp's converter is in {target} ({count} files)")
    return 0


def downloaded(folder: Path) -> Path:
    """Return the source distribution of the version that is installed."""
    wanted = f"{PACKAGE}=={metadata.version(PACKAGE)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-binary", PACKAGE, "--dest", str(folder), wanted], check=True)
    return next(folder.glob("*.tar.gz"))


def unpack(source: Path, target: Path) -> int:
    """Put llama.cpp's converter into `target`, whole or not at all; return its number of files."""
    staging = target.with_name(f".{target.name}-staging")
    shutil.rmtree(staging, ignore_errors=True)
    count = 0
    with tarfile.open(source) as archive:
        for member in archive:
            _, _, name = member.name.partition(WITHIN)
            if member.isfile() and name.startswith(PARTS):
                member.name = name
                archive.extract(member, staging, filter="data")
                count += 1
    if not (staging / PARTS[0]).is_file():
        raise SystemExit(f"{source} has no {WITHIN}{PARTS[0]}; LLAMA_CPP= names a checkout instead")
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
