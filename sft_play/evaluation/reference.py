"""What the evaluated model computes for a few held-out rows: saved weights must match it.

The reference is written once at the end of a run, in eval/reference.safetensors; a merge or an
export then needs no second copy of the trained model. Legend: N labeled positions of all rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sft_kernels.e4m3.linear import has_float8
from sft_kernels.process import Process
from sft_play.data.collate import ImageInputs
from sft_play.data.render import IGNORE_INDEX, RenderError, render_prompt, stop_ids
from sft_play.data.rows import Message
from sft_play.data.store import Sample, Split
from sft_play.data.templates import template_messages
from sft_play.evaluation.plain import IMAGES, Outputs, each_row, scored
from sft_play.runs.files import Json, share

REFERENCE_FILE = "reference.safetensors"
MOST_ROWS = 8
MOST_TOKENS = 512  # of a row, from its beginning
MOST_IMAGE_TOKENS = 4096  # of a row with images, and of all such rows: 100 MB of pixels
MOST_LABELS = 64  # of a row
FLOAT8 = "float8"  # compute_dtype of a model over a float8 base
FACTS = ("stops", "prompts", "compute_dtype", "device")
OF_ROWS = ("ids", "ends", "positions", "position_ends")  # the others are what the model says


@dataclass(frozen=True)
class Reference:
    """Rows, the evaluated model's outputs for them, and prompts and stops as in training."""

    rows: dict[str, Tensor]  # OF_ROWS: of all rows in one; positions (N,) count in their row
    outputs: Outputs
    stops: list[tuple[list[int], int]]  # prompt of a row, and the stop that was trained after it
    prompts: list[tuple[list[Json], list[int]]]  # messages, and their ids
    compute_dtype: str  # of the evaluated model's products
    device: str

    @property
    def loss(self) -> float:
        """The evaluated model's loss on these rows, nats a token."""
        return float(self.outputs.nats.mean())

    def shortened(self, count: int) -> "Reference":
        """Return that of the first `count` rows."""
        tokens, positions = (int(self.rows[name][count - 1]) for name in ("ends", "position_ends"))
        kept = zip(OF_ROWS, (tokens, count, positions, count), strict=True)
        # the images of rows that are left out are not looked at
        rows = self.rows | {name: self.rows[name][:end] for name, end in kept}
        outputs = Outputs._make(tensor[:positions] for tensor in self.outputs)
        return replace(self, rows=rows, outputs=outputs)

    def write(self, folder: Path) -> None:
        """Write it into a run's folder of evaluations."""
        facts = {name: getattr(self, name) for name in FACTS}
        named = (self.rows | self.outputs._asdict()).items()
        tensors = {name: tensor.contiguous() for name, tensor in named}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / REFERENCE_FILE, metadata={"facts": json.dumps(facts)})
        share(folder)

    @classmethod
    def read(cls, folder: Path) -> "Reference | None":
        """Return that of a folder of evaluations, None if there is none."""
        if not (folder / REFERENCE_FILE).is_file():
            return None
        with safe_open(folder / REFERENCE_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(file.metadata()["facts"])
        rows = {name: tensors.pop(name) for name in OF_ROWS}
        rows |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(IMAGES)}
        return cls(rows, Outputs(**tensors), **facts)


@torch.no_grad()
def make_reference(
    model: torch.nn.Module,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    process: Process,
    system_prompt: str | None,
    images: ImageInputs | None = None,
) -> Reference | None:
    """Return what a model in evaluation mode says of rows of a split; None if none is labeled.

    `images` makes the inputs of a split that has some. Every rank of divided weights must call it.
    """
    samples = chosen_samples(split)
    if not samples:
        return None
    rows = as_tensors(samples, list(map(labelled_positions, samples)))
    for number, (sample, (ids, _, _)) in enumerate(zip(samples, each_row(rows), strict=True)):
        if images is not None and sample.images:
            for name, tensor in images([sample.images], ids[None]).items():
                rows[f"{IMAGES}{number}.{name}"] = tensor
    with process.autocast():
        outputs = scored(model, rows, process.device)
    return Reference(
        rows,
        outputs,
        trained_ends(samples, stop_ids(tokenizer)),
        checked_prompts(tokenizer, system_prompt),
        FLOAT8 if has_float8(model) else str(process.compute_dtype).removeprefix("torch."),
        process.device.type,
    )


def chosen_samples(split: Split) -> list[Sample]:
    """Return samples spread over a split that have a label among their first tokens.

    Those with images come first, as many as MOST_IMAGE_TOKENS allows and at least one: nothing else
    shows that a vision encoder is unchanged. The last prompt of a row has all of its images.
    """
    places = np.unique(np.linspace(0, len(split) - 1, 4 * MOST_ROWS, dtype=np.int64))
    labelled = filter(labelled_positions, map(split.__getitem__, places.tolist()))
    found: list[Sample] = []
    for sample in sorted(labelled, key=lambda sample: not sample.images):
        image_tokens = sum(len(each.ids) for each in (*found, sample) if each.images)
        has_room = not sample.images or not found or image_tokens <= MOST_IMAGE_TOKENS
        if len(found) < MOST_ROWS and has_room:
            found.append(sample)
    return found


def labelled_positions(sample: Sample) -> list[int]:
    """Return the first positions of a sample that have a label."""
    labels = sample.labels[: MOST_IMAGE_TOKENS if sample.images else MOST_TOKENS]
    first = sample.answer_start if sample.images else 0
    return (first + np.flatnonzero(labels[first:] != IGNORE_INDEX))[:MOST_LABELS].tolist()


def as_tensors(samples: Sequence[Sample], positions: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return the rows of a reference: ids up to their last position, positions, where each ends."""
    pairs = zip(samples, positions, strict=True)
    ids = [sample.ids[: of_row[-1] + 1].tolist() for sample, of_row in pairs]
    return {
        "ids": torch.tensor(list(chain.from_iterable(ids))),
        "ends": torch.tensor([len(row) for row in ids]).cumsum(0),
        "positions": torch.tensor(list(chain.from_iterable(positions))),
        "position_ends": torch.tensor([len(row) for row in positions]).cumsum(0),
    }


def trained_ends(samples: Sequence[Sample], stops: set[int]) -> list[tuple[list[int], int]]:
    """Return the prompt of each sample and the last stop token that it trains."""
    ends: list[tuple[list[int], int]] = []
    for sample in samples:
        trained = sample.labels[np.isin(sample.labels, list(stops))]
        if len(trained):
            prompt = sample.prompt or sample.ids[:1].tolist()
            ends.append((prompt[-MOST_TOKENS:], int(trained[-1])))
    return ends


def checked_prompts(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> list[tuple[list[Json], list[int]]]:
    """Return prompts of one and of three messages with the ids that training gives them."""
    start = [Message("system", system_prompt)] if system_prompt else []
    question = Message("user", "What is blue?")
    turns = [question, Message("assistant", "The sea."), Message("user", "And green?")]
    prompts: list[tuple[list[Json], list[int]]] = []
    for messages in ([*start, question], [*start, *turns]):
        try:
            ids = render_prompt(messages, tokenizer)
        except RenderError:  # a template that takes no such conversation
            continue
        prompts.append((template_messages(messages), ids))
    return prompts
