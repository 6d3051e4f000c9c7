"""Answer prompts with the weights of a run, and chat with them."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase, TextStreamer

from sft_play.config.invocation import SamplingRequest
from sft_play.config.schema import Config
from sft_play.data.image_parts import TEXT_MARK
from sft_play.data.images import ImageReader
from sft_play.data.render import template_space
from sft_play.data.row_parsing import NO_SYSTEM_PROMPT, read_prompt
from sft_play.data.rows import InvalidRowError, Message
from sft_play.errors import DataError, EnvironmentFault
from sft_play.evaluation.generate import GeneratedAnswer
from sft_play.inference.file_answers import written_messages
from sft_play.inference.load import MAX_ANSWER_TOKENS, TrainedModel, base_of, load_run
from sft_play.plan.config_json import positions_of
from sft_play.progress import visible
from sft_play.runs.files import json_line, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation, keep the system message",
    "/system TEXT": "forget the conversation and set the system message, or none",
    "/image PATH": "show the model an image with the next question; several with one each",
    "/save FILE": "save the conversation as a row to train on; without a name in the run's folder",
    "/exit": "leave; so do an empty line and Ctrl-D",
}
COMMAND = re.compile(r"/[a-z]+")
NOTHING_ASKED = SamplingRequest()


class AnswerPrinter(TextStreamer):
    """Prints an answer as it is generated, without the whitespace of the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""
        self._space = template_space(tokenizer)
        self._waiting = ""  # possibly the template's whitespace, until text follows it

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next part of the answer."""
        text = self._waiting + text
        if not self.text:
            text = text.removeprefix(self._space.before)
        shown = text.removesuffix(self._space.after) if stream_end else text.rstrip()
        self._waiting = text[len(shown) :]
        self.text += shown
        print(visible(shown), end="\n" if stream_end else "", flush=True)


def next_turn(
    trained: TrainedModel, messages: Sequence[Message], printer: AnswerPrinter | None = None
) -> GeneratedAnswer:
    """Return the model's next turn; a `printer` shows it while it is generated.

    Raises: DataError for a prompt that the model or its template does not accept.
    """
    prompt = trained.prompt_ids(messages)
    generator = trained.generator(trained.answer_limit(len(prompt)))
    return generator.decode(generator.generate(trained.model, [prompt], printer))[0]


def answer_all(
    folder: RunFolder,
    device: str,
    prompts: Iterable[str],
    config: Config | None = None,
    request: SamplingRequest = NOTHING_ASKED,
    images: str | Sequence[str] = (),
) -> Iterator[str]:
    """Yield the answer to each prompt; a note on a cut answer goes to standard error.

    `config` is the run's config with other generation settings. `images` have the format of
    `question_of`, and each prompt gets all of them.
    """
    trained = load_run(folder, device, config).sampled(request)
    for prompt in prompts:
        question = question_of(trained, prompt, images, "IMAGE")
        found = next_turn(trained, [*system_messages(trained), question])
        yield found.text
        if found.was_cut:
            print(answer_cut_note(trained), file=sys.stderr, flush=True)


def question_of(
    trained: TrainedModel, text: str, images: str | Sequence[str], name: str
) -> Message:
    """Return a question with images (paths or URLs) at its marks, or before its text.

    They may be one text, a list in JSON. Raises: DataError, with `name` as their name, for an
    image that cannot be read, and for a model that reads none; EnvironmentFault.
    """
    if not images:
        return Message("user", text)
    try:
        asked = read_prompt({"prompt": text, "images": images}, {}, NO_SYSTEM_PROMPT, name)
        reader = ImageReader.from_config(trained.config)
        return trained.with_images(reader.open_images(asked.messages, Path()))[0]
    except (InvalidRowError, DataError) as error:
        raise DataError(f"{name}: {error}") from error


def system_messages(trained: TrainedModel) -> list[Message]:
    """Return the start of a conversation: the system prompt of the config, or nothing."""
    prompt = trained.config.data.system_prompt
    return [Message("system", prompt)] if prompt else []


@dataclass
class Speaker:
    """A model that answers, and its conversation."""

    name: str  # tuned or base
    trained: TrainedModel
    is_used: Callable[[], contextlib.AbstractContextManager[None]]  # context for its answers
    messages: list[Message]


def chat_with(
    folder: RunFolder,
    device: str,
    config: Config | None = None,
    is_terminal: bool = False,
    request: SamplingRequest = NOTHING_ASKED,
    compares: bool = False,
) -> None:
    """Chat until /exit, an empty line or the end of the input.

    Each prompt is the full conversation so far. A terminal shows a banner and a prompt
    sign; piped input gets only the answers. With `compares` the base answers, too.
    """
    trained = load_run(folder, device, config).sampled(request)
    if is_terminal:
        import readline  # noqa: F401 (editing keys and a history for `input`)

        print("\n".join(banner_lines(folder, trained)))
    system = system_messages(trained)
    speakers = [Speaker("tuned", trained, contextlib.nullcontext, system)]
    if compares:
        base, is_used = base_of(trained)
        speakers.insert(0, Speaker("base", base, is_used, system))
    Chat(speakers, system, "> " if is_terminal else "", folder.results).run()


def banner_lines(folder: RunFolder, trained: TrainedModel) -> list[str]:
    """Return the start of a chat: the run, its base, the device, limits, how to leave."""
    config = trained.config
    dtype = str(trained.process.compute_dtype).removeprefix("torch.")
    positions = positions_of(trained.model.config.to_dict())
    limit = config.train.generation_max_new_tokens
    if limit == "auto":
        limit = min(MAX_ANSWER_TOKENS, positions or MAX_ANSWER_TOKENS)
    whole = f", {positions} for the conversation" if positions else ""
    sampling = "the most likely token; TEMPERATURE=0.7 draws"
    if trained.sampling is not None:
        sampling = f"{trained.sampling.words()}; TEMPERATURE=0 takes the most likely token"
    is_model = isinstance(folder, ModelFolder)
    steps = f"{config.tuning.mode}, {folder.read_report().global_step} steps"
    return [
        f"model   {folder.path}" if is_model else f"run     {folder.path} ({steps})",
        f"base    {config.model.name}",
        f"device  {trained.process.device.type}, {dtype}",
        f"limits  {limit} tokens an answer{whole}",
        f"tokens  {sampling}",
        "Ctrl-C stops an answer; /help lists the commands; /exit leaves",
    ]


@dataclass
class Chat:
    """A conversation on standard input and output, with one model or with several."""

    speakers: list[Speaker]  # the tuned one is the last
    system: list[Message]  # the start of a conversation
    sign: str  # before each question
    folder: Path = Path()  # of the run
    images: list[str] = field(default_factory=list)  # paths, for the next question

    def run(self) -> None:
        """Read questions and commands, and answer them."""
        while question := self._read():
            word = question.split(maxsplit=1)[0]
            if word == "/exit":
                return
            if COMMAND.fullmatch(word):
                print(self._obey(word, question.removeprefix(word).strip()))
                continue
            try:
                asked = question_of(self.speakers[-1].trained, question, self.images, "/image")
            except (DataError, EnvironmentFault) as error:
                print(error, file=sys.stderr, flush=True)
                continue
            for speaker in self.speakers:
                if len(self.speakers) > 1:
                    print(f"{speaker.name}:")
                self._reply(speaker, asked)

    def _read(self) -> str:
        try:
            return input(self.sign).strip()
        except (EOFError, KeyboardInterrupt):
            if self.sign:
                print()  # the shell's prompt needs a new line
            return ""

    def _obey(self, command: str, text: str) -> str:
        """Execute a command and return its output."""
        if command == "/reset":
            self._begin_anew()
            return "the conversation is empty"
        if command == "/system":
            self.system = [Message("system", text)] if text else []
            self._begin_anew()
            return "the conversation is empty" + (", with your system message" if text else "")
        if command == "/save":
            return self._save(text)
        if command == "/image":
            return self._add_image(os.path.expanduser(text.strip("'\"")))
        if command == "/help":
            return "\n".join(f"{name:<14}{meaning}" for name, meaning in COMMANDS.items())
        return f"{command} is no command; /help lists them"

    def _begin_anew(self) -> None:
        for speaker in self.speakers:
            speaker.messages = list(self.system)
        self.images = []

    def _add_image(self, path: str) -> str:
        """Store an image for the next question if it can be read."""
        if not path:
            return f"/image needs a path; images of the next question: {len(self.images)}"
        trained = self.speakers[-1].trained
        try:
            (image,) = question_of(trained, TEXT_MARK, [path], "/image").images
        except (DataError, EnvironmentFault) as error:
            return str(error)
        if not image.path:
            return "/image takes a path or a URL"
        self.images.append(image.path)
        return f"{image.path} ({image.width} x {image.height}) goes with the next question"

    def _save(self, name: str) -> str:
        """Write a row for each model that has answered."""
        if not any(message.role == "assistant" for message in self.speakers[-1].messages):
            return "there is no answer to save yet"
        path = Path(name).expanduser()
        if not name:
            path = self.folder / "chats" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        if path.exists():
            return f"{path} is there already; name another file"
        lines = [
            json_line({"messages": written_messages(speaker.messages), "model": speaker.name})
            for speaker in self.speakers
        ]
        try:
            write_text(path, "".join(lines))
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"saved {path}"

    def _reply(self, speaker: Speaker, question: Message) -> None:
        """Print a model's next turn; Ctrl-C ends it there."""
        trained = speaker.trained
        turn = [*speaker.messages, question]
        # transformers cannot stream the best of several beams
        is_streamed = trained.config.train.generation_num_beams == 1
        printer = AnswerPrinter(trained.tokenizer) if is_streamed else None
        note = ""
        try:
            with speaker.is_used():
                found = next_turn(trained, turn, printer)
            text = found.text
            if printer is None:
                print(visible(text), flush=True)
            if found.was_cut:
                note = answer_cut_note(trained)
        except KeyboardInterrupt:
            text = printer.text if printer else ""
            note = "\nstopped"
        except DataError as error:
            print(error, file=sys.stderr, flush=True)
            return
        self.images = []
        if note:
            print(note, file=sys.stderr, flush=True)
        speaker.messages = [*turn, Message("assistant", text)]


def answer_cut_note(trained: TrainedModel) -> str:
    """Return why an answer was cut, and how to allow longer answers."""
    limit = trained.config.train.generation_max_new_tokens
    if limit == "auto":
        return "the answer was cut: the model wrote no stop token"
    return (
        f"the answer was cut at {limit} tokens; "
        f"TRAIN_GENERATION_MAX_NEW_TOKENS={2 * limit} lets it continue"
    )
