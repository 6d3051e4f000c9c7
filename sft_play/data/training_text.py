"""Build the texts that train a conversation's answers, and locate each answer. No tokenization.

The *generation view* of an answer is what the template writes for the conversation up to and
including it: first the prompt of inference, then the text that the model has to write. Templates
write some answers differently once the conversation continues: Qwen 3 and DeepSeek R1 omit the
reasoning from the history, gpt-oss ends the last answer with another token. One row may therefore
give several texts. Each answer is trained in a text that begins with its generation view, up to
its stop token. `{% generation %}` marks of a template are ignored.
"""

import contextlib
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from os.path import commonprefix
from typing import Any, Literal, Self

from sft_play.data.rows import Images, Json, Message, Notes, Row
from sft_play.data.special_text import match_any
from sft_play.data.template_checks import (
    check_answer,
    check_calls,
    check_prompt,
    describe_losses,
    json_characters,
    quote,
    text_after_answer,
)
from sft_play.data.templates import (
    PART_ENDS,
    ChatTemplate,
    RenderError,
    list_strings,
    stop_ids,
    template_messages,
)
from sft_play.data.thoughts import THOUGHT_END, AskedAnswer, Reasoning, ThoughtPolicy

TrainOn = Literal["all", "last"]  # data.train_on
IGNORE_INDEX = -100  # labels that carry no loss; torch's and transformers' default
# Longest conversation, in messages, that `_check_places` renders a second time: longer ones
# continue in the same way, and are expensive to render
MAX_CHECKED_MESSAGES = 16
get_role = attrgetter("role")
get_calls = attrgetter("tool_calls")
is_trained = attrgetter("is_trained")
INDENT = re.compile(r"\s*?((?: [ \t]+|\t[ \t]*)?)(?=\S|$)")  # a single blank does not count
MAX_VARIANTS = 64  # values of a template's variables, or names, whose checks are cached
UNWRITTEN = (
    "messages[].{1} of the {0} is in no token: the chat template does not write it; "
    "MODEL_CHAT_TEMPLATE=<file> with one that writes message.{1}, or put it into the contents"
)
TRIMMED = (
    "blanks and line breaks around a message are left out, as the chat template trims messages; "
    "an answer's indentation is trained"
)


@dataclass(slots=True)
class AnswerSpan:
    """The characters of one trained answer in a text."""

    message: int  # its index in the conversation
    start: int  # where its prompt ends
    stop: int  # where its stop token begins
    end: int  # where its stop token ends
    images: Images = ()  # before the answer
    # The last part of its prompt, from an added token or the beginning. It is tokenized to check
    # that the sample begins with the prompt's ids; other parts do not depend on what follows
    tail: str = ""
    tail_token: int = 0  # index of the tail's first token in the tokens of the full text


@dataclass(slots=True)
class RenderedSample:
    """One sequence as the model sees it: ids (T,) and labels (T,), IGNORE_INDEX if no loss."""

    ids: list[int]
    labels: list[int]
    answer_start: int = 0  # first token of the last answer; 0: no prompt, as in plain text
    as_text: tuple[str, ...] = ()  # special tokens in its messages that are read as plain text
    weights: list[float] | None = None  # (T,) of its tokens in the loss; None: each is 1
    notes: Notes = field(default=(), repr=False)  # changes to its row
    images: Images = field(default=(), repr=False)  # represented by its ids
    text: str = field(default="", repr=False, compare=False)  # source text of its ids
    # The trained answers in the text of a conversation, in order
    answers: list[AnswerSpan] = field(default_factory=list, repr=False, compare=False)

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss."""
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


Samples = list[RenderedSample]


class TrainingTextBuilder:
    """Builds training texts with one tokenizer's template and stop tokens."""

    def __init__(self, tokenizer: Any, train_on: TrainOn = "all", reasoning: Reasoning = "keep"):
        self._reasoning: Reasoning = reasoning
        self._use(ChatTemplate(tokenizer))
        self._train_on = train_on
        self._eos = tokenizer.eos_token
        stop_tokens = tokenizer.convert_ids_to_tokens(sorted(stop_ids(tokenizer)))
        self._stop = match_any(stop_tokens)
        self._next_stop = re.compile(rf"\s*(?:{self._stop.pattern})")
        added = tokenizer.added_tokens_decoder.values()
        any_special = match_any(token.content for token in added if token.special).pattern
        self._whitespace_or_special = re.compile(rf"(?:\s|{any_special})*")
        # Kimi K3 closes an answer with <|close|>response<|sep|>: a word between special tokens
        self._ending = re.compile(rf"(?:\s|(?:{any_special})(?:\w+(?:{any_special}))?)*")
        # Solar Open ends every part of an answer with <|end|>; then eos ends the answer
        parts = match_any(tokenizer.added_tokens_encoder.keys() & PART_ENDS - {*stop_tokens})
        self._part_ends = re.compile(rf"(?:\s|{parts.pattern})*")
        self._variants: dict[str, Self] = {}  # by the rows' variables

    def _use(self, template: ChatTemplate) -> None:
        self._template = template
        self.thoughts = ThoughtPolicy(template, self._reasoning)
        # roles, and whether they call tools, of conversations whose places were checked
        self._checked: set[tuple[str | bool, ...]] = set()
        # notes on keys of messages that are in no token, by the keys and names of a row
        self._unwritten: dict[frozenset, list[str]] = {}

    def for_row(self, row: Row) -> Self:
        """Return the builder for a row's template variables."""
        template = self._template.for_row(row.variables)
        if template is self._template:
            return self
        key = repr(row.variables)
        if key not in self._variants:
            if len(self._variants) == MAX_VARIANTS:  # e.g. documents, a different one in each row
                self._variants.clear()
            self._variants[key] = variant = copy.copy(self)
            variant._use(template)
        return self._variants[key]

    def describe_unread(self, row: Row) -> Notes:
        """Return notes on a row's variables that the template does not read.

        And on names and ids of messages on which the text of the row does not depend.
        """
        notes = []
        if row.variables:
            read = self._template.variables_read
            names = ", ".join(sorted(read)) or "none"
            for name in sorted(row.variables.keys() - read):
                words = f"the variable {name} is not used: the chat template reads {names}"
                notes.append(words)
        said = row.messages
        places = [(m.role, "name", m.name) for m in said if m.name]
        places += [(m.role, "tool_call_id", "") for m in said if m.tool_call_id]
        key = frozenset(places)
        if key not in self._unwritten:
            if len(self._unwritten) == MAX_VARIANTS:
                self._unwritten.clear()
            self._unwritten[key] = [
                UNWRITTEN.format(*place)
                for place in sorted({place[:2] for place in places})
                if not self._writes(row, place)
            ]
        return (*notes, *self._unwritten[key])

    def _writes(self, row: Row, place: tuple[str, str]) -> bool:
        """Return whether the text of a row depends on a key of the messages of a role."""
        messages = template_messages(row.messages)
        without = [
            {key: given[key] for key in given if (given["role"], key) != place}
            for given in messages
        ]
        render = self._template.render_conversation
        with contextlib.suppress(RenderError):  # the template requires the key
            return render(messages, row.tools) != render(without, row.tools)
        return True

    def build(self, row: Row) -> Samples:
        """Return the texts that train the answers of an arranged conversation, each once.

        There are none if every answer is excluded from loss. Text after the last trained answer is
        omitted, since nothing learns from it. Raises RenderError.
        """
        said = row.messages
        answers = [index for index in range(len(said)) if said[index].role == "assistant"]
        if not answers:
            raise RenderError("no message is the assistant's, so there is nothing to train")
        if self._train_on == "last":
            answers = answers[-1:]
        trained = [index for index in answers if said[index].is_trained]
        messages = template_messages(row.messages)
        try:
            views = [self._generation_view(row, messages, index) for index in trained]
        except RenderError as error:
            raise RenderError(f"{error}{self._find_remedy(row, trained, str(error))}") from None
        has_tools = row.tools or any(map(get_calls, row.messages))
        notes = describe_losses(self._template, row, trained) if has_tools else ()
        texts: Samples = []
        for view in reversed(views):
            (answer,) = view.answers
            for later in texts:
                if later.text.startswith(view.text[: answer.end]):
                    later.answers.insert(0, answer)  # the later text also trains this answer
                    later.notes += view.notes
                    break
            else:
                texts.append(view)
        for text in texts:
            text.notes += notes
        return texts[::-1]

    def _find_remedy(self, row: Row, trained: Sequence[int], error: str) -> str:
        """Return what to type against an error, tested on the row; "" if nothing is known."""
        without, _ = ThoughtPolicy(self._template, "drop").apply(row)
        with contextlib.suppress(RenderError):
            if without is not row and "DATA_REASONING" not in error:
                messages = template_messages(without.messages)
                for index in trained:
                    self._generation_view(without, messages, index)
                return "; DATA_REASONING=drop trains the answers without their reasoning"
        with contextlib.suppress(RenderError):
            if len(trained) > 1 and not describe_losses(self._template, row, trained[-1:]):
                self._generation_view(row, template_messages(row.messages), trained[-1])
                return "; DATA_TRAIN_ON=last trains only the last answer"
        return ""

    def _generation_view(self, row: Row, messages: list[Json], index: int) -> RenderedSample:
        """Return the generation view of the answer `messages[index]`, with its span.

        If the template writes no stop token, eos is added after the last character: the model must
        learn to end. At inference it reads its earlier answers as the template writes them, without
        eos, so in a longer conversation such an answer has a separate text.
        """
        message = row.messages[index]
        where = f"messages[{index}]"
        if message.reasoning or message.tool_calls or self._stop.search(message.content):
            self._refuse_stop(message, where)
        prompt = self._template.render_conversation(messages[:index], row.tools, is_prompt=True)
        text = self._template.render_conversation(messages[: index + 1], row.tools)
        notes: Notes = ()
        reasoning = (message.reasoning or "").strip()
        if not text.startswith(prompt) or reasoning not in text[len(prompt) :]:
            written = self.thoughts.write_text(AskedAnswer(row, messages, index, prompt, text))
            if written is not None:
                text, notes = written
            elif not text.startswith(prompt):
                raise RenderError(_why_not_prefix(index, prompt, text))
        check_prompt(row.messages[:index], prompt)
        start = len(prompt)
        found = self._stop.search(text, start)
        stop, end = found.span() if found else (len(text), len(text))
        if message.reasoning is not None or message.content[:1].isspace():
            restored = restore_beginning(message, start, text[:stop])
            text, end = restored + text[stop:], end + len(restored) - stop
            stop = len(restored)
        if is_trimmed(row.messages[: index + 1], text):
            notes = (*notes, TRIMMED)
        after = text[end:]
        ending = self._ending if found else self._part_ends
        check_answer(message, where, text[start:stop], after, ending)
        if message.tool_calls:
            check_calls(self._template, message, where)
        if not self._whitespace_or_special.fullmatch(after):
            raise RenderError(
                f"the chat template writes {quote(after.strip())} after the stop token of {where}"
            )
        asked = row.messages[: index + 1]
        structure = (*map(get_role, asked), *map(bool, map(get_calls, asked)))
        if structure not in self._checked and len(asked) <= MAX_CHECKED_MESSAGES:
            self._check_places(messages[: index + 1], row.tools)
            self._checked.add(structure)
        if not found:
            # GLM ends an answer with the token that begins the next message
            begun = self._next_stop.match(
                text_after_answer(self._template, bool(message.tool_calls))
            )
            text += begun[0] if begun else self._eos
            end = len(text)
        images = images_of(asked)
        answer = AnswerSpan(index, start, stop, end, images)
        return RenderedSample([], [], notes=notes, text=text, answers=[answer])

    def _refuse_stop(self, message: Message, where: str) -> None:
        """Raise RenderError for an answer that contains a stop token."""
        for text in list_strings((message.content, message.reasoning, message.tool_calls)):
            found = self._stop.search(text)
            if found:
                raise RenderError(
                    f"{where} contains {found[0]}, which ends an answer, "
                    "so the text after it would not be learned"
                )

    def _check_places(self, messages: list[Json], tools: Sequence[Json]) -> None:
        """Raise RenderError unless the template writes every message, and the last answer once.

        It renders words that no template contains: a content as short as "a" occurs in many
        places by chance.
        """
        last = len(messages) - 1
        words: dict[int, str] = {}
        marked = list(messages)
        for index, message in enumerate(messages):
            is_last = index == last and "tool_calls" not in message
            if message["role"] in ("system", "user") or is_last:
                words[index] = f"Place{index}Of{len(messages)}Messages"
                marked[index] = {**message, "content": words[index]}
        prompt, text = self._template.render_both(marked, tools)
        for index, word in words.items():
            if word not in (text if index == last else prompt):
                raise RenderError(
                    f"the chat template leaves out or changes messages[{index}], "
                    f"of the role {messages[index]['role']}"
                )
        if last in words and text.count(words[last], len(prompt)) > 1:
            raise RenderError(
                f"the chat template writes messages[{last}], an answer, more than once"
            )


def images_of(messages: Sequence[Message]) -> Images:
    """Return the images of messages in their order."""
    return tuple(image for message in messages for image in message.images)


def restore_beginning(message: Message, prompt_end: int, text: str) -> str:
    """Return a text up to an answer's stop token, restoring what the template cuts at its start.

    That is the indentation of its first line, and text before a </think> that it quotes.
    """
    answer = message.content.strip()
    quotes_mark = message.reasoning == "" and THOUGHT_END in answer
    (indent,) = INDENT.match(message.content).groups()  # type: ignore[union-attr]
    if not answer or not (indent or quotes_mark):
        return text
    start = prompt_end
    if message.reasoning:
        start = text.find(message.reasoning.strip(), prompt_end) + len(message.reasoning.strip())
    if quotes_mark and answer not in text[start:]:
        written = answer.rpartition(THOUGHT_END)[2].strip()
        place = text.rfind(written, start)
        if not written or place < 0 or text[place + len(written) :].strip():
            return text
        text = text[:place] + answer
    place = text.rfind(answer, start)
    if place < 0 or text[:place].endswith(indent):
        return text
    return text[:place] + indent + text[place:]


def is_trimmed(messages: Sequence[Message], text: str) -> bool:
    """Return whether a text has a message without the blanks around it."""
    for message in messages:
        for content in message.texts if message.images else (message.content,):
            if content == content.strip() or content in text:
                continue
            if json_characters(content) not in text:  # as Llama 3 writes a tool's answer
                return True
    return False


def _why_not_prefix(index: int, prompt: str, text: str) -> str:
    """Return why an answer cannot be found in a text that does not begin with its prompt."""
    same = len(commonprefix((prompt, text)))  # noqa: RUF071 - of texts, not of paths
    return (
        f"the chat template writes what is before messages[{index}] otherwise once it is answered, "
        f"so the answer cannot be found: the prompt has {quote(prompt[same:])} "
        f"and the conversation has {quote(text[same:])}; MODEL_CHAT_TEMPLATE=mine.jinja takes a "
        "template that writes both alike"
    )
