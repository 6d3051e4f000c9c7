"""`make preview` as one HTML page, light or dark, without scripts or outside files.

It opens the images that it shows, and no other file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from sft_play.data.images import decode, encode_small
from sft_play.data.ledger import Ledger, Table, padding_lines, source_tables, split_table
from sft_play.data.preview import PreviewDocument, PreviewSequence, TokenSpan, token_counts
from sft_play.data.rows import make_visible

THUMBNAIL = 128  # pixels of a side, at most
# The content security policy keeps markup in a row harmless even if it were not escaped.
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""

STYLE = """
:root { --page: #fff; --ink: #1c2024; --faint: #68707a; --line: #d9dde2; --shade: #00000009 }
:root { --label: #2f5fb3; --trained: #c9ecd0; --trained-shade: #b2e0bc }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --ink: #dde1e6; --faint: #8f98a3; --line: #363c44; --shade: #ffffff0d }
  :root { --label: #8fb4f5; --trained: #1d4a2b; --trained-shade: #275c37 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 66rem }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.5rem }
h2 { margin: 2.5rem 0 .25rem; font-size: 1rem; overflow-wrap: anywhere }
h3 { margin: 0; padding: .3rem .8rem; border-top: 2px dashed var(--faint) }
h3 { font-size: .85rem; overflow-wrap: anywhere }
h3:first-of-type { border-top: 0 }
p { margin: .25rem 0 }
.facts, h3, .note, caption { color: var(--faint); font-weight: normal }
.note { padding: .3rem .8rem; font-style: italic }
.scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .1rem .8rem .1rem 0; text-align: right; white-space: nowrap }
th { font-weight: normal; color: var(--faint) }
th:first-child { min-width: 10rem; text-align: left; white-space: normal; overflow-wrap: anywhere }
thead th { border-bottom: 1px solid var(--line); color: inherit; font-weight: 600 }
.sequence { border: 1px solid var(--line); border-radius: .4rem; overflow: hidden }
pre { margin: 0; padding: .6rem .8rem; font: 14px/1.7 ui-monospace, monospace; tab-size: 4 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext }
h3 + pre, .note + pre { padding-top: 0 }
i { font-style: normal; border-radius: .15rem }
i:nth-of-type(even) { background: var(--shade) }
i:hover { outline: 1px solid var(--label) }
mark { background: var(--trained); color: inherit; border-radius: .15rem }
mark i:nth-of-type(even) { background: var(--trained-shade) }
i.special { padding: 0 .25em; border: 1px solid; color: var(--label); font-size: .8em }
img { display: block; max-width: 100%; margin: .25rem 0 }
i:empty::before { content: "\\22EF"; color: var(--faint) }
u { text-decoration: none; color: var(--faint) }
u.line::before { content: "\\21B5" }
u.tab { position: relative }
u.tab::before { content: "\\21E5"; position: absolute }
u.blanks { font-family: ui-monospace, monospace; white-space: pre-wrap }
u.blanks { background: radial-gradient(circle, var(--faint) 1px, transparent 1.5px) 0 / 1ch 100% }
"""

LEGEND = (
    "<p>Shown as <mark>trained</mark> is what carries loss, the stop token included; the rest is "
    "context. Every token has its own shade, and its position and id under the pointer; "
    '<i class="special">special</i> tokens are labels; <u class="line"></u> is a line feed, '
    '<u class="blanks">   </u> are blanks that would be missed.</p>'
)


def render_page(
    facts: Mapping[str, str], ledger: Ledger, sequences: Sequence[PreviewSequence]
) -> str:
    """Return the page: facts on the run, its ledger, and the sequences token by token."""
    title = _text(next(iter(facts.values()), ""))
    about = " · ".join(f"{_text(name)} {_text(value)}" for name, value in facts.items())
    parts = [
        f"{HEAD}<title>Preview of {title}</title>\n<style>{STYLE}</style>\n",
        "<h1>What the model sees</h1>\n",
        f'<p class="facts">{about}</p>\n',
        *map(_table_html, [split_table(ledger), *source_tables(ledger)]),
        *(f"<p>{escape(line)}</p>\n" for line in padding_lines(ledger)),
        f"{LEGEND}\n",
        *map(_sequence_html, sequences),
        "</html>\n",
    ]
    return "".join(parts)


def span_html(span: TokenSpan) -> str:
    """Return a span as an element with the span's text; the style sheet marks whitespace."""
    last = span.index + len(span.ids) - 1
    where = f"tokens {span.index} to {last}, ids"
    if last == span.index:
        where = f"token {span.index}, id"
    special = ' class="special"' if span.is_special else ""
    picture = ""
    shown_ids: Iterable[int] = span.ids
    if span.image is not None:
        shown_ids = dict.fromkeys(span.ids)  # for one id that repeats hundreds of times
        picture = f'<img src="{encode_small(decode(span.image), THUMBNAIL)}" alt="">'
    ids = ", ".join(map(str, shown_ids))
    return f'<i{special} title="{where} {ids}">{picture}{_span_text(span.text)}</i>'


def _text(text: str) -> str:
    return escape(make_visible(text))


def _table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.headings)
    body = ""
    for name, *cells in table.lines:
        cells_html = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(name)}</th>{cells_html}</tr>\n'
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _sequence_html(sequence: PreviewSequence) -> str:
    documents = sequence.documents
    if len(documents) == 1:
        title = _document_title(documents[0])
        body = _document_html(documents[0])
    else:
        title = f"{len(documents)} documents · {token_counts(documents)}"
        body = ""
        for number, document in enumerate(documents, 1):
            body += f"<h3>document {number}: {_document_title(document)}</h3>\n"
            body += _document_html(document)
    reasons = escape(", ".join(sequence.reasons))
    return (
        f"<section>\n<h2>{sequence.split} · {title}</h2>\n"
        f'<p class="facts">{reasons}</p>\n'
        f'<div class="sequence">\n{body}</div>\n</section>\n'
    )


def _document_title(document: PreviewDocument) -> str:
    return f"{_text(document.origin)} · {token_counts([document])}"


def _document_html(document: PreviewDocument) -> str:
    html = ""
    if document.note:
        html += f'<p class="note">{escape(document.note)}</p>\n'
    html += "<pre>"
    for is_trained, run in groupby(document.spans, key=lambda span: span.is_trained):
        spans = "".join(map(span_html, run))
        html += f"<mark>{spans}</mark>" if is_trained else spans
    return html + "</pre>\n"


def _span_text(text: str) -> str:
    html = re.sub("⟨U\\+[0-9A-F]+⟩", r"<u>\g<0></u>", _text(text))
    html = re.sub(r"^ +$| {2,}| +(?=\n)", r'<u class="blanks">\g<0></u>', html)
    return html.replace("\t", '<u class="tab">\t</u>').replace("\n", '<u class="line"></u>\n')
