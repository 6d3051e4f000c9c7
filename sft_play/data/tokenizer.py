"""The tokenizer of a run.

Separate from the weights, so that reading data imports no model class, adapters or quantisation.
transformers' AutoTokenizer itself imports torch.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.template_variables import with_variables
from sft_play.data.templates import read_template, template_of
from sft_play.errors import EnvironmentFault, first_line
from sft_play.progress import Stage, watched

# What a tokenizer is read from, in the formats that models have
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer with a chat template and a pad token.

    Raises: EnvironmentFault when it cannot be loaded or used.
    """
    name = config.model.name
    try:
        with watched(Stage(f"loading the tokenizer of {name}")):
            tokenizer = AutoTokenizer.from_pretrained(
                name,
                revision=config.model.revision,
                trust_remote_code=config.model.trust_remote_code,
            )
    except (OSError, ValueError, ImportError) as error:
        # ImportError: a package that the tokenizer's file format needs
        raise EnvironmentFault(
            f"model.name={name}: no tokenizer could be loaded: {_reason(name, error)}"
        ) from error
    if not tokenizer.is_fast:
        raise EnvironmentFault(
            f"model.name={name}: its tokenizer has no fast version, "
            "which finding the answers' tokens needs"
        )
    if tokenizer.eos_token_id is None:
        raise EnvironmentFault(
            f"model.name={name}: its tokenizer names no eos_token, so an answer could not end; "
            "add one to tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        # padding is masked out everywhere, so any existing id will do
        tokenizer.pad_token = tokenizer.eos_token
    if config.model.chat_template is not None:
        tokenizer.chat_template = read_template(config.model.chat_template)
    # saved with the adapter, so that inference renders prompts as training did
    tokenizer.chat_template = with_variables(template_of(tokenizer), config.model)
    return tokenizer


def _reason(name: str, error: Exception) -> str:
    """Return why there is no tokenizer, and for a folder what to do."""
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in FILES):
        return f"the folder has none of {', '.join(FILES)}; copy those of its base into it"
    reason = first_line(error)
    if reason.endswith(":"):  # a list follows, with what is missing
        reason = " ".join(str(error).split())
    return f"{reason.removesuffix('.')}; get the model again" if folder.is_dir() else reason
