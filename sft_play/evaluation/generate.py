"""Generate answers: the only module that calls `model.generate`, for evaluation and inference.

Batches have the longest prompts first, and as many as fit into memory. Attention of one new token
to a cache reads keys that several query heads share once, if transformers copies them for each.

Legend: B prompts of a batch, T tokens of the longest one, N generated tokens, H query heads,
K key and value heads, S tokens in the cache, D features of a head.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from peft.helpers import disable_input_dtype_casting
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sft_kernels.process import Process
from sft_kernels.training_setup import base_model_of
from sft_play.config.schema import TrainSection
from sft_play.data.collate import ImageInputs
from sft_play.data.render import stop_ids, template_space
from sft_play.data.rows import ImageFile
from sft_play.models.positions import room_for_answer
from sft_play.plan.devices import host_memory
from sft_play.plan.model_shape import shape_of

logger = logging.getLogger(__name__)

SDPA = "sdpa"
MOST_PROMPTS = {"cuda": 256, "cpu": 32}  # on a CPU more at once do not come faster
# Of the free memory: a cache that grows by a token leaves blocks of its former sizes
SHARE = 0.5
CACHE_COPIES = 2  # of a layer, while its cache is made one token longer
SCORE_COPIES = 3  # of the scores of a token: the head's, in float32, and processed


class GeneratedAnswer(NamedTuple):
    """A generated answer."""

    text: str  # without special tokens
    was_cut: bool  # it reached the limit before a stop token


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None leaves the filter out."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def words(self) -> str:
        """Return `temperature=0.7 top_p=0.8`."""
        return " ".join(f"{name}={value:g}" for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Generator:
    """Greedy or beam search with the settings of a run's evaluation, in its compute dtype.

    With `sampling` tokens are drawn from torch's generator.
    """

    tokenizer: PreTrainedTokenizerBase
    train: TrainSection
    process: Process
    synced_gpus: bool = False  # divided weights: every rank takes part in every forward pass
    saved_stops: tuple[int, ...] = ()  # ids that end an answer; () is the tokenizer's `stop_ids`
    sampling: Sampling | None = None  # None: the most likely token, or the best of the beams
    images: ImageInputs | None = None  # of a model that reads them

    @property
    def stops(self) -> list[int]:
        """The ids that end an answer, sorted."""
        return sorted(self.saved_stops or stop_ids(self.tokenizer))

    @torch.no_grad()
    def generate(
        self,
        model: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        streamer: BaseStreamer | None = None,
        stopping: StoppingCriteriaList | None = None,
        scored: LogitsProcessor | None = None,
    ) -> torch.Tensor:
        """Return the generated ids (B, N) after each prompt, on the device.

        The model must be in evaluation mode. Autocast is entered here, because accelerate wraps
        a model's forward in autocast but not PEFT's generate. A `streamer` takes the ids of one
        prompt as they come, and `scored` the scores (B, V) of each token, after the penalties of
        the base's generation_config.json. Raises: DataError if no position is left after a
        prompt.
        """
        limit = self.train.generation_max_new_tokens
        assert limit != "auto", "the rows or the command resolve generation_max_new_tokens"
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        limit = room_for_answer(model, input_ids.shape[1], limit)
        device = self.process.device
        pictures = [getattr(prompt, "images", ()) for prompt in prompts]
        seen = self._show(pictures, input_ids)
        # else PEFT casts the input of each adapter to float32, and autocast casts it back
        is_half = self.process.compute_dtype != torch.float32
        casting = disable_input_dtype_casting(model, active=is_half)
        with self.process.autocast(), casting, shared_keys(), self._beams_see(model, pictures):
            ids = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                max_new_tokens=limit,
                num_beams=self.train.generation_num_beams,
                do_sample=self.sampling is not None,
                **vars(self.sampling or NO_SAMPLING),
                use_cache=True,
                eos_token_id=self.stops,
                pad_token_id=self.tokenizer.pad_token_id,
                synced_gpus=self.synced_gpus,
                streamer=streamer,
                stopping_criteria=stopping,
                logits_processor=None if scored is None else LogitsProcessorList([scored]),
                **seen,
            )
        return ids[:, input_ids.shape[1] :]

    def _show(self, pictures: Sequence[Sequence[ImageFile]], ids: Tensor) -> dict[str, Any]:
        """Return the inputs of the images of each prompt, on the device."""
        found = {} if self.images is None else self.images(pictures, ids)
        return send_to_device(found, self.process.device)

    @contextlib.contextmanager
    def _beams_see(
        self, model: nn.Module, pictures: Sequence[Sequence[ImageFile]]
    ) -> Iterator[None]:
        """Give each beam the images of its prompt.

        transformers repeats them one by one: two beams on images a and b would see a, a and b, b.
        """
        base = base_model_of(model)
        own = type(base)._expand_inputs_for_generation
        if not any(pictures) or own is not GenerationMixin._expand_inputs_for_generation:
            yield
            return

        def expand(
            expand_size: int = 1, input_ids: Tensor | None = None, **inputs: Any
        ) -> tuple[Tensor, dict[str, Any]]:
            assert input_ids is not None
            repeated = [each for each in pictures for _ in range(expand_size)]
            input_ids, inputs = own(expand_size, input_ids=input_ids, **inputs)
            return input_ids, inputs | self._show(repeated, input_ids.cpu())

        base._expand_inputs_for_generation = expand
        try:
            yield
        finally:
            del base._expand_inputs_for_generation

    def generate_or_halve(
        self,
        model: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        stopping: StoppingCriteriaList | None = None,
    ) -> list[tuple[slice, torch.Tensor]]:
        """Return the generated ids of parts of the prompts: of all at once if memory allows.

        Otherwise the prompts are halved, with a warning.

        Raises: torch.OutOfMemoryError for one prompt, and if every rank must take part.
        """
        waiting, found = [slice(0, len(prompts))], []
        while waiting:
            part = waiting.pop(0)
            count = part.stop - part.start
            try:
                found.append((part, self.generate(model, prompts[part], stopping=stopping)))
                continue
            except torch.OutOfMemoryError:
                if count == 1 or self.synced_gpus:
                    raise
            torch.cuda.empty_cache()
            half = count // 2
            logger.warning(
                "generation of %d answers at once is out of memory: %d at once; "
                "TRAIN_GENERATION_BATCH_SIZE=%d starts with fewer",
                count,
                count - half,
                half,
            )
            middle = part.start + half
            waiting[:0] = [slice(part.start, middle), slice(middle, part.stop)]
        return found

    def decode(self, ids: torch.Tensor) -> list[GeneratedAnswer]:
        """Return the answers of generated ids (B, N). Synchronizes with the GPU."""
        ids = ids.cpu()
        has_ended = torch.isin(ids, torch.tensor(self.stops)).any(dim=1).tolist()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        space = template_space(self.tokenizer)
        return [
            GeneratedAnswer(space.without(text), was_cut=not ended)
            for text, ended in zip(texts, has_ended, strict=True)
        ]


class StopWhen(StoppingCriteria):
    """Ends all answers of a batch once `is_stopping` is true; counts the tokens of each answer."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._length = 0  # of prompt and answer
        self.tokens = 0  # of each answer of the batch

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        length = input_ids.shape[1]
        self.tokens = self.tokens + 1 if length == self._length + 1 else 1
        self._length = length
        return torch.full((len(input_ids),), self._is_stopping(), device=input_ids.device)


NO_SAMPLING = Sampling(temperature=None)  # what transformers warns of if nothing is drawn


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids and attention_mask (B, T), padded on the left: generation appends."""
    ids = [torch.tensor(prompt) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad(ids, padding_value=pad_id), pad([torch.ones_like(prompt) for prompt in ids])


@contextlib.contextmanager
def shared_keys() -> Iterator[None]:
    """Let models with transformers' sdpa attention generate without repeated keys and values."""
    own = ALL_ATTENTION_FUNCTIONS[SDPA]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what transformers' function returns, by another way if heads share keys."""
        # what else transformers' function reads, of all that it is given
        is_plain = kwargs.get("position_bias") is None and not kwargs.get("dropout")
        # several query heads (B, H, 1, D) share keys (B, K, S, D) and a mask
        has_one_mask = attention_mask is None or attention_mask.shape[1] == 1
        can_share = query.shape[2] == 1 and query.shape[1] > key.shape[1] and has_one_mask
        if not (is_plain and can_share):
            return own(module, query, key, value, attention_mask, **kwargs)
        return attend_one_token(query, key, value, attention_mask, kwargs.get("scaling")), None

    ALL_ATTENTION_FUNCTIONS[SDPA] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[SDPA] = own


def attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the output (B, 1, H, D) of query (B, H, 1, D) over key and value (B, K, S, D).

    The mask is (B, 1, 1, S), or None if every token is seen.
    """
    rows, heads = query.shape[:2]
    groups = heads // key.shape[1]
    grouped = query.view(rows, key.shape[1], groups, query.shape[-1])
    if attention_mask is not None:
        attention_mask = attention_mask.expand(-1, -1, groups, -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scale
    )
    return output.reshape(rows, 1, heads, value.shape[-1])


@dataclass(frozen=True)
class Room:
    """The memory that generation may take, and what it takes for each prompt."""

    free_bytes: int
    cached_token_bytes: int  # keys and values of all layers
    read_token_bytes: int  # activations of a layer, while the prompts are read
    prompt_bytes: int  # scores of all tokens of the vocabulary
    most: int  # prompts, however much memory there is

    def prompts(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return how many prompts of so many tokens are answered at once, at least one."""
        bytes_each = (
            self.cached_token_bytes * (prompt_tokens + new_tokens)
            + self.read_token_bytes * prompt_tokens
            + self.prompt_bytes
        )
        return max(1, min(self.most, int(SHARE * self.free_bytes) // bytes_each))


def room_for(
    model: torch.nn.Module, process: Process, beams: int = 1, limit_bytes: int | None = None
) -> Room:
    """Return the room for generation in addition to what this process uses now.

    `limit_bytes` is what it may use on its GPU in all; None is all that is free.
    """
    shape = shape_of(model.config.to_dict(), getattr(model.config, "name_or_path", ""))
    itemsize = process.compute_dtype.itemsize
    # inputs and outputs of attention and MLP, of the layer that is computed
    read_features = 8 * shape.hidden + 4 * shape.intermediate
    return Room(
        free_bytes=max(0, free_bytes(process, limit_bytes)),
        cached_token_bytes=beams * CACHE_COPIES * 2 * shape.counts.kv_features * itemsize,
        read_token_bytes=beams * read_features * itemsize,
        prompt_bytes=beams * SCORE_COPIES * 4 * shape.vocab,
        most=max(1, MOST_PROMPTS[process.device.type] // beams),
    )


def free_bytes(process: Process, limit_bytes: int | None = None) -> int:
    """Return what this process can still allocate on the fullest of its devices."""
    if process.device.type != "cuda":
        return host_memory().available_bytes // process.world_size
    found = []
    for device in process.devices:
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - allocated
        if limit_bytes is not None:
            free = min(free, limit_bytes - allocated)
        found.append(free)
    return min(found)


def split_batches(
    lengths: Sequence[int], rows_at: Callable[[int], int], world_size: int = 1
) -> list[list[int]]:
    """Split rows of `lengths` tokens into batches of their indices, the longest first.

    `rows_at(tokens)` is how many rows a batch takes whose longest has so many tokens. No batch is
    larger than a rank's share of all rows.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    share = -(-len(order) // world_size)
    found = []
    while order:
        rows = min(share, rows_at(lengths[order[0]]))
        found.append(order[:rows])
        order = order[rows:]
    return found


def take_rank_share(
    batches: Sequence[list[int]], process: Process, shared: int = 1
) -> list[list[int]]:
    """Return this rank's batches; every rank has the same number, and `shared` have the same ones.

    A rank with one batch too few gets a batch of one filler, `~index` of the last row.
    """
    replicas = process.world_size // shared
    missing = -len(batches) % replicas
    every = list(batches) + [[~batches[-1][-1]]] * missing
    return every[process.rank // shared :: replicas]
