"""Ids of rows with images are those of the processor itself, and labels are the answers alone."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_models import WITH_TORCHVISION, draw_image, image_tokenizer, write_image_model
from PIL import Image
from record_files import write_rows
from transformers import AutoConfig

from sft_play.config.schema import Config
from sft_play.data.pipeline import build_run_data
from sft_play.data.processor import Processor, load_processor
from sft_play.data.render import IGNORE_INDEX, Renderer, RenderError
from sft_play.data.rows import IMAGE_MARK, ImageFile, Message, Row
from sft_play.data.store import Sample
from sft_play.errors import ConfigError, DataError

CALL = {"type": "function", "function": {"name": "take", "arguments": {"zoom": 2}}}
# The template of image_models with calls of tools
SAID = "'<|assistant|>' + message['content']"
WITH_CALLS = (
    f"{SAID} + (message['tool_calls'][0]['function'] | tojson if message['tool_calls'] else '')"
)
SIZES = [(64, 32), (32, 96)]
STOP = "<|end|>"


def turn(role: str, *parts: str | int) -> dict[str, Any]:
    """A message of texts and numbers of images."""
    if role == "assistant":
        return {"role": role, "content": "".join(map(str, parts))}
    content = []
    for part in parts:
        is_image = isinstance(part, int)
        key = "image" if is_image else "text"
        content.append({"type": key, key: f"{part}.png" if is_image else part})
    return {"role": role, "content": content}


CONVERSATIONS = {
    "first": [turn("user", 0, "\nWhat is it?"), turn("assistant", "Noise.")],
    "in a second turn": [
        turn("user", "Hello"),
        turn("assistant", "Hi."),
        turn("user", "See ", 1, "!"),
        turn("assistant", "I do.\nIt is noise."),
    ],
    "two adjacent": [turn("user", 0, 1, "Alike?"), turn("assistant", "No.")],
    "at the end": [
        turn("user", "Compare ", 1, " with ", 0),
        turn("assistant", "One is wide."),
        turn("user", "Now ", 0),
        turn("assistant", "It is the same."),
    ],
    "in a tool's answer": [
        turn("user", "Take a picture."),
        turn("assistant", "Now. ") | {"tool_calls": [CALL]},
        turn("tool", "Taken: ", 1),
        turn("assistant", "It shows noise."),
    ],
    "next to a system prompt": [
        turn("system", "Be brief. \ufffd"),
        turn("user", "What is ", 0, "?"),
        turn("assistant", "Noise."),
    ],
}


TYPES = ("qwen2_5_vl", "qwen3_5", "gemma3")


@pytest.fixture(scope="module", params=[*TYPES, *WITH_TORCHVISION])
def model(request, tokenizer, tmp_path_factory) -> tuple[Path, Any]:
    """A base and its tokenizer."""
    folder = tmp_path_factory.mktemp("base") / request.param
    own = image_tokenizer(tokenizer, request.param)
    own.chat_template = own.chat_template.replace(SAID, WITH_CALLS)
    return write_image_model(request.param, folder, tokenizer), own


@pytest.fixture(scope="module")
def qwen(tokenizer, tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("base") / "qwen3_vl"
    return write_image_model("qwen3_vl", folder, tokenizer), image_tokenizer(tokenizer, "qwen3_vl")


def configured(base: Path, folder: Path, **data: Any) -> Config:
    data |= {"train_path": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")}
    return Config.model_validate({"model": {"name": str(base), "max_seq_len": 512}, "data": data})


def samples_of(
    records: list[dict[str, Any]], base: Path, own: Any, folder: Path, **data: Any
) -> list[Sample]:
    """The samples of records in their order, through files, store and splits."""
    for number, size in enumerate(SIZES):
        draw_image(folder / f"{number}.png", size, number)
    write_rows(folder / "rows.jsonl", *records)
    data = build_run_data(configured(base, folder, **data), own)
    found = {}
    for split in (data.train, data.validation):
        for index, record in enumerate(split.records):
            found[int(record["number"])] = split[index]
    return [found[number] for number in sorted(found)]


def answers_in(sample: Sample, tokenizer: Any) -> list[str]:
    """The texts of labeled stretches, each decoded by itself."""
    texts: list[list[int]] = []
    before = IGNORE_INDEX
    for label in sample.labels.tolist():
        if label != IGNORE_INDEX:
            if before == IGNORE_INDEX:
                texts.append([])
            texts[-1].append(label)
        before = label
    return [tokenizer.decode(ids) for ids in texts]


def test_a_sample_is_what_the_processor_writes_and_its_answers_are_trained(model, tmp_path):
    base, own = model
    records = [{"messages": messages} for messages in CONVERSATIONS.values()]
    samples = samples_of(records, base, own, tmp_path)
    processor = load_processor(configured(base, tmp_path).model, own)
    assert len(samples) == len(CONVERSATIONS)
    for (name, messages), sample in zip(CONVERSATIONS.items(), samples, strict=True):
        parts = [part for each in messages for part in each["content"] if isinstance(part, dict)]
        images = [Image.open(tmp_path / part["image"]) for part in parts if "image" in part]
        text = own.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[text], images=[images], return_tensors="pt")
        assert sample.ids.tolist() == inputs["input_ids"][0].tolist(), name
        assert [image.size for image in sample.images] == [image.size for image in images], name
        answers = [each for each in messages if each["role"] == "assistant"]
        calls = [json.dumps(CALL["function"]) if "tool_calls" in each else "" for each in answers]
        said = [each["content"] + call + STOP for each, call in zip(answers, calls, strict=True)]
        assert answers_in(sample, own) == said, name
        counted = sum(processor.create_mm_token_type_ids([sample.ids.tolist()])[0])
        replaced = AutoConfig.from_pretrained(base).image_token_id
        assert counted >= sample.ids.tolist().count(replaced) > 0, name
        trained = sample.labels != IGNORE_INDEX
        assert (sample.labels[trained] == sample.ids[trained]).all()


def test_our_mark_is_text_in_what_stands_beside_images(qwen, tmp_path):
    """In tools, variables and data.system_prompt; a message of such a row may not have it."""
    base, own = qwen
    own = copy.deepcopy(own)
    own.chat_template = "{{ tools | tojson if tools }}{{ hint }}" + own.chat_template
    parameters = {"type": "object", "properties": {"a\ufffc": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages = [turn("user", 0, "What?"), turn("assistant", "Noise.")]
    record = {"messages": messages, "tools": tools, "chat_template_kwargs": {"hint": "h\ufffc"}}
    other = {"messages": CONVERSATIONS["two adjacent"]}
    sample, _ = samples_of([record, other], base, own, tmp_path, system_prompt="s\ufffc")
    text = own.decode(sample.ids)
    assert all(f"{name}\ufffc" in text for name in "ahs")
    assert answers_in(sample, own) == [f"Noise.{STOP}"] and len(sample.images) == 1


TOKENS = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_5"), "<|image_pad|>"),
    "gemma3": "<image_soft_token>",
    "mistral3": "[IMG]",
    "gemma4": "<|image|>",
    "llama4": "<|patch|>",
}


# <image> is a mark for an image in any row: the tokens of SmolVLM and LFM2-VL
@pytest.mark.parametrize("model", [*TYPES, *WITH_TORCHVISION[:3]], indirect=True)
@pytest.mark.parametrize(("place", "shows"), [("question", True), ("answer", False)])
def test_a_token_of_images_in_a_text_is_text_or_refused(model, place, shows, tmp_path):
    base, own = model
    token = TOKENS[base.name]
    plain = {"question": "2 + 3?", "answer": "5"}
    record = {"question": "<image>What?" if shows else "What?", "answer": "It is."}
    record |= {"images": ["0.png"] if shows else None}
    record[place] += f" {token}"
    sample, _ = samples_of([record, plain], base, own, tmp_path)
    expected, _ = samples_of([{**record, place: "Is it?"}, plain], base, own, tmp_path)
    processor = Processor(configured(base, tmp_path), own)
    of_images = [sum(processor.token_types(each.ids.tolist())) for each in (sample, expected)]
    assert of_images[0] == of_images[1] and (of_images[0] > 0) == shows
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*(stand for images|for 1 images)"):
        samples_of([record, plain], base, own, tmp_path, special_tokens_in_text="allow")


def test_a_plain_text_with_a_token_of_images_is_refused_where_they_are_read(
    qwen, tokenizer, tiny_base, tmp_path
):
    base, own = qwen
    records = [{"text": "Once upon <|image_pad|> a time."}, {"text": "And then?"}]
    with pytest.raises(DataError, match=r"jsonl:1: 1 of its tokens stand for images, and .* 0 for"):
        samples_of(records, base, own, tmp_path)
    sample, _ = samples_of(records, tiny_base, own, tmp_path)  # a model of text has no images
    assert own.convert_tokens_to_ids("<|image_pad|>") in sample.ids


def rendered(own: Any, processor: Processor, folder: Path):
    path = draw_image(folder / "a.png", (64, 32))
    image = ImageFile(str(path), b"", 64, 32)
    asked = Message("user", f"{IMAGE_MARK}What?", images=(image,))
    row = Row((asked, Message("assistant", "It is.")), "rows.jsonl:1")
    ((sample,),) = Renderer(own).render([processor.write(row)])
    return sample


def test_no_token_of_an_image_may_be_lost_added_or_trained(qwen, tmp_path):
    base, own = qwen
    processor = Processor(configured(base, tmp_path), own)
    sample = rendered(own, processor, tmp_path)
    processor.check(sample)
    place = processor.token_types(sample.ids).index(1)
    pad = sample.ids[place]
    labels = [*sample.labels[:place], pad, *sample.labels[place + 1 :]]
    for spoiled, words in (
        (replace(sample, labels=labels), "a token that stands for an image would be trained"),
        (replace(sample, images=()), "8 of its tokens stand for images, and .* writes 0 for its 0"),
        (replace(sample, images=sample.images * 2), "8 of its .* writes 16 for its 2"),
        (replace(sample, ids=[*sample.ids, pad], labels=[*sample.labels, -100]), "9 of its"),
    ):
        with pytest.raises(RenderError, match=words):
            processor.check(spoiled)


@pytest.mark.parametrize(("marks", "times"), [("", 0), ("<|image_pad|>" * 2, 2)])
def test_a_template_that_drops_or_repeats_an_image_is_refused(qwen, marks, times, tmp_path):
    base, own = qwen
    given = own.chat_template
    own.chat_template = given.replace("<|vision_start|><|image_pad|><|vision_end|>", marks)
    try:
        assert own.chat_template != given
        with pytest.raises(DataError, match=rf"writes <\|image_pad\|> {times} times for 1 images"):
            samples_of([{"messages": CONVERSATIONS["first"]}] * 2, base, own, tmp_path)
    finally:
        own.chat_template = given


LARGE = ImageFile("", b"", 640, 320)
SMALL = ImageFile("", b"", 32, 32)


def tokens_of(image: ImageFile, base: Path, own: Any, folder: Path, **data: int) -> int:
    processor = Processor(configured(base, folder, **data), own)
    row = Row((Message("user", IMAGE_MARK, images=(image,)), Message("assistant", "a")), "")
    return processor.count(processor.write(row).messages[0].images)


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_5"], indirect=True)
def test_bounds_of_pixels_count_alone_and_together(model, tmp_path):
    base, own = model
    pixels = 16 * 16  # of a token
    plain = tokens_of(LARGE, base, own, tmp_path)
    assert plain <= 2048 // pixels < tokens_of(LARGE, base, own, tmp_path, image_max_pixels=65536)
    fewer = tokens_of(LARGE, base, own, tmp_path, image_max_pixels=1024)
    assert fewer <= 1024 // pixels < plain
    assert tokens_of(SMALL, base, own, tmp_path) == 1024 // pixels
    assert tokens_of(SMALL, base, own, tmp_path, image_min_pixels=2000) >= 2000 // pixels
    both = {"image_min_pixels": 5000, "image_max_pixels": 9000}
    for image in (SMALL, LARGE):
        assert 5000 // pixels <= tokens_of(image, base, own, tmp_path, **both) <= 9000 // pixels


def test_bounds_reach_the_pixels_that_a_model_is_given(qwen, tmp_path):
    base, own = qwen
    image = Image.new("RGB", LARGE.size)
    shapes = []
    for limit in (None, 1024):
        processor = Processor(configured(base, tmp_path, image_max_pixels=limit), own)
        shapes.append(len(processor.inputs([image])["pixel_values"]))
    assert shapes[1] < shapes[0]


@pytest.mark.parametrize(
    ("model", "bounds", "said"),
    [
        ("gemma3", {"image_max_pixels": 1024}, "image_max_pixels=1024: Gemma3"),
        ("qwen2_5_vl", {"image_min_pixels": 4096}, r"min_pixels=4096: .*4,096.*2,048"),
    ],
    indirect=["model"],
)
def test_bounds_that_cannot_be_are_refused(model, bounds, said, tmp_path):
    records = [{"messages": CONVERSATIONS[name]} for name in ("first", "two adjacent")]
    with pytest.raises(ConfigError, match=said):
        samples_of(records, *model, tmp_path, **bounds)
    if "image_min_pixels" in bounds:
        samples_of(records, *model, tmp_path, **bounds, image_max_pixels=8192)
