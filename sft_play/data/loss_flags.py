"""Flags of a message that say whether it carries loss. Pure.

OpenAI and Mistral write `"weight": 0`, Axolotl `"train": false` or `"training": false`. An answer
that is excluded stays in the conversation, so later answers are trained behind it.
"""

from sft_play.data.rows import InvalidRowError, Json, Message, shorten

# Flag: the value that asks for loss
LOSS_FLAGS = {"weight": 1, "train": 1, "training": 1, "loss": 1, "mask": 0}
PARTS_OF_ANSWERS = ("train_detail", "training_detail")  # Axolotl's, by characters
FLAG_KEYS = frozenset((*LOSS_FLAGS, *PARTS_OF_ANSWERS))


def is_excluded(message: Message, record: Json) -> bool:
    """Return whether the flags of a message's record exclude it from loss.

    Raises InvalidRowError, whose reason continues the name of the message: for another value than
    true and false (1 and 0), for flags that contradict each other, and for a flag that asks for
    loss on a message that is no answer.
    """
    if any(record.get(key) for key in PARTS_OF_ANSWERS):
        raise InvalidRowError(
            " asks for loss on a part of the answer, which is not done here; "
            "write such rows as segments: [{label: true or false, text: ...}]"
        )
    asked: dict[str, bool] = {}
    for name, trained_value in LOSS_FLAGS.items():
        value = record.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # True equals 1
            raise InvalidRowError(
                f".{name} is {shorten(value)}; an answer is trained or not: write 1 or 0"
            )
        asked[name] = value == trained_value
    if len(set(asked.values())) > 1:
        raise InvalidRowError(f": {' and '.join(asked)} contradict each other; keep one")
    if message.role == "assistant":
        return False in asked.values()
    for name, is_trained in asked.items():
        if is_trained:
            raise InvalidRowError(
                f".{name} asks for loss on a message of the {message.role}; "
                "only answers of the assistant carry loss"
            )
    return False
