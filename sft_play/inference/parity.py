"""Prompts with the evaluated model's greedy answers: the rows of an export's parity.jsonl.

Legend: B prompts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from sft_play.data.render import RenderError, render_prompt
from sft_play.data.rows import Message
from sft_play.data.splits import question_indices
from sft_play.data.store import Split
from sft_play.data.templates import ChatTemplate, template_messages
from sft_play.evaluation.reference import checked_prompts
from sft_play.inference.load import TrainedModel
from sft_play.runs.exports import MOST_TOKENS, ParityRow
from sft_play.runs.files import Json

MOST_ROWS = 8  # of the test rows; those of `checked_prompts` are added
CONTENT = "⟦content⟧"  # represents a question in a template
Messages = list[Json]


def parity_rows(trained: TrainedModel, split: Split) -> list[ParityRow]:
    """Return prompts of a split and some of several turns, with the model's greedy answers."""
    prompts = prompts_of(trained.tokenizer, trained.config.data.system_prompt, split, MOST_ROWS)
    return [answered(trained, ids, messages) for messages, ids in prompts]


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, split: Split, most: int
) -> list[tuple[Messages | None, list[int]]]:
    """Return at most `most` different prompts of a split, and some of several turns.

    Each has the messages from which the template makes it, if these are known, and its ids. Prompts
    with images are left out: the export may be published, and contains no images.
    """
    prompts = (split[index].prompt for index in question_indices(split, None))
    different = dict.fromkeys(tuple(ids) for ids in prompts if not ids.images)
    found = [
        (messages_of(ids, tokenizer, system_prompt), list(ids)) for ids in islice(different, most)
    ]
    return [*found, *checked_prompts(tokenizer, system_prompt)]


def messages_of(
    prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Messages | None:
    """Return the messages of a prompt of one question, None for any other prompt.

    They are parsed from its text and verified: the template must make the same ids from them.
    """
    text = tokenizer.decode(prompt)
    system = [Message("system", system_prompt)] if system_prompt else []
    shape = template_messages([*system, Message("user", CONTENT)])
    try:
        before, _, after = ChatTemplate(tokenizer).render_prompt(shape, ()).partition(CONTENT)
        question = text.removeprefix(before).removesuffix(after)
        messages = [*system, Message("user", question)]
        # a server reads special tokens in a message as tokens
        ids = render_prompt(messages, tokenizer, tokens_in_text="allow")
    except RenderError:
        return None
    return template_messages(messages) if ids == list(prompt) else None


def answered(trained: TrainedModel, prompt: list[int], messages: Messages | None) -> ParityRow:
    """Return a prompt with the model's greedy answer."""
    tokenizer = trained.tokenizer
    greedy = replace(trained, config=trained.config.changed({"train.generation_num_beams": 1}))
    generator = greedy.generator(MOST_TOKENS)
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
    """Records the margin in nats of each answer token over the second most likely one.

    It uses the scores by which the token was chosen: a penalty of the base changes them.
    """

    def __init__(self) -> None:
        self.nats: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best, second = scores[0].float().topk(2).values.tolist()  # (B = 1, V)
        self.nats.append(round(best - second, 4))
        return scores
