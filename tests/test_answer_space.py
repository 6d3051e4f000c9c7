"""Answers keep the whitespace that the model wrote; the template's own is left out."""

import pytest

from sft_play.data.render import TemplateSpace, template_space

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}[q]{{ m.content }}[/q]{% else %}"
    "BEFORE{{ m.content }}AFTER</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", TemplateSpace("", "")),
        (" ", "", TemplateSpace(" ", "")),
        ("\\n", "\\n", TemplateSpace("\n", "\n")),
        ("<think>", "", TemplateSpace("", "")),
    ],
)
def test_the_whitespace_of_a_template_is_found(
    tokenizer, before, after, expected, monkeypatch
) -> None:
    template = TEMPLATE.replace("BEFORE", before.replace("\\n", "{{ '\\n' }}"))
    template = template.replace("AFTER", after.replace("\\n", "{{ '\\n' }}"))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert template_space(tokenizer) == expected


def test_an_indented_answer_stays_indented() -> None:
    space = TemplateSpace("\n", "\n")
    assert space.without("\n    return x\n\n") == "    return x\n"
    assert space.without("  a ") == "  a "
