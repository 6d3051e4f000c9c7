"""Samples of many row formats under many templates equal what plain transformers writes."""

import json
from typing import Any

import pytest
from families import FAMILIES, LLAMA3_WORDS, TEMPLATES, family, tokenizer
from record_files import read_rows
from renderings import pin_clock

from sft_play.data.render import IGNORE_INDEX, Renderer, RenderError, stop_ids
from sft_play.data.templates import TURN_ENDS

EOS = {
    "granite": "<|end_of_text|>",
    "minimax_m1": "<end_of_sentence>",
    "minimax_m2": "[e~[",
    "deepseek_v32": "<｜end▁of▁sentence｜>",
}
Q, A, Q2, A2 = "What is red?", "A rose.", "And blue?", "The sea."
ONE = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]
TWO = [*ONE, {"role": "user", "content": Q2}, {"role": "assistant", "content": A2}]
SAID = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
HH = f"\n\nHuman: {Q}\n\nAssistant: {A}"
# Format: a row of it, and its turns as transformers takes them
FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "messages": ({"messages": ONE}, ONE),
    "two turns": ({"messages": TWO}, TWO),
    "as JSON": ({"messages": json.dumps(TWO)}, TWO),
    "parts": (
        {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]}
                      for t in TWO]}, TWO),
    "columns": ({"messages": {"role": ["user", "assistant"], "content": [Q, A]}}, ONE),
    "conversations": ({"conversations": SAID}, ONE),
    "lima": ({"conversations": [Q, A, Q2, A2]}, TWO),
    "capybara": ({"conversation": [{"input": Q, "output": A}, {"input": Q2, "output": A2}]}, TWO),
    "alpaca": ({"instruction": Q, "input": "", "output": A}, ONE),
    "dolly": ({"instruction": Q, "context": "", "response": A}, ONE),
    "prompt": ({"prompt": Q, "completion": A}, ONE),
    "prompt turns": ({"prompt": TWO[:3], "completion": TWO[3:]}, TWO),
    "question": ({"question": Q, "answer": A}, ONE),
    "user": ({"user": Q, "assistant": A}, ONE),
    "target": ({"input": Q, "target": A}, ONE),
    "input": ({"input": Q, "output": A}, ONE),
    "prompt response": ({"prompt": Q, "response": A}, ONE),
    "query": ({"query": Q, "response": A}, ONE),
    "flan": ({"inputs": Q, "targets": A}, ONE),
    "hh": ({"messages": HH}, ONE),
    "chatml text": (
        {"messages": f"<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\n{A}<|im_end|>\n"},
        ONE),
}  # fmt: skip
# Their prompt of use has a block that their conversations have not
OTHERWISE = ("gemma4_31b", "deepseek_v32")
OPENS = ("command_a", "glm47", "minimax_m2")  # a think block: such rows ask for DATA_REASONING
NAMES = sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - {*OTHERWISE})


def tokenizer_of(name: str) -> Any:
    if name in FAMILIES:
        return family(name)
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    marks = tuple(mark for mark in TURN_ENDS if mark in text)
    return tokenizer(text, marks, EOS.get(name, "<|endoftext|>"), "<bos>", LLAMA3_WORDS)


def live_answer(tok: Any, turns: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return plain transformers' ids of a prompt, and of the answer up to its stop token."""
    pin_clock(tok.chat_template)
    prompt = tok.apply_chat_template(turns[:-1], add_generation_prompt=True, tokenize=False)
    text = tok.apply_chat_template(turns, tokenize=False)
    assert text.startswith(prompt)
    ids = tok(text, add_special_tokens=False)["input_ids"]
    first = len(tok(prompt, add_special_tokens=False)["input_ids"])
    stops = stop_ids(tok)
    ends = [place for place in range(first, len(ids)) if ids[place] in stops]
    answer = ids[first : ends[0] + 1] if ends else [*ids[first:], tok.eos_token_id]
    return ids[:first], answer


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_has_the_ids_and_labels_of_plain_transformers(name, tmp_path):
    tok, tried = tokenizer_of(name), 0
    for number, (kind, (record, turns)) in enumerate(FORMATS.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(record) + "\n")
        (row,) = read_rows(path, {})
        (samples,) = Renderer(tok).render([row])
        if isinstance(samples, RenderError):
            assert "DATA_REASONING" in str(samples), kind
            continue
        due = {end: live_answer(tok, turns[:end]) for end in range(2, len(turns) + 1, 2)}
        met: set[int] = set()
        for sample in samples:
            labels = [IGNORE_INDEX] * len(sample.ids)
            for end, (prompt, answer) in due.items():
                place = slice(len(prompt), len(prompt) + len(answer))
                is_trained = sample.labels[place] == answer
                if is_trained and sample.ids[: place.stop] == [*prompt, *answer]:
                    met.add(end)
                    labels[place] = answer
            assert sample.labels == labels, kind
        assert met == due.keys(), kind
        tried += 1
    assert tried == (0 if name in OPENS else len(FORMATS))
