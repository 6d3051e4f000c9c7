"""Answer prompts and chat with the weights of a run."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase, TextStreamer

from sft_play.config.schema import Config
from sft_play.data.render import RenderError, render_prompt
from sft_play.data.rows import Message
from sft_play.errors import DataError
from sft_play.evaluation.generate import Answer, Generator
from sft_play.inference.load import TrainedModel, load_run
from sft_play.plan.model_shape import positions_of
from sft_play.runs.folder import RunFolder

MAX_ANSWER_TOKENS = 2048  # of an answer where generation_max_new_tokens is auto
COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, keep the system message",
    "/system TEXT": "forget the conversation and set the system message, or none",
    "/exit": "leave; so do an empty line and Ctrl-D",
}
COMMAND = re.compile(r"/[a-z]+")


class AnswerPrinter(TextStreamer):
    """Prints an answer as it is generated, without the whitespace around it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""
        self._whitespace = ""  # printed once text follows it

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next part of the answer."""
        text = self._whitespace + text
        if not self.text:
            text = text.lstrip()
        shown = text.rstrip()
        self._whitespace = text[len(shown) :]
        self.text += shown
        print(shown, end="\n" if stream_end else "", flush=True)


def answer(
    trained: TrainedModel, messages: Sequence[Message], printer: AnswerPrinter | None = None
) -> Answer:
    """Return the model's next turn; a `printer` shows it while it is generated.

    Raises: DataError for a prompt that the model or its template does not take.
    """
    prompt = render_prompt(messages, trained.tokenizer)
    train = trained.config.train
    if train.generation_max_new_tokens == "auto":
        limit = answer_limit(trained, len(prompt))
        train = train.model_copy(update={"generation_max_new_tokens": limit})
    generator = Generator(trained.tokenizer, train, trained.process, saved_stops=trained.stops)
    ids = generator.generate(trained.model, [prompt], printer)
    return generator.decode(ids)[0]


def answer_limit(trained: TrainedModel, prompt_tokens: int) -> int:
    """Return the longest answer to a prompt where generation_max_new_tokens is auto.

    Raises: DataError for a prompt that leaves no room.
    """
    positions = positions_of(trained.model.config.to_dict())
    if positions is None:
        return MAX_ANSWER_TOKENS
    if prompt_tokens >= positions:
        raise DataError(
            f"the prompt has {prompt_tokens} tokens, and the model takes {positions} with the "
            "answer; write less, in a chat /reset"
        )
    return min(MAX_ANSWER_TOKENS, positions - prompt_tokens)


def answer_all(
    folder: RunFolder, device: str, prompts: Iterable[str], config: Config | None = None
) -> Iterator[str]:
    """Yield the answer to each prompt; that one was cut goes to standard error.

    `config` is the run's with other settings of generation.
    """
    trained = load_run(folder, device, config)
    for prompt in prompts:
        found = answer(trained, [*system_messages(trained), Message("user", prompt)])
        yield found.text
        if found.was_cut:
            print(_cut_note(trained), file=sys.stderr, flush=True)


def system_messages(trained: TrainedModel) -> list[Message]:
    """Return the start of a conversation: the system prompt of the config, or nothing."""
    prompt = trained.config.data.system_prompt
    return [Message("system", prompt)] if prompt else []


def chat_with(
    folder: RunFolder, device: str, config: Config | None = None, is_terminal: bool = False
) -> None:
    """Chat until /exit, an empty line or the end of the input.

    Each prompt is the whole conversation so far. On a terminal there are a banner and a prompt
    sign; piped input gets the answers alone.
    """
    trained = load_run(folder, device, config)
    if is_terminal:
        print("\n".join(banner_lines(folder, trained)))
    Chat(trained, system_messages(trained), "> " if is_terminal else "").run()


def banner_lines(folder: RunFolder, trained: TrainedModel) -> list[str]:
    """Return what a chat begins with: the run, its base, the device, limits, how to leave."""
    config = trained.config
    dtype = str(trained.process.compute_dtype).removeprefix("torch.")
    positions = positions_of(trained.model.config.to_dict())
    limit = config.train.generation_max_new_tokens
    if limit == "auto":
        limit = min(MAX_ANSWER_TOKENS, positions or MAX_ANSWER_TOKENS)
    whole = f", {positions} for the conversation" if positions else ""
    return [
        f"run     {folder.path} ({config.tuning.mode}, {folder.read_report().global_step} steps)",
        f"base    {config.model.name}",
        f"device  {trained.process.device.type}, {dtype}",
        f"limits  {limit} tokens an answer{whole}",
        "Ctrl-C stops an answer; /help lists the commands; /exit leaves",
    ]


@dataclass
class Chat:
    """A conversation on standard input and output."""

    trained: TrainedModel
    messages: list[Message]  # the conversation so far
    sign: str  # before each question
    system: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.system = list(self.messages)

    def run(self) -> None:
        """Read questions and commands, and answer them."""
        while question := self._read():
            word = question.split(maxsplit=1)[0]
            if word == "/exit":
                return
            if COMMAND.fullmatch(word):
                print(self._obey(word, question.removeprefix(word).strip()))
            else:
                self._reply(question)

    def _read(self) -> str:
        try:
            return input(self.sign).strip()
        except (EOFError, KeyboardInterrupt):
            if self.sign:
                print()  # the shell's prompt begins a line
            return ""

    def _obey(self, command: str, text: str) -> str:
        """Carry out a command and return what it says."""
        if command == "/reset":
            self.messages = list(self.system)
            return "the conversation is empty"
        if command == "/system":
            self.system = [Message("system", text)] if text else []
            self.messages = list(self.system)
            return "the conversation is empty" + (", with your system message" if text else "")
        if command == "/help":
            return "\n".join(f"{name:<14}{meaning}" for name, meaning in COMMANDS.items())
        return f"{command} is no command; /help lists them"

    def _reply(self, question: str) -> None:
        """Print the model's next turn; Ctrl-C ends it there."""
        turn = [*self.messages, Message("user", question)]
        is_greedy = self.trained.config.train.generation_num_beams == 1
        # transformers cannot stream the best of several beams
        printer = AnswerPrinter(self.trained.tokenizer) if is_greedy else None
        note = ""
        try:
            found = answer(self.trained, turn, printer)
            text = found.text
            if printer is None:
                print(text, flush=True)
            if found.was_cut:
                note = _cut_note(self.trained)
        except KeyboardInterrupt:
            text = printer.text if printer else ""
            note = "\nstopped"
        except (DataError, RenderError) as error:
            print(error, file=sys.stderr, flush=True)
            return
        if note:
            print(note, file=sys.stderr, flush=True)
        self.messages = [*turn, Message("assistant", text)]


def _cut_note(trained: TrainedModel) -> str:
    limit = trained.config.train.generation_max_new_tokens
    if limit == "auto":
        return "the answer was cut: the model wrote no stop token"
    return (
        f"the answer was cut at {limit} tokens; "
        f"TRAIN_GENERATION_MAX_NEW_TOKENS={2 * limit} lets it go on"
    )
