"""Answers and losses of rows with images: in a batch as alone, and as plain transformers has them.

Legend: B prompts, N generated tokens, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architecture_steps import adapted, fused, settings
from image_models import (
    WITH_TORCHVISION,
    draw_image,
    image_model,
    image_tokenizer,
    write_image_model,
)
from image_steps import conversations, stored
from marks import long
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.images import decode
from sft_play.data.processor import load_processor
from sft_play.data.render import render_prompt
from sft_play.data.rows import IMAGE_MARK, ImageFile, Message, PromptIds, Row
from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.generate import Generator
from sft_play.models.images import image_inputs_of

TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", *WITH_TORCHVISION)
TOKENS = 8
SETTINGS = {
    "generation_max_new_tokens": TOKENS,
    "eval_batch_size": 3,
    "predict_with_generate": False,
}


class Answer(NamedTuple):
    """What was generated, and by which scores (N, V)."""

    ids: list[int]
    scores: Tensor


class Scores(LogitsProcessor):
    """Keeps the scores of each token, and never lets an answer end."""

    def __init__(self, stops: list[int]) -> None:
        self.stops = stops
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        scores[:, self.stops] = -torch.inf
        return scores


class Reader:
    """A tiny model that reads images, with adapters, in float32, and what asks it."""

    def __init__(self, model_type: str, shipped: PreTrainedTokenizerBase, folder: Path):
        base = write_image_model(model_type, folder / "base", shipped)
        chosen = settings("lora").model_dump()
        changes = {"model": {"name": str(base)}, "train": SETTINGS}
        self.config = Config.model_validate({**chosen, **changes})
        self.tokenizer = image_tokenizer(shipped, model_type)
        self.plain = adapted(image_model(self.tokenizer, model_type), self.config).eval()
        self.model = fused(self.plain, self.config).eval()
        self.images = image_inputs_of(self.model, self.config, self.tokenizer)
        self.process = Process.alone(torch.device("cpu"), torch.float32)
        self.folder = folder

    def generator(self, beams: int = 1) -> Generator:
        train = self.config.train.model_copy(update={"generation_num_beams": beams})
        return Generator(self.tokenizer, train, self.process, images=self.images)

    def prompt(self, *sizes: tuple[int, int], text: str = "What?", seed: int = 0) -> PromptIds:
        """Return a prompt with images of these sizes before its text."""
        images = []
        for width, height in sizes:
            path = self.folder / f"{width}x{height}-{seed}.png"
            draw_image(path, (width, height), width + seed)
            images.append(ImageFile(str(path), b"", width, height))
        asked = Message("user", IMAGE_MARK * len(sizes) + text, images=tuple(images))
        return render_prompt(
            self.images.processor.write(Row((asked,), "here")).messages, self.tokenizer
        )

    def prompts(self) -> list[PromptIds]:
        return [
            self.prompt((40, 24)),
            self.prompt(text="And 2 + 3, and then 4 more than that, or less?"),
            self.prompt((24, 56), (64, 32), text="Which is it of these two?"),
            self.prompt((32, 32), text="A?"),
        ]

    def answers(self, prompts: list[PromptIds]) -> list[Answer]:
        generator = self.generator()
        scores = Scores(generator.stops)
        ids = generator.generate(self.model, prompts, scored=scores)
        return list(map(Answer, ids.tolist(), torch.stack(scores.seen, dim=1)))

    def plain_answer(self, prompt: PromptIds) -> Answer:
        """Return what transformers generates, from the inputs that its own processor makes."""
        processor = load_processor(self.config.model, self.tokenizer)
        pictures = [decode(image) for image in prompt.images]
        text = self.tokenizer.decode(prompt)
        for image in prompt.images:
            text = text.replace(image.text, image.token, 1)
        inputs = processor(
            text=[text], images=[pictures] if pictures else None, return_tensors="pt"
        )
        assert inputs["input_ids"][0].tolist() == prompt
        inputs.to(torch.float32)  # Llama 4's pixels are in 16 bits
        scores = Scores(self.generator().stops)
        ids = self.plain.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            logits_processor=LogitsProcessorList([scores]),
        )
        return Answer(ids[0, len(prompt) :].tolist(), torch.cat(scores.seen))


# qwen2_5_vl has positions of three axes, as qwen3_vl
QUICK_AND_LONG = [long(name) if name == "qwen2_5_vl" else name for name in TYPES]


@pytest.fixture(scope="module", params=QUICK_AND_LONG)
def reader(request, tokenizer, tmp_path_factory) -> Reader:
    return Reader(request.param, tokenizer, tmp_path_factory.mktemp("reader"))


def test_prompts_of_a_batch_are_answered_as_plain_transformers_answers_each(reader):
    prompts = reader.prompts()
    for prompt, found in zip(prompts, reader.answers(prompts), strict=True):
        for expected in (reader.plain_answer(prompt), *reader.answers([prompt])):
            assert found.ids == expected.ids
            torch.testing.assert_close(found.scores, expected.scores, atol=3e-4, rtol=0)  # float32


def test_an_answer_depends_on_the_image(reader):
    first, second = reader.prompt((32, 32)), reader.prompt((32, 32), seed=1)
    assert first == second, "other pixels in as many tokens"
    one, other = reader.answers([first, second])
    assert (one.scores[0] - other.scores[0]).abs().max() > 1e-3


def test_beams_of_a_batch_are_those_of_each_prompt(reader):
    prompts = reader.prompts()
    generator = reader.generator(beams=2)
    every = generator.decode(generator.generate(reader.model, prompts))
    alone = [generator.decode(generator.generate(reader.model, [prompt]))[0] for prompt in prompts]
    assert every == alone


def test_halves_of_a_batch_have_their_own_images(reader, monkeypatch):
    really = reader.model.generate
    prompts = reader.prompts()

    def generate(**inputs):
        if len(inputs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("as a GPU says")
        return really(**inputs)

    generator = reader.generator()
    whole = generator.decode(generator.generate(reader.model, prompts))
    monkeypatch.setattr(reader.model, "generate", generate)
    found = []
    for part, ids in generator.generate_or_halve(reader.model, prompts):
        assert part == slice(len(found), len(found) + 1)
        found += generator.decode(ids)
    assert found == whole


def test_rows_of_a_padded_batch_have_the_loss_of_each_alone(reader, tmp_path):
    samples = stored(conversations(tmp_path), reader.config, reader.tokenizer, tmp_path / "store")

    def losses(rows: int) -> list[float]:
        train = reader.config.train.model_copy(update={"eval_batch_size": rows})
        evaluator = Evaluator(samples, reader.tokenizer, train, reader.process, reader.images)
        return [row.nats for row in evaluator.row_losses(reader.model)]

    assert losses(3) == pytest.approx(losses(1), abs=1e-4)
    for index, nats in enumerate(losses(1)):
        sample = samples[index]
        ids = torch.tensor(sample.ids.tolist())[None]
        inputs = reader.images([sample.images], ids)
        logits = reader.plain(input_ids=ids, **inputs).logits[0, :-1]
        labels = torch.tensor(sample.labels.tolist())[1:]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        assert nats == pytest.approx(loss.item(), abs=1e-4)
