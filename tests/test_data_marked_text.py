"""sft_play.data.marked_text: conversations in one text, as chat templates wrote them, or people."""

import re
from pathlib import Path

import pytest
from families import tokenizer
from record_files import run_data, write_rows
from renderings import CHATML

from sft_play.data.marked_text import find_style, split_marked_text

SAID = [("user", "Name a tree."), ("assistant", "An oak.")]
SYSTEM = [("system", "Be brief."), *SAID]
TEXTS = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a tree.<|im_end|>\n"
        "<|im_start|>assistant\nAn oak.<|im_end|>\n", SYSTEM),
    "phi4": (
        "<|im_start|>user<|im_sep|>Name a tree.<|im_end|>"
        "<|im_start|>assistant<|im_sep|>An oak.<|im_end|>", SAID),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nName a tree.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nAn oak.<|eot_id|>", SYSTEM),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nName a tree. [/INST] An oak. </s>", SYSTEM),
    "mistral": ("<s>[INST] Name a tree. [/INST] An oak.</s>", SAID),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nName a tree.</s>\n<|assistant|>\nAn oak.</s>\n",
        SYSTEM),
    "phi3": ("<|user|>\nName a tree.<|end|>\n<|assistant|>\nAn oak.<|end|>\n<|endoftext|>", SAID),
    "vicuna": ("Be brief. USER: Name a tree. ASSISTANT: An oak.</s>", SYSTEM),
    "gemma": (
        "<bos><start_of_turn>user\nName a tree.<end_of_turn>\n"
        "<start_of_turn>model\nAn oak.<end_of_turn>\n", SAID),
    "gemma4": ("<bos><|turn>user\nName a tree.<turn|>\n<|turn>model\nAn oak.<turn|>\n", SAID),
    "alpaca": (
        "Be brief.\n\n### Instruction:\nName a tree.\n\n### Input:\nOslo\n\n"
        "### Response:\nAn oak.</s>",
        [("user", "Be brief.\n\nName a tree.\n\nOslo"), ("assistant", "An oak.")]),
    "deepseek": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Name a tree.<｜Assistant｜>An oak."
        "<｜end▁of▁sentence｜>", SYSTEM),
    "harmony": (
        "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Name a tree.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>An oak.<|return|>", SYSTEM),
    "guanaco": ("### Human: Name a tree.### Assistant: An oak.", SAID),
    "headings": ("### User:\nName a tree.\n\n### Assistant:\nAn oak.</s>\n\n", SAID),
    "hh": ("\n\nHuman: Name a tree.\n\nAssistant: An oak.", SAID),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_marks_are_read_as_the_turns_that_they_begin(name):
    text, turns = TEXTS[name]
    assert find_style(text)
    found = split_marked_text(text, "text")
    assert [(turn["role"], turn["content"]) for turn in found] == turns


def test_an_analysis_of_harmony_is_the_reasoning_of_the_answer_after_it():
    thought = "<|start|>assistant<|channel|>analysis<|message|>A tall one.<|end|>"
    text = TEXTS["harmony"][0].replace("<|start|>assistant", f"{thought}<|start|>assistant", 1)
    (_, _, answer) = split_marked_text(text, "text")
    assert answer == {"role": "assistant", "content": "An oak.", "reasoning_content": "A tall one."}


@pytest.mark.parametrize(
    "text",
    [
        "A story of the USER: and of no one else.",
        "How ChatML looks: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>",
        "### Response:\nAn oak.",
        "<|im_start|>user\nName a tree.<|im_end|>\n",
        "<|im_start|>user\nName a tree.<|im_end|>\n<|im_start|>assistant\n",
        f"{'A long text. ' * 100} USER: Why? ASSISTANT: So.",
        '[{"role": "user", "content": "Say USER: Why? ASSISTANT: So."}]',
    ],
)
def test_a_text_that_is_no_answered_conversation_is_a_text(text):
    assert not find_style(text)


def notes_and_labels(path: Path, **data: object) -> tuple[list[str], list[str]]:
    """Return the notes of a run, and what its first rows train."""
    val = path.with_name("val.jsonl")
    write_rows(val, {"question": "Why?", "answer": "So."})
    tok = tokenizer(CHATML)
    run = run_data(path, tok, 512, val_path=str(val), **data)
    trained = [
        tok.decode([label for label in run.train[index].labels.tolist() if label >= 0])
        for index in range(len(run.train))
    ]
    return run.ledger.as_json()["notes"], trained


@pytest.mark.parametrize(
    ("name", "column"), [("phi4", "formatted"), *((name, "text") for name in TEXTS)]
)
def test_a_run_names_the_setting_that_trains_the_answers_alone_and_it_does(name, column, tmp_path):
    path = tmp_path / "a.jsonl"
    text = TEXTS[name][0]
    rows = [{column: text.replace("a tree", f"{n} trees")} for n in range(8)]
    write_rows(path, *rows)
    (note,), _ = notes_and_labels(path, columns={"text": column})
    assert "(8 rows) not used: every token is trained, also the questions'" in note
    setting = re.search(r"DATA_COLUMNS='\{(\w+): (\w+)\}'", note)
    notes, trained = notes_and_labels(path, columns={setting[1]: setting[2]})
    assert not notes and trained == ["An oak.<|im_end|>"] * 8
