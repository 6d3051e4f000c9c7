"""What a model is given for the images of a batch: pixels, types of tokens, and positions.

The pixels of all images of a batch are one input, in the order of their tokens, so the tower runs
once. Images are opened here, in the processes that load batches.
Legend: B rows of a batch, T tokens of a row, N documents, I images.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sft_play.data.images import decode
from sft_play.data.processor import Processor
from sft_play.data.rows import ImageFile

TYPES = ("mm_token_type_ids", "token_type_ids")  # how models call the types of tokens
IMAGE_BLOCKS = "image_blocks"  # no argument of the model


@dataclass(frozen=True)
class ImageInputs:
    """Makes the inputs of images for one model.

    `arguments` are those of the model's forward method. `rope` has transformers' `get_rope_index`
    where positions are of three axes; packed batches need it. With `gives_blocks`, images are read
    in both directions, and a packed batch has `image_blocks`, see `image_blocks`.
    """

    processor: Processor
    arguments: frozenset[str]
    dtype: torch.dtype = torch.float32  # of pixels, as the tower computes
    rope: nn.Module | None = None  # on the meta device
    gives_blocks: bool = False

    def __call__(
        self,
        images: Sequence[Sequence[ImageFile]],
        ids: Tensor,
        documents: Sequence[Sequence[int]] = (),
    ) -> dict[str, Any]:
        """Return the inputs for the images of each document; {} where none has any.

        ids (B, T); `documents` are the lengths of the documents of each row, () where each row is
        one and the model finds its positions by itself.

        Raises: DataError for an image that is not what it was when its row was read.
        """
        opened = [decode(image) for image in chain.from_iterable(images)]
        if not opened:
            return {}
        batch: dict[str, Any] = self.processor.inputs(opened)
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(self.dtype)  # half the bytes to copy
        types = torch.tensor(list(map(self.processor.token_types, ids.tolist())))
        batch |= {name: types for name in TYPES if name in self.arguments}
        if documents and self.gives_blocks:
            batch[IMAGE_BLOCKS] = image_blocks(types, documents)
        if documents and self.rope is not None:
            batch["position_ids"] = self._positions(self.rope, images, ids, types, documents, batch)
        return batch

    @staticmethod
    def _positions(
        rope: nn.Module,
        images: Sequence[Sequence[ImageFile]],
        ids: Tensor,
        types: Tensor,
        documents: Sequence[Sequence[int]],
        batch: dict[str, Any],
    ) -> Tensor:
        """Return positions (4, B, T): in the text, then by time, height and width."""
        of_images = inspect.signature(rope.get_rope_index).parameters.keys() & batch.keys()
        of_images -= set(TYPES)
        found = torch.zeros(4, *ids.shape, dtype=torch.int64)
        counts = iter(map(len, images))
        first = 0  # image of a document
        for row, lengths in enumerate(documents):
            start = 0
            for length in (*lengths, ids.shape[1] - sum(lengths)):
                here = slice(start, start + length)
                is_padding = start == sum(lengths)
                count = 0 if is_padding else next(counts)
                own = {name: batch[name][first : first + count] for name in of_images}
                found[:, row, here] = torch.arange(length)
                if count:
                    found[1:, row, here] = rope.get_rope_index(
                        ids[row : row + 1, here],
                        mm_token_type_ids=types[row : row + 1, here],
                        **own,
                    )[0][:, 0]
                start += length
                first += count
        return found


def image_blocks(types: Tensor, documents: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return where images are read in both directions: start and end of each, and its document's.

    types (B, T) are 1 where a token is of an image; all count in the flattened rows.

    >>> image_blocks(torch.tensor([[0, 1, 1, 1, 0, 1]]), [[3, 3]])
    [(1, 3, 0), (3, 4, 3), (5, 6, 3)]
    """
    found = []
    for row, lengths in enumerate(documents):
        begin = row * types.shape[1]
        start = 0
        for length in lengths:
            is_image = [0, *types[row, start : start + length].tolist(), 0]
            edges = [at for at in range(length + 1) if is_image[at] != is_image[at + 1]]
            document = begin + start
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                found.append((document + first, document + last, document))
            start += length
    return found
