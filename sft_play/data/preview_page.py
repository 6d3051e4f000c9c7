"""`make preview` as a page: one HTML file that loads nothing, runs nothing, and reads in light and dark. Pure."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from sft_play.data.check import Table, padding_lines, source_tables, split_table
from sft_play.data.preview import Document, Shown, Span, counts, visible

# The policy makes a row that holds markup inert a second time, should escaping ever miss one.
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""

STYLE = """
:root { --page: #fff; --ink: #1c2024; --faint: #68707a; --line: #d9dde2; --shade: #00000009; --label: #2f5fb3 }
:root { --trained: #c9ecd0; --trained-shade: #b2e0bc }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --ink: #dde1e6; --faint: #8f98a3; --line: #363c44; --shade: #ffffff0d; --label: #8fb4f5 }
  :root { --trained: #1d4a2b; --trained-shade: #275c37 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 66rem; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.5rem }
h2 { margin: 2.5rem 0 .25rem; font-size: 1rem; overflow-wrap: anywhere }
h3 { margin: 0; padding: .3rem .8rem; border-top: 2px dashed var(--faint); font-size: .85rem; overflow-wrap: anywhere }
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
i:empty::before { content: "\\22EF"; color: var(--faint) }
u { text-decoration: none; color: var(--faint) }
u.line::before { content: "\\21B5" }
u.tab { position: relative }
u.tab::before { content: "\\21E5"; position: absolute }
u.blanks { font-family: ui-monospace, monospace; white-space: pre-wrap; background: radial-gradient(circle, var(--faint) 1px, transparent 1.5px) 0 / 1ch 100% }
"""

LEGEND = (
    "<p>Shown as <mark>trained</mark> is what carries loss, the stop token included; the rest is context. Every token has a shade of its own, its "
    'place and id under the pointer; <i class="special">special</i> tokens are labels; <u class="line"></u> is a line feed, '
    '<u class="blanks">   </u> are blanks that would be missed.</p>'
)


def page(facts: Mapping[str, str], ledger: Mapping[str, Any], sequences: Sequence[Shown]) -> str:
    """Return the page: facts on the run, its ledger, and the sequences token by token."""
    about = " · ".join(
        f"{escape(visible(name))} {escape(visible(value))}" for name, value in facts.items()
    )
    tables = "".join(map(_table, [split_table(ledger), *source_tables(ledger)]))
    padding = "".join(f"<p>{escape(line)}</p>\n" for line in padding_lines(ledger))
    body = "".join(map(_sequence, sequences))
    return (
        f"{HEAD}<title>Preview of {escape(visible(next(iter(facts.values()), '')))}</title>\n<style>{STYLE}</style>\n<h1>What the model sees</h1>\n"
        + (f'<p class="facts">{about}</p>\n{tables}{padding}{LEGEND}\n{body}</html>\n')
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.headings)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for name, *cells in table.lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _sequence(sequence: Shown) -> str:
    documents = sequence.documents
    parts = [
        (f"<h3>document {number}: {_named(document)}</h3>\n" if len(documents) > 1 else "")
        + _document(document)
        for number, document in enumerate(documents, 1)
    ]
    title = (
        _named(documents[0])
        if len(documents) == 1
        else f"{len(documents)} documents · {counts(documents)}"
    )
    told = f'<h2>{sequence.split} · {title}</h2>\n<p class="facts">{escape(", ".join(sequence.reasons))}</p>\n'
    return f'<section>\n{told}<div class="sequence">\n{"".join(parts)}</div>\n</section>\n'


def _named(document: Document) -> str:
    return f"{escape(visible(document.place))} · {counts([document])}"


def _document(document: Document) -> str:
    note = f'<p class="note">{escape(document.note)}</p>\n' if document.note else ""
    runs = groupby(document.spans, key=lambda span: span.is_trained)
    text = "".join(
        f"<mark>{_run(run)}</mark>" if is_trained else _run(run) for is_trained, run in runs
    )
    return f"{note}<pre>{text}</pre>\n"


def _run(spans: Any) -> str:
    return "".join(map(span_html, spans))


def span_html(span: Span) -> str:
    """Return a span as an element whose text is that of the span; marks for line feeds and blanks are the style sheet's."""
    last = span.index + len(span.ids) - 1
    where = (
        f"token {span.index}, id" if last == span.index else f"tokens {span.index} to {last}, ids"
    )
    special = ' class="special"' if span.is_special else ""
    return f'<i{special} title="{where} {", ".join(map(str, span.ids))}">{_html(span.text)}</i>'


def _html(text: str) -> str:
    text = re.sub("⟨U\\+[0-9A-F]+⟩", r"<u>\g<0></u>", escape(visible(text)))
    text = re.sub(r"^ +$| {2,}| +(?=\n)", r'<u class="blanks">\g<0></u>', text)
    return text.replace("\t", '<u class="tab">\t</u>').replace("\n", '<u class="line"></u>\n')
