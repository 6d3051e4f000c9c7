"""sft_play.data.preview_page: the page shows every token and nothing in a row is markup."""

import pytest
from html_pages import Page
from previews import LEDGER, TEXTS, shown

from sft_play.data.preview_page import render_page

HOSTILE = (
    "<script>document.title='owned'</script></pre></mark><img src=x onerror=alert(1)> "
    "& \"quoted\" 'so' &lt;"
)


def test_a_row_with_markup_is_inert(tokenizer):
    sequence = shown(tokenizer, HOSTILE, HOSTILE, place=f"/tmp/{HOSTILE}.jsonl:1", note=HOSTILE)
    page = render_page({"config": HOSTILE}, LEDGER, [sequence])
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert not any(word in page for word in ("http:", "https:", "url(", "@import"))
    found = Page(page)
    allowed_tags = "html meta title style h1 h2 h3 p section div pre i u mark".split()
    allowed_tags += "table thead tbody tr th td".split()
    assert {tag for tag, _ in found.tags} <= set(allowed_tags)
    allowed = {"lang", "charset", "http-equiv", "content", "name", "class", "title", "scope"}
    assert {name for _, attributes in found.tags for name in attributes} <= allowed
    assert found.pre == f"<|user|>{HOSTILE}<|assistant|>{HOSTILE}<|end|>"
    assert found.title == f"Preview of {HOSTILE}"


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_page_is_that_of_the_sample(tokenizer, text):
    found = Page(render_page({}, LEDGER, [shown(tokenizer, text, text)]))
    assert found.pre == f"<|user|>{text}<|assistant|>{text}<|end|>"
    assert found.marked == f"{text}<|end|>"


def test_the_pointer_shows_place_and_ids_of_every_token(tokenizer):
    sequence = shown(tokenizer, "Red 🙂", "Blue")
    tags = Page(render_page({}, LEDGER, [sequence])).tags
    titles = [found["title"] for tag, found in tags if tag == "i" and "title" in found]
    spans = sequence.documents[0].spans
    ids = [title.partition("id")[2].lstrip("s").split(",") for title in titles]
    assert [list(map(int, each)) for each in ids] == [list(span.ids) for span in spans]
    (emoji,) = [span for span in spans if "🙂" in span.text]
    place = f"tokens {emoji.index} to {emoji.index + len(emoji.ids) - 1}"
    assert titles[0].startswith("token 0,") and any(place in title for title in titles)


def test_the_ledger_is_on_the_page(prepared_rows, tokenizer):
    ledger = prepared_rows.ledger
    text = render_page({}, ledger, [])
    assert (
        f'<tr><th scope="row">trained tokens</th><td>{ledger.splits["train"].tally.trained_tokens:,}</td>'
        in text
    )
