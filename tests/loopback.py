"""An HTTP server on the loopback interface."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Silent(BaseHTTPRequestHandler):
    """Answers with bytes, or with another value as JSON, and logs nothing."""

    def answer(self, value: object, code: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served_by(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the URL of a server while it runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
