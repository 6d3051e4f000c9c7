"""Images of rows: however a row names them, they are opened once, and a broken one is named."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sft_play.data.rows import IMAGE_MARK, Message
from sft_play.errors import DataError
from tests.record_files import read_rows

ANSWER = {"role": "assistant", "content": "A cat."}


def encoded(size: tuple[int, int] = (6, 4), kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(encoded((6, 4)))
    (tmp_path / "b.jpg").write_bytes(encoded((9, 5), "JPEG"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.webp").write_bytes(encoded((3, 8), "WEBP"))
    return tmp_path


def read_messages(folder: Path, record: dict[str, Any]) -> tuple[Message, ...]:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (row,) = read_rows(path)
    return row.messages


def shown(message: Message) -> tuple[str, list[tuple[str, int, int]]]:
    images = [(Path(each.path).name, each.width, each.height) for each in message.images]
    return message.content.replace(IMAGE_MARK, "#"), images


A, B, C = ("a.png", 6, 4), ("b.jpg", 9, 5), ("c.webp", 3, 8)


def asked(*parts: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **columns}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


PARTS = {
    "transformers": {"type": "image", "image": "a.png"},
    "a path": {"type": "image", "path": "a.png"},
    "a URL": {"type": "image", "url": "./a.png"},
    "OpenAI": {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
    "OpenAI in short": {"type": "image_url", "image_url": "a.png"},
    "responses": {"type": "input_image", "image_url": "a.png"},
    "Qwen": {"image": "a.png"},
    "null beside it": {"type": "image", "image": "a.png", "text": None, "image_url": None},
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_names_its_file(part: dict[str, Any], folder: Path) -> None:
    question, answer = read_messages(folder, asked(text("What is "), part, text("?")))
    assert shown(question) == ("What is #?", [A])
    assert shown(answer) == ("A cat.", [])
    assert question.images[0].path == str(folder / "a.png")


def test_parts_keep_their_order_and_may_be_json_text(folder: Path) -> None:
    parts = [PARTS["transformers"], text("or"), {"type": "image", "path": "sub/c.webp"}]
    for content in (parts, json.dumps(parts)):
        record = {"messages": [{"role": "user", "content": content}, ANSWER]}
        assert shown(read_messages(folder, record)[0]) == ("#or#", [A, C])


def test_a_part_alone_takes_the_next_image_of_the_column(folder: Path) -> None:
    own = {"type": "image", "image": "sub/c.webp"}
    record = asked({"type": "image"}, own, {"type": "image"}, text("?"), images=["a.png", "b.jpg"])
    assert shown(read_messages(folder, record)[0]) == ("###?", [A, C, B])


@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("many", [False, True])
def test_a_sharegpt_row_has_its_images_at_its_marks(column: str, many: bool, folder: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
    ]
    record = {"conversations": turns, column: ["a.png"] if many else "a.png"}
    assert shown(read_messages(folder, record)[0]) == ("#\nWhat is it?", [A])


PAIRS = {
    "alpaca": {"instruction": "See <image>", "input": "<image>?", "output": "x"},
    "question": {"question": "See <image>\n\n<image>?", "answer": "x"},
    "prompt": {"prompt": "See <image>\n\n<image>?", "completion": "x"},
    "query": {"query": "See <image>\n\n<image>?", "response": "x"},
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_a_pair_has_its_images_at_its_marks(record: dict[str, Any], folder: Path) -> None:
    found = read_messages(folder, {**record, "images": ["b.jpg", "a.png"]})
    assert shown(found[0]) == ("See #\n\n#?", [B, A])


def test_marks_are_counted_over_system_history_tool_and_question(folder: Path) -> None:
    record = {
        "system": "Logo: <image>", "history": [["<image>", "x"]], "query": "<image>!",
        "response": "y", "images": ["a.png", "b.jpg", "sub/c.webp"],
    }  # fmt: skip
    found = read_messages(folder, record)
    assert [shown(message) for message in found if message.images] == [
        ("Logo: #", [A]),
        ("#", [B]),
        ("#!", [C]),
    ]


def test_images_without_a_mark_come_before_the_first_question(folder: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, ANSWER]
    found = read_messages(folder, {"messages": turns, "images": ["a.png", "b.jpg"]})
    assert [shown(message) for message in found[:2]] == [("s", []), ("##q", [A, B])]


def test_a_mark_is_text_where_no_column_has_images(folder: Path) -> None:
    record = {"question": "What does <image> mean in HTML? \ufffc", "answer": "<image> is none."}
    question, answer = read_messages(folder, record)
    assert question.content == record["question"] and answer.content == record["answer"]
    assert question.images == answer.images == ()


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_a_row_without_images_may_have_the_column(nothing: Any, folder: Path) -> None:
    found = read_messages(folder, {"question": "q", "answer": "a", "images": nothing})
    assert found == (Message("user", "q"), Message("assistant", "a"))


REFUSED = {
    "fewer images": (
        {"question": "<image><image>", "answer": "x", "images": ["a.png"]},
        "2 marks of images (<image>, or a part that names none), and 1 images in the column images",
    ),
    "more images": (
        {"question": "<image>", "answer": "x", "image": ["a.png", "b.jpg"]},
        "1 marks of images (<image>, or a part that names none), and 2 images in the column image",
    ),
    "no image": ({"question": "<image>", "answer": "x", "images": None}, "and 0 images"),
    "a part alone": (asked({"type": "image"}, text("?")), "1 marks of images"),
    "parts and a column": (asked(PARTS["transformers"], images=["b.jpg"]), "0 marks of images"),
    "two columns": (
        {"question": "q", "answer": "x", "image": "a.png", "images": ["b.jpg"]},
        "images in the columns image and images; keep one",
    ),
    "a mark of ours": (asked(PARTS["transformers"], text("\ufffc")), "holds U+FFFC"),
    "in an answer": (
        {"question": "<image>", "answer": "<image>", "images": ["a.png", "a.png"]},
        "an answer holds an image, and no model here writes images",
    ),
    "part of an answer": (
        {"messages": [{"role": "user", "content": "Draw."},
                      {"role": "assistant", "content": [PARTS["transformers"]]}]},
        "messages[1].content[0] is an image, and no model here writes images",
    ),
    "video": ({"question": "q", "answer": "x", "videos": ["a.mp4"]}, "column videos is of a video"),
    "marked": ({"question": "<audio>", "answer": "x", "audio": None}, "column audio is of sound"),
    "audio": (asked({"type": "input_audio", "input_audio": {}}), "messages[0].content[0] is sound"),
    "a number": ({"question": "q", "answer": "x", "image": 5}, "image[0] is 5; an image is a path"),
    "null": ({"question": "q", "answer": "x", "images": ["a.png", None]}, "images[1] is null"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "words"), REFUSED.values(), ids=REFUSED)
def test_a_row_whose_images_cannot_be_placed_is_refused(
    record: dict[str, Any], words: str, folder: Path
) -> None:
    with pytest.raises(DataError) as error:
        read_messages(folder, record)
    assert str(error.value).startswith(f"{folder}/rows.jsonl:1: ")
    assert words in str(error.value)
