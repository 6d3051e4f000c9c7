"""Answer prompts and chat with the weights of a run."""

from collections.abc import Iterable, Iterator, Sequence

from sft_play.data.render import render_prompt
from sft_play.data.rows import Message
from sft_play.evaluation.generate import Generator
from sft_play.inference.load import TrainedModel, load_run
from sft_play.runs.folder import RunFolder


def answer(trained: TrainedModel, messages: Sequence[Message]) -> str:
    """Return the model's next turn, generated with the settings of the run's evaluations."""
    generator = Generator(
        trained.tokenizer, trained.config.train, trained.process, saved_stops=trained.stops
    )
    prompt = render_prompt(messages, trained.tokenizer)
    ids = generator.generate(trained.model, [prompt])
    return generator.decode(ids)[0].text


def answer_all(folder: RunFolder, device: str, prompts: Iterable[str]) -> Iterator[str]:
    """Yield the answer to each prompt."""
    trained = load_run(folder, device)
    for prompt in prompts:
        yield answer(trained, [*_system_message(trained), Message("user", prompt)])


def chat_with(folder: RunFolder, device: str) -> None:
    """Chat on the terminal until an empty line or end of input.

    Each prompt is the whole conversation so far.
    """
    trained = load_run(folder, device)
    messages = _system_message(trained)
    while question := _read_question():
        messages.append(Message("user", question))
        reply = answer(trained, messages)
        messages.append(Message("assistant", reply))
        print(reply)


def _read_question() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _system_message(trained: TrainedModel) -> list[Message]:
    """Return the start of a conversation: the run's system prompt, or nothing without one."""
    prompt = trained.config.data.system_prompt
    return [Message("system", prompt)] if prompt else []
