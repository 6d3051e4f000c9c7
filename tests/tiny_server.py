"""A small OpenAI-compatible server over plain transformers, with faults that a test plants."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loopback import Silent, served_by
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Faults:
    """What the server does otherwise than plain transformers."""

    system_prompt: str | None = None
    forgets_stop: bool = False
    adds_token: int | None = None  # before each prompt
    has_chat: bool = True


class TinyServer:
    """Answers chat/completions and completions with a folder's model, greedily."""

    def __init__(self, folder: Path, faults: Faults | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.faults = faults or Faults()

    def answer(self, path: str, asked: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the body and the status of an answer."""
        if path == "/v1/chat/completions" and self.faults.has_chat:
            messages = asked["messages"]
            if self.faults.system_prompt:
                messages = [{"role": "system", "content": self.faults.system_prompt}, *messages]
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            text, body = self.generate(list(ids), asked["max_tokens"])
            body["choices"][0]["message"] = {"role": "assistant", "content": text}
            return body, 200
        if path == "/v1/completions":
            ids = self.tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]
            text, body = self.generate(ids, asked["max_tokens"])
            body["choices"][0]["text"] = text
            return body, 200
        return {"error": "no such endpoint"}, 404

    def generate(self, ids: list[int], limit: int) -> tuple[str, dict[str, Any]]:
        if self.faults.adds_token is not None:
            ids = [self.faults.adds_token, *ids]
        stops = self.model.generation_config.eos_token_id
        options = {"eos_token_id": None} if self.faults.forgets_stop else {}
        inputs = torch.tensor([ids])
        with torch.no_grad():
            found = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=limit,
                do_sample=False,
                **options,
            )[0, len(ids) :].tolist()
        has_ended = found[-1] in (stops if isinstance(stops, list) else [stops])
        reason = "stop" if has_ended and not self.faults.forgets_stop else "length"
        text = self.tokenizer.decode(found, skip_special_tokens=True)
        return text, {"choices": [{"finish_reason": reason}], "usage": {"prompt_tokens": len(ids)}}


def serving(server: TinyServer) -> AbstractContextManager[str]:
    """Return a context in which a server runs, with its URL."""

    class Handler(Silent):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(*server.answer(self.path, asked))

    return served_by(Handler)
