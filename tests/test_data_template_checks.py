"""sft_play.data.template_checks: templates that cannot be trained with are refused."""

import re

import pytest
from families import LLAMA3_WORDS, tokenizer
from renderings import (
    ASKS,
    CHATML,
    MARKED,
    OF_ANSWERS,
    OF_USERS,
    STOPS,
    WRITES,
    conversation,
    error_of,
    samples_of,
    trained,
    writes,
)

from sft_play.data.render import render_prompt
from sft_play.data.rows import Message, Row

MUTANTS = {
    "the answer in capitals": (
        writes(OF_ANSWERS, "m['content'] | upper"),
        r"leaves out or changes messages\[2\], an answer: 'A rose.'",
    ),
    "the answer twice": (
        writes(OF_ANSWERS, "m['content'] + ' ' + m['content']"),
        r"writes messages\[2\], an answer, more than once",
    ),
    "the answer in a comment": (
        writes(OF_ANSWERS, "'<!-- ' + m['content'] + ' -->'"),
        r"writes '-->' after messages\[2\]",
    ),
    "the question in a comment": (
        writes(OF_USERS, "'' #}{{ m['content'] #}"),
        r"refuses the conversation",
    ),
    "the question in lower case": (
        writes(OF_USERS, "m['content'] | lower"),
        r"leaves out or changes messages\[1\], of the role user: 'What is red\?'",
    ),
    "no system message": (
        "{% set messages = messages[1:] %}" + CHATML,
        r"leaves out or changes messages\[0\], of the role system",
    ),
    "a closing phrase": (
        CHATML.replace(STOPS, "' Bye.<|im_end|>\n'"),
        r"writes 'Bye\.' after messages\[2\]",
    ),
    "a text behind the stop token": (
        CHATML.replace(STOPS, "'<|im_end|>END\n'"),
        r"writes 'END' after the stop token of messages\[2\]",
    ),
    "a stop token that is none": (
        CHATML.replace(STOPS, "'<|stop|>\n'"),
        r"writes '<\|stop\|>' after messages\[2\]; if it ends answers, name it as eos_token",
    ),
    "the stop token before the answer": (
        writes(OF_ANSWERS, "'<|im_end|>' + m['content']"),
        r"writes a stop token before messages\[2\]",
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
        r"the prompt has 'model\\n' and the conversation has 'assistant\\nA rose",
    ),
    "a thought only when asked": (
        CHATML.replace(ASKS, "'<|im_start|>assistant\n<think>\n'"),
        r"opens a think block before an answer, and messages\[\d\] has no reasoning",
    ),
    "how many messages": (
        "{{ messages | length }}" + CHATML,
        r"the prompt has '2<\|im_start\|>system\\nBe b...' and the conversation has '3",
    ),
    "another prompt in the history": (
        "{% if not add_generation_prompt %}{{ 'Done. ' }}{% endif %}" + CHATML,
        r"otherwise once it is answered",
    ),
    "chance": ("{{ range(100000) | random }}" + CHATML, r"otherwise once it is answered"),
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
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_template_that_cannot_be_trained_through_is_refused(mutant):
    chat_template, reason = MUTANTS[mutant]
    assert re.search(reason, error_of(conversation("chatml"), chat_template))


@pytest.mark.parametrize("chat_template", [CHATML, MARKED])
def test_the_templates_that_these_come_from_are_proven(chat_template):
    tok = tokenizer(chat_template, bos="<bos>", words=LLAMA3_WORDS)
    (sample,) = samples_of(conversation("chatml"), tok)
    assert trained(sample, tok) == ["A rose.<|im_end|>", "The sea.<|im_end|>"]


@pytest.mark.parametrize("form", [OF_ANSWERS, OF_USERS, "{}"])
@pytest.mark.parametrize(
    "change", ["''", "m['content'] | upper", "m['content'] | capitalize", "m['content'][:1]"]
)
def test_a_change_of_messages_of_a_letter_is_refused_too(form, change):
    row = Row(
        (Message("system", "s"), Message("user", "a"), Message("assistant", "s")), "rows.jsonl:7"
    )
    assert "leaves out or changes messages" in error_of(row, writes(form, change))


LAST_PART = writes(OF_ANSWERS, "m['content'].split('</think>')[-1]")  # and no field


def test_reasoning_that_is_never_written_is_refused():
    row = Row(
        (Message("user", "q"), Message("assistant", "a", reasoning="because")), "rows.jsonl:7"
    )
    assert (
        error_of(row, LAST_PART) == "rows.jsonl:7: the chat template leaves out or changes "
        "the reasoning of messages[1]: 'because'; DATA_REASONING=drop trains the answers without it"
    )


def test_an_error_says_where_training_on_the_last_answer_helps():
    thought, plain = Message("assistant", "a", reasoning="because"), Message("assistant", "b")
    ask = Message("user", "q")
    assert error_of(Row((ask, thought, ask, plain), "r:1"), LAST_PART).endswith(
        "without it; DATA_TRAIN_ON=last trains only the last answer"
    )
    assert error_of(Row((ask, thought, ask, thought), "r:1"), LAST_PART).endswith(
        "'because'; DATA_REASONING=drop trains the answers without it"
    )


def test_a_clock_stands_still():
    tok = tokenizer("{{ strftime_now('%H:%M:%S.%f %d %b %Y') }}" + CHATML, words=LLAMA3_WORDS)
    sample = samples_of(conversation("chatml"), tok)[-1]
    assert tok.decode(sample.ids).startswith("00:00:00.000000 26 Jul 2024<|im_start|>")
    assert sample.ids[: sample.answer_start] == render_prompt(
        conversation("chatml").messages[:-1], tok
    )
