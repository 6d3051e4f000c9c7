"""sft_play.data.limits: what does not end, or grows, is ended by the kernel and named in words."""

import os
import signal

import pytest
from families import tokenizer
from record_files import QA, run_data, write_rows
from renderings import CHATML

from sft_play.config.sections.model import ModelSection
from sft_play.data import chunk_tokenizer
from sft_play.data.limits import find_excess, refuse_endless
from sft_play.data.template_sources import find_template
from sft_play.errors import DataError

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(text='x' * 1000) %}"
    "{% for a in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("harm", "words"),
    [(NESTED, "has not ended after 0 s; correct its loops"), (DOUBLING, "iB of memory or more")],
)
def test_the_row_that_a_template_does_not_get_done_with_is_named(
    harm, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(chunk_tokenizer, "CPU_SECONDS", 0 if harm == NESTED else 60)
    monkeypatch.setattr(chunk_tokenizer, "GROWN_BYTES", 64 << 20)
    tok = tokenizer("{% if messages[0]['content'] == 'no end' %}" + harm + "{% endif %}" + CHATML)
    rows = write_rows(tmp_path / "rows.jsonl", QA, {**QA, "question": "no end"}, QA)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: the chat template .*{words}"):
        run_data(rows, tok)


SLOW = "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}"
# written at once, and long to tokenize: of each row another text, since equal ones are encoded once
LONG = "{{ 'a.' * 100000 ~ messages[0]['content'] }}"


@pytest.mark.parametrize("harm", [SLOW, LONG])
def test_a_template_that_slows_every_row_is_named_and_not_the_tokenizer(
    harm, tmp_path, monkeypatch
):
    monkeypatch.setattr(chunk_tokenizer, "CPU_SECONDS", 0)
    forks = []
    monkeypatch.setattr(
        chunk_tokenizer, "find_excess", lambda *args: forks.append(1) or find_excess(*args)
    )
    tok = tokenizer("{% if 'what?' in messages[0]['content'] %}" + harm + "{% endif %}" + CHATML)
    questions = [{**QA, "question": f"what? {number}"} for number in range(50)]
    rows = write_rows(tmp_path / "rows.jsonl", *questions)
    words = r"rows.jsonl:1( and \d+ rows after it)?: the chat template has .*MODEL_CHAT_TEMPLATE"
    with pytest.raises(DataError, match=words):
        run_data(rows, tok)
    assert len(forks) < 5, "rows are searched one by one"


def test_a_template_that_never_ends_is_found_before_a_row_is_read(monkeypatch):
    monkeypatch.setattr(refuse_endless, "__defaults__", (0, 64 << 20))
    with pytest.raises(DataError, match="the chat template has not ended after 0 s; correct"):
        find_template(NESTED, lambda name: None, ModelSection(), {})


def test_what_ends_is_within_the_limits_whatever_it_raises():
    assert find_excess(lambda: 1 / 0, 1, 64 << 20) is None


def test_a_crash_is_not_taken_for_a_lack_of_memory():
    excess = find_excess(lambda: os.kill(os.getpid(), signal.SIGSEGV), 1, 64 << 20)
    assert excess == "is ended by SIGSEGV"
