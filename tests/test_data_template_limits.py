"""sft_play.data.limits: a template that does not end is stopped, with words."""

import time

import pytest
from families import tokenizer
from renderings import row

from sft_play.data import limits
from sft_play.data.render import Renderer, RenderError, render_prompt
from sft_play.data.rows import Message
from sft_play.errors import DataError

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(text='x' * 1000) %}"
    "{% for a in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)


def test_loops_in_loops_end_the_run_and_not_one_row(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CPU_SECONDS", 0.3)
    tok = tokenizer(NESTED)
    begin = time.process_time()
    with pytest.raises(DataError, match="has not ended after 0 s; correct its loops") as error:
        Renderer(tok).render([row("q", "a")])
    assert not isinstance(error.value, RenderError)
    with pytest.raises(DataError, match="has not ended"):
        render_prompt([Message("user", "q")], tok)
    assert time.process_time() - begin < 3


def test_a_text_that_doubles_is_stopped_before_the_memory_is_full(monkeypatch):
    monkeypatch.setattr(limits, "MAX_GROWN_BYTES", 64 << 20)
    monkeypatch.setattr(limits, "MAX_CPU_SECONDS", 60.0)  # memory is what stops it
    with pytest.raises(DataError, match="iB of memory"):
        Renderer(tokenizer(DOUBLING)).render([row("q", "a")])
