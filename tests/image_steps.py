"""Training steps of rows with images: as a run computes them, and as plain transformers does.

Legend: T tokens of a document, V vocabulary.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from architecture_steps import Step, add_gradients, gradients_of, loss_of
from image_models import draw_image
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerBase

from sft_kernels.install import fused_kernels_of
from sft_play.config.schema import Config
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.processor import Processor, load_processor
from sft_play.data.render import Renderer
from sft_play.data.row_hashes import RowHashes
from sft_play.data.rows import IMAGE_MARK, ImageFile, Message, Row
from sft_play.data.store import Split, Store, StoredSample, StoreWriter, to_arrays
from sft_play.models.images import image_inputs_of

MAX_SEQ_LEN = 256


def conversations(folder: Path) -> list[Row]:
    """Return rows: an image first, text alone, two images of other sizes in two turns."""
    sizes = [(40, 24), (24, 56), (64, 32)]
    images = []
    for number, size in enumerate(sizes):
        path = draw_image(folder / f"{number}.png", size, number)
        images.append(ImageFile(str(path), b"", *size))
    data = (folder / "2.png").read_bytes()
    embedded = ImageFile("", data, *sizes[2])
    one = (
        Message("user", f"{IMAGE_MARK}\nWhat is this?", images=(images[0],)),
        Message("assistant", "Noise, and nothing else."),
    )
    text = (Message("user", "And 2 + 3?"), Message("assistant", "It is 5."))
    two = (
        Message("user", f"First {IMAGE_MARK} or", images=(images[1],)),
        Message("assistant", "Noise again."),
        Message("user", f"{IMAGE_MARK}{IMAGE_MARK} then?", images=(embedded, images[0])),
        Message("assistant", "More of it."),
    )
    return [Row(messages, f"rows.jsonl:{n}") for n, messages in enumerate((one, text, two), 1)]


def stored(
    rows: Sequence[Row], config: Config, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Split:
    """Return rows as samples of a store."""
    processor = Processor(config, tokenizer)
    samples = []
    for number, found in enumerate(Renderer(tokenizer).render(list(map(processor.write, rows)))):
        assert not isinstance(found, Exception), found
        (sample,) = found
        samples.append(StoredSample(sample, 0, number, RowHashes(0, 0, 0), 0))
    with StoreWriter(folder) as writer:  # in two parts: ends count on
        writer.append(to_arrays(samples[:1]))
        writer.append(to_arrays(samples[1:]))
    return Split.whole([Store(folder, ("rows.jsonl",))])


def reference_step(
    model: nn.Module, rows: Sequence[Row], samples: Split, config: Config, tokenizer
) -> Step:
    """Return the step of transformers: its processor's inputs, each document by itself."""
    model.zero_grad()
    processor = load_processor(config.model, tokenizer)
    labelled = sum(samples[index].trained_tokens for index in range(len(samples)))
    total, logits = 0.0, []
    for index, row in enumerate(rows):
        messages, images = [], []
        for message in row.messages:
            parts: list[dict] = []
            own = iter(message.images)
            for number, text in enumerate(message.content.split(IMAGE_MARK)):
                if number:
                    parts.append({"type": "image"})
                    image = next(own)
                    images.append(Image.open(image.path or io.BytesIO(image.data)))
                if text:
                    parts.append({"type": "text", "text": text})
            content = parts if message.images else message.content
            messages.append({"role": message.role, "content": content})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
        sample = samples[index]
        assert inputs["input_ids"][0].tolist() == sample.ids.tolist()
        inputs.pop("attention_mask")
        inputs.to(model.dtype)  # the pixels
        scores = model(**inputs, use_cache=False).logits[0]
        total += add_gradients(scores, sample.labels, labelled)
        logits.append(scores.detach())
    return Step(total, logits, gradients_of(model))


def batch_of(model: nn.Module, samples: Split, config: Config, tokenizer, packed: bool) -> Batch:
    """Return all samples as one micro-batch of a run."""
    rows = TrainRows(samples)
    indices = list(range(len(samples)))
    kernels = fused_kernels_of(model)
    varlen = packed and kernels.reads_boundaries
    images = image_inputs_of(model, config, tokenizer, varlen)
    if not packed:
        collator = PadCollator(0, MAX_SEQ_LEN, images)
        return collator([rows[index] for index in indices])
    packer = PackCollator(0, MAX_SEQ_LEN, varlen, in_one_row=kernels.in_one_row, images=images)
    return packer([rows[indices]])


def trained_step(model: nn.Module, samples: Split, config: Config, tokenizer, packed: bool) -> Step:
    """Return the step as a run computes it."""
    model.zero_grad()
    batch = batch_of(model, samples, config, tokenizer, packed)
    loss = loss_of(model, batch)
    loss.backward()
    with torch.no_grad():
        scores = model(**batch.arguments).logits
    lengths = samples.lengths.tolist()
    if packed:
        logits = list(scores[0, : sum(lengths)].split(lengths))
    else:
        logits = [row[:length] for row, length in zip(scores, lengths, strict=True)]
    return Step(loss.item(), logits, gradients_of(model))
