"""Load the tokenizer of a run; if that fails, explain what is wrong with its files.

Separate from the weights, so that reading data imports no model class, adapters or quantization.
transformers' AutoTokenizer itself imports torch.
"""

import functools
import importlib.util
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from sft_play.config.schema import Config
from sft_play.config.sections.model import ModelSection
from sft_play.data.limits import (
    LOAD_BYTES,
    LOAD_SECONDS,
    TOKENIZER_REMEDY,
    find_excess,
    panics_as_errors,
    refuse_endless,
)
from sft_play.data.rows import FORMS, shorten
from sft_play.data.special_text import between_turns, encode
from sft_play.data.template_sources import FindFile, find_template
from sft_play.data.templates import BASE_STOPS
from sft_play.errors import EnvironmentFault, first_line, of_os_error
from sft_play.plan.base_model import POINTER
from sft_play.progress import Stage, watched_stage
from sft_play.runs.model_folder import read_object

# Vocabulary files: the only tokenizer file of some models, next to tokenizer_config.json in others
FILES = """
    tokenizer.json tokenizer.model tiktoken.model spiece.model tekken.json vocab.json vocab.txt
    """.split()
NO_VOCABULARY = f"it has none of {', '.join(FILES)}; copy those of its base into the folder"
# A file with this name may belong to either package
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # base64 of a token, and its rank
SENTENCEPIECE_START = b"\n"  # tag of a protobuf's first field
WORD = "a"  # that every tokenizer can read
MAX_TOKEN_CHARACTERS = 4096  # of an added token; every text is searched for it
logger = logging.getLogger(__name__)
TEKKEN = FORMS["tekken"]  # special tokens of a converted tekken.json, which lacks their roles
# Files to search for an eos that tokenizer_config.json does not contain
EOS_FILES = ("special_tokens_map.json", "generation_config.json", "config.json")


def why_not_loaded(name: str, find: FindFile, error: Exception) -> str:
    """Return why transformers could not load a tokenizer, and what to do.

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
    if reason.endswith(":"):  # a list of missing things follows
        reason = text
    if not isinstance(error, OSError | ValueError | ImportError):  # its text is not helpful
        reason = f"its files are not what transformers expects ({type(error).__name__}: {reason})"
    return f"{reason.removesuffix('.')}; correct its files, or get the model again"


def _why_not_read(path: Path) -> str | None:
    """Return what a vocabulary file needs before it can be read, None if nothing is known."""
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


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template, an eos and a pad token, and model.add_tokens.

    Raises: EnvironmentFault when it cannot be loaded or used.
    """
    model = config.model
    find = functools.partial(fetch_file, model)
    with watched_stage(Stage(f"loading the tokenizer of {model.name}")):
        tokenizer = _load(model, find)
    if str(tokenizer.init_kwargs.get("vocab_file")).endswith("tekken.json"):
        for role, token in TEKKEN.items():
            if getattr(tokenizer, role) is None and token in tokenizer.added_tokens_encoder:
                setattr(tokenizer, role, token)
    stops = list(_find_stops(tokenizer, find))
    if tokenizer.eos_token_id is None:
        if not stops:
            raise EnvironmentFault(
                f"model.name={model.name}: its tokenizer names no eos_token, so an answer could "
                "not end; add one to tokenizer_config.json"
            )
        file, tokenizer.eos_token = stops[0]
        logger.info(
            "tokenizer: eos is %s, which %s of %s names", tokenizer.eos_token, file, model.name
        )
    # other tokens are ids of another vocabulary, such as the default of a model class
    named = [token for _, token in stops if token in tokenizer.added_tokens_encoder]
    setattr(tokenizer, BASE_STOPS, named)
    if tokenizer.pad_token_id is None:
        # padding is always masked, so any existing id is fine
        tokenizer.pad_token = tokenizer.eos_token
    # saved with the adapter, so that inference renders prompts as training did
    tokenizer.chat_template = find_template(
        tokenizer.chat_template, find, model, tokenizer.special_tokens_map
    )
    _add_tokens(tokenizer, model.add_tokens or ())
    return tokenizer


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add tokens that are never split; existing tokens keep their id.

    Tokens that the chat template writes between turns are special: answers do not show them, and
    messages cannot contain them. Others, e.g. <tool>, are read and shown like text.
    """
    new = [token for token in tokens if token not in tokenizer.added_tokens_encoder]
    words = [token for token in new if token in tokenizer.get_vocab()]
    if words:
        logger.warning(
            "model.add_tokens: %s already in the vocabulary, with the meaning that the base "
            "learned; texts are now split around it. Type others, such as <tool>, to avoid this.",
            ", ".join(words),
        )
    turns = between_turns(tokenizer) if new else ""
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token in turns) for token in new]
    )


def _load(model: ModelSection, find: FindFile) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer. Raises: EnvironmentFault, DataError if it reads no word."""
    try:
        load = functools.partial(
            AutoTokenizer.from_pretrained,
            model.name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            # otherwise mistral-common, if installed, reads tekken.json with its class
            # that has no offsets
            mistral_format=False,
        )
        if excess := find_excess(load, LOAD_SECONDS, LOAD_BYTES):
            raise ValueError(excess)
        with panics_as_errors():
            tokenizer = load()
        _refuse_long_tokens(tokenizer)
    # The tokenizers library raises plain Exceptions, and transformers many kinds of them
    except Exception as error:
        known = of_os_error(error) if isinstance(error, OSError) else None
        if known is not None:  # e.g. a full disk of the hub's cache
            raise known from error
        reason = why_not_loaded(model.name, find, error)
        raise EnvironmentFault(
            f"model.name={model.name}: no tokenizer could be loaded: {reason}"
        ) from error
    if not tokenizer.is_fast:
        raise EnvironmentFault(
            f"model.name={model.name}: its tokenizer has no fast version, which finding the "
            "answers' tokens needs; set MODEL_NAME to a copy that has a tokenizer.json"
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # for some classes transformers creates an empty tokenizer if there is no file
        raise EnvironmentFault(
            f"model.name={model.name}: no tokenizer could be loaded: {NO_VOCABULARY}"
        )
    read_word = functools.partial(encode, tokenizer.backend_tokenizer, [WORD])
    refuse_endless(read_word, "the tokenizer", TOKENIZER_REMEDY)
    return tokenizer


def _refuse_long_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    longest = max(tokenizer.added_tokens_encoder, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise ValueError(
            f"the added token {shorten(longest)!r} has {len(longest):,} characters, more than "
            f"{MAX_TOKEN_CHARACTERS:,}"
        )


def fetch_file(model: ModelSection, file: str) -> Path | None:
    """Return a file of the model, downloaded if needed, None if it does not exist."""
    try:
        path = cached_file(
            model.name,
            file,
            revision=model.revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no such repository: nothing else of it can be loaded either
        return None
    return Path(path) if path else None


def _find_stops(tokenizer: PreTrainedTokenizerBase, find: FindFile) -> Iterator[tuple[str, str]]:
    """Yield the tokens that end answers by the model's other files, each with its file."""
    for file in EOS_FILES:
        path = find(file)
        for token in _eos_tokens(read_object(path) if path else {}, tokenizer):
            yield file, token


def _eos_tokens(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the eos tokens in a file, as text or by ids that the tokenizer has."""
    token = values.get("eos_token")
    if token:
        yield token["content"] if isinstance(token, dict) else token
    ids = values.get("eos_token_id")
    if ids is None:  # composite configs may have a null next to the text part's value
        ids = (values.get("text_config") or {}).get("eos_token_id")
    for eos in ids if isinstance(ids, list) else [ids]:
        if isinstance(eos, int) and 0 <= eos < len(tokenizer):
            yield tokenizer.convert_ids_to_tokens(eos)
