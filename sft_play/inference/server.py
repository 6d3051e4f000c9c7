"""`make serve` without vLLM: an OpenAI-compatible server of one model.

Each connection has a thread, which checks its request and waits for its turn: one request is
answered at a time. The answer of a client that leaves ends at its next token.
"""

import json
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any

from transformers import StoppingCriteriaList, TextStreamer

from sft_play.config.invocation import SamplingRequest
from sft_play.data.rows import Json
from sft_play.errors import DataError
from sft_play.evaluation.generate import StopWhen
from sft_play.inference.load import TrainedModel
from sft_play.inference.server_requests import Request, RequestError, parse

MAX_BODY_DIGITS = 7  # of its length
LONG_TOKEN = 32  # characters: no text has longer tokens on average


class Pieces(TextStreamer):
    """Collects an answer, and sends its pieces."""

    send: Callable[[str], None]
    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take the next piece."""
        self.text += text
        self.send(text)


class Server(ThreadingTCPServer):
    """A server whose connections share one model."""

    allow_reuse_address = True
    request_queue_size = 128
    turn = Lock()
    name: str
    trained: TrainedModel


class Connection(BaseHTTPRequestHandler):
    """A client with one request. The end of the connection ends the response, as in HTTP 1.0."""

    server: Server
    timeout = 30  # seconds, of each read and write
    disable_nagle_algorithm = True
    streams = has_begun = False

    def handle(self) -> None:
        """Answer the request, unless the client leaves."""
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        """Answer a request, or send why not."""
        try:
            self._route(f"{self.command} {self.path}")
        except RequestError as error:
            self._refuse(error)
        except RuntimeError as error:  # of torch, e.g. out of memory
            self.log_error("%r", error)
            self._refuse(RequestError(str(error), status=500))

    do_GET = do_POST

    def _route(self, asked: str) -> None:
        if asked in ("GET /health", "GET /v1/models"):
            listed = {"id": self.server.name, "object": "model"}
            return self._send({"status": "ok", "object": "list", "data": [listed]})
        if asked != "POST /v1/chat/completions":
            raise RequestError(f"{asked} is not served here", status=404)
        size = self.headers.get("Content-Length", "unknown")
        if not size.isdecimal() or len(size) > MAX_BODY_DIGITS:
            text = f"Content-Length={size}: a body has a known length, below 10 MB"
            raise RequestError(text, status=413)
        self._answer(parse(self.rfile.read(int(size))))

    def _answer(self, request: Request) -> None:
        """Send the answer to a request. Raises: RequestError, ConnectionError."""
        name, trained = self.server.name, self.server.trained
        if request.model not in (None, name):
            raise RequestError(f"model={request.model!r}: write {name!r}", "model", 404)
        made = time.time_ns()

        def send(text: str, finish: str | None = None, **more: Any) -> None:
            """Send the answer; of a stream a piece, unless it may have to be cut at a stop text."""
            is_piece = self.streams and not request.stop and (text or not self.has_begun)
            if finish or is_piece:
                message = {"role": "assistant", "content": text}
                key = "delta" if self.streams else "message"
                choice = {"index": 0, key: message, "finish_reason": finish}
                kind = "chat.completion" + ".chunk" * self.streams
                head = {"id": str(made), "object": kind, "created": made // 10**9, "model": name}
                self._send({**head, "choices": [choice], **more})

        with self.server.turn:
            self._check()
            messages = [each for turn in request.messages for each in turn]
            try:
                # refused before it is tokenized, which would take long
                trained.auto_limit(sum(len(each.content) for each in messages) // LONG_TOKEN)
                prompt = trained.prompt_ids(messages)
                limit = trained.auto_limit(len(prompt), request.max_tokens)
            except DataError as error:
                raise RequestError(str(error), "messages") from None
            wanted = SamplingRequest(request.temperature, request.top_p, seed=request.seed)
            generator = trained.sampled(wanted).generator(limit)
            self.streams = request.stream
            pieces = Pieces(trained.tokenizer, skip_prompt=True, skip_special_tokens=True)
            pieces.send = send
            ended = StopWhen(lambda: self._check() or any(map(pieces.text.count, request.stop)))
            ids = generator.generate(trained.model, [prompt], pieces, StoppingCriteriaList([ended]))
        (found,) = generator.decode(ids)
        text = found.text
        for stop in request.stop:
            text = text.partition(stop)[0]
        finish = "length" if found.was_cut and text == found.text else "stop"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": ids.numel()}
        usage["total_tokens"] = sum(usage.values())
        send("" if self.has_begun else text, finish, usage=usage)
        if self.streams:
            self.wfile.write(b"data: [DONE]\n\n")

    def _check(self) -> None:
        """Raise ConnectionError if the client has left."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        if waiting.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError

    def _send(self, body: Json, status: int = 200) -> None:
        """Send a response, or the next event of a stream."""
        if not self.has_begun:
            self.has_begun = True
            self.send_response(status)
            kind = "text/event-stream" if self.streams else "application/json"
            self.send_header("Content-Type", kind)
            self.end_headers()
        text = json.dumps(body)
        self.wfile.write((f"data: {text}\n\n" if self.streams else text).encode())

    def _refuse(self, error: RequestError) -> None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        body = {"message": error.text, "type": kind, "param": error.param, "code": None}
        self._send({"error": body}, error.status)
        # what the client still sends would reset the connection before it reads the error
        self.connection.shutdown(socket.SHUT_WR)
        while self.connection.recv(1 << 16):
            pass


def serve(trained: TrainedModel, name: str, host: str, port: int) -> None:
    """Serve a model until Ctrl-C."""
    Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = Server((host, port), Connection)
    server.trained, server.name = trained, name
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    os._exit(0)  # threads of torch abort when the interpreter ends
