"""Rows with images become samples: each is what the processor writes, and those of its files now."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from image_models import draw_image, image_tokenizer, write_image_model
from PIL import Image
from record_files import write_rows

from sft_play.config.schema import Config, DataSection
from sft_play.data import tokenize
from sft_play.data.assemble import RunData
from sft_play.data.images import ImageReader
from sft_play.data.ledger import ledger_lines
from sft_play.data.pipeline import build_run_data
from sft_play.data.row_facts import look_at_rows
from sft_play.data.rows import IMAGE_MARK, ImageFile, Message
from sft_play.data.sources import find_sources
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import DataError
from sft_play.plan.sources import resolved

QWEN = "qwen3_vl"


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    return write_image_model(QWEN, tmp_path_factory.mktemp("base") / QWEN, tokenizer)


@pytest.fixture(scope="module")
def own(tokenizer):
    return image_tokenizer(tokenizer, QWEN)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two pairs with an image each, and two without."""
    rows = tmp_path / "rows"
    rows.mkdir()
    pairs: list[dict[str, Any]] = [
        {"question": f"What is {n}?", "answer": "Six."} for n in range(2)
    ]
    for number, size in enumerate([(64, 32), (32, 32)]):
        draw_image(rows / f"{number}.png", size, number)
        pairs.append({"question": "Seen?", "answer": f"It is {number}.", "image": f"{number}.png"})
    write_rows(rows / "rows.jsonl", *pairs)
    return rows


def configured(folder: Path, base: Path, **data: Any) -> Config:
    data = {"train_path": str(folder / "rows.jsonl"), **data}
    data["cache_dir"] = str(folder.parent / "cache")
    return Config.model_validate({"model": {"name": str(base), "max_seq_len": 256}, "data": data})


def sizes(data: RunData) -> list[tuple[int, int]]:
    """The sizes of all images that are trained or evaluated on."""
    splits = (data.train, data.validation)
    return sorted(image.size for split in splits for sample in split for image in sample.images)


def entries(folder: Path) -> set[str]:
    cache = folder.parent / "cache"
    return {path.name for path in cache.iterdir() if path.is_dir() and path.name[0] != "."}


def test_changed_images_are_read_anew(folder, base, own, caplog):
    config = configured(folder, base)
    assert sizes(build_run_data(config, own)) == [(32, 32), (64, 32)]
    (first,) = entries(folder)
    build_run_data(config, own)
    assert entries(folder) == {first} and not caplog.records

    draw_image(folder / "1.png", (96, 32))
    assert sizes(build_run_data(config, own)) == [(64, 32), (96, 32)]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"{folder}/rows.jsonl: its images have changed or moved, so its rows")
    caplog.clear()
    two = entries(folder)
    assert len(two) == 2 and first in two  # another run may train on those
    assert sizes(build_run_data(config, own)) == [(64, 32), (96, 32)]
    assert entries(folder) == two and not caplog.records

    stat = (folder / "1.png").stat()
    os.utime(folder / "1.png", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    build_run_data(config, own)
    assert len(entries(folder)) == 3


def test_an_image_that_vanished_is_named_as_when_rows_are_first_read(folder, base, own):
    config = configured(folder, base, on_bad_row="quarantine")
    build_run_data(config, own)
    (folder / "1.png").unlink()
    with pytest.raises(DataError, match=r"rows.jsonl:4: image 1 '1.png' is missing: no file"):
        build_run_data(configured(folder, base), own)
    assert sizes(build_run_data(config, own)) == [(64, 32)]
    draw_image(folder / "1.png", (32, 32))  # that of a row that was set aside
    assert sizes(build_run_data(config, own)) == [(32, 32), (64, 32)]


def test_rows_that_moved_find_the_images_beside_them(folder, base, own):
    build_run_data(configured(folder, base), own)
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    data = build_run_data(configured(other, base), own)
    paths = {Path(i.path).parent for s in data.train for i in s.images}
    assert paths <= {other}
    draw_image(other / "0.png", (96, 32))
    assert sizes(build_run_data(configured(other, base), own)) == [(32, 32), (96, 32)]
    assert sizes(build_run_data(configured(folder, base), own)) == [(32, 32), (64, 32)]


def test_the_folder_of_images_is_a_part_of_the_key(folder, base, own, monkeypatch):
    build_run_data(configured(folder, base), own)
    for name, size in (("a", (32, 64)), ("b", (64, 64))):
        images = folder.parent / name / "images"
        images.mkdir(parents=True)
        for number in range(2):
            draw_image(images / f"{number}.png", size)
        config = configured(folder, base, image_folder=str(images))
        assert sizes(build_run_data(config, own)) == [size] * 2
    monkeypatch.chdir(folder.parent / "a")
    data = resolved(DataSection(train_path="rows.jsonl", image_folder="images"))
    assert data.image_folder == str(folder.parent / "a" / "images")


def test_the_settings_of_the_processor_are_a_part_of_the_key(folder, base, own, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(base, changed)
    before = build_run_data(configured(folder, changed), own).train.lengths.sum()
    settings = changed / "preprocessor_config.json"
    values = json.loads(settings.read_text())
    values["size"] = {"shortest_edge": 8192, "longest_edge": 16384}
    settings.write_text(json.dumps(values))
    assert build_run_data(configured(folder, changed), own).train.lengths.sum() > before


def test_rows_that_name_images_are_tokenized_on_all_cores(folder, base, own, monkeypatch):
    pair = {"answer": "No.", "image": "0.png"}
    write_rows(folder / "rows.jsonl", *({"question": f"{n}?", **pair} for n in range(100)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    asked: list[int] = []
    tokenize_tasks = tokenize.tokenize_tasks

    def watched(tasks, chunk_tokenizer, processes):
        asked.append(processes)
        return tokenize_tasks(tasks, chunk_tokenizer, processes)

    monkeypatch.setattr(tokenize, "tokenize_tasks", watched)
    data = build_run_data(configured(folder, base), own)
    assert sizes(data) == [(64, 32)] * 100 and asked == [2]
    assert data.train.records["number"].tolist() == sorted(data.train.records["number"])


def test_images_are_not_decoded_before_their_rows_are_tokenized(folder, base):
    draw_image(folder / "0.jpg", (64, 32))
    (folder / "0.jpg").write_bytes((folder / "0.jpg").read_bytes()[:-100])
    pair = {"question": "q", "answer": "x", "image": "0.jpg"}
    write_rows(folder / "rows.jsonl", pair)
    config = configured(folder, base)
    facts = look_at_rows(config, {}, may_fetch=True)
    assert facts.rows and facts.uncounted_because is None
    with pytest.raises(DataError, match=r"image 1 '0.jpg' is damaged, or breaks off"):
        tokenize.tokenize_sources(config, find_sources(config), load_tokenizer(config))
    (folder / "0.jpg").unlink()
    with pytest.raises(DataError, match=r"image 1 '0.jpg' is missing"):
        tokenize.tokenize_sources(config, find_sources(config), load_tokenizer(config))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_header_says_the_size_as_it_is_shown(orientation, folder):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("a.jpg", "a.png", "a.webp"):
        Image.new("RGB", (6, 4)).save(folder / name, exif=exif)
        for decodes in (True, False):
            reader = ImageReader(decodes=decodes)
            image = ImageFile(name, b"", 0, 0)
            messages = (Message("user", IMAGE_MARK, images=(image,)),)
            ((found,),) = (m.images for m in reader.open_images(messages, folder / "rows.jsonl"))
            assert found.size == ((4, 6) if orientation == 6 else (6, 4))


def test_images_of_a_folder_that_no_row_names_are_counted(folder, base, own):
    draw_image(folder / "unnamed.png", (32, 32))
    ledger = build_run_data(configured(folder, base, train_path=str(folder)), own).ledger
    assert ledger.notes[0] == f"{folder}: 1 files are not read: 1 .png"


def test_the_ledger_counts_images_and_their_tokens(folder, base, own):
    draw_image(folder / "2.png", (20, 20))  # rounded to 16
    draw_image(folder / "3.png", (640, 320))
    pairs = [
        {"question": "Both?", "answer": "Yes.", "images": ["0.png", "1.png"]},
        {"question": "Text?", "answer": "Yes."},
        {"question": "Large?", "answer": "Yes.", "image": "3.png"},
        {"question": "Too long? " * 200, "answer": "Yes.", "image": "0.png"},
    ]
    write_rows(folder / "rows.jsonl", *pairs)
    write_rows(folder / "val.jsonl", {"question": "Out?", "answer": "Yes.", "image": "2.png"})
    settings = {"val_path": str(folder / "val.jsonl"), "max_lost": 0.9}
    data = build_run_data(configured(folder, base, **settings), own)
    ledger = data.ledger
    pad = own.convert_tokens_to_ids("<|image_pad|>")
    for name, images, rows in (("train", 3, 2), ("validation", 1, 1)):
        tokens = sum(int((sample.ids == pad).sum()) for sample in getattr(data, name))
        facts = ledger.splits[name].as_json()
        for part in (facts, *facts["sources"]):
            counts = [part[name] for name in ("images", "image_tokens", "image_rows")]
            assert counts == [images, tokens, rows]
    table = "\n".join(ledger_lines(ledger))
    assert re.search(r"^images +3 +1$", table, re.M)
    assert re.search(r"^tokens that stand for images +20 +1$", table, re.M)
    (note,) = ledger.notes
    assert note == f"{folder}/rows.jsonl: 1 rows: the processor shrinks an image"
    bounds = {"image_min_pixels": 2000, "image_max_pixels": 9000}
    notes = build_run_data(configured(folder, base, **settings, **bounds), own).ledger.notes
    assert f"{folder}/val.jsonl: 1 rows: the processor enlarges an image" in notes


def test_rows_are_equal_where_their_images_are(folder, base, own):
    draw_image(folder / "1.png", (64, 32), 1)
    pairs = [{"question": "Seen?", "answer": "Yes.", "image": f"{n}.png"} for n in range(2)]
    write_rows(folder / "rows.jsonl", *pairs)
    write_rows(folder / "val.jsonl", {"question": "4?", "answer": "4"})
    config = configured(folder, base, val_path=str(folder / "val.jsonl"))
    assert build_run_data(config, own).ledger.splits["train"].duplicates.exact == 0
    shutil.copy(folder / "0.png", folder / "1.png")
    assert build_run_data(config, own).ledger.splits["train"].duplicates.exact == 1
