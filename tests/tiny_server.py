"""A small OpenAI-compatible server over plain transformers, with faults that a test plants."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
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

    def answer(self, path: str, asked: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer."""
        if path == "/v1/chat/completions" and self.faults.has_chat:
            messages = asked["messages"]
            if self.faults.system_prompt:
                messages = [{"role": "system", "content": self.faults.system_prompt}, *messages]
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            text, body = self.generate(list(ids), asked["max_tokens"])
            body["choices"][0]["message"] = {"role": "assistant", "content": text}
            return 200, body
        if path == "/v1/completions":
            ids = self.tokenizer(asked["prompt"], add_special_tokens=False)["input_ids"]
            text, body = self.generate(ids, asked["max_tokens"])
            body["choices"][0]["text"] = text
            return 200, body
        return 404, {"error": "no such endpoint"}

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


@contextmanager
def serving(server: TinyServer) -> Iterator[str]:
    """Yield the URL of a server on the loopback interface while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(*server.answer(self.path, asked))

        def send(self, status: int, body: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *words: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
