"""Rendering of conversations with tools: calls are trained, results are not."""

from dataclasses import replace

import pytest
from families import LLAMA3_WORDS, family, tokenizer
from renderings import CHATML, WRITES, error_of, samples_of, trained

from sft_play.data.messages import parse_conversation
from sft_play.data.render import render_prompt
from sft_play.data.rows import Row

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
    result = {"content": 'It is "mild".\n12 degrees', "name": "weather", "tool_call_id": "c1"}
    turns = [
        {"role": "user", "content": "Is it warm in Köln?"},
        {"role": "assistant", "reasoning": reasoning, "tool_calls": [call]},
        {"role": "tool", **result},
        {"role": "assistant", "content": "It is mild."},
    ]
    messages = parse_conversation({"messages": turns}, set())
    return Row(messages, "rows.jsonl:7", tools=TOOLS)


@pytest.mark.parametrize(
    "arguments", [{"city": "Köln"}, '{"city": "Köln"}'], ids=["object", "text"]
)
def test_calls_of_tools_are_trained_and_their_answers_are_not(arguments):
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


CALL = "m.tool_calls[0]"


@pytest.mark.parametrize(
    "call, begin",
    [
        (
            f"{CALL}.function.name + '(' + {CALL}.function.arguments + ')'",
            'weather({"city": "Köln"})<|im_end|>',
        ),
        (f"{CALL}.id ~ {CALL}.function", "c1{"),
    ],
)
def test_a_template_gets_arguments_as_text_and_the_rows_own_id(call, begin):
    adds = f"m['content'] + ({call} if m.tool_calls else '')"
    tok = tokenizer(CHATML.replace(WRITES, adds), words=LLAMA3_WORDS)
    (sample,) = samples_of(calling({"city": "Köln"}), tok)
    assert trained(sample, tok)[0].startswith(begin)


# As Mistral's own: it refuses ids of another form
WITH_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{% endfor %}{% endfor %}"
) + CHATML.replace(
    WRITES,
    "(m['content'] + (m.tool_calls[0].function | tojson ~ m.tool_calls[0].id if m.tool_calls"
    " else '') + (m.tool_call_id if m.role == 'tool' else ''))",
)


@pytest.mark.parametrize("call_id", ["c1", None, "abcdefgh1"])
def test_a_template_that_wants_ids_of_calls_gets_them(call_id):
    row = calling({"city": "Köln"})
    call = {**row.messages[1].tool_calls[0], "id": call_id}
    if call_id is None:
        del call["id"]
    messages = (
        row.messages[0],
        replace(row.messages[1], tool_calls=(call,)),
        replace(row.messages[2], tool_call_id=call_id),
        row.messages[3],
    )
    tok = tokenizer(WITH_IDS, words=LLAMA3_WORDS)
    (sample,) = samples_of(replace(row, messages=messages), tok)
    expected = call_id if call_id == "abcdefgh1" else "call00000"
    text = tok.decode(sample.ids)
    assert text.count(expected) == 2
    assert trained(sample, tok)[0].endswith(f"{expected}<|im_end|>")


def test_calls_that_a_template_leaves_out_are_refused():
    advice = "; MODEL_CHAT_TEMPLATE=default writes them in plain words"
    assert f"leaves out or changes a tool call of messages[1]: 'weather'{advice}" in error_of(
        calling({"city": "Köln"}), CHATML
    )
    named = CHATML.replace(
        WRITES, "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '')"
    )
    assert "leaves out or changes a tool call of messages[1]: 'city'" in error_of(
        calling({"city": "Köln"}), named
    )
