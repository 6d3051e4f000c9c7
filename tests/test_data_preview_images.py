"""`make preview` of rows with images: each is one mark, and a small picture on the page."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from image_models import draw_image, image_tokenizer, write_image_model
from PIL import Image
from previews import LEDGER
from record_files import write_rows

from sft_play.config.schema import Config
from sft_play.data.images import decode, encode_small
from sft_play.data.pipeline import build_run_data
from sft_play.data.preview import PreviewSequence, in_marks, preview_sequences
from sft_play.data.preview_page import render_page
from sft_play.data.rows import ImageFile

TOKENS = {"qwen3_vl": (8, 4), "gemma3": (4, 4), "qwen3_5": (8, 4)}  # of images of 64x32 and 32x32


@pytest.fixture(scope="module", params=TOKENS)
def shown(request, tokenizer, tmp_path_factory) -> tuple[list[PreviewSequence], Any, str]:
    """The preview of two rows, packed too: two adjacent images, one of a file, and text alone."""
    folder: Path = tmp_path_factory.mktemp("rows")
    own = image_tokenizer(tokenizer, request.param)
    base = write_image_model(request.param, folder / request.param, tokenizer)
    draw_image(folder / "<b>.png", (64, 32))
    data = base64.b64encode(draw_image(folder / "1.png", (32, 32)).read_bytes()).decode()
    rows = [
        {"question": "2 + 3?", "answer": "5"},
        {"question": "<image><image>Alike?", "answer": "No.", "images": ["<b>.png", data]},
        {"question": "What is one?", "answer": "A number."},
    ]
    write_rows(folder / "rows.jsonl", *rows)
    paths = {"train_path": str(folder / "rows.jsonl"), "val_path": str(folder / "val.jsonl")}
    write_rows(folder / "val.jsonl", {"question": "4?", "answer": "4"})
    settings = {
        "model": {"name": str(base), "max_seq_len": 128},
        "data": {**paths, "cache_dir": str(folder / "c")},
    }
    config = Config.model_validate(settings)
    data = build_run_data(config, own)
    return preview_sequences(data, own, 0, config, [0, 1]), own, request.param


def images_in(sequence: PreviewSequence) -> list[str]:
    return [span.text for document in sequence.documents for span in document.spans if span.image]


def test_a_sample_with_images_is_shown_and_each_image_is_one_mark(shown):
    sequences, own, kind = shown
    (sequence,) = (each for each in sequences if "has images" in each.reasons)
    wide, square = TOKENS[kind]
    marks = [f"⟨image <b>.png 64x32, {wide} tokens⟩", f"⟨image 32x32, {square} tokens⟩"]
    assert images_in(sequence) == images_in(sequences[-1]) == marks
    text = in_marks(sequence)
    assert all(mark in text for mark in marks)
    assert not re.search(r"image_pad|image_soft_token", text)
    assert "⟦No.<|end|>⟧" in text and text.count("⟦") == 1
    (document,) = sequence.documents
    places = [
        index for span in document.spans for index in range(span.index, span.index + len(span.ids))
    ]
    ids = [token_id for span in document.spans for token_id in span.ids]
    assert places == list(range(len(ids)))
    rest = own.decode(ids)
    for span in document.spans:
        if span.image:
            rest = rest.replace(own.decode(span.ids), span.text, 1)
    assert rest == "".join(span.text for span in document.spans)


def test_the_page_has_small_pictures_and_opens_nothing_else(shown):
    sequences = shown[0]
    page = render_page({"config": "c"}, LEDGER, sequences)
    sources = re.findall(r'<img src="([^"]*)"', page)
    assert len(sources) == sum(len(images_in(sequence)) for sequence in sequences)
    for source in sources:
        head, _, text = source.partition(",")
        assert head == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
            assert picture.format == "JPEG" and picture.size in [(64, 32), (32, 32)]
    assert "<b>" not in page and "&lt;b&gt;.png 64x32" in page
    assert re.search(r'title="tokens \d+ to \d+, ids \d+"><img', page)
    assert "default-src 'none'; img-src data:; style-src" in page


def test_a_large_image_is_shown_small(tmp_path):
    path = draw_image(tmp_path / "a.png", (512, 256))
    text = encode_small(decode(ImageFile(str(path), b"", 512, 256)), 128).partition(",")[2]
    with Image.open(io.BytesIO(base64.b64decode(text))) as picture:
        assert picture.size == (128, 64)
