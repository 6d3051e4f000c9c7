"""sft_play.data.preview_page: the page shows every token and nothing in a row is markup."""

import pytest
from previews import LEDGER, TEXTS, read, shown

from sft_play.data.preview_page import render_page

HOSTILE = (
    "<script>document.title='owned'</script></pre></mark><img src=x onerror=alert(1)> "
    "& \"quoted\" 'so' &lt;"
)


def test_a_row_with_markup_is_inert(tokenizer) -> None:
    sequence = shown(tokenizer, HOSTILE, HOSTILE, place=f"/tmp/{HOSTILE}.jsonl:1", note=HOSTILE)
    found = read(render_page({"config": HOSTILE}, LEDGER, [sequence]))
    allowed_tags = "html meta title style h1 h2 h3 p section div pre i u mark".split()
    allowed_tags += "table thead tbody tr th td".split()
    assert {tag for tag, _ in found.tags} <= set(allowed_tags)
    allowed = {"lang", "charset", "http-equiv", "content", "name", "class", "title", "scope"}
    assert {name for _, attributes in found.tags for name in attributes} <= allowed
    assert found.text == f"<|user|>{HOSTILE}<|assistant|>{HOSTILE}<|end|>"
    assert found.title == f"Preview of {HOSTILE}"


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_page_is_that_of_the_sample(tokenizer, text: str) -> None:
    found = read(render_page({}, LEDGER, [shown(tokenizer, text, text)]))
    assert found.text == f"<|user|>{text}<|assistant|>{text}<|end|>"
    assert found.marked == f"{text}<|end|>"


def test_the_page_loads_nothing(tokenizer) -> None:
    text = render_page({"model": "m"}, LEDGER, [shown(tokenizer, "a", "b")])
    assert not any(
        word in text for word in ("http:", "https:", "url(", "@import", "<script", "<link", "src=")
    )
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_the_pointer_shows_place_and_ids_of_every_token(tokenizer) -> None:
    sequence = shown(tokenizer, "Red 🙂", "Blue")
    titles = [
        attributes["title"]
        for tag, attributes in read(render_page({}, LEDGER, [sequence])).tags
        if tag == "i" and "title" in attributes
    ]
    spans = sequence.documents[0].spans
    ids = [number for span in spans for number in span.ids]
    (emoji,) = [span for span in spans if "🙂" in span.text]
    assert titles[0] == f"token 0, id {ids[0]}"
    assert [
        int(number)
        for title in titles
        for number in title.partition("id")[2].lstrip("s").split(",")
    ] == ids
    assert [title.partition(", ids")[0] for title in titles if title.startswith("tokens ")] == [
        f"tokens {emoji.index} to {emoji.index + len(emoji.ids) - 1}"
    ]


def test_documents_of_a_packed_sequence_are_apart_on_the_page(tokenizer) -> None:
    tags = [
        tag
        for tag, _ in read(
            render_page({}, LEDGER, [shown(tokenizer, "One", "1", documents=3)])
        ).tags
        if tag in ("h3", "pre")
    ]
    assert tags == ["h3", "pre"] * 3


def test_the_ledger_is_on_the_page(prepared_rows, tokenizer) -> None:
    ledger = prepared_rows.ledger
    text = render_page({}, ledger, [])
    assert (
        f'<tr><th scope="row">trained tokens</th><td>{ledger.splits["train"].tally.trained_tokens:,}</td>'
        in text
    )
