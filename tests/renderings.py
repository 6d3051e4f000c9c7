"""Conversations, and what is trained of them, for tests of rendering."""

import re

from families import FAMILIES, LLAMA3_WORDS, tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from sft_play.data.render import IGNORE_INDEX, RenderedSample, Renderer, RenderError
from sft_play.data.rows import Message, Row
from sft_play.data.templates import CLOCK, DEFAULT_TEMPLATE

EVERY = [
    (name, marked)
    for name in FAMILIES
    for marked in (False, True)
    if not (marked and name == "default")
]


def row(*contents: str, system: str | None = None) -> Row:
    """A conversation that the user begins."""
    turns = [
        Message(("user", "assistant")[number % 2], content)
        for number, content in enumerate(contents)
    ]
    if system:
        turns.insert(0, Message("system", system))
    return Row(tuple(turns), "rows.jsonl:7")


def conversation(name: str) -> Row:
    """Two questions and answers, with what else the family's template writes."""
    known = FAMILIES[name]
    thoughts = ("A flower?", "No flower.") if known.reasoning else (None, None)
    messages = [
        Message("user", "What is red?"),
        Message("assistant", "A rose.", thoughts[0]),
        Message("user", "And blue?"),
        Message("assistant", "The sea.", thoughts[1]),
    ]
    if known.system:
        messages.insert(0, Message("system", "Be brief."))
    return Row(tuple(messages), "rows.jsonl:7")


def samples_of(
    row: Row, tok: PreTrainedTokenizerFast, train_on: str = "all"
) -> tuple[RenderedSample, ...]:
    (samples,) = Renderer(tok, train_on).render([row])
    assert not isinstance(samples, RenderError), samples
    return samples


def runs(rendered: RenderedSample) -> list[tuple[int, int]]:
    """The runs of trained tokens, as (first, behind the last)."""
    mask = "".join(" x"[label != IGNORE_INDEX] for label in rendered.labels)
    return [match.span() for match in re.finditer("x+", mask)]


def trained(rendered: RenderedSample, tok: PreTrainedTokenizerFast) -> list[str]:
    return [tok.decode(rendered.ids[first:behind]) for first, behind in runs(rendered)]


def shown(rendered: RenderedSample, tok: PreTrainedTokenizerFast) -> str:
    """The text of a sample, with brackets around what is trained."""
    position = 0
    text = ""
    for first, behind in runs(rendered):
        context = tok.decode(rendered.ids[position:first])
        text += f"{context}⟦{tok.decode(rendered.ids[first:behind])}⟧"
        position = behind
    return text + tok.decode(rendered.ids[position:])


def assert_consistent(rendered: RenderedSample) -> None:
    """Labels are the ids, or nothing; the first token is never predicted."""
    assert len(rendered.ids) == len(rendered.labels)
    assert all(
        label in (IGNORE_INDEX, token)
        for label, token in zip(rendered.labels, rendered.ids, strict=True)
    )
    assert rendered.labels[0] == IGNORE_INDEX


def turns(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    records = []
    for message in messages:
        record = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            record |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        records.append(record)
    return records


def pin_clock(jinja: str) -> None:
    """Give transformers' template the clock of ours."""
    _compile_jinja_template(jinja).environment.globals["strftime_now"] = CLOCK.strftime


def written(messages: tuple[Message, ...], tok: PreTrainedTokenizerFast, prompt: bool) -> str:
    """What transformers writes, by its own interface."""
    kept = tok.chat_template or DEFAULT_TEMPLATE
    pin_clock(kept)
    return tok.apply_chat_template(
        turns(messages), tokenize=False, chat_template=kept, add_generation_prompt=prompt
    )


CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WRITES = "m['content']"
STOPS = "'<|im_end|>\n'"
ASKS = "'<|im_start|>assistant\n'"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' }}"
    "{% if m['role'] == 'assistant' %}{{ 'assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OF_ANSWERS = "({} if m['role'] == 'assistant' else m['content'])"
OF_USERS = "({} if m['role'] == 'user' else m['content'])"


def writes(form: str, expression: str) -> str:
    return CHATML.replace(WRITES, form.format(expression))


def error_of(row: Row, chat_template: str, train_on: str = "all", **options: str) -> str:
    tok = tokenizer(chat_template, bos="<bos>", words=LLAMA3_WORDS, **options)
    (result,) = Renderer(tok, train_on).render([row])
    assert isinstance(result, RenderError), result
    return str(result)
