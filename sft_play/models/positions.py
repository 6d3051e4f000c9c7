"""Tables of learned positions, as GPT-2 and OPT have them: behind their end there is nothing."""

import logging

from torch import nn

from sft_play.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
OFFSETS = (0, 2)  # rows of a table before position 0: OPT's has two


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has a learned vector for, None where it computes them.

    Its table is an embedding, not of tokens, of as many rows as config.json names positions.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)  # GPT-2's n_positions, too
    if positions is None:
        return None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            rows = module.num_embeddings
            if rows != config.vocab_size and rows - positions in OFFSETS:
                return positions
    return None


def refuse_longer_rows(model: nn.Module, max_seq_len: int | str | None) -> None:
    """Raise ConfigError where rows may have more tokens than the model has learned positions."""
    positions = learned_positions(model)
    if positions is not None and isinstance(max_seq_len, int) and max_seq_len > positions:
        raise ConfigError(
            f"model.max_seq_len={max_seq_len}: the model has a table of {positions} learned "
            f"positions and nothing behind it; set MODEL_MAX_SEQ_LEN={positions}"
        )


def room_for_answer(model: nn.Module, prompt_tokens: int, limit: int) -> int:
    """Return how many of `limit` tokens can be generated behind a prompt.

    Raises: DataError where the prompt takes all learned positions.
    """
    positions = learned_positions(model)
    if positions is None or prompt_tokens + limit <= positions:
        return limit
    room = positions - prompt_tokens
    if room < 1:
        raise DataError(
            f"a prompt has {prompt_tokens} tokens, and the model takes {positions} with the "
            "answer; write less, in a chat /reset"
        )
    logger.warning(
        "answers behind %d tokens end after %d in place of %d: the model has %d learned positions",
        *(prompt_tokens, room, limit, positions),
    )
    return room
