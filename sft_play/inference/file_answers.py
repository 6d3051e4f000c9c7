"""Answer the prompts of a file in batches, in one process or in several."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from sft_play.data.render import images_of
from sft_play.data.row_parsing import Prompt
from sft_play.data.rows import Json, Message, PromptIds
from sft_play.data.templates import template_messages
from sft_play.errors import DataError
from sft_play.evaluation.generate import GeneratedAnswer, room_for, split_batches
from sft_play.inference.load import TrainedModel
from sft_play.runs.answer_file import AnswerFile, FanOutPlace

WINDOW = 4096  # prompts that are tokenized and sorted by length together


def answer_prompts(
    trained: TrainedModel,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    place: FanOutPlace,
    seed: int,
    advance: Callable[[int], None],
) -> None:
    """Write this process's share of the missing answers into its part of the file.

    `place` is this process's index among those that answer, and `advance` counts answers. `seed` is
    that of sampling; each batch adds the number of its first prompt. A prompt that the model or its
    template does not accept is answered with the reason.
    """
    answered = file.answered()
    every = range(place.number, len(prompts), place.of)
    own = [number for number in every if number not in answered]
    part = file.append_to_part(place.number)
    for start in range(0, len(own), WINDOW):
        window = own[start : start + WINDOW]
        ids = {number: _ids_or_reason(trained, prompts[number]) for number in window}
        refused = [number for number in window if isinstance(ids[number], str)]
        part.write((number, _line(prompts[number], reason=ids[number])) for number in refused)
        advance(len(refused))
        tokenized = {number: each for number, each in ids.items() if not isinstance(each, str)}
        for numbers, answers in _answer_window(trained, tokenized, seed):
            found = zip(numbers, answers, strict=True)
            part.write((number, _line(prompts[number], answer)) for number, answer in found)
            advance(len(numbers))
    part.close()


def _ids_or_reason(trained: TrainedModel, prompt: Prompt) -> PromptIds | str:
    """Return the ids of a prompt, or why it cannot be answered."""
    try:
        ids = trained.prompt_ids(prompt.messages, prompt.tools, prompt.variables)
        trained.auto_limit(len(ids))
    except DataError as error:
        return str(error)
    return ids


def _answer_window(
    trained: TrainedModel, ids: dict[int, list[int]], seed: int
) -> Iterator[tuple[list[int], list[GeneratedAnswer]]]:
    """Yield numbers of prompts with their answers, batch by batch, the longest prompts first."""
    numbers = list(ids)
    lengths = [len(ids[number]) for number in numbers]
    train = trained.config.train
    room = room_for(trained.model, trained.process, train.generation_num_beams)

    def rows_at(tokens: int) -> int:
        return train.generation_batch_size or room.prompts(tokens, trained.answer_limit(tokens))

    for batch in split_batches(lengths, rows_at):
        own = [numbers[index] for index in batch]
        longest = max(lengths[index] for index in batch)
        generator = trained.generator(trained.answer_limit(longest))
        torch.manual_seed(seed + min(own))
        prompts = [ids[number] for number in own]
        for part, generated in generator.generate_or_halve(trained.model, prompts):
            yield own[part], generator.decode(generated)


def _line(prompt: Prompt, answer: GeneratedAnswer | None = None, reason: str = "") -> Json:
    """Return the content of a line of the answers."""
    values: Json = {"origin": prompt.origin}
    if len(prompt.messages) == 1 and not prompt.tools and not images_of(prompt.messages):
        values["prompt"] = prompt.question
    else:
        values["messages"] = written_messages(prompt.messages)
    if prompt.expected is not None:
        values["expected"] = prompt.expected
    if answer is None:
        return {**values, "answer": None, "error": reason}
    return {**values, "answer": answer.text, "was_cut": answer.was_cut}


def written_messages(messages: Sequence[Message]) -> list[Json]:
    """Return messages as rows have them, with the paths of images.

    An image given as bytes is replaced by its number of bytes.
    """
    written = template_messages(messages)
    for part in chain.from_iterable(message["content"] for message in written):
        if isinstance(part, dict) and part["type"] == "image":
            part["image"] = part["image"].name
    return written
