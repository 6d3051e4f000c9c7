"""The requests that the server answers, checked before one of them reaches the model.

A field that asks for what the server does not do is an error. Messages are parsed as those of
rows. Loads no torch.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from sft_play.data.calls import parse_tools
from sft_play.data.images import BESIDE_FILES
from sft_play.data.rows import InvalidRowError, Json, Message, shorten
from sft_play.data.turns import parse_turn

# Fields, and their values that ask for nothing; so does null, and any value if the list is empty
IDLE: Json = json.loads("""{
    "best_of": [1], "echo": [false], "frequency_penalty": [0], "functions": [[]],
    "logit_bias": [{}], "logprobs": [false], "metadata": [], "modalities": [["text"]],
    "parallel_tool_calls": [true], "presence_penalty": [0], "prompt_cache_key": [],
    "response_format": [{"type": "text"}], "safety_identifier": [],
    "service_tier": ["auto", "default"], "store": [false], "stream_options": [], "suffix": [""],
    "top_logprobs": [0], "user": []
}""")


@dataclass
class RequestError(Exception):
    """A request that is not answered: why, its field, and the HTTP status."""

    text: str
    param: str | None = None
    status: int = 400


def as_row(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a validator that parses as rows are parsed, and refuses parts of other types."""

    def checked(given: Any) -> Any:
        try:
            return parse(given)
        except (TypeError, LookupError, AttributeError) as error:
            raise InvalidRowError(f" is malformed: {error!r}") from None

    return checked


def parse_message(given: Json) -> list[Message]:
    """Return the messages of a turn, with its images. Raises: InvalidRowError."""
    messages = parse_turn(given)
    if any(image.path for message in messages for image in message.images):
        raise InvalidRowError(" has an image that is not data:image/...;base64,...")
    return list(BESIDE_FILES.open_images(tuple(messages), Path()))


def parse_functions(given: list[Json]) -> tuple[Json, ...]:
    """Return the functions that the model may call. Raises: InvalidRowError."""
    tools = parse_tools(given, "")
    "".join(tool["function"]["name"] for tool in tools)  # they have names
    return tools


def parse_prompt(given: Any) -> str | list[int]:
    """Return one text or the ids of one. Raises: ValueError."""
    if isinstance(given, str) or (
        isinstance(given, list) and all(type(each) is int and each >= 0 for each in given)
    ):
        return given
    raise ValueError("write one text, or the list of its token ids")


Count = Annotated[int, Field(ge=1)]


class GenerationRequest(BaseModel, extra="forbid", strict=True):
    """What every request may have."""

    source: ClassVar[str]  # the field of the prompt

    model: str | None = None
    max_tokens: Count | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int = Field(default_factory=time.time_ns, ge=0, lt=1 << 63)
    n: int = Field(1, ge=1, le=8)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=4),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _leave_out_idle(cls, given: Any) -> Any:
        if isinstance(given, dict):
            if given.get("max_completion_tokens") is not None:
                given.pop("max_tokens", None)
            given = {
                name: value
                for name, value in given.items()
                if not (value is None or (name in IDLE and value in (IDLE[name] or [value])))
            }
        return given


class ChatRequest(GenerationRequest):
    """A request for the next message of a conversation."""

    source = "messages"

    # of each turn: its `Message`s
    messages: list[Annotated[Json, AfterValidator(as_row(parse_message))]] = Field(min_length=1)
    tools: Annotated[list[Json], AfterValidator(as_row(parse_functions))] = []
    tool_choice: Literal["auto", "none"] = "auto"

    def model_post_init(self, context: Any) -> None:
        """Leave out the tools if none may be called."""
        if self.tool_choice == "none":
            self.tools = []

    @property
    def turns(self) -> list[Message]:
        """The messages of all turns."""
        return [each for turn in self.messages for each in turn]

    @property
    def characters(self) -> int:
        """At most those of the prompt."""
        return sum(len(each.content) for each in self.turns)

    @property
    def kind(self) -> str:
        """The type of its response."""
        return "chat.completion" + ".chunk" * self.stream


class TextRequest(GenerationRequest):
    """A request for what follows a text."""

    source = "prompt"
    kind: ClassVar[str] = "text_completion"

    prompt: Annotated[Any, AfterValidator(parse_prompt)]
    max_tokens: Count = 16

    @property
    def characters(self) -> int:
        """At most those of the prompt."""
        return len(self.prompt)


REQUESTS: dict[str, type[GenerationRequest]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": TextRequest,
}


def parse_request(kind: type[GenerationRequest], body: bytes) -> GenerationRequest:
    """Return the request of a body. Raises: RequestError, which names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"])) or "body"
    why = first["msg"].removeprefix("Value error, ")
    raise RequestError(f"{param}: {why} (got {shorten(first['input'])})", param)
