"""Conversations to token ids and labels, through the chat template, for training and for use alike. Loads no torch.

Legend: T tokens of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.rows import Message, Row
from sft_play.errors import DataError

IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default

# For base models that bring no template: ChatML's shape, in plain words so that no token needs to be new.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


class RenderError(DataError):
    """A row whose trained span cannot be proven."""


@dataclass(frozen=True)
class Rendered:
    """One row as the model sees it: ids (T,) and labels (T,), IGNORE_INDEX where no loss."""

    ids: list[int]
    labels: list[int]

    @property
    def trained_tokens(self) -> int:
        return sum(label != IGNORE_INDEX for label in self.labels)


def render(row: Row, tokenizer: Any) -> Rendered:
    """Return ids and labels of a row; every assistant turn and the stop token behind it carry loss.

    The text of each turn is found by rendering the conversation up to it, with and without its answer, so that any
    template works unedited. Raises: RenderError when the prompt is not a prefix of the conversation, or a token
    straddles the seam between them.
    """
    text = _text(row.messages, tokenizer, generation_prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    labels = [IGNORE_INDEX] * len(ids)
    for number, message in enumerate(row.messages):
        if message.role == "assistant":
            start, end = _span(row, number, text, tokenizer)
            _train_on(labels, ids, offsets, start, end, row.origin, tokenizer)
    if ids and labels[-1] != IGNORE_INDEX and ids[-1] not in stop_ids(tokenizer):
        ids, labels = [*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]  # the template writes no stop
    if labels:
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
    return Rendered(ids, labels)


def render_prompt(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Return the ids of a prompt, ready for the model to answer."""
    return tokenizer(_text(messages, tokenizer, generation_prompt=True), add_special_tokens=False)["input_ids"]


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: eos, and the end-of-turn token of templates that have their own."""
    turn_ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|return|>")
    known = tokenizer.get_vocab()
    return {tokenizer.eos_token_id, *(known[token] for token in turn_ends if token in known)}


def template_of(tokenizer: Any) -> str:
    """Return the chat template in force: the tokenizer's own, else the default one."""
    return tokenizer.chat_template or DEFAULT_TEMPLATE


def _text(messages: Sequence[Message], tokenizer: Any, generation_prompt: bool) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(
        turns, chat_template=template_of(tokenizer), tokenize=False, add_generation_prompt=generation_prompt
    )


def _span(row: Row, number: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Return where in `text` the answer `messages[number]` starts and ends, in characters."""
    prompt = _text(row.messages[:number], tokenizer, generation_prompt=True)
    answered = _text(row.messages[: number + 1], tokenizer, generation_prompt=False)
    if not (text.startswith(prompt) and text.startswith(answered)):
        raise RenderError(f"{row.origin}: the chat template writes turn {number} otherwise in a longer conversation, so its answer cannot be found")
    return len(prompt), len(answered)


def _train_on(labels: list[int], ids: list[int], offsets: list[tuple[int, int]], start: int, end: int, origin: str, tokenizer: Any) -> None:
    """Give the tokens of text[start:end] their labels, up to and with the stop token."""
    stops = stop_ids(tokenizer)
    for position, (first, last) in enumerate(offsets):
        if first < start < last:
            raise RenderError(f"{origin}: the token {tokenizer.decode([ids[position]])!r} straddles the end of the prompt")
        if first >= start and last <= end and first < last:
            labels[position] = ids[position]
            if ids[position] in stops:
                return  # what a template writes behind the stop token (a line break) is not learned
