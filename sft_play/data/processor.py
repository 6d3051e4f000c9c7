"""The model's processor: the tokens of an image in a text, and the tensors of its pixels.

Nothing is resized here: transformers' processor of the base model does it, with its settings.
torchvision is used if it is installed, as in transformers, otherwise Pillow.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from sft_play.config.loader import environment
from sft_play.config.schema import Config, ModelSection
from sft_play.data.files import digest_files
from sft_play.data.images import image_limits
from sft_play.data.render import IGNORE_INDEX, RenderedSample, images_of
from sft_play.data.rows import ImageFile, InvalidRowError, Notes, Row
from sft_play.data.templates import RenderError
from sft_play.errors import ConfigError, EnvironmentFault, first_line
from sft_play.plan.config_json import find_file, is_composite
from sft_play.runs.model_folder import read_object

BOUNDS = ("min_pixels", "max_pixels")
IMAGE_WORDS = re.compile("image|img|patch", re.I)  # in tokens that may represent images
SIZES = 1 << 14  # of images whose texts are cached
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
SETTINGS_FILES = ("processor_config.json", "preprocessor_config.json")
ROUNDED = 16  # maximum change in pixels of a side by rounding to patches of 32
SCALED = ("the processor shrinks an image", "the processor enlarges an image")  # notes
NO_IMAGES = "the row has an image, and {} reads none; set MODEL_NAME to a model that does"


class _ImageText(NamedTuple):
    """The text that a processor writes for an image, its number of image tokens, and its scale."""

    text: str
    tokens: int
    notes: Notes


class Processor:
    """Reads images like one base model. It is loaded when the first image is read."""

    def __init__(self, config: Config, tokenizer: Any):
        self._model = config.model
        self._tokenizer = tokenizer
        self._given = image_limits(config)
        self._suspects = {
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if IMAGE_WORDS.search(token.content)
        }

    def write(self, row: Row) -> Row:
        """Return a row in which images have the text that represents them.

        Raises: InvalidRowError for an image that the processor does not take, and if the model
        reads none; EnvironmentFault if its processor cannot be loaded.
        """
        if not images_of(row.messages):
            return row
        messages = []
        for message in row.messages:
            images = tuple(
                replace(image, token=self._own.image_token, text=self._read(*image.size).text)
                for image in message.images
            )
            messages.append(replace(message, images=images))
        return replace(row, messages=tuple(messages))

    def describe_scale(self, image: ImageFile) -> Notes:
        """Return whether the processor resizes an image by more than its rounding to patches."""
        return self._read(*image.size).notes

    @functools.lru_cache(SIZES)  # noqa: B019 - one processor for each process
    def _read(self, width: int, height: int) -> _ImageText:
        """Return the processor's text for an image of a size; it processes a black image."""
        from PIL import Image

        try:
            found = self._run([Image.new("RGB", (width, height))], with_text=True)
        except ValueError as error:
            raise InvalidRowError(
                f"an image of {width} x {height} pixels is refused by "
                f"{type(self._own).__name__}: {first_line(error)}"
            ) from error
        ((place,),) = found["text_replacement_offsets"]
        sides: Sequence[int] = (height, width)  # if the processor does not return them
        if "image_grid_thw" in found:
            patch = self._own.image_processor.patch_size
            sides = [patch * patches for patches in found["image_grid_thw"][0, 1:].tolist()]
        elif found["pixel_values"].ndim == 4 and len(found["pixel_values"]) == 1:
            sides = found["pixel_values"].shape[-2:]
        notes: Notes = ()
        if max(abs(sides[0] - height), abs(sides[1] - width)) > ROUNDED:
            notes = (SCALED[sides[0] * sides[1] > height * width],)
        tokens = sum(self.token_types(found["input_ids"][0].tolist()))
        return _ImageText(place["replacement"], tokens, notes)

    def inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        """Return the tensors of PIL images by the names of the model's arguments."""
        found = self._run(images)
        return {name: value for name, value in found.items() if name not in TEXT_INPUTS}

    def check(self, sample: RenderedSample) -> None:
        """Raise RenderError unless only its images have image tokens, and none of them is trained.

        A text may contain such a token, and a template may drop or repeat some.
        """
        has_suspects = not self._suspects.isdisjoint(sample.ids)
        if not sample.images and not (has_suspects and self.reads_images):
            return  # an ordinary token
        types = self.token_types(sample.ids)
        written = self.count(sample.images)
        if sum(types) != written:
            raise RenderError(
                f"{sum(types)} of its tokens stand for images, and {type(self._own).__name__} "
                f"writes {written} for its {len(sample.images)}: a text contains some, or the chat "
                "template drops or repeats them"
            )
        pairs = zip(types, sample.labels, strict=True)
        if any(is_image and label != IGNORE_INDEX for is_image, label in pairs):
            raise RenderError("a token that stands for an image would be trained")

    def count(self, images: Sequence[ImageFile]) -> int:
        """Return how many of the processor's ids for the images represent image parts."""
        return sum(self._read(*image.size).tokens for image in images)

    @property
    def reads_images(self) -> bool:
        """Whether the base model has an image processor, which is loaded by this call."""
        return self._loaded is not None

    @functools.lru_cache(1)  # noqa: B019
    def find_limits(self) -> dict[str, int]:
        """Return the limits of pixels that are set; a null limit is the processor's.

        A single limit would have no effect. Raises: ConfigError if the processor has no limits.
        """
        if not self._given or not self.reads_images:
            return {}
        own = self._own.image_processor
        name = type(own).__name__
        typed = ", ".join(f"data.image_{bound}={limit}" for bound, limit in self._given.items())
        sides = (own.size.shortest_edge, own.size.longest_edge)
        if None in sides or not self._given.keys() <= own.valid_kwargs.__annotations__.keys():
            raise ConfigError(
                f"{typed}: {name} of {self._model.name} has no bounds of pixels; set it to null"
            )
        limits = dict(zip(BOUNDS, sides, strict=True)) | self._given
        if limits["min_pixels"] > limits["max_pixels"]:
            raise ConfigError(
                f"{typed}: more pixels at least ({limits['min_pixels']:,}) than at most "
                f"({limits['max_pixels']:,}) by {name} of {self._model.name}; set both"
            )
        return limits

    def token_types(self, ids: Sequence[int]) -> list[int]:
        """Return 1 for each id that represents a part of an image, 0 for all others."""
        return self._own.create_mm_token_type_ids([list(ids)])[0]

    def _run(self, images: Sequence[Any], with_text: bool = False) -> dict[str, Any]:
        text = [self._own.image_token * len(images)]
        return self._own(
            text=text,
            images=[list(images)],
            text_kwargs={"return_text_replacement_offsets": with_text},
            images_kwargs=self.find_limits(),
            return_tensors="pt",
        )

    @cached_property
    def _own(self) -> Any:
        if not self.reads_images:
            raise InvalidRowError(NO_IMAGES.format(self._model.name))
        return self._loaded

    @cached_property
    def _loaded(self) -> Any | None:
        return load_processor(self._model, self._tokenizer)


@contextlib.contextmanager
def without_torch(model: ModelSection) -> Iterator[None]:
    """Keep transformers from importing torch, which takes seconds, for a base model without images.

    For processes that run no model: modules imported inside cannot use torch.
    """
    config = find_file(model.name, "config.json", model.revision, environment())
    is_loaded = "torch" in sys.modules or "transformers" in sys.modules
    if is_loaded or config is None or is_composite(read_object(config)) or model.trust_remote_code:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)  # transformers warns that it has not found torch
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        del sys.modules["torch"]


def digest_settings(model: ModelSection) -> str:
    """Return a digest of the settings files of a base model's processor, "" for a text model."""
    config = find_file(model.name, "config.json", model.revision, environment())
    if config is None or not is_composite(read_object(config)):
        return ""
    from sft_play.data.tokenizer import fetch_file

    found = [fetch_file(model, name) for name in SETTINGS_FILES]
    return digest_files(filter(None, found))


def load_processor(model: Any, tokenizer: Any) -> Any | None:
    """Return transformers' processor of a base model, None if it reads no images.

    Raises: EnvironmentFault if its files cannot be read.
    """
    from transformers import AutoConfig, ProcessorMixin
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(model.name, **options)
        name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
        if name is None or not hasattr(config, "vision_config"):
            return None
        image_processor = AutoImageProcessor.from_pretrained(model.name, **options)
        processor_class = _processor_class(name)
        if processor_class.replace_image_token is ProcessorMixin.replace_image_token:
            raise EnvironmentFault(
                f"model.name={model.name}: {name} is of an older form, which does not say what it "
                "writes for an image; set MODEL_NAME to another model, or leave the images out"
            )
        settings, _ = processor_class.get_processor_dict(model.name, revision=model.revision)
        parts = dict.fromkeys(processor_class.get_attributes())
        parts |= {"image_processor": image_processor, "tokenizer": tokenizer}
        known = inspect.signature(processor_class.__init__).parameters
        own = {key: value for key, value in settings.items() if key in known and key not in parts}
        processor = _without_others(processor_class)(**parts, **own)
    except (OSError, ValueError, ImportError) as error:
        remedy = (
            "copy preprocessor_config.json and processor_config.json of its base into the folder"
        )
        is_there = importlib.util.find_spec("torchvision") is not None
        if not is_there and not isinstance(error, OSError):
            remedy = "it needs the torchvision of the installed torch: pip install torchvision"
        elif isinstance(error, ImportError):
            remedy = "install the package that is missing"
        raise EnvironmentFault(
            f"model.name={model.name}: its image processor could not be loaded: "
            f"{first_line(error)}; {remedy}"
        ) from error
    replaced = getattr(config, "image_token_id", None)  # by the model; Llama 4 marks with another
    if replaced is not None and replaced not in processor.image_token_ids:
        processor.image_token_ids = [*processor.image_token_ids, replaced]
    return processor


def _processor_class(name: str) -> type:
    """Return a processor's class, also if transformers asks for a package that it can miss."""
    import transformers

    found = getattr(transformers, name)
    module = importlib.import_module(found.__module__)
    return getattr(module, name, found)


def _without_others(processor_class: type) -> type:
    """Return the class without its video and audio parts and their packages."""

    class ImagesAlone(processor_class):  # type: ignore[misc, valid-type]
        """The processor of images and text."""

        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            """Accept missing parts; otherwise refuse the same parts as transformers."""
            return part and super().check_argument_for_proper_class(name, part)

    return cast(type, ImagesAlone)
