"""The rows of parity.jsonl: test prompts and the evaluated model's greedy answers to them.

Legend: B prompts, N generated tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from sft_play.data.render import RenderError, render_prompt
from sft_play.data.rows import Message
from sft_play.data.splits import question_indices
from sft_play.data.store import Split
from sft_play.data.templates import ChatTemplate, template_messages
from sft_play.evaluation.generate import Generator
from sft_play.evaluation.reference import checked_prompts
from sft_play.inference.load import TrainedModel
from sft_play.runs.parity import MOST_TOKENS, ParityRow

MOST_ROWS = 8  # of the test rows; those of `checked_prompts` come on top
CONTENT = "⟦content⟧"  # stands for a question in a template
Messages = list[dict[str, Any]]


def parity_rows(trained: TrainedModel, split: Split) -> list[ParityRow]:
    """Return prompts of a split and some of several turns, with the model's greedy answers."""
    tokenizer = trained.tokenizer
    prompts: list[tuple[list[int], Messages | None]] = [
        (ids, messages_of(ids, tokenizer, trained.config.data.system_prompt))
        for ids in first_prompts(split)
    ]
    for messages, ids in checked_prompts(tokenizer, trained.config.data.system_prompt):
        prompts.append((ids, messages))
    return [answered(trained, ids, messages) for ids, messages in prompts]


def first_prompts(split: Split, most: int = MOST_ROWS) -> list[list[int]]:
    """Return the ids of the first different prompts of a split."""
    found: dict[tuple[int, ...], None] = {}
    for index in question_indices(split, None):
        found.setdefault(tuple(split[index].prompt))
        if len(found) == most:
            break
    return [list(ids) for ids in found]


def messages_of(
    prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Messages | None:
    """Return the messages of a prompt of one question, None for any other prompt.

    They are read out of its text and held to it: the template must make the same ids of them.
    """
    text = tokenizer.decode(prompt)
    system = [Message("system", system_prompt)] if system_prompt else []
    shape = template_messages([*system, Message("user", CONTENT)])
    try:
        before, _, after = ChatTemplate(tokenizer).render_prompt(shape, ()).partition(CONTENT)
    except RenderError:
        return None
    if not (text.startswith(before) and text.endswith(after)):
        return None
    messages = [*system, Message("user", text[len(before) : len(text) - len(after)])]
    try:
        # a server reads special tokens in a message as the tokens
        ids = render_prompt(messages, tokenizer, tokens_in_text="allow")
        is_same = ids == list(prompt)
    except RenderError:
        return None
    return template_messages(messages) if is_same else None


def answered(trained: TrainedModel, prompt: list[int], messages: Messages | None) -> ParityRow:
    """Return a prompt with the model's greedy answer."""
    train = trained.config.train.model_copy(
        update={"generation_max_new_tokens": MOST_TOKENS, "generation_num_beams": 1}
    )
    tokenizer = trained.tokenizer
    generator = Generator(tokenizer, train, trained.process, saved_stops=trained.stops)
    margins = Margins()
    ids = generator.generate(trained.model, [prompt], scored=margins)[0].tolist()
    texts = [
        tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(1, len(ids) + 1)
    ]
    return ParityRow(
        prompt=tokenizer.decode(prompt),
        prompt_ids=prompt,
        answer=texts[-1],
        answer_ids=ids,
        answer_ends=[len(text) for text in texts],
        margins=margins.nats,
        has_ended=ids[-1] in generator.stops,
        messages=messages,
    )


class Margins(LogitsProcessor):
    """Notes how many nats each token of an answer is above the second most likely one.

    It sees the scores by which the token was chosen: a penalty of the base changes them.
    """

    def __init__(self) -> None:
        self.nats: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best, second = scores[0].float().topk(2).values.tolist()  # (B = 1, V)
        self.nats.append(round(best - second, 4))
        return scores
