"""The answer to a request of the server: its prompt is checked, then its choices are generated."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from sft_play.config.invocation import SamplingRequest
from sft_play.data.calls import parse_calls
from sft_play.data.render import TemplateSpace, template_space
from sft_play.data.rows import Json, PromptIds
from sft_play.errors import DataError
from sft_play.inference.load import TrainedModel
from sft_play.inference.server_requests import (
    ChatRequest,
    GenerationRequest,
    RequestError,
    TextRequest,
)

LONG_TOKEN = 32  # characters: no text has longer tokens on average
PARTIAL = "\ufffd"  # of a character whose bytes are not all generated


@dataclass
class GeneratedChoice:
    """One of the answers to a request, as far as it is generated."""

    index: int
    ids: list[int] = field(default_factory=list)
    text: str = ""  # more tokens only add to it
    finish: str | None = None


class ChatReply(StoppingCriteria):
    """The choices of a request. Each token passes through here, and a stream is sent from here."""

    client: Any  # the Connection
    space, before = TemplateSpace(), []  # ids that decide on a space after them
    parser: ResponseTemplate | None = None  # of the calls in an answer

    def __init__(self, request: GenerationRequest, trained: TrainedModel, name: str):
        """Check what does not need the model. Raises: RequestError."""
        self.request, self.trained, self.tokenizer = request, trained, trained.tokenizer
        self.choices = [GeneratedChoice(index) for index in range(request.n)]
        made = time.time_ns()
        self.head = {"id": str(made), "object": request.kind, "created": made // 10**9}
        self.head["model"] = name
        wrong = request.source
        try:
            # refused before it is tokenized, which would take long
            trained.auto_limit(request.characters // LONG_TOKEN)
            self.prompt = self._encode(request)
            trained.auto_limit(len(self.prompt))
            wrong = "max_tokens"
            self.limit = trained.auto_limit(len(self.prompt), request.max_tokens)
        except DataError as error:
            raise RequestError(str(error), wrong) from None

    def _encode(self, request: ChatRequest | TextRequest) -> PromptIds:
        """Return the ids of the prompt. Raises: DataError, RequestError."""
        if isinstance(request, ChatRequest):
            self.space = template_space(self.tokenizer)
            prompt = self.trained.prompt_ids(request.turns, request.tools)
            if request.tools:
                self._find_parser(prompt, self.trained.prompt_ids(request.turns))
            return prompt
        ids = request.prompt
        if isinstance(ids, str):
            ids = self.tokenizer.encode(ids)
            if ids[:2] == [self.tokenizer.bos_token_id] * 2:  # the text has it, too
                del ids[0]
        vocabulary = len(self.trained.model.get_input_embeddings().weight)
        if not ids or max(ids) >= vocabulary:
            raise DataError(f"prompt: write at least one token, and only ids below {vocabulary}")
        self.before = ids[-1:]
        return PromptIds(ids)

    def _find_parser(self, prompt: PromptIds, without_tools: PromptIds) -> None:
        """Find the format of calls in an answer. Raises: RequestError if it is not known."""
        text = self.tokenizer.decode(prompt)
        found = get_response_template(self.tokenizer, self.trained.model)
        self.parser = found and load_response_template(found)
        if found is None or self.parser.truncate_past_last_anchor(text) == text:
            why = "the tokenizer has no response_template for its chat template, to find calls by"
        elif prompt == without_tools:
            why = "the chat template leaves them out"
        else:
            return
        raise RequestError(f"tools: {why}; send none, or tool_choice='none'", "tools")

    def generate(self, client: Any) -> None:
        """Generate the choices and send them to a client. Needs the model for itself."""
        self.client, request = client, self.request
        wanted = SamplingRequest(request.temperature, request.top_p, seed=request.seed)
        generator = self.trained.sampled(wanted).generator(self.limit)
        self.stops = generator.stops
        prompts = [self.prompt] * request.n
        generator.generate(self.trained.model, prompts, stopping=StoppingCriteriaList([self]))
        usage = {"prompt_tokens": len(self.prompt)}
        usage["completion_tokens"] = sum(len(choice.ids) for choice in self.choices)
        usage["total_tokens"] = sum(usage.values())
        self._send([self._end(choice) for choice in self.choices], usage=usage)

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        """Read the next token of each choice, of input_ids (B, T); return which choices end."""
        self.client.check()
        found = input_ids[:, len(self.prompt) :].tolist()
        for choice, ids in zip(self.choices, found, strict=True):
            if choice.finish is None:
                self._read(choice, ids)
        ended = [choice.finish is not None for choice in self.choices]
        return torch.tensor(ended, device=input_ids.device)

    def _read(self, choice: GeneratedChoice, ids: list[int]) -> None:
        """Read the ids of a choice; a stream sends what they add to its text."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        text = decode(self.before + ids)[len(decode(self.before)) :]
        text = text.removeprefix(self.space.before)
        found = [text.index(stop) for stop in self.request.stop if stop in text]
        if found:
            text, choice.finish = text[: min(found)], "stop"
        elif ids[-1] in self.stops or len(ids) == self.limit:
            text = text.removesuffix(self.space.after)
            choice.finish = "stop" if ids[-1] in self.stops else "length"
        else:
            text = text.rstrip(PARTIAL)
            text = text[: len(text) - held_back(text, [*self.request.stop, self.space.after])]
        piece = text[len(choice.text) :]
        if self.request.stream and not self.parser and (piece or not choice.ids):
            self._send([self._form(choice, {"content": piece})])
        choice.ids, choice.text = ids, text

    def _end(self, choice: GeneratedChoice) -> Json:
        """Return the end of a choice: why it ended, and what no piece of a stream has sent."""
        finish = choice.finish
        said = {"content": "" if self.request.stream and not self.parser else choice.text}
        if self.parser and choice.ids[-1] in self.stops:
            # a format that is not kept is no error: the client gets the text
            with suppress(ValueError, KeyError):
                said = self._parse(choice)
            finish = "tool_calls" if "tool_calls" in said else finish
        return self._form(choice, said, finish)

    def _parse(self, choice: GeneratedChoice) -> Json:
        """Return the message of an answer. Raises: ValueError, KeyError for another format."""
        parsed = self.tokenizer.parse_response(
            choice.ids, self.parser, prefix=self.prompt, tools=[*self.request.tools]
        )
        calls = parse_calls(parsed.get("tool_calls"), "tool_calls")
        for number, call in enumerate(calls):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            made = f"call_{self.head['id']}_{choice.index}_{number}"
            call.update(index=number, id=made)
        said = {"reasoning_content": parsed.get("thinking"), "tool_calls": calls}
        said = {name: value for name, value in said.items() if value}
        return {"content": parsed.get("content"), **said}

    def _form(self, choice: GeneratedChoice, said: Json, finish: str | None = None) -> Json:
        """Return a choice, or a piece of it, as the API has it."""
        form: Json = {"index": choice.index, "finish_reason": finish}
        if isinstance(self.request, TextRequest):
            return {**form, "text": said["content"], "logprobs": None}
        key = "delta" if self.request.stream else "message"
        return {**form, key: {"role": "assistant", **said}}

    def _send(self, choices: list[Json], **more: Any) -> None:
        self.client.send({**self.head, "choices": choices, **more})


def held_back(text: str, ends: list[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of `ends`."""
    longest = max(map(len, ends), default=0)
    starts = range(max(0, len(text) - longest), len(text))
    found = (at for at in starts if any(end.startswith(text[at:]) for end in ends))
    return len(text) - next(found, len(text))
