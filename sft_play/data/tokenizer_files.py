"""What is wrong with a model's tokenizer files, and what to do. Loads no torch."""

import importlib.util
import re
from pathlib import Path

from sft_play.data.template_sources import FindFile
from sft_play.errors import first_line

# Files that hold a vocabulary, of some models alone and of others beside tokenizer_config.json
FILES = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
NO_VOCABULARY = f"it has none of {', '.join(FILES)}; copy those of its base into the folder"
POINTER = b"version https://git-lfs"  # begins what git writes where git-lfs is not installed
# A file by this name may be of either package
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # base64 of a token, and its rank
SENTENCEPIECE_START = b"\n"  # tag of a protobuf's first field


def why_not_loaded(name: str, find: FindFile, error: Exception) -> str:
    """Return why transformers loaded no tokenizer, and what to do.

    `find` returns a file of the model, None if it has none.
    """
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it is Python code of the model's repository; read that code, then set "
            "MODEL_TRUST_REMOTE_CODE=true"
        )
    if "mistral-common" in text:
        return "its tekken.json is of an old form that needs a package: pip install mistral-common"
    folder = Path(name)
    paths = [path for path in map(find, FILES) if path is not None]
    for path in paths:
        reason = _why_not_read(path)
        if reason is not None:
            return reason
    if not folder.is_dir():
        return first_line(error)
    if not paths:
        return NO_VOCABULARY
    if [path.name for path in paths] == ["vocab.json"]:
        if not (folder / "merges.txt").is_file():
            return "vocab.json is without merges.txt; copy that of its base into the folder"
        return (
            "nothing says what vocab.json and merges.txt are for; write the tokenizer_class of its "
            "base into tokenizer_config.json, such as GPT2Tokenizer"
        )
    reason = first_line(error)
    if reason.endswith(":"):  # a list follows, with what is missing
        reason = text
    if not isinstance(error, OSError | ValueError | ImportError):  # its text alone says little
        reason = f"its files are not what transformers expects ({type(error).__name__}: {reason})"
    return f"{reason.removesuffix('.')}; correct its files, or get the model again"


def _why_not_read(path: Path) -> str | None:
    """Return what a file of a vocabulary needs before it can be read, None if nothing is known."""
    with path.open("rb") as file:
        head = file.read(1000)
    if head.startswith(POINTER):
        return f"{path.name} is a pointer of git-lfs, not the file; run git lfs pull in the folder"
    if path.suffix != ".model":
        return None
    if TIKTOKEN_LINE.match(head):
        package, packages = "tiktoken", "tiktoken"
    elif head.startswith(SENTENCEPIECE_START):
        package, packages = "sentencepiece", "sentencepiece protobuf"
    else:
        return f"{path.name} is no file of sentencepiece or tiktoken; get it again"
    if importlib.util.find_spec(package):
        return None
    return f"{path.name} is a file of {package}, which is not installed: pip install {packages}"
