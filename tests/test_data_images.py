"""Images of rows: however a row names them, they are opened once, and a broken one is named."""

import base64
import io
import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import pytest
from loopback import Silent, served_by
from PIL import Image
from record_files import cases, format_of, read_rows, to_parquet, write_rows
from transformers.image_utils import load_image

from sft_play.config.schema import Config
from sft_play.data.files import read_chunks
from sft_play.data.images import ImageReader, decode
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows, read_prompts
from sft_play.data.rows import IMAGE_MARK, Message
from sft_play.errors import DataError

ANSWER = {"role": "assistant", "content": "A cat."}


def encoded(size: tuple[int, int] = (6, 4), kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a.png").write_bytes(encoded((6, 4)))
    (tmp_path / "b.jpg").write_bytes(encoded((9, 5), "JPEG"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.webp").write_bytes(encoded((3, 8), "WEBP"))
    return tmp_path


def read_messages(folder: Path, record: dict[str, Any]) -> tuple[Message, ...]:
    (row,) = read_rows(write_rows(folder / "rows.jsonl", record))
    return row.messages


def shown(message: Message) -> tuple[str, list[tuple[str, int, int]]]:
    images = [(Path(each.path).name, each.width, each.height) for each in message.images]
    return message.content.replace(IMAGE_MARK, "#"), images


A, B, C = ("a.png", 6, 4), ("b.jpg", 9, 5), ("c.webp", 3, 8)


def asked(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **columns}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def text_turn(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


PARTS = {
    "transformers": {"type": "image", "image": "a.png"},
    "a path": {"type": "image", "path": "a.png"},
    "a URL": {"type": "image", "url": "./a.png"},
    "OpenAI": {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
    "OpenAI in short": {"type": "image_url", "image_url": "a.png"},
    "responses": {"type": "input_image", "image_url": "a.png"},
    "Qwen": {"image": "a.png"},
    "Anthropic": {"type": "image", "source": {"type": "url", "url": "a.png"}},
    "null next to it": {"type": "image", "image": "a.png", "text": None, "image_url": None},
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_names_its_file(part, folder):
    question, answer = read_messages(folder, asked(text("What is "), part, text("?")))
    assert shown(question) == ("What is #?", [A])
    assert shown(answer) == ("A cat.", [])
    assert question.images[0].path == str(folder / "a.png")


@pytest.mark.parametrize("case", cases("images"), ids=lambda case: case["case"])
def test_images_are_where_the_row_has_them(case, folder):
    found = read_messages(folder, case["record"])
    names = {image[0]: image for image in (A, B, C)}
    expected = [(text, [names[name] for name in images]) for text, images in case["images"]]
    assert [shown(message) for message in found if message.images] == expected


def test_a_mark_is_text_where_no_column_has_images(folder):
    record = {"question": "What does <image> mean in HTML? \ufffc", "answer": "<image> is none."}
    question, answer = read_messages(folder, record)
    assert question.content == record["question"] and answer.content == record["answer"]
    assert question.images == answer.images == ()


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_a_row_without_images_may_have_the_column(nothing, folder):
    found = read_messages(folder, {"question": "q", "answer": "a", "images": nothing})
    assert found == (Message("user", "q"), Message("assistant", "a"))


def test_a_message_has_images_as_ollama_writes_them(folder):
    turns = [{**text_turn("What?"), "images": ["a.png", AS_TEXT]}, ANSWER]
    question, answer = read_messages(folder, {"messages": turns})
    assert shown(question) == ("##What?", [A, ("", 6, 4)]) and answer.images == ()
    with pytest.raises(DataError, match="an answer contains an image"):
        read_messages(folder, {"messages": [text_turn("q"), {**ANSWER, "images": ["a.png"]}]})


@pytest.mark.parametrize("case", cases("bad_images"), ids=lambda case: case["case"])
def test_a_row_whose_images_cannot_be_placed_is_refused(case, folder):
    with pytest.raises(DataError) as error:
        read_messages(folder, case["record"])
    assert str(error.value).startswith(f"{folder}/rows.jsonl:1: ")
    assert case["reason"] in str(error.value)


PIXELS = encoded((6, 4))
AS_TEXT = base64.b64encode(PIXELS).decode()
EMBEDDED = {
    "data URI": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{AS_TEXT}"}},
    "raw base64": {"type": "image", "image": AS_TEXT},
    "in lines": {"type": "image", "base64": "\n".join(AS_TEXT[n:][:76] for n in range(0, 400, 76))},
    "a file's bytes": {"type": "image", "image": {"bytes": AS_TEXT, "path": "gone.png"}},
    "Anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": AS_TEXT},
    },
    "Gemini": {"inlineData": {"mimeType": "image/png", "data": AS_TEXT}},
    "Gemini in snake case": {"inline_data": {"mime_type": "image/png", "data": AS_TEXT}},
    "Bedrock": {"image": {"format": "png", "source": {"bytes": AS_TEXT}}},
}


@pytest.mark.parametrize("part", EMBEDDED.values(), ids=EMBEDDED)
def test_a_part_has_its_image_as_base64(part, folder):
    question, _ = read_messages(folder, asked(text("What?"), part))
    (image,) = question.images
    assert image.path == "" and (image.width, image.height) == (6, 4)
    assert image.data == PIXELS


def test_a_tool_shows_an_image(folder):
    shot = [{"type": "text", "text": "Shot: "}, PARTS["transformers"]]
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": shot}
    by_role = {"role": "tool", "content": shot, "tool_call_id": "1"}
    for turn in ({"role": "user", "content": [result]}, by_role):
        turns = [text_turn("q"), {"role": "assistant", "content": [call]}, turn, ANSWER]
        tool = read_messages(folder, {"messages": turns})[2]
        assert tool.role == "tool" and shown(tool) == ("Shot: #", [A])


@pytest.mark.parametrize("replaces", [True, False])
def test_a_system_message_with_an_image_is_not_replaced(replaces, folder):
    path = folder / "rows.jsonl"
    turns = [{"role": "system", "content": "Logo: <image>"}, text_turn("q"), ANSWER]
    write_rows(path, {"messages": turns, "images": ["a.png"]})
    (chunk,) = read_chunks(path)
    prompt = SystemPrompt("Be brief.", replaces)
    (found,) = parse_record_rows(chunk, format_of(path), prompt)
    if replaces:
        assert found.reason.startswith("data.system_prompt_mode=replace would drop an image")
    else:
        assert shown(found[0].messages[0]) == ("Logo: #", [A])


def test_paths_begin_in_the_folder_of_the_setting(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    record = {"question": "q", "answer": "x", "image": "sub/c.webp"}
    write_rows(elsewhere, record)
    with pytest.raises(DataError, match="DATA_IMAGE_FOLDER"):
        read_rows(elsewhere)
    (row,) = read_rows(elsewhere, images=ImageReader(folder))
    assert row.messages[0].images[0].path == str(folder / "sub" / "c.webp")
    for absolute in (str(folder / "a.png"), (folder / "a.png").as_uri()):
        write_rows(elsewhere, {**record, "image": absolute})
        (row,) = read_rows(elsewhere)
        assert row.messages[0].images[0].path == str(folder / "a.png")


def drawn(mode: str, kind: str, color: float = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (5, 7), color).save(file, kind, **options)
    return file.getvalue()


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (5, 7), "red")]}
HUGE = b"BM" + bytes(8) + b"\x36\0\0\0\x28\0\0\0" + (20_000).to_bytes(4, "little") * 2
BROKEN = {
    "empty": (b"", "is empty; download or write it again"),
    "cut png": (encoded((64, 64))[:-400], "is damaged, or breaks off (Truncated File Read)"),
    "overwritten png": (
        encoded((64, 64))[:-100] + bytes(100),
        "is damaged, or breaks off (broken PNG file",
    ),
    "cut jpeg": (encoded((64, 64), "JPEG")[:-400], "is damaged, or breaks off (image file is trun"),
    "cut webp": (encoded((64, 64), "WEBP")[:-400], "is damaged, or breaks off ("),
    "web page": (b"\n<!DOCTYPE html><html>", "is a web page, not an image; fetch the image itself"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "is a pointer of git-lfs, not the image; git lfs p",
    ),
    "svg": (b'<?xml version="1.0"?><svg xmlns="x"/>', "is an SVG drawing; save it as PNG"),
    "text": (b"hello", "is not a supported image: it starts with 'hello'; save it as JPEG, PNG or"),
    "postscript": (drawn("RGB", "EPS"), "is not a supported image: it starts with '%!PS-Adobe"),
    "bomb": (HUGE + b"\1\0\x18\0" + bytes(24), "has more than 89,478,485 pixels; save it smaller"),
    "animation": (drawn("RGB", "GIF", **FRAMES), "has 2 frames or pages; save the one that is"),
    "animated png": (drawn("RGB", "PNG", **FRAMES), "has 2 frames or pages"),
    "pages": (drawn("RGB", "TIFF", **FRAMES), "has 2 frames or pages"),
    "16 bits": (
        drawn("I;16", "TIFF", 40_000),
        "has more than 8 bits a channel, which RGB would cut",
    ),
    "floats": (drawn("F", "TIFF", 0.5), "has more than 8 bits a channel, which RGB would cut off"),
}


@pytest.mark.parametrize(("data", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_image_is_named(data, words, folder):
    (folder / "x.png").write_bytes(data)
    images = {"image 1 'x.png' ": "x.png"}
    if data:
        images["image 1 "] = {"bytes": base64.b64encode(data).decode()}
    for name, image in images.items():
        with pytest.raises(DataError) as error:
            read_messages(folder, {"question": "q", "answer": "x", "image": image})
        assert f"rows.jsonl:1: {name}{words}" in str(error.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("A.PNG", "is missing: no file '{0}/A.PNG'; did you mean 'a.png'? Paths begin in DATA_"),
        ("a.jpg", "; did you mean 'a.png'?"),
        ("subs/c.webp", "is missing: no file '{0}/subs/c.webp'; did you mean '{0}/sub'?"),
        ("sub", "cannot be read: Is a directory"),
        ("x" * 300, "cannot be read: File name too long"),
        ("pipe", "cannot be read: a FIFO, not a regular file"),
        ("data:image/png,abc", "image[0] begins with data:image/png, not data:image/...;base64,"),
        ("data:image/png;base64,a*", "image[0] is no base64 text, or a damaged one"),
        ("https://example.org/a.png", "is a URL, which is not fetched; to fetch each once: "),
    ],
)  # fmt: skip
def test_an_image_that_is_not_there_is_named(path, words, folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(DataError) as error:
        read_messages(folder, {"question": "q", "answer": "x", "image": path})
    assert words.format(folder) in str(error.value)


def with_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def with_late_exif(orientation: int) -> bytes:
    """Return a PNG whose EXIF data come behind its pixels."""
    data = encoded((40, 9), exif=with_exif(orientation))
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    return data[:start] + data[end:-12] + data[start:end] + data[-12:]


READ = {
    **{mode: drawn(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")},
    **{f"turned {n}": encoded((40, 9), "JPEG", exif=with_exif(n)) for n in (1, 3, 6, 8)},
    "turned png": encoded((40, 9), exif=with_exif(5)),
    "turned late": with_late_exif(6),
    "cmyk": drawn("CMYK", "JPEG"),
    "progressive": encoded((40, 9), "JPEG", progressive=True),
    "still gif": drawn("P", "GIF"),
    "avif": encoded((40, 9), "AVIF"),
    "with a preview": drawn("RGB", "MPO", **FRAMES),
}


@pytest.mark.parametrize("data", READ.values(), ids=READ)
@pytest.mark.parametrize("is_file", [True, False])
def test_an_image_is_decoded_as_transformers_does(data, is_file, folder):
    (folder / "x").write_bytes(data)
    image = "x" if is_file else {"bytes": base64.b64encode(data).decode()}
    question, _ = read_messages(folder, {"question": "q", "answer": "x", "image": image})
    (found,) = question.images
    decoded, expected = decode(found), load_image(str(folder / "x"))
    assert (found.width, found.height) == decoded.size == expected.size
    assert decoded.mode == "RGB" and decoded.tobytes() == expected.tobytes()


def test_an_image_that_changed_since_is_named(folder):
    question, _ = read_messages(folder, {"question": "q", "answer": "x", "image": "a.png"})
    (image,) = question.images
    (folder / "a.png").write_bytes(encoded((7, 4)))
    with pytest.raises(DataError, match=r"a.png: 7 x 4 pixels, and 6 x 4 when the rows were read"):
        decode(image)
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match=r"a.png: it was readable when the rows were tokenized"):
        decode(image)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("many", [False, True])
def test_rows_that_datasets_writes_have_their_images(suffix, many, folder):
    one, other = ({"bytes": (folder / n).read_bytes(), "path": n} for n in ("a.png", "b.jpg"))
    values = [[one], [other], []] if many else [one, other, None]
    pair = {"question": ["q", "<image>?", "none"], "answer": ["x", "y", "z"]}
    feature = datasets.Sequence(datasets.Image()) if many else datasets.Image()
    texts = dict.fromkeys(pair, datasets.Value("string"))
    features = datasets.Features(texts | {"images": feature})
    rows = datasets.Dataset.from_dict({**pair, "images": values}, features=features)
    path = folder / f"rows.{suffix}"
    if suffix == "parquet":
        rows.to_parquet(path)  # with the bytes of each file
    else:
        rows.save_to_disk(folder / "saved")
        (folder / "saved" / "data-00000-of-00001.arrow").rename(path)
    found = [row.messages[0] for row in read_rows(path)]
    assert [shown(message)[0] for message in found] == ["#q", "#?", "none"]
    images = [image for message in found for image in message.images]
    assert [(image.width, image.height) for image in images] == [(6, 4), (9, 5)]
    assert all(image.data for image in images)


def test_a_cell_of_a_table_names_one_image_or_a_list(folder):
    path = folder / "rows.csv"
    path.write_text('question,answer,images\nq,x,a.png\n<image>?,y,"[""a.png"", ""b.jpg""]"\n')
    with pytest.raises(DataError, match=r"rows.csv:3: .*names none\): 1; images .*: 2;"):
        read_rows(path)
    path.write_text("question,answer,images\nq,x,a.png\n<image><image>,y,\"['a.png', 'b.jpg']\"\n")
    assert [shown(row.messages[0]) for row in read_rows(path)] == [("#q", [A]), ("##", [A, B])]


def test_rows_of_large_images_are_read_from_parquet(folder):
    large = encoded((2600, 1500), "BMP")  # 11 MiB: two are more than a line of text may have
    record = {"question": "q", "answer": "x", "images": [{"bytes": large, "path": None}] * 2}
    (folder / "rows.parquet").write_bytes(to_parquet([record, record]))  # and a chunk each
    for row in read_rows(folder / "rows.parquet"):
        assert [image.data for image in row.messages[0].images] == [large, large]


def test_a_bad_row_tells_the_size_of_its_bytes(folder):
    record = {"question": "q", "answer": "", "image": {"bytes": PIXELS}}
    (folder / "rows.parquet").write_bytes(to_parquet([record]))
    (chunk,) = read_chunks(folder / "rows.parquet")
    assert chunk.raw(0).endswith(f'"image": {{"bytes": "<{len(PIXELS)} bytes>"}}}}')


@pytest.mark.parametrize(("column", "view"), [("view.left", {"left": "a.png"}), ("view", "a.png")])
def test_another_column_may_have_the_images(column, view, folder):
    path = folder / "rows.jsonl"
    write_rows(path, {"question": "q", "answer": "x", "view": view})
    (row,) = read_rows(path, {"images": column})
    assert shown(row.messages[0]) == ("#q", [A])


def test_a_file_of_questions_has_images(folder):
    path = folder / "asked.jsonl"
    write_rows(path, {"prompt": "<image>\nWhat?", "image": "a.png"})
    (prompt,) = read_prompts(path, {}, SystemPrompt())
    assert shown(prompt.messages[0]) == ("#\nWhat?", [A])


@pytest.fixture
def server(folder) -> Iterator[tuple[str, list[str]]]:
    """A server of the folder's files; what it was asked for."""
    asked_for: list[str] = []

    class Handler(Silent, SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(self.path)
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                self.end_headers()
            else:
                super().do_GET()

    with served_by(partial(Handler, directory=folder)) as url:
        yield url, asked_for


def test_an_image_is_fetched_once_if_the_setting_says_so(server, folder):
    url, asked_for = server
    config = Config.model_validate(
        {"data": {"image_urls": "fetch", "cache_dir": str(folder / "cache")}}
    )
    path = folder / "rows.jsonl"
    record = {"question": "q", "answer": "x", "images": [f"{url}/a.png", f"{url}/moved.png"]}
    write_rows(path, record)
    for _ in range(2):
        (row,) = read_rows(path, images=ImageReader.from_config(config))
        for image in row.messages[0].images:
            assert Path(image.path).parent == folder / "cache" / "images"
            assert Path(image.path).read_bytes() == (folder / "a.png").read_bytes()
            assert decode(image).size == (6, 4)
    assert asked_for == ["/a.png", "/moved.png", "/a.png"]


def test_a_url_without_an_image_is_named_and_not_kept(server, folder):
    url, _ = server
    (folder / "page.html").write_text("<!doctype html>")
    reader = ImageReader(fetched=folder / "cache")
    for name, words in (
        ("gone.png", f"image 1 '{url}/gone.png' cannot be fetched: it answers with status 404"),
        ("page.html", "is a web page, not an image"),
    ):
        path = folder / "rows.jsonl"
        write_rows(path, {"question": "q", "answer": "x", "image": f"{url}/{name}"})
        with pytest.raises(DataError) as error:
            read_rows(path, images=reader)
        assert words in str(error.value)
    assert not (folder / "cache").exists()
