"""sft_play.data.render through the templates of fourteen families: what is trained, by eye, by an independent reference, and by what must be refused."""

import json
import random
import re
from collections import Counter

import pytest
from families import FAMILIES, LLAMA3_WORDS, TEMPLATES, family, template, tokenizer
from transformers import PreTrainedTokenizerFast

from sft_play.data.render import (
    IGNORE_INDEX,
    RenderedSample,
    Renderer,
    RenderError,
    render_prompt,
    stop_ids,
)
from sft_play.data.rows import Message, Row
from sft_play.data.templates import CLOCK, DEFAULT_TEMPLATE

GOLDEN = json.loads((TEMPLATES / "golden.json").read_text(encoding="utf-8"))
EVERY = [
    (name, marked)
    for name in FAMILIES
    for marked in (False, True)
    if not (marked and name == "default")
]

# what the model must learn to write, answer by answer; in a text of their own where the list is in brackets of its own
TRAINED = {
    "chatml": [["A rose.<|im_end|>", "The sea.<|im_end|>"]],
    "llama2": [[" A rose. </s>", " The sea. </s>"]],
    "llama3": [["A rose.<|eot_id|>", "The sea.<|eot_id|>"]],
    "qwen3": [
        ["<think>\nA flower?\n</think>\n\nA rose.<|im_end|>"],
        ["<think>\nNo flower.\n</think>\n\nThe sea.<|im_end|>"],
    ],
    "gemma": [["A rose.<end_of_turn>", "The sea.<end_of_turn>"]],
    "mistral": [
        [" A rose.</s>"],
        [" The sea.</s>"],
    ],  # the system message moves to the last question
    "phi3": [["A rose.<|end|>", "The sea.<|end|>"]],
    "deepseek_r1": [
        ["<think>\nA flower?\n</think>\n\nA rose.<｜end▁of▁sentence｜>"],
        ["<think>\nNo flower.\n</think>\n\nThe sea.<｜end▁of▁sentence｜>"],
    ],
    "zephyr": [["A rose.</s>", "The sea.</s>"]],
    "alpaca": [["A rose.</s>", "The sea.</s>"]],
    "vicuna": [[" A rose.</s>", " The sea.</s>"]],
    "command_r": [
        [
            "<|START_RESPONSE|>A rose.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            "<|START_RESPONSE|>The sea.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ],
    ],
    "harmony": [
        [
            "<|channel|>analysis<|message|>A flower?<|end|><|start|>assistant<|channel|>final<|message|>A rose.<|return|>"
        ],
        [
            "<|channel|>analysis<|message|>No flower.<|end|><|start|>assistant<|channel|>final<|message|>The sea.<|return|>"
        ],
    ],
    "default": [["A rose.</s>", "The sea.</s>"]],
}


def conversation(name: str) -> Row:
    """Two questions and answers, with what else the family's template writes."""
    known = FAMILIES[name]
    thoughts = ("A flower?", "No flower.") if known.reasoning else (None, None)
    answers = [
        Message("assistant", text, thought)
        for text, thought in zip(("A rose.", "The sea."), thoughts, strict=True)
    ]
    system = [Message("system", "Be brief.")] if known.system else []
    return Row(
        (
            *system,
            Message("user", "What is red?"),
            answers[0],
            Message("user", "And blue?"),
            answers[1],
        ),
        "rows.jsonl:7",
    )


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
    position, text = 0, ""
    for first, behind in runs(rendered):
        text += (
            f"{tok.decode(rendered.ids[position:first])}⟦{tok.decode(rendered.ids[first:behind])}⟧"
        )
        position = behind
    return text + tok.decode(rendered.ids[position:])


# What is trained, by eye


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_trains_the_answers_that_its_model_must_write(name: str, marked: bool) -> None:
    tok = family(name, marked)
    assert [trained(sample, tok) for sample in samples_of(conversation(name), tok)] == TRAINED[name]


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_family_has_its_golden_ids(name: str, marked: bool) -> None:
    tok = family(name, marked)
    samples = samples_of(conversation(name), tok)
    assert [{"text": shown(sample, tok), "ids": sample.ids} for sample in samples] == GOLDEN[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_answer_alone_is_one_sample(name: str) -> None:
    tok = family(name)
    (sample,) = samples_of(conversation(name), tok, "last")
    assert trained(sample, tok) == TRAINED[name][-1][-1:]
    assert runs(sample)[0][0] == sample.answer_start


@pytest.mark.parametrize(("name", "marked"), EVERY)
@pytest.mark.parametrize("number", [-3, -1])
def test_the_prompt_of_use_is_what_stands_before_an_answer(
    name: str, marked: bool, number: int
) -> None:
    tok, messages = family(name, marked), conversation(name).messages
    messages = messages[: len(messages) + number + 1]
    sample = samples_of(Row(messages, "rows.jsonl:7"), tok)[-1]
    assert sample.ids[: sample.answer_start] == render_prompt(messages[:-1], tok)
    assert (
        sample.ids[: sample.answer_start]
        == tok(prompt_text(messages[:-1], tok), add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(("name", "marked"), [(name, marked) for name, marked in EVERY if marked])
def test_our_mask_is_that_of_transformers_but_for_blanks_behind_the_stop_token(
    name: str, marked: bool
) -> None:
    tok, row = family(name, marked), conversation(name)
    sample = samples_of(row, tok)[-1]
    given = tok.apply_chat_template(
        turns(row.messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        strftime_now=CLOCK.strftime,
    )
    assert given["input_ids"] == sample.ids
    first = runs(sample)[0][
        0
    ]  # earlier answers are another sample's where the template rewrites them
    for index in range(first, len(sample.ids)):
        if bool(given["assistant_masks"][index]) != (sample.labels[index] != IGNORE_INDEX):
            assert not tok.decode(sample.ids[index]).strip()
            assert sample.ids[index - 1] in stop_ids(tok)


# An independent reference, character by character


def turns(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    thoughts = [
        {} if m.reasoning is None else {"reasoning_content": m.reasoning, "thinking": m.reasoning}
        for m in messages
    ]
    return [
        {"role": m.role, "content": m.content, **thought}
        for m, thought in zip(messages, thoughts, strict=True)
    ]


def written(messages: tuple[Message, ...], tok: PreTrainedTokenizerFast, prompt: bool) -> str:
    """What transformers writes, by its own interface."""
    kept = tok.chat_template or DEFAULT_TEMPLATE
    return tok.apply_chat_template(
        turns(messages),
        tokenize=False,
        chat_template=kept,
        add_generation_prompt=prompt,
        strftime_now=CLOCK.strftime,
    )


def prompt_text(messages: tuple[Message, ...], tok: PreTrainedTokenizerFast) -> str:
    return written(messages, tok, prompt=True)


def assert_proven(
    row: Row, samples: tuple[RenderedSample, ...], tok: PreTrainedTokenizerFast
) -> None:
    """Every answer is trained once, behind its prompt, as it is written when it is the last, up to its stop token."""
    stops = stop_ids(tok)
    due = {}  # ids of a prompt: the answer that has to follow
    for number, message in enumerate(row.messages):
        if message.role == "assistant":
            prompt = prompt_text(row.messages[:number], tok)
            due[tuple(tok(prompt, add_special_tokens=False)["input_ids"])] = (
                message,
                written(row.messages[: number + 1], tok, prompt=False)[len(prompt) :],
            )
    met = []
    for sample in samples:
        assert len(sample.ids) == len(sample.labels)
        assert all(
            label in (IGNORE_INDEX, token)
            for label, token in zip(sample.labels, sample.ids, strict=True)
        )
        assert sample.ids == tok(tok.decode(sample.ids), add_special_tokens=False)["input_ids"]
        assert sample.trained_tokens == sum(behind - first for first, behind in runs(sample))
        for first, behind in runs(sample):
            message, live = due[tuple(sample.ids[:first])]
            met.append(tuple(sample.ids[:first]))
            text, stop = tok.decode(sample.ids[first:behind]), tok.decode(sample.ids[behind - 1])
            assert (
                text.startswith(live)
                if not any(tok.convert_ids_to_tokens(number) in live for number in stops)
                else live.startswith(text)
            )
            assert message.content.strip() in text
            assert (message.reasoning or "").strip() in text
            assert sample.ids[behind - 1] in stops and stops.isdisjoint(
                sample.ids[first : behind - 1]
            )
            assert text.endswith(stop)
        assert sample.answer_start == runs(sample)[-1][0]
    assert Counter(met) == Counter(due.keys())


PIECES = [
    *(
        "A rose",
        " is red.",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "naïve",
        "e\u0301",
        "🙂",
        "👩‍🚀",
        "日本語",
        "\u2028",
        "\u00a0",
        "12",
        "345",
        "a",
        "'s",
        "x",
    ),
    *(
        "<|im_start|>",
        "user\n",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
        "### Response:\n",
        "USER:",
        " ASSISTANT:",
        "<think>",
        "{{ 1 + 1 }}",
        "{% if x %}",
        "assistant",
    ),
    *("<|end|>", "</s>", "<|im_end|>", "<s>"),
]


def random_text(rng: random.Random) -> str:
    likely = PIECES if rng.random() < 0.3 else PIECES[:18]
    text = "".join(rng.choices(likely, k=rng.randint(1, 12)))
    return text if text.strip() else text + "."


def random_row(name: str, rng: random.Random) -> Row:
    known = FAMILIES[name]
    messages = [Message("system", random_text(rng))] if known.system and rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        thought = random_text(rng).strip() if known.reasoning and rng.random() < 0.7 else None
        messages += [
            Message("user", random_text(rng)),
            Message("assistant", random_text(rng), thought),
        ]
    return Row(tuple(messages), "rows.jsonl:7")


REASONS = (
    "which ends an answer",
    "straddles the end of the prompt",
    "token twice",
    "leaves out or changes",
    "generation marks",
    "otherwise once it is answered",
)


@pytest.mark.parametrize(("name", "marked"), EVERY)
def test_a_random_conversation_is_proven_or_refused_by_name(name: str, marked: bool) -> None:
    tok, rng = family(name, marked), random.Random(f"{name} {marked}")
    rows = [random_row(name, rng) for _ in range(120)]
    results = Renderer(tok).render(rows)
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, RenderError):
            assert str(result).startswith("rows.jsonl:7: ")
            assert any(reason in str(result) for reason in REASONS), result
        else:
            assert_proven(row, result, tok)
    assert sum(not isinstance(result, RenderError) for result in results) > 50


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_rendered_alike_alone_and_in_a_batch(name: str) -> None:
    tok, rng = family(name), random.Random(name)
    rows = [random_row(name, rng) for _ in range(30)]
    together = Renderer(tok).render(rows)
    alone = [Renderer(tok).render([row])[0] for row in rows]
    assert [str(result) for result in together] == [str(result) for result in alone]


# What must not pass

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WRITES, STOPS, ASKS = "m['content']", "'<|im_end|>\n'", "'<|im_start|>assistant\n'"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' }}{% if m['role'] == 'assistant' %}{{ 'assistant\n' }}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OF_ANSWERS = "({} if m['role'] == 'assistant' else m['content'])"
OF_USERS = "({} if m['role'] == 'user' else m['content'])"


def writes(form: str, expression: str) -> str:
    return CHATML.replace(WRITES, form.format(expression))


MUTANTS = {
    "the answer in capitals": (
        writes(OF_ANSWERS, "m['content'] | upper"),
        r"leaves out or changes messages\[2\], an answer: 'A rose.'",
    ),
    "the answer cut off": (
        writes(OF_ANSWERS, "m['content'][:4]"),
        r"leaves out or changes messages\[2\], an answer",
    ),
    "the answer twice": (
        writes(OF_ANSWERS, "m['content'] + ' ' + m['content']"),
        r"writes messages\[2\], an answer, more than once",
    ),
    "the answer in a comment": (
        writes(OF_ANSWERS, "'<!-- ' + m['content'] + ' -->'"),
        r"writes '-->' behind messages\[2\]",
    ),
    "no answer": (writes(OF_ANSWERS, "''"), r"leaves out or changes messages\[2\], an answer"),
    "the question in a comment": (
        writes(OF_USERS, "'' #}{{ m['content'] #}"),
        r"refuses the conversation",
    ),
    "the question in lower case": (
        writes(OF_USERS, "m['content'] | lower"),
        r"leaves out or changes messages\[1\], of the role user: 'What is red\?'",
    ),
    "the question cut off": (
        writes(OF_USERS, "m['content'][:4]"),
        r"leaves out or changes messages\[1\], of the role user",
    ),
    "no system message": (
        "{% set messages = messages[1:] %}" + CHATML,
        r"leaves out or changes messages\[0\], of the role system",
    ),
    "the last two messages alone": (
        "{% set messages = messages[-2:] %}" + CHATML,
        r"leaves out the system message once a question is answered",
    ),
    "a closing phrase": (
        CHATML.replace(STOPS, "' Bye.<|im_end|>\n'"),
        r"writes 'Bye\.' behind messages\[2\]",
    ),
    "a text behind the stop token": (
        CHATML.replace(STOPS, "'<|im_end|>END\n'"),
        r"writes 'END' behind the stop token of messages\[2\]",
    ),
    "a stop token that is none": (
        CHATML.replace(STOPS, "'<|stop|>\n'"),
        r"writes '<\|stop\|>' behind messages\[2\]; if it ends answers, name it as eos_token",
    ),
    "the stop token before the answer": (
        writes(OF_ANSWERS, "'<|im_end|>' + m['content']"),
        r"writes a stop token before messages\[2\]",
    ),
    "the stop token in the answer": (
        writes(OF_ANSWERS, "m['content'][:4] + '<|im_end|>' + m['content'][4:]"),
        r"leaves out or changes messages\[2\]",
    ),
    "the beginning twice": (
        "{{ bos_token + bos_token }}" + CHATML,
        r"begins with the beginning-of-text token twice",
    ),
    "roles swapped": (
        CHATML.replace(
            "m['role']", "{'system': 'system', 'user': 'assistant', 'assistant': 'user'}[m['role']]"
        ),
        r"otherwise once it is answered",
    ),
    "another role when asked": (
        CHATML.replace(ASKS, "'<|im_start|>model\n'"),
        r"the prompt has 'model\\n' where the conversation has 'assistant\\nA rose",
    ),
    "a thought only when asked": (
        CHATML.replace(ASKS, "'<|im_start|>assistant\n<think>\n'"),
        r"otherwise once it is answered",
    ),
    "how many messages": (
        "{{ messages | length }}" + CHATML,
        r"the prompt has '2<\|im_start\|>system\\nBe b...' where the conversation has '3",
    ),
    "another prompt in the history": (
        "{% if not add_generation_prompt %}{{ 'Done. ' }}{% endif %}" + CHATML,
        r"otherwise once it is answered",
    ),
    "the system message in prompts alone": (
        "{% set messages = messages if add_generation_prompt else messages[1:] %}" + CHATML,
        r"leaves out the system message once a question is answered; write it into the first question",
    ),
    "chance": ("{{ range(10 ** 5) | random }}" + CHATML, r"otherwise once it is answered"),
    "a history without answers": (
        CHATML.replace(
            WRITES, "(m['content'] if m['role'] != 'assistant' or loop.last else '(cut)')"
        ),
        r"leaves out or changes messages\[2\], of the role assistant",
    ),
    "a blank over the seam": (
        CHATML.replace("'\n' + m['content']", "': ' + m['content']").replace(
            ASKS, "'<|im_start|>assistant: '"
        ),
        r"straddles the end",
    ),
    "an undefined name": (
        "{{ nowhere.at_all }}" + CHATML,
        r"the chat template refuses the conversation: 'nowhere' is undefined",
    ),
    "a sum of text and number": (
        "{{ 'a' + 1 }}" + CHATML,
        r"the chat template refuses the conversation: can only concatenate str",
    ),
    "marks without the stop token": (
        MARKED.replace(
            "m['content'] + '<|im_end|>' }}{% endgeneration %}",
            "m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
        ),
        r"generation marks leave out the stop token of messages\[2\]",
    ),
    "marks without the first word": (
        MARKED.replace(
            "{% generation %}{{ m['content'] + ",
            "{{ m['content'][:1] }}{% generation %}{{ m['content'][1:] + ",
        ),
        r"generation marks leave out a part of messages\[2\]",
    ),
    "marks that begin in the prompt": (
        MARKED.replace(
            "{{ 'assistant\n' }}{% generation %}", "{% generation %}{{ 'assistant\n' }}"
        ),
        r"generation marks begin before messages\[2\]",
    ),
    "marks that go on": (
        MARKED.replace(
            "{{ '\n' }}{% else %}", "{% generation %}{{ '\n' }}{% endgeneration %}{% else %}"
        ).replace("<|im_end|>' }}", "<|im_end|><|im_start|>' }}", 1),
        r"generation marks go on behind the stop token of messages\[2\]",
    ),
    "marks around questions": (
        MARKED.replace(
            "{{ m['role'] + '\n'", "{% generation %}{{ m['role'] }}{% endgeneration %}{{ '\n'"
        ),
        r"which no answer holds",
    ),
    "marks around one answer of two": (
        MARKED.replace(
            "{% if m['role'] == 'assistant' %}",
            "{% if m['role'] == 'assistant' and loop.index0 > 2 %}",
        ),
        r"generation marks leave out the stop token of messages\[2\]",
    ),
}


def error_of(row: Row, chat_template: str, train_on: str = "all", **options: str) -> str:
    (result,) = Renderer(
        tokenizer(chat_template, bos="<bos>", words=LLAMA3_WORDS, **options), train_on
    ).render([row])
    assert isinstance(result, RenderError), result
    return str(result)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_template_that_cannot_be_trained_through_is_refused(mutant: str) -> None:
    chat_template, reason = MUTANTS[mutant]
    assert re.search(reason, error_of(conversation("chatml"), chat_template))


@pytest.mark.parametrize("chat_template", [CHATML, MARKED])
def test_the_templates_that_these_come_from_are_proven(chat_template: str) -> None:
    tok = tokenizer(chat_template, bos="<bos>", words=LLAMA3_WORDS)
    assert [trained(sample, tok) for sample in samples_of(conversation("chatml"), tok)] == TRAINED[
        "chatml"
    ]


@pytest.mark.parametrize("form", [OF_ANSWERS, OF_USERS, "{}"])
@pytest.mark.parametrize(
    "change", ["''", "m['content'] | upper", "m['content'] | capitalize", "m['content'][:1]"]
)
def test_a_change_of_messages_of_a_letter_is_refused_too(form: str, change: str) -> None:
    row = Row(
        (Message("system", "s"), Message("user", "a"), Message("assistant", "s")), "rows.jsonl:7"
    )
    assert "leaves out or changes messages" in error_of(row, writes(form, change))


def test_marks_are_compared_by_token() -> None:
    in_prompt = template("vicuna", marked=True).replace(
        "{%- generation %}{{- ' ' + message.content",
        "{{- ' ' }}{%- generation %}{{- message.content",
    )
    tok = tokenizer(in_prompt, (), "</s>", "<s>", LLAMA3_WORDS)
    assert [trained(sample, tok) for sample in samples_of(conversation("vicuna"), tok)] == TRAINED[
        "vicuna"
    ]  # " A" is one token, which is marked


def test_marks_of_earlier_answers_are_not_asked_of_the_last() -> None:
    tok = family("chatml", marked=True)
    (sample,) = samples_of(conversation("chatml"), tok, "last")
    assert trained(sample, tok) == ["The sea.<|im_end|>"]
    chat_template, reason = MUTANTS["marks without the stop token"]
    assert re.search(
        reason.replace("2", "4"), error_of(conversation("chatml"), chat_template, "last")
    )


def test_a_template_that_escapes_is_refused() -> None:
    row = Row((Message("user", "Is 1 < 2?"), Message("assistant", "1 < 2")), "rows.jsonl:7")
    assert "leaves out or changes messages[0], of the role user" in error_of(
        row, writes(OF_USERS, "m['content'] | replace('<', '&lt;')")
    )
    assert "leaves out or changes messages[1], an answer" in error_of(
        row, writes(OF_ANSWERS, "m['content'] | replace('<', '&lt;')")
    )


def test_reasoning_that_is_never_written_is_refused() -> None:
    row = Row(
        (Message("user", "q"), Message("assistant", "a", reasoning="because")), "rows.jsonl:7"
    )
    assert (
        error_of(row, CHATML)
        == "rows.jsonl:7: the chat template leaves out or changes the reasoning of messages[1]: 'because'"
    )


def test_an_error_says_where_training_on_the_last_answer_helps() -> None:
    thought, plain = Message("assistant", "a", reasoning="because"), Message("assistant", "b")
    ask = Message("user", "q")
    assert error_of(Row((ask, thought, ask, plain), "r:1"), CHATML).endswith(
        "'because'; DATA_TRAIN_ON=last trains the last answer alone"
    )
    assert error_of(Row((ask, thought, ask, thought), "r:1"), CHATML).endswith(
        "the reasoning of messages[1]: 'because'"
    )


def test_a_clock_stands_still() -> None:
    tok = tokenizer("{{ strftime_now('%H:%M:%S.%f %d %b %Y') }}" + CHATML, words=LLAMA3_WORDS)
    sample = samples_of(conversation("chatml"), tok)[-1]
    assert tok.decode(sample.ids).startswith("00:00:00.000000 26 Jul 2024<|im_start|>")
    assert sample.ids[: sample.answer_start] == render_prompt(
        conversation("chatml").messages[:-1], tok
    )


# Tools

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


def calling(arguments: object, reasoning: str | None = None) -> Row:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = (
        Message("user", "Is it warm in Köln?"),
        Message("assistant", "", reasoning, tool_calls=(call,)),
        Message("tool", 'It is "mild".\n12 degrees', name="weather", tool_call_id="c1"),
        Message("assistant", "It is mild."),
    )
    return Row(messages, "rows.jsonl:7", tools=TOOLS)


@pytest.mark.parametrize(
    "arguments", [{"city": "Köln"}, '{"city": "Köln"}'], ids=["object", "text"]
)
def test_calls_of_tools_are_trained_and_their_answers_are_not(arguments: object) -> None:
    tok = family("llama3", marked=True)
    (sample,) = samples_of(calling(arguments), tok)
    assert trained(sample, tok) == [
        '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>',
        "It is mild.<|eot_id|>",
    ]
    assert 'You may call: [{"type": "function"' in tok.decode(sample.ids)
    assert sample.ids[: sample.answer_start] == render_prompt(
        calling(arguments).messages[:-1], tok, TOOLS
    )


def test_an_answer_in_several_steps_is_one_sample_as_long_as_its_reasoning_stays() -> None:
    tok = family("qwen3")
    row = calling({"city": "Köln"}, "Ask.")
    longer = Row(
        (*row.messages, Message("user", "And blue?"), Message("assistant", "The sea.")),
        row.origin,
        tools=TOOLS,
    )
    steps, last = samples_of(longer, tok)
    assert trained(steps, tok) == [
        '<think>\nAsk.\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is mild.<|im_end|>",
    ]
    assert trained(last, tok) == ["<think>\n\n</think>\n\nThe sea.<|im_end|>"]
    assert "Ask." not in tok.decode(last.ids)


def test_a_template_that_wants_arguments_as_text_gets_them() -> None:
    adds = "m['content'] + (m.tool_calls[0].function.name + '(' + m.tool_calls[0].function.arguments + ')' if m.tool_calls else '')"
    tok = tokenizer(CHATML.replace(WRITES, adds), words=LLAMA3_WORDS)
    (sample,) = samples_of(calling({"city": "Köln"}), tok)
    assert trained(sample, tok)[0] == 'weather({"city": "Köln"})<|im_end|>'


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    assert "leaves out or changes a tool call of messages[1]: 'weather'" in error_of(
        calling({"city": "Köln"}), CHATML
    )
    named = CHATML.replace(
        WRITES, "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '')"
    )
    assert "leaves out or changes a tool call of messages[1]: 'city'" in error_of(
        calling({"city": "Köln"}), named
    )


def test_the_answer_of_a_tool_that_a_template_leaves_out_is_refused() -> None:
    row = Row(
        (Message("user", "q"), Message("tool", "12 degrees"), Message("assistant", "a")),
        "rows.jsonl:7",
    )
    assert "leaves out or changes messages[1], of the role tool" in error_of(
        row, CHATML.replace(WRITES, "(m['content'] if m['role'] != 'tool' else '')")
    )
