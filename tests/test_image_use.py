"""A run with images in use: infer, chat, eval, merge, export, its page and its card."""

import base64
import io
import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import opening_here
from image_models import draw_image, image_rows, write_image_model
from PIL import Image
from record_files import write_rows
from safetensors.torch import load_file, save_file
from terminals import called, lines_of
from transformers import AutoTokenizer

from sft_play.config.schema import ModelSection
from sft_play.data.processor import load_processor
from sft_play.errors import CheckpointError, ConfigError, DataError
from sft_play.evaluation import reference
from sft_play.evaluation.reference import Reference, chosen_samples
from sft_play.evaluation.reopened import Folder, reopen
from sft_play.inference.chat import next_turn as answer_of
from sft_play.inference.chat import question_of
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.export import export_run
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.reporting.page import thumbnail, write_report
from sft_play.runs.exports import ExportAsked, read_parity
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder

SIZES = [(40, 24), (24, 56), (64, 32), (32, 32), (56, 24), (24, 24)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder with PNG files and rows.jsonl, whose last row is of text."""
    folder = tmp_path_factory.mktemp("pictures")
    rows = image_rows(folder, SIZES)
    write_rows(folder / "rows.jsonl", *rows)
    return folder


@pytest.fixture(scope="module")
def seen(train_run, pictures, tokenizer, tmp_path_factory) -> RunFolder:
    """A finished lora run on rows with images."""
    base = write_image_model("qwen3_vl", tmp_path_factory.mktemp("base"), tokenizer)
    changes = {
        "model.name": base,
        "data.train_path": pictures / "rows.jsonl",
        "data.val_path": pictures / "rows.jsonl",
        "data.on_overlap": "allow",
        "train.predict_with_generate": True,
        "train.max_steps": 8,  # from random weights, until it is better than a guess
    }
    folder = train_run(changes, may_trace=False)
    return folder


@pytest.fixture
def call(seen):
    """A function that runs a command on the run."""
    return partial(called, seen.path)


def test_infer_answers_rows_with_images_and_names_them_by_path(call, pictures, tmp_path):
    data = (pictures / "2.png").read_bytes()
    draw_image(pictures / "own.png", SIZES[0])
    records = [
        {"prompt": "<image>What is it?", "images": ["own.png"]},
        {"prompt": "And 2 + 3?"},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "1.png"}]}]},
        {"prompt": "What?", "image": base64.b64encode(data).decode()},
    ]
    asked = pictures / "asked.jsonl"
    write_rows(asked, *records)
    done = call("infer", IN=asked, OUT=tmp_path / "out.jsonl")
    assert done.exit_code == 0, done.exception
    first, text, second, encoded = lines_of(tmp_path / "out.jsonl")
    assert text["prompt"] == "And 2 + 3?"
    path = str(pictures / "own.png")
    content = [{"type": "image", "image": path}, {"type": "text", "text": "What is it?"}]
    assert first["messages"] == [{"role": "user", "content": content}]
    assert second["messages"][0]["content"] == [{"type": "image", "image": str(pictures / "1.png")}]
    content = [
        {"type": "image", "image": f"<{len(data):,} bytes>"},
        {"type": "text", "text": "What?"},
    ]
    assert encoded["messages"] == [{"role": "user", "content": content}]
    assert all(line["answer"] is not None for line in (first, text, second, encoded))
    assert call("infer", IN=asked, OUT=tmp_path / "out.jsonl").exit_code == 0
    draw_image(pictures / "own.png", SIZES[0], seed=9)
    error = call("infer", IN=asked, OUT=tmp_path / "out.jsonl").exception
    assert isinstance(error, ConfigError) and "answers of another call are there" in str(error)


def test_infer_takes_images_beside_a_prompt(call, pictures):
    one, other = pictures / "0.png", pictures / "1.png"
    done = call("infer", PROMPT="What?", IMAGE=f"{one}, {other}")
    assert done.exit_code == 0 and done.stdout.strip(), done.exception
    listed = json.dumps([str(one), str(other)])
    assert call("infer", PROMPT="<image>What?<image>", IMAGE=listed).exit_code == 0
    missing = {"PROMPT": "What?", "IMAGE": f"{one},nope.png"}
    for kind, said, variables in (
        (DataError, "IMAGE: image 2 'nope.png'", missing),
        (
            DataError,
            "is not a supported image",
            {"PROMPT": "What?", "IMAGE": pictures / "rows.jsonl"},
        ),
        (DataError, "write as many", {"PROMPT": "<image>?", "IMAGE": f"{one},{other}"}),
        (ConfigError, "their own images", {"IN": pictures / "rows.jsonl", "IMAGE": one}),
    ):
        error = call("infer", **variables).exception
        assert isinstance(error, kind) and said in str(error)


def test_a_model_of_text_reads_no_images(call, finished, pictures):
    run = finished("lora")
    error = call("infer", RUN=run.path, PROMPT="What?", IMAGE=pictures / "0.png").exception
    assert isinstance(error, DataError) and "reads no images; RUN= chooses" in str(error)
    done = call("chat", typed=f"/image {pictures / '0.png'}\nCount to 3.\n", RUN=run.path)
    said, _answer = done.stdout.split("\n", 1)
    name = run.read_config().model.name
    assert said == f"/image: {name} reads no images; RUN= chooses another model"
    assert done.exit_code == 0


def test_a_chat_shows_images_and_saves_a_row_that_trains(call, pictures, tmp_path, seen):
    saved = tmp_path / "talk.jsonl"
    one, other = pictures / "0.png", pictures / "1.png"
    typed = [f"/image {one}", "/image nope.png", f"/image '{other}'", "Which?", "And now?"]
    typed += [f"/save {saved}", "/help", "/image"]
    limit = {"TRAIN_GENERATION_MAX_NEW_TOKENS": 4}
    done = call("chat", typed="\n".join(typed) + "\n", COMPARE=1, **limit)
    assert done.exit_code == 0, done.exception
    lines = done.stdout.splitlines()
    assert lines[0] == f"{one} (40 x 24) goes with the next question"
    assert lines[1].startswith("/image: image 1 'nope.png' is missing: no file")
    assert lines[-1] == "/image needs a path; images of the next question: 0"
    assert any(line.startswith("/image PATH") for line in lines)
    rows = lines_of(saved)
    assert [row["model"] for row in rows] == ["base", "tuned"]
    for row in rows:
        first, *_, later, _answer = row["messages"]
        images = [part["image"] for part in first["content"] if part["type"] == "image"]
        assert images == [str(one), str(other)] and later["content"] == "And now?"
    done = call("eval", DATA_TEST_PATH=saved, **limit)
    assert done.exit_code == 0, done.exception
    assert "rows=2 used=2" in done.stdout


def test_eval_scores_other_rows_with_images(call, pictures, seen):
    done = call("eval")
    assert done.exit_code == 0, done.exception
    after = read_json(seen.path / "run.json")["metrics"]["after"]
    again = read_json(seen.evaluation / "again.json")
    assert again["eval_loss"] == pytest.approx(after["eval_loss"], abs=1e-6)
    moved = pictures / "moved"
    moved.mkdir()
    (moved / "test.jsonl").write_text((pictures / "rows.jsonl").read_text())
    error = call("eval", DATA_TEST_PATH=moved / "test.jsonl").exception
    assert isinstance(error, DataError) and "DATA_IMAGE_FOLDER=<folder>" in str(error)
    done = call("eval", DATA_TEST_PATH=moved / "test.jsonl", DATA_IMAGE_FOLDER=pictures)
    assert done.exit_code == 0 and "used=7" in done.stdout, done.exception


@pytest.fixture(scope="module")
def merged(seen) -> Path:
    """The merged run."""
    with opening_here():
        merge_run(seen)
    return seen.path / "merged"


def reopened_at(folder: Path, seen: RunFolder, device: str = "cpu", offload: Path | None = None):
    opened = Folder(folder, "auto", {"": device}, offload_folder=offload)
    return reopen(opened, Reference.read(seen.evaluation))


@pytest.mark.parametrize("part", ["visual.blocks.0", "visual.merger."])
def test_a_merge_with_another_encoder_or_projector_is_found(
    merged, seen, tmp_path, part, opens_here
):
    assert reopened_at(merged, seen).faults() == []
    changed = shutil.copytree(merged, tmp_path / "merged")
    tensors = load_file(changed / "model.safetensors")
    name = next(name for name in sorted(tensors) if part in name and name.endswith("weight"))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert reopened_at(changed, seen).faults()[0].startswith("KL=")


def test_a_merge_that_is_read_from_the_disk_is_shown_its_pictures(
    merged, seen, tmp_path, opens_here
):
    found = reopened_at(merged, seen, "disk", tmp_path)
    assert found.faults() == [] and found.rows == 7


def test_rows_with_images_come_first_in_a_reference_and_their_pixels_are_bounded(seen, monkeypatch):
    split = prepared_data(seen, seen.read_config(), load_run(seen, "cpu").tokenizer).test
    assert [bool(sample.images) for sample in chosen_samples(split)] == [True] * 6 + [False]
    monkeypatch.setattr(reference, "MOST_IMAGE_TOKENS", 40)
    assert [bool(sample.images) for sample in chosen_samples(split)] == [True, False]


def test_another_processor_of_the_base_is_refused(seen, call, monkeypatch):
    base = Path(seen.read_config().model.name) / "preprocessor_config.json"
    preserving_state = base.read_text()
    base.write_text(preserving_state.replace("2048", "4096"))
    try:
        for command in ("merge", "export", "eval"):
            error = call(command).exception
            assert isinstance(error, CheckpointError), error
            assert "differs, so images would be read otherwise" in str(error)
            assert f"cp {seen.path / 'adapter' / base.name} {base}" in str(error)
    finally:
        base.write_text(preserving_state)


@pytest.mark.parametrize("kind", ["safetensors", "adapter"])
def test_an_export_has_the_processor_and_no_pictures(seen, merged, kind, opens_here):
    export_run(seen, ExportAsked(kind), "cpu")
    folder = seen.path / "export" / kind
    base = Path(seen.read_config().model.name)
    for folder_of in (folder, merged):
        name = "preprocessor_config.json"
        assert (folder_of / name).read_bytes() == (base / name).read_bytes()
    rows = read_parity(folder / "parity.jsonl")
    assert [row.prompt for row in rows if "And 2 + 3?" in row.prompt]
    assert not any("image_pad" in row.prompt for row in rows)


def test_a_gguf_file_is_not_made_of_a_run_on_images(seen):
    with pytest.raises(ConfigError, match=r"FORMAT=gguf: .* has rows with images"):
        export_run(seen, ExportAsked("gguf", quantizations=("Q8_0",)), "cpu")


def test_a_prompt_is_shown_with_a_mark_for_each_image(seen, pictures):
    lines = lines_of(seen.evaluation / "after.jsonl")
    assert len(lines) == 4
    for line in lines:
        assert "image_pad" not in line["prompt"]
        number = line["origin"].rpartition(":")[2]
        if int(number) > len(SIZES):
            assert "images" not in line
            continue
        assert line["images"] == [str(pictures / f"{int(number) - 1}.png")]
        assert line["prompt"].count("⟨image⟩") == 1


def test_the_report_shows_images_of_answers(seen, pictures, tmp_path):
    copy = RunFolder(shutil.copytree(seen.path, tmp_path / "run"))
    after = copy.evaluation / "after.jsonl"
    lines = [{**line, "rougeL": 1.0} for line in lines_of(after)]
    gone = next(line for line in lines if "images" in line)
    gone["images"] = [str(tmp_path / "gone.png")]
    write_rows(after, *lines)
    page = write_report(copy).read_text()
    shown = sum("images" in line for line in lines) - 1
    assert page.count('<img src="data:image/jpeg;base64,') == shown > 0
    assert "⟨image⟩" in page and "image_pad" not in page
    assert "base64" not in (copy.path / "report.json").read_text()


def test_a_thumbnail_is_small(tmp_path):
    head, data = thumbnail(str(draw_image(tmp_path / "wide.png", (900, 300)))).split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert (head, image.format, image.size) == ("data:image/jpeg;base64", "JPEG", (256, 85))
    assert thumbnail("<9 bytes>") == ""


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_the_code_of_a_card_answers_about_a_picture(
    seen, merged, kind, monkeypatch, tmp_path, capsys
):
    card = (seen.path / kind / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "Trained on rows with images: 6 of 7. What reads images was kept as it is" in card
    code = re.search("```python\n(.*?)```", card, re.DOTALL)[1]
    base = ModelSection(name=str(seen.path / kind))
    base = base if kind == "merged" else seen.read_config().model
    tokenizer = AutoTokenizer.from_pretrained(seen.path / kind)
    processor = load_processor(base, tokenizer)
    processor.chat_template = tokenizer.chat_template
    # transformers' own asks for torchvision, for videos
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda folder: processor)
    monkeypatch.chdir(tmp_path)
    draw_image(tmp_path / "picture.jpg", (40, 24))
    exec(code.replace("max_new_tokens=256", "max_new_tokens=4"), {})
    said = capsys.readouterr().out.strip()
    trained = load_run(
        seen, "cpu", seen.read_config().changed({"train.generation_max_new_tokens": 4})
    )
    question = question_of(trained, "What is this?", ["picture.jpg"], "IMAGE")
    assert said == answer_of(trained, [question]).text
