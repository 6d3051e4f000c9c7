"""Conversations to token ids and labels, through the chat template, for training and for use alike. Loads no torch.

Legend: T tokens of one row.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from sft_play.data.rows import Message, Row
from sft_play.errors import DataError

IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|return|>")

# For base models that bring no template: ChatML's shape, in plain words so that no token needs to be new. Base models that
# have a token for the beginning (Llama, Gemma) saw it before every text; others render it as nothing.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


class RenderError(DataError):
    """A row whose trained span cannot be proven."""


@dataclass(frozen=True)
class Rendered:
    """One sequence as the model sees it: ids (T,) and labels (T,), IGNORE_INDEX where no loss."""

    ids: list[int]
    labels: list[int]
    answer_start: int = 0  # where the last answer begins, behind its prompt; 0: no prompt, as in plain text

    @property
    def trained_tokens(self) -> int:
        return sum(label != IGNORE_INDEX for label in self.labels)


def render(row: Row, tokenizer: Any) -> Rendered:
    """Return ids and labels of a row; every assistant turn and the stop token behind it carry loss.

    Where an answer stands is found by rendering the conversation up to it, with and without it, so that any template
    works unedited. Raises: RenderError when the prompt is not a prefix of the conversation, when a token straddles the seam
    between them, when an answer holds a stop token itself, or when the template refuses the row.
    """
    try:
        text = _text(row.messages, tokenizer, generation_prompt=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        labels, stops = [IGNORE_INDEX] * len(ids), stop_ids(tokenizer)
        for number, message in enumerate(row.messages):
            if message.role == "assistant":
                _refuse_stop_inside(message.content, number, tokenizer.convert_ids_to_tokens(sorted(stops)))
                prompt, end, is_whole = _span(row.messages, number, text, tokenizer)
                first = _first_token(prompt, number, ids, offsets, tokenizer)
                if not _train_on(labels, ids, offsets, first, end, stops) and not is_whole:
                    raise RenderError(f"the chat template writes turn {number} otherwise in a longer conversation, so its answer cannot be found")
    except RenderError as error:
        raise RenderError(f"{row.origin}: {error}") from None
    if ids and labels[-1] != IGNORE_INDEX and ids[-1] not in stops:
        ids, labels = [*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]  # the template writes no stop
    if labels:
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
    return Rendered(ids, labels)


def render_prompt(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Return the ids of a prompt, ready for the model to answer."""
    return tokenizer(_text(messages, tokenizer, generation_prompt=True), add_special_tokens=False)["input_ids"]


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: eos, and the end-of-turn token of templates that have their own."""
    # not by get_vocab: it copies the whole vocabulary, and this is asked for every row
    found = zip(TURN_ENDS, tokenizer.convert_tokens_to_ids(list(TURN_ENDS)), strict=True)
    known = {number for token, number in found if number is not None and tokenizer.convert_ids_to_tokens(number) == token}
    return {tokenizer.eos_token_id, *known}


def template_of(tokenizer: Any) -> str:
    """Return the chat template in force: the tokenizer's own, else the default one."""
    return tokenizer.chat_template or DEFAULT_TEMPLATE


def _text(messages: Sequence[Message], tokenizer: Any, generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, chat_template=template_of(tokenizer), tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:  # what raise_exception() in a template becomes: roles that the model does not know
        raise RenderError(f"the chat template refuses the conversation: {error}") from None


def _refuse_stop_inside(answer: str, number: int, stops: list[str]) -> None:
    found = [stop for stop in stops if stop in answer]
    if found:
        raise RenderError(f"messages[{number}] holds {found[0]}, which ends an answer, so what stands behind it would not be learned")


def _span(messages: Sequence[Message], number: int, text: str, tokenizer: Any) -> tuple[str, int, bool]:
    """Return the prompt of the answer `messages[number]`, and the character of `text` at which the answer ends.

    The third value says whether all that the template wrote for the answer is in `text`: a template that ends every conversation
    with a token of its own (Phi-3) has written that too, and is left at it where the answer's stop token comes before.
    """
    prompt = _text(messages[:number], tokenizer, generation_prompt=True)
    answered = _text(messages[: number + 1], tokenizer, generation_prompt=False)
    if not text.startswith(prompt):
        raise RenderError(f"the chat template writes what is before turn {number} otherwise in a longer conversation, so its answer cannot be found")
    end = len(commonprefix((text, answered)))  # noqa: RUF071 - of texts, not of paths
    return prompt, end, end == len(answered)


def _first_token(prompt: str, number: int, ids: list[int], offsets: list[tuple[int, int]], tokenizer: Any) -> int:
    """Return the index of the first token behind the prompt. Raises RenderError when a token holds a part of both."""
    first = bisect_right(offsets, len(prompt), key=lambda span: span[1])
    # many tokenizers cut leading blanks off a token's span, so what lies between two spans belongs to the second
    if (offsets[first - 1][1] if first else 0) == len(prompt) and all(begins >= len(prompt) for begins, _ in offsets[first : first + 1]):
        return first
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]  # or the tokenizer drops the end of the prompt in any case
    if ids[: len(prompt_ids)] == prompt_ids:
        return len(prompt_ids)
    raise RenderError(f"the token {tokenizer.decode(ids[first])!r} straddles the end of the prompt of turn {number}")


def _train_on(labels: list[int], ids: list[int], offsets: list[tuple[int, int]], first: int, end: int, stops: set[int]) -> bool:
    """Label the tokens from `first` up to character `end`, up to and with the stop token; return whether there was one."""
    for position in range(first, len(ids)):
        begins, ends = offsets[position]
        is_stop = ids[position] in stops
        if begins > end or (ends > end and not is_stop):  # a stop token may reach over the line break behind it
            return False
        labels[position] = ids[position]
        if is_stop:
            return True  # what a template writes behind the stop token (a line break) is not learned
    return False
