"""Servers are not believed: time, size, redirects and the form of an answer are bounded."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sft_play import http_client
from sft_play.commands.check_server import CHAT, RemoteServer
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.http_client import NoAnswer, download, fetch
from sft_play.runs.exports import ParityRow

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def listening(reply: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Serve connections by `reply`; yield the URL and the requests that came."""
    came: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # the test has ended
            with connection:
                came.append(connection.recv(1 << 16))
                try:
                    reply(connection)
                except OSError:
                    continue  # the client has hung up

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)


def whole(body: bytes, status: bytes = OK) -> Callable[[socket.socket], None]:
    length = f"Content-Length: {len(body)}\r\n\r\n".encode()
    return lambda connection: connection.sendall(status + length + body)


def drip(connection: socket.socket) -> None:
    for byte in OK * 100:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def pour(connection: socket.socket) -> None:
    connection.sendall(OK + b"\r\n")
    while True:
        connection.sendall(b" " * (1 << 20))


@pytest.mark.parametrize("reply", [drip, lambda connection: time.sleep(5)])
def test_an_answer_has_a_time_in_all(reply) -> None:
    with listening(reply) as (url, _):
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=r"no whole answer in 0.5 s"):
            fetch(url, 0.5)
        assert time.monotonic() - began < 3


def test_an_answer_without_end_is_left() -> None:
    with listening(pour) as (url, _), pytest.raises(NoAnswer, match="longer than 16 MiB"):
        fetch(url, 20)


def test_a_key_goes_to_the_named_server_alone() -> None:
    with listening(whole(b"{}")) as (other, came):
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {other}/v1/models\r\n".encode()
        told = pytest.raises(EnvironmentFault, match=f"redirects to {other}/v1/models, which is")
        with listening(whole(b"", moved)) as (url, first), told:
            RemoteServer.at(url, None, "the-key")
    assert b"Bearer the-key" in first[0]
    assert came == []


ROW = ParityRow("a", [1], "b", [2], [1], [1.0], True, [{"role": "user", "content": "a"}])
MALFORMED = [
    b"",
    b"no JSON",
    b"[]",
    b"null",
    b"{}",
    b'{"choices": null}',
    b'{"choices": []}',
    b'{"choices": {}}',
    b'{"choices": [null]}',
    b'{"choices": ["text"]}',
    b'{"choices": [{"message": "text"}]}',
    b'{"choices": [{"message": {"content": 3}}]}',
    b'{"choices": [{"text": ["a"]}]}',
    b'{"choices": [{"text": "a", "finish_reason": 2}]}',
    b'{"choices": [{"text": "a"}], "usage": [1]}',
    b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}',
    b'{"choices": [{"text": "\xff"}]}',
    b"[" * 100_000,
    b'{"choices": ' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_answer_is_told_in_words(body: bytes) -> None:
    with listening(whole(body)) as (url, _):
        server = RemoteServer.at(url, "model", None)
        with pytest.raises(EnvironmentFault, match="gives no answer that can be compared: "):
            server.ask(CHAT, ROW)


@pytest.mark.parametrize("body", [b'{"data": 1}', b'{"data": [1]}', b'{"data": [{"name": "x"}]}'])
def test_a_malformed_list_of_models_is_told_in_words(body: bytes) -> None:
    told = pytest.raises(EnvironmentFault, match="gives no answer that can be compared: data")
    with listening(whole(body)) as (url, _), told:
        RemoteServer.at(url, None, None)


def test_what_is_quoted_cannot_steer_a_terminal() -> None:
    reply = whole(b"\x1b[2J gone", b"HTTP/1.1 500 No\r\n")
    with listening(reply) as (url, _), pytest.raises(EnvironmentFault) as error:
        RemoteServer.at(url, "model", None).ask(CHAT, ROW)
    assert "status 500" in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://[::1", ConfigError),
        ("http://host:99999", ConfigError),
        ("http://127.0.0.1:-1", ConfigError),
        ("http://", EnvironmentFault),
        ("http://a b", EnvironmentFault),
        ("http://\udce4", EnvironmentFault),
    ],
)
def test_a_url_that_cannot_be_is_named(url: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(url[:12])):
        RemoteServer.at(url, None, None)


def test_a_port_that_no_host_has_is_no_answer() -> None:
    with pytest.raises(NoAnswer, match="port"):
        fetch("http://127.0.0.1:99999", 5)


def test_a_key_that_no_header_can_hold_is_not_printed() -> None:
    for key in ("a\nb", "k\u00e4y"):
        with pytest.raises(ConfigError) as error:
            RemoteServer.at("http://127.0.0.1:1", "model", key)
        assert key not in str(error.value)


def test_a_download_is_bounded() -> None:
    with listening(whole(b"x" * 2000)) as (url, _):
        assert download(url, 5, 2000) == b"x" * 2000
    with listening(whole(b"x" * 2000)) as (url, _), pytest.raises(NoAnswer, match="longer than"):
        download(url, 5, 1999)


def test_a_compressed_answer_is_not_unpacked() -> None:
    import zlib

    bomb = zlib.compress(b" " * (64 << 20))
    with listening(whole(bomb, OK + b"Content-Encoding: deflate\r\n")) as (url, _):
        assert len(fetch(url, 5).body) == len(bomb) < http_client.MAX_BYTES
