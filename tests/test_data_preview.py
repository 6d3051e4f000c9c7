"""What `make preview` shows: spans of real samples, the terminal's text, and the page."""

import json
import os
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from sft_play import commands
from sft_play.config.invocation import Invocation
from sft_play.config.schema import Config
from sft_play.data import preview_text
from sft_play.data.ledger import EqualRows, Ledger, LengthPercentiles, SplitLedger
from sft_play.data.pipeline import build_run_data
from sft_play.data.preview import (
    PreviewDocument,
    PreviewSequence,
    SpanFinder,
    TokenSpan,
    choose_samples,
    cut_note,
    first_packed_sequence,
    preview_sequences,
)
from sft_play.data.preview_page import render_page
from sft_play.data.preview_text import in_color, in_marks, make_visible, print_sequences
from sft_play.data.render import IGNORE_INDEX, RenderedSample
from sft_play.data.store import (
    RowIdentity,
    Sample,
    Split,
    Store,
    StoredSample,
    StoreWriter,
    to_arrays,
)
from sft_play.errors import EnvironmentFault
from sft_play.plan.layout import Layout

ROOT = Path(__file__).resolve().parents[1]
NO_CONFIG = ROOT / "tests" / "fixtures" / "empty.yaml"
TEXTS = [
    "Plain words, two  blanks.\n\tA tab; naïve café",
    "Family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿, faces 🙂🙃🙂",
    "请用中文回答。 日本語 한국어",
    "ما هو الوقت الآن؟ מה השעה?",
    " begins and ends blank ",
    "\n\n",
    "🙂",
]


@pytest.fixture(scope="module")
def blanks_as_underlines() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's kind: ▁ for a blank, one before the text, and bytes for characters that it lacks."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [
        AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")
    ]
    by_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["Plain words begin and end, a tab here: blank blank words"] * 9
    bpe.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=360, special_tokens=[*special, *by_bytes], show_progress=False
        ),
    )
    written = json.loads(bpe.to_str())
    written["added_tokens"] = written["added_tokens"][:3]  # bytes are plain tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token="</s>", bos_token="<s>"
    )


@pytest.fixture(params=["bytes of characters", "blanks as underlines"])
def any_tokenizer(request, tokenizer, blanks_as_underlines):
    return tokenizer if request.param == "bytes of characters" else blanks_as_underlines


def sample_of(ids: list[int], trained: list[bool] | None = None) -> Sample:
    mask = np.array(trained if trained is not None else [False, *[True] * (len(ids) - 1)])
    return Sample(np.array(ids, dtype=np.int32), np.where(mask, ids, IGNORE_INDEX), answer_start=0)


def text_of(spans: tuple[TokenSpan, ...]) -> str:
    return "".join(span.text for span in spans)


# Spans


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_spans_are_the_decoded_ids(any_tokenizer, text: str) -> None:
    ids = any_tokenizer(text)["input_ids"] + [any_tokenizer.eos_token_id]
    spans = SpanFinder(any_tokenizer)(sample_of(ids))
    assert text_of(spans) == any_tokenizer.decode(ids) == text + any_tokenizer.eos_token
    assert [number for span in spans for number in span.ids] == ids
    assert [span.index for span in spans] == np.cumsum([0, *(len(span.ids) for span in spans)])[
        :-1
    ].tolist()


def test_texts_of_spans_are_the_decoded_ids_of_any_ids(tokenizer) -> None:
    draw = random.Random(0)
    for _ in range(200):  # most of these are bytes of no character
        ids = [
            draw.randrange(len(tokenizer)) if draw.random() < 0.5 else draw.randrange(5, 261)
            for _ in range(draw.randrange(1, 40))
        ]
        trained = [False, *(draw.random() < 0.5 for _ in ids[1:])]
        spans = SpanFinder(tokenizer)(sample_of(ids, trained))
        assert text_of(spans) == tokenizer.decode(ids), ids
        assert [span.is_trained for span in spans for _ in span.ids] == trained


def test_trained_spans_are_the_labels(prepared_rows, tokenizer) -> None:
    for sample in prepared_rows.train:
        spans = SpanFinder(tokenizer)(sample)
        assert [span.is_trained for span in spans for _ in span.ids] == (
            sample.labels != IGNORE_INDEX
        ).tolist()
        trained = [number for span in spans if span.is_trained for number in span.ids]
        assert trained == sample.labels[sample.labels != IGNORE_INDEX].tolist()
        assert trained[-1] == tokenizer.eos_token_id, "the stop token is shown as trained"


def test_a_character_of_several_tokens_is_one_span(any_tokenizer) -> None:
    ids = any_tokenizer("a 🙂 b")["input_ids"]
    (emoji,) = [span for span in SpanFinder(any_tokenizer)(sample_of(ids)) if "🙂" in span.text]
    assert len(emoji.ids) > 1
    assert "\ufffd" not in text_of(SpanFinder(any_tokenizer)(sample_of(ids)))


def test_a_character_that_is_trained_in_part_stands_with_the_token_that_ends_it(tokenizer) -> None:
    ids = tokenizer("🙂")["input_ids"]
    spans = SpanFinder(tokenizer)(sample_of(ids))  # the first token of a sample is never trained
    assert [(span.text, span.is_trained) for span in spans] == [("", False), ("🙂", True)]


def test_a_sample_that_begins_or_ends_within_a_character_says_so(tokenizer) -> None:
    ids = tokenizer("🙂 red 🙂")["input_ids"]
    spans = SpanFinder(tokenizer)(sample_of(ids[1:-1], [False] * (len(ids) - 2)))
    assert text_of(spans) == tokenizer.decode(ids[1:-1])
    assert text_of(spans).startswith("\ufffd")
    assert text_of(spans).endswith("\ufffd")


def test_special_tokens_stand_alone(tokenizer) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": "Yes"}],
        return_dict=False,
    )
    special = [span.text for span in SpanFinder(tokenizer)(sample_of(ids)) if span.is_special]
    assert special == ["<|user|>", "<|assistant|>", "<|end|>"]


# Which samples


def split_of(folder: Path, samples: list[StoredSample]) -> Split:
    with StoreWriter(folder) as writer:
        writer.append(to_arrays(samples))
    return Split.whole(Store(folder))


def plain(
    tokens: int, number: int, cut: int = 0, trained: tuple[bool, ...] | None = None
) -> StoredSample:
    mask = trained or (False, *[True] * (tokens - 1))
    ids = list(range(10, 10 + tokens))
    labels = [i if is_trained else IGNORE_INDEX for i, is_trained in zip(ids, mask, strict=True)]
    identity = RowIdentity(0, number, number, number)
    return StoredSample(RenderedSample(ids, labels), identity, cut)


def test_the_first_and_the_instructive_are_chosen(tmp_path) -> None:
    turns = (False, True, False, True)
    split = split_of(
        tmp_path,
        [
            plain(5, 1),
            plain(5, 2),
            plain(9, 3),
            plain(2, 4),
            plain(4, 5, cut=7),
            plain(4, 6),
            plain(3, 6),
            plain(4, 7, trained=turns),
        ],
    )
    assert choose_samples(split, 2) == {
        0: ["sample 1"],
        1: ["sample 2"],
        2: ["longest"],
        3: ["shortest"],
        4: ["shortened"],
        6: ["goes on with a row"],
        7: ["several answers"],
    }


def test_a_sample_is_shown_once_with_all_its_reasons(tmp_path) -> None:
    assert choose_samples(split_of(tmp_path, [plain(3, 1)]), 5) == {
        0: ["sample 1", "longest", "shortest"]
    }


def test_a_source_of_one_row_that_repeats_has_no_pieces(tmp_path) -> None:
    split = split_of(tmp_path, [plain(3, 1)])
    assert list(choose_samples(Split(split.stores, [np.zeros(4, dtype=np.int64)]), 0)) == [0]


def test_a_packed_example_is_a_sequence_of_several_documents() -> None:
    lengths = np.array([3, 4, 5, 2, 6, 8])
    found = first_packed_sequence(
        lengths, Layout(3, grad_accum=2, world_size=1, max_seq_len=10, fullest_step=3), seed=0
    )
    assert len(found) > 1
    assert sum(lengths[found]) <= 10
    assert (
        first_packed_sequence(
            np.array([10, 10, 10]),
            Layout(1, grad_accum=3, world_size=1, max_seq_len=10, fullest_step=3),
            seed=0,
        )
        == []
    )


def test_what_was_cut_is_said_in_the_words_of_the_policy() -> None:
    assert cut_note(0, "truncate_left") is None
    assert (
        cut_note(1234, "truncate_left")
        == "1,234 tokens before this text were cut off (data.too_long=truncate_left)"
    )
    assert cut_note(3, "split") == "3 tokens of this row are in no sample (data.too_long=split)"


def test_sequences_name_the_row_that_they_come_from(prepared_rows, tokenizer, rows) -> None:
    sequences = preview_sequences(prepared_rows, tokenizer, 2, "drop", packed=[0, 3])
    assert sequences[0].heading.startswith(f"train  {rows['train']}:1  ")
    assert sequences[1].documents[0].origin == f"{rows['train']}:2"
    assert [document.origin for document in sequences[-1].documents] == [
        f"{rows['train']}:1",
        f"{rows['train']}:4",
    ]
    assert sequences[-1].reasons == ("packed into one sequence",)
    sample = prepared_rows.train[0]
    assert (sequences[0].documents[0].tokens, sequences[0].documents[0].trained_tokens) == (
        len(sample.ids),
        sample.trained_tokens,
    )


# The terminal


def shown(
    tokenizer,
    prompt: str,
    answer: str,
    place: str = "rows.jsonl:1",
    note: str | None = None,
    documents: int = 1,
) -> PreviewSequence:
    """One conversation `documents` times, as the model would see it."""
    before = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    ids = [*before, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    spans = SpanFinder(tokenizer)(
        sample_of(ids, [index >= len(before) for index in range(len(ids))])
    )
    return PreviewSequence(
        "train", ("longest",), (PreviewDocument(place, spans, note),) * documents
    )


def test_text_without_colours_marks_what_is_trained(tokenizer) -> None:
    told = in_marks(shown(tokenizer, "Red\tor\nblue?", "Red 🙂", note="7 tokens were cut"))
    assert told.splitlines()[1:] == [
        "┄┄ 7 tokens were cut",
        "<|user|>Red⇥\tor↵",
        "blue?<|assistant|>⟦Red 🙂<|end|>⟧",
    ]
    assert told.splitlines()[0].startswith("── train  rows.jsonl:1  ")
    assert told.splitlines()[0].endswith(" trained  (longest)")


def test_colours_say_what_marks_say(tokenizer) -> None:
    sequence = shown(tokenizer, "Red or blue?", "Red it is")
    fragments = in_color(sequence)
    assert "".join(text for text, _ in fragments) == in_marks(sequence).translate(
        {ord("⟦"): None, ord("⟧"): None}
    )
    assert [text for text, style in fragments if "green" in style] == ["Red it is", "<|end|>"]


def test_nothing_in_a_row_commands_a_terminal(tokenizer) -> None:
    told = in_marks(
        shown(
            tokenizer,
            "\x1b[2J\x07 \u202eright to left \u200b\u00a0\r\x85",
            "\x9b31m",
            place="a\x1bb:1",
        )
    )
    assert [
        character
        for character in told
        if (ord(character) < 32 and character != "\n") or 127 <= ord(character) < 160
    ] == []
    assert "⟨U+001B⟩[2J⟨U+0007⟩ ⟨U+202E⟩right to left ⟨U+200B⟩⟨U+00A0⟩⟨U+000D⟩⟨U+0085⟩" in told


def test_joined_emoji_and_letters_stay_joined() -> None:
    for text in ("👩‍👩‍👧‍👦", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "می‌خواهم", "日本\u3000語", "é"):
        assert make_visible(text) == text


def test_a_long_sample_loses_its_middle_in_the_terminal_alone(tokenizer) -> None:
    sequence = shown(tokenizer, "word " * 900, "end")
    told = in_marks(sequence)
    hidden = sequence.documents[0].tokens - preview_text.MAX_TOKENS
    assert f"{hidden:,} tokens more, on the page" in told
    assert told.count("word") < page_text(render_page({}, LEDGER, [sequence])).count("word") == 900


def test_seams_of_a_packed_sequence_are_named(tokenizer) -> None:
    told = in_marks(shown(tokenizer, "One", "1", documents=2))
    assert [line.split("  ")[0] for line in told.splitlines() if line.startswith("┄┄")] == [
        "┄┄ document 1: rows.jsonl:1",
        "┄┄ document 2: rows.jsonl:1",
    ]
    assert told.count("⟦1<|end|>⟧") == 2
    assert in_marks(shown(tokenizer, "One", "1", documents=9)).endswith(
        "┄┄ 5 documents more, on the page\n"
    )


# The page

TRAIN = SplitLedger(
    rows_in=1,
    rows_used=1,
    samples=1,
    tokens=2,
    trained_tokens=1,
    lost_trained_tokens=0,
    lost_fraction=0.0,
    dropped={},
    shortened={},
    lengths=LengthPercentiles(2, 2, 2, max=2),
    duplicates=EqualRows(0, 0),
    sources=(),
)
LEDGER = Ledger({"train": TRAIN}, max_seq_len=8)


class Reader(HTMLParser):
    """The tags of a page, and the text of its <pre> and of what of it is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = self.marked = self.title = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = "pre" in self.open
        self.text += data if inside else ""
        self.marked += data if inside and "mark" in self.open else ""
        self.title += data if "title" in self.open else ""


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [], "every element is closed"
    return reader


def page_text(text: str) -> str:
    return read(text).text


HOSTILE = "<script>document.title='owned'</script></pre></mark><img src=x onerror=alert(1)> & \"quoted\" 'so' &lt;"


def test_a_row_with_markup_is_inert(tokenizer) -> None:
    sequence = shown(tokenizer, HOSTILE, HOSTILE, place=f"/tmp/{HOSTILE}.jsonl:1", note=HOSTILE)
    found = read(render_page({"config": HOSTILE}, LEDGER, [sequence]))
    assert {tag for tag, _ in found.tags} <= set(
        "html meta title style h1 h2 h3 p section div table thead tbody tr th td pre i u mark".split()
    )
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
        f'<tr><th scope="row">trained tokens</th><td>{ledger.train.trained_tokens:,}</td>' in text
    )


# The command


def test_the_command_prints_samples_and_the_path_of_the_page(tmp_path) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TRAIN_OUTPUT_DIR": str(tmp_path),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = [
        sys.executable,
        "-m",
        "sft_play",
        "preview",
        "--rows",
        "1",
        "--set",
        "train.packing=true",
    ]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == str(tmp_path / "preview.html")
    assert lines[0].startswith("── train  ")
    assert any("⟦" in line and "<|end|>⟧" in line for line in lines)
    assert any("packed into one sequence" in line for line in lines)
    assert "<mark>" in (tmp_path / "preview.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_named(tmp_path, settings_of) -> None:
    words = tuple(
        f"{name}={value}"
        for name, value in settings_of({"train.output_dir": tmp_path / "out"}).items()
    )
    call = commands.Call(Invocation(config=str(NO_CONFIG), device="cpu"), {}, words)
    (tmp_path / "file").touch()
    with pytest.raises(
        EnvironmentFault,
        match=f"--page {tmp_path}/file/p.html: .*; name a file in a folder that can be written",
    ):
        commands.preview(
            commands.plan_run(call, commands.load_config(call)),
            NO_CONFIG,
            1,
            f"{tmp_path}/file/p.html",
            no_color=True,
        )


@pytest.mark.parametrize(
    ("no_color", "environ", "has_colour"),
    [(False, {}, True), (True, {}, False), (False, {"NO_COLOR": "1"}, False)],
)
def test_a_terminal_gets_colours_unless_they_are_unwanted(
    no_color: bool, environ: dict, has_colour: bool, tokenizer, monkeypatch, capsys
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", **environ}.items():
        monkeypatch.setenv(name, value)
    print_sequences([shown(tokenizer, "Red [bold]or[/bold] :smile:", "x" * 300)], no_color)
    told = capsys.readouterr().out
    assert ("\x1b[1;32m" in told, "⟦" in told) == (has_colour, not has_colour)
    assert "Red [bold]or[/bold] :smile:" in told, "a row is no markup"
    assert "x" * 300 in told, "a line is the terminal's to wrap"


def test_a_truncated_row_says_how_much_was_cut(tmp_path, rows, tokenizer) -> None:
    settings = {
        "train_path": str(rows["train"]),
        "val_path": str(rows["val"]),
        "too_long": "truncate_left",
        "max_lost": 0.9,
        "cache_dir": str(tmp_path),
    }
    data = build_run_data(
        Config.model_validate({"data": settings, "model": {"max_seq_len": 12}}), tokenizer
    )
    (sequence,) = [
        sequence
        for sequence in preview_sequences(data, tokenizer, 0, "truncate_left")
        if "shortened" in sequence.reasons
    ]
    record = next(record for record in data.train.records if record["cut"])
    assert f"┄┄ {record['cut']} tokens before this text were cut off" in in_marks(sequence)
    assert f"{record['cut']} tokens before this text were cut off" in render_page(
        {}, LEDGER, [sequence]
    )
