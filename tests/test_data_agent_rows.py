"""Conversations with calls and reasoning: each answer is trained as the published model writes it."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from families import TEMPLATES
from record_files import run_data, write_rows
from test_data_template_table import (
    ALONE,
    LLAMA_CPP_NAMES,
    OF_LLAMA_CPP,
    OF_TRL,
    QUESTION,
    TRL_NAMES,
    WRITTEN,
    Setting,
    call,
    losses_of,
    stops_of,
    tokenizer_of,
)

from sft_play.config.sections.model import ModelSection
from sft_play.data.render import IGNORE_INDEX, Renderer, RenderError, render_prompt
from sft_play.data.row_hashes import hash_row
from sft_play.data.rows import Message, Row
from sft_play.data.store import StoredSample, to_arrays
from sft_play.data.template_checks import TOOL
from sft_play.data.templates import TURN_ENDS, ChatTemplate, stop_ids
from sft_play.data.thoughts import ThoughtPolicy

TOOLS = (json.loads(json.dumps(TOOL).replace("zq1_tool", "add")),)
RESULTS = tuple(
    Message("tool", f"Result{n}", name="add", tool_call_id=f"Zq{n}Call00") for n in (0, 1)
)
AGAIN, ROSE, SEA = Message("user", "And blue?"), "A rose.", "The sea."
ONE, BOTH = call({"a": "x"}), call({"a": "x"}, {"a": "y"})
SECOND = replace(ONE, tool_calls=({**ONE.tool_calls[0], "id": "Zq1Call00"},))


def said(answer: str | Message, reasoning: str | None = None) -> Message:
    made = Message("assistant", answer) if isinstance(answer, str) else answer
    return replace(made, reasoning=reasoning)


KINDS = {
    "plain": (QUESTION, said(ROSE), AGAIN, said(SEA)),
    "reasoning": (QUESTION, said(ROSE, "Flower."), AGAIN, said(SEA, "No flower.")),
    "a call": (QUESTION, ONE, RESULTS[0], said(ROSE), AGAIN, said(SEA)),
    "calls in parallel": (QUESTION, BOTH, *RESULTS, said(ROSE)),
    "calls in sequence": (QUESTION, ONE, RESULTS[0], SECOND, RESULTS[1], said(ROSE)),
    "reasoning before calls": (
        *(QUESTION, said(ONE, "Need x."), RESULTS[0], said(SECOND, "Again."), RESULTS[1]),
        *(said(ROSE, "Flower."), AGAIN, said(SEA, "No flower.")),
    ),
}
PATHS = [
    *(OF_TRL / f"{name}.jinja" for name in TRL_NAMES),
    *(OF_LLAMA_CPP / f"{name}.jinja" for name in LLAMA_CPP_NAMES),
    *(TEMPLATES / f"{name}.jinja" for name in (*WRITTEN, *ALONE)),
]
# What a family cannot write, as its refusal says it
CANNOT = re.compile(
    r"leaves out or changes (a tool call|messages\[\d\]|the reasoning)|single tool-calls"
    r"|refuses the conv|a stop token before a tool call"
)
# What the page of templates does not say, by the beginnings of the templates' names
NO_REASONING = ("Reka", "llama-cpp-rwkv")
NOT_WRITTEN = {
    "reasoning": NO_REASONING,
    "reasoning before calls": (
        *("llama3_", "meta-llama", "Mistral-Small", "mistralai-Mistral-Nemo", "MiniMax-M1"),
        *("gemma4_v2", *NO_REASONING),
    ),
}
# Its template ends answers where the generation config does not
OTHER_ENDS = {"gemma": "<end_of_turn>"}


@cache
def cannot_write(path: Path) -> set[str]:
    """Return the kinds of conversation that a template cannot write."""
    lost, name = losses_of(path), path.stem
    # GigaChat 3 writes a stop token before a call
    if re.search(r"(^|, )calls", lost) or name.startswith("GigaChat3-"):
        kinds = {kind for kind in KINDS if "call" in kind}
    else:
        kinds = {"calls in parallel"} if "several calls" in lost else set()
    return kinds | {kind for kind, names in NOT_WRITTEN.items() if name.startswith(names)}


def rendered(path: Path, kind: str) -> tuple[list[str], Row, tuple[str, ...]]:
    """Return what each answer trains, the row, and the stops of the model.

    The prompt of each answer is checked to be that of use.
    """
    row = Row(KINDS[kind], "rows:1", tools=TOOLS if "call" in kind else ())
    model, reasoning, samples = ModelSection(), "keep", ""
    for _ in range(3):  # the settings that errors name
        tok = tokenizer_of(path, model)
        (samples,) = Renderer(tok, "all", reasoning).render([row])
        if "DATA_REASONING=empty" in str(samples):
            reasoning = "empty"
        elif setting := re.search(r"MODEL_TEMPLATE_KWARGS='[^']+'", str(samples)):
            model = Setting.of(setting[0]).model
    if isinstance(samples, RenderError):
        raise samples
    row, _ = ThoughtPolicy(ChatTemplate(tok), reasoning).apply(row)
    found = []
    for index, message in enumerate(row.messages):
        if message.role == "assistant":
            prompt = render_prompt(row.messages[:index], tok, row.tools)
            size = len(prompt)
            (labels,) = (
                one.labels[size - 1 :]
                for one in samples
                if one.ids[:size] == prompt and one.labels[size : size + 1] > [IGNORE_INDEX]
            )
            labels = [*labels[1:], IGNORE_INDEX]
            found.append(tok.decode(labels[: labels.index(IGNORE_INDEX)]))
    trained = sum(label != IGNORE_INDEX for one in samples for label in one.labels)
    assert trained == sum(len(tok(text)["input_ids"]) for text in found)
    return found, row, stops_of(path.stem) or (tok.eos_token, *TURN_ENDS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_follows_its_prompt_of_use_and_ends_where_its_model_stops(path, kind):
    try:
        found, row, stops = rendered(path, kind)
    except RenderError as error:
        assert CANNOT.search(str(error)) and kind in cannot_write(path)
        return
    assert kind not in cannot_write(path)
    answers = [message for message in row.messages if message.role == "assistant"]
    for text, message in zip(found, answers, strict=True):
        assert message.content.strip() in text and (message.reasoning or "") in text
        ends = [one for one in (*stops, OTHER_ENDS.get(path.stem, "")) if text.endswith(one)]
        assert ends[0], text
        assert not any(stop in text.removesuffix(ends[0]) for stop in stops)


def path_of(name: str) -> Path:
    return next(path for path in PATHS if path.stem == name)


@pytest.mark.parametrize(("name", "is_stop"), [("llama4", True), ("muse_glimmer", False)])
def test_an_end_of_a_part_is_a_stop_if_the_base_names_it(name, is_stop):
    tok = tokenizer_of(path_of(name), ModelSection())
    assert (tok.convert_tokens_to_ids("<|eom|>") in stop_ids(tok)) == is_stop


CALLS = {
    "glm4moe": (
        "\n<think>{}</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n"
        "</tool_call><|observation|>"
    ),
    "glm5": (
        "{}</think><tool_call>add<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
        "<|observation|>"
    ),
    "gptoss": (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant to=functions.add<|channel|>"
        'commentary json<|message|>{{"a": "x"}}<|call|>'
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_one_after_the_other_keep_the_reasoning_of_their_turn(name):
    found, *_ = rendered(path_of(name), "reasoning before calls")
    assert found[:2] == [CALLS[name].format(words) for words in ("Need x.", "Again.")]


def test_beginnings_that_samples_share_are_counted_once():
    tok = tokenizer_of(OF_TRL / "qwen3.jinja", ModelSection())
    row = Row(KINDS["reasoning before calls"], "rows:1", tools=TOOLS)
    (samples,) = Renderer(tok).render([row])
    stored = [StoredSample(one, 0, 1, hash_row(row), 0) for one in samples]
    tokens = [tuple(one.ids[: end + 1]) for one in samples for end in range(len(one.ids))]
    assert len(to_arrays(stored).ids) == len(set(tokens)) < len(tokens)


def test_a_second_call_of_deepseek_begins_as_the_first_does():
    found, *_ = rendered(OF_TRL / "deepseekv3.jinja", "calls in sequence")
    begins = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    assert found[0].startswith(f"\n</think>\n\n{begins}") and found[1].startswith(begins)


def test_a_mix_repeats_rows_with_all_their_samples(tmp_path):
    def chat(answers: int, number: int) -> dict[str, object]:
        turns = []
        for turn in range(answers):
            turns.append({"role": "user", "content": f"What is {number} {turn}?"})
            answer = {"role": "assistant", "content": ROSE, "reasoning_content": SEA}
            turns.append(answer)
        return {"messages": turns}

    many = write_rows(tmp_path / "many.jsonl", *(chat(1, number) for number in range(20)))
    few = write_rows(tmp_path / "few.jsonl", *(chat(3, number) for number in range(20, 23)))
    sources = [{"path": str(many), "weight": 2}, {"path": str(few), "weight": 1}]
    held_out = write_rows(tmp_path / "val.jsonl", chat(1, 50))
    tok = tokenizer_of(OF_TRL / "qwen3.jinja", ModelSection())
    data = run_data(many, tok, 256, train_path=sources, val_path=str(held_out))
    shares = data.ledger.as_json()["splits"]["train"]["epoch"]
    assert [(one["rows"], one["samples"], one["share"]) for one in shares] == [
        (20, 20, pytest.approx(2 / 3, abs=1e-6)),
        (10, 30, pytest.approx(1 / 3, abs=1e-6)),
    ]
    assert np.diff(data.row_ends, prepend=0).tolist() == [1] * 20 + [3] * 10
    assert (data.train.index_in[20:].reshape(10, 3) % 3 == [0, 1, 2]).all()
