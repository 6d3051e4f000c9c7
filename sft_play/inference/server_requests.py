"""The requests that the server answers, checked before one of them reaches the model.

A field that asks for what the server does not do is an error. Messages are parsed as those of
rows. Loads no torch.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from sft_play.data.images import BESIDE_FILES
from sft_play.data.rows import InvalidRowError, Json, Message, shorten
from sft_play.data.turns import parse_turn

# Fields, and their values that ask for nothing; so does null, and any value if the list is empty
IDLE: Json = json.loads("""{
    "best_of": [1], "echo": [false], "frequency_penalty": [0], "functions": [[]],
    "logit_bias": [{}], "logprobs": [false], "metadata": [], "modalities": [["text"]], "n": [1],
    "parallel_tool_calls": [true], "presence_penalty": [0], "prompt_cache_key": [],
    "response_format": [{"type": "text"}], "safety_identifier": [],
    "service_tier": ["auto", "default"], "store": [false], "stream_options": [], "suffix": [""],
    "tool_choice": ["auto", "none"], "tools": [[]], "top_logprobs": [0], "user": []
}""")


@dataclass
class RequestError(Exception):
    """A request that is not answered: why, its field, and the HTTP status."""

    text: str
    param: str | None = None
    status: int = 400


def parse_message(given: Json) -> list[Message]:
    """Return the messages of a turn, with its images. Raises: InvalidRowError."""
    try:
        messages = parse_turn(given)
    except (TypeError, LookupError, AttributeError) as error:  # parts of other types
        raise InvalidRowError(f" is malformed: {error!r}") from None
    if any(image.path for message in messages for image in message.images):
        raise InvalidRowError(" has an image that is not data:image/...;base64,...")
    return list(BESIDE_FILES.open_images(tuple(messages), Path()))


class Request(BaseModel, extra="forbid", strict=True):
    """A request for the next message of a conversation."""

    # of each turn: its `Message`s
    messages: list[Annotated[Json, AfterValidator(parse_message)]] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int = Field(default_factory=time.time_ns, ge=0, lt=1 << 63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Field(max_length=4),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _leave_out_idle(cls, given: Any) -> Any:
        if isinstance(given, dict):
            given = {
                name: value
                for name, value in given.items()
                if not (value is None or (name in IDLE and value in (IDLE[name] or [value])))
            }
        return given


def parse(body: bytes) -> Request:
    """Return the request of a body. Raises: RequestError, which names the first wrong field."""
    try:
        return Request.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"])) or "body"
    why = first["msg"].removeprefix("Value error, ")
    raise RequestError(f"{param}: {why} (got {shorten(first['input'])})", param)
