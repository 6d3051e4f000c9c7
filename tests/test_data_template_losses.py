"""sft_play.data.template_checks: what a template leaves out of tools and calls is found by words of
our own, then refused, or said once with the rows that have it."""

import json
from typing import Any

import pytest
from families import LLAMA3_WORDS, tokenizer
from record_files import run_data, write_rows
from renderings import CHATML, WRITES

from sft_play.data.render import Renderer, RenderError
from sft_play.data.rows import Message, Row

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = Message("user", "Add 0 and 2, and 3 and 4.")
# As gpt-oss and GigaChat: of several calls the first alone
CALL = "m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | tojson"
FIRST_CALL = CHATML.replace(WRITES, f"m['content'] + (({CALL}) if m.tool_calls else '')")
EVERY_CALL = CHATML.replace(
    WRITES, "m['content'] + ((m.tool_calls | tojson) if m.tool_calls else '')"
)
ONLY_ANSWERS = EVERY_CALL.replace("if m.tool_calls", "if m.tool_calls and loop.last")
WITH_TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>' }}{% endif %}"


def calling(*arguments: dict[str, Any], content: str = "") -> Message:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": given}}
        for n, given in enumerate(arguments)
    ]
    return Message("assistant", content, tool_calls=tuple(calls))


def rendered(template: str | None, *messages: Message, tools=(TOOL,), train_on="all") -> Any:
    tok = tokenizer(template, words=LLAMA3_WORDS)
    (result,) = Renderer(tok, train_on).render([Row(messages, "r:1", tools=tools)])
    return result


def notes_of(*args: Any, **options: Any) -> tuple[str, ...]:
    result = rendered(*args, **options)
    assert not isinstance(result, RenderError), result
    return result[0].notes


PAIRS = {
    "numbers": ({"a": 0, "b": 2}, {"a": 3, "b": 4}),
    "booleans": ({"on": True}, {"on": False}),
    "nulls": ({"a": None}, {"a": None}),
    "equal": ({"a": "x"}, {"a": "x"}),
    "nothing": ({}, {}),
    "within": ({"a": {"b": [1]}}, {"a": {"b": [2]}}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_second_call_that_is_in_no_token_is_refused_whatever_its_arguments_are(pair):
    result = rendered(WITH_TOOLS + FIRST_CALL, ASK, calling(*PAIRS[pair]))
    assert "all but the first of several calls" in str(result)
    assert "MODEL_CHAT_TEMPLATE=default" in str(result)
    (sample,) = rendered(WITH_TOOLS + EVERY_CALL, ASK, calling(*PAIRS[pair]))
    assert not sample.notes
    (sample,) = rendered(None, ASK, calling(*PAIRS[pair]))
    written = tokenizer(None, words=LLAMA3_WORDS).decode(sample.ids)
    for arguments in PAIRS[pair]:
        assert f'{{"name": "add", "arguments": {json.dumps(arguments)}}}' in written
    assert not sample.notes, "the remedy leaves nothing out"


@pytest.mark.parametrize("value", [7, 1.5, 0, True, False, None, "", "x", [1], {"a": 1}])
def test_an_argument_that_a_template_leaves_out_is_refused(value):
    kinds = "m.tool_calls[0].function.arguments.items()"
    skips = f"{{% for k, v in {kinds} if v is not sameas skipped %}}{{{{ k ~ '=' }}}}"
    turn = CHATML.replace("+ '<|im_end|>\n' }}", "}}")
    body = "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}" + skips
    keeps = turn.replace(
        "{% endfor %}",
        body + "{{ v | tojson }};{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}",
        1,
    )
    loses = keeps.replace("{{ v | tojson }}", "{{ v if v is string and v == 'never' }}")
    assert not isinstance(rendered(keeps, ASK, calling({"a": value})), RenderError)
    assert "leaves out or changes a tool call" in str(rendered(loses, ASK, calling({"a": value})))


def test_tools_in_no_token_are_said_also_where_no_answer_calls_one():
    (note,) = notes_of(CHATML, ASK, Message("assistant", "6."))
    assert "leaves out the tools" in note and "MODEL_CHAT_TEMPLATE=default" in note
    assert notes_of(WITH_TOOLS + CHATML, ASK, Message("assistant", "6.")) == ()
    assert notes_of(CHATML, ASK, Message("assistant", "6."), tools=()) == ()
    assert notes_of(None, ASK, Message("assistant", "6.")) == ()


def test_a_part_of_tools_that_is_in_no_token_is_named_if_a_row_has_it():
    names = "{% for t in tools %}{{ t.function.name + ' ' + t.function.description }}{% endfor %}"
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo"]}}}
    described = {"name": "add", "description": "Adds."}
    tool = {"type": "function", "function": {**described, "parameters": schema}}
    template = "{% if tools %}" + names + "{% endif %}" + CHATML
    (note,) = notes_of(template, ASK, Message("assistant", "6."), tools=(tool,))
    assert "leaves out of tools: enum, properties;" in note
    bare = {"type": "function", "function": described}
    assert notes_of(template, ASK, Message("assistant", "6."), tools=(bare,)) == ()


HISTORY = (
    ASK,
    calling({"city": "Ulm"}, content="I look."),
    Message("tool", "10 degrees"),
    Message("assistant", "10 degrees."),
)


def test_calls_of_the_history_that_vanish_are_refused_or_said_and_not_advised():
    result = rendered(WITH_TOOLS + CHATML, *HISTORY)
    assert isinstance(result, RenderError) and "DATA_TRAIN_ON" not in str(result)
    (note,) = notes_of(WITH_TOOLS + CHATML, *HISTORY, train_on="last")
    assert "leaves out of earlier calls: the calls themselves" in note
    assert "MODEL_CHAT_TEMPLATE=default" in note
    (note,) = notes_of(WITH_TOOLS + ONLY_ANSWERS, *HISTORY)
    assert "leaves out of earlier calls: the calls themselves" in note
    for template in (WITH_TOOLS + EVERY_CALL, None):
        for train_on in ("all", "last"):
            assert notes_of(template, *HISTORY, train_on=train_on) == ()


def test_words_and_thoughts_beside_an_earlier_call_are_said_if_lost():
    calls = WITH_TOOLS + CHATML.replace(
        WRITES, "((m.tool_calls | tojson) if m.tool_calls else m.content)"
    )
    (note,) = notes_of(calls, *HISTORY, train_on="last")
    assert "leaves out of earlier calls: words in the same message;" in note


def test_the_run_counts_the_rows_that_lose_something(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = []
    for n in range(20):
        turns = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]
        rows.append({"messages": turns, "tools": [TOOL] if n % 2 else None})
    write_rows(path, *rows)
    ledger = run_data(path, tokenizer(CHATML), val_size=0.1).ledger.as_json()
    (note,) = ledger["notes"]
    assert note.startswith(f"{path}: 10 rows: the chat template leaves out the tools")
    again = run_data(path, tokenizer(CHATML), val_size=0.1).ledger.as_json()
    assert again == ledger, "out of the cache, too"
