"""`make serve` without vLLM: an OpenAI-compatible server of one model.

Each connection has a thread, which checks its request and waits for its turn: one request is
answered at a time. The answer of a client that leaves ends at its next token.
"""

import json
import os
import select
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock

from sft_play.data.rows import Json
from sft_play.inference.load import TrainedModel
from sft_play.inference.server_answers import ChatReply
from sft_play.inference.server_requests import REQUESTS, RequestError, parse_request
from sft_play.stops import StopSignals

MAX_BODY_DIGITS = 7  # of its length


class ModelServer(ThreadingTCPServer):
    """A server whose connections share one model."""

    allow_reuse_address = True
    request_queue_size = 128
    turn = Lock()
    name: str
    trained: TrainedModel


class Connection(BaseHTTPRequestHandler):
    """A client with one request. The end of the connection ends the response, as in HTTP 1.0."""

    server: ModelServer
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
        except (RuntimeError, ValueError) as error:  # of torch, e.g. out of memory
            self.log_error("%r", error)
            self._refuse(RequestError(str(error), status=500))

    do_GET = do_POST

    def _route(self, asked: str) -> None:
        if asked in ("GET /health", "GET /v1/models"):
            listed = {"id": self.server.name, "object": "model"}
            return self.send({"status": "ok", "object": "list", "data": [listed]})
        if asked not in REQUESTS:
            raise RequestError(f"{asked} is not served here", status=404)
        size = self.headers.get("Content-Length", "unknown")
        if not size.isdecimal() or len(size) > MAX_BODY_DIGITS:
            text = f"Content-Length={size}: a body has a known length, below 10 MB"
            raise RequestError(text, status=413)
        request = parse_request(REQUESTS[asked], self.rfile.read(int(size)))
        if request.model not in (None, self.server.name):
            text = f"model={request.model!r}: write {self.server.name!r}"
            raise RequestError(text, "model", 404)
        reply = ChatReply(request, self.server.trained, self.server.name)
        with self.server.turn:
            self.check()
            self.streams = request.stream
            reply.generate(self)
        if self.streams:
            self.wfile.write(b"data: [DONE]\n\n")

    def check(self) -> None:
        """Raise ConnectionError if the client has left."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        if waiting.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError

    def send(self, body: Json, status: int = 200) -> None:
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
        self.send({"error": body}, error.status)
        # what the client still sends would reset the connection before it reads the error
        self.connection.shutdown(socket.SHUT_WR)
        while self.connection.recv(1 << 16):
            pass


def serve_model(trained: TrainedModel, name: str, host: str, port: int) -> None:
    """Serve a model until Ctrl-C, SIGTERM or SIGHUP."""
    ModelServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = ModelServer((host, port), Connection)
    server.trained, server.name = trained, name
    with suppress(KeyboardInterrupt), StopSignals():
        server.serve_forever()
    os._exit(0)  # threads of torch abort when the interpreter ends
