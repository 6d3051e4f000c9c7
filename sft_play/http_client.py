"""The one client of servers. It believes none of them: time, size, redirects and forms are bounded.

Loads no torch.
"""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from sft_play.progress import visible

MAX_BYTES = 16 << 20
QUOTED = 300  # characters of an answer in an error

AnswerType = TypeVar("AnswerType", bound=BaseModel)


class NoAnswer(Exception):
    """A server gave no answer, or none that can be used; the text says why, fit for a terminal."""


class HttpResponse(NamedTuple):
    """What a server answered."""

    status: int
    body: bytes

    def text(self) -> str:
        """Return the beginning of the body, fit for a terminal."""
        return visible(self.body[:QUOTED].decode(errors="replace"))

    def parse(self, kind: type[AnswerType]) -> AnswerType:
        """Return the body, JSON, as what it should be. Raises: NoAnswer."""
        try:
            return kind.model_validate_json(self.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            said = f"{where}: {first['msg']}" if where else first["msg"]
            raise NoAnswer(f"{visible(said)}, in {self.text()!r}") from None


def fetch(
    url: str,
    seconds: float,
    body: dict[str, object] | None = None,
    headers: dict[str, str] | None = None,
    uses_proxy: bool = True,
) -> HttpResponse:
    """Return what a URL answers within `seconds` in all: to a POST of JSON if there is a body.

    Redirects are not followed: a header may hold a key, and the other server has not been named.

    Raises: NoAnswer.
    """
    return _wait(_receive(url, body, headers or {}, uses_proxy), seconds)


def download(url: str, seconds: float, max_bytes: int) -> bytes:
    """Return the file at a URL, of at most so many bytes; redirects are followed.

    Raises: NoAnswer.
    """
    answer = _wait(_receive(url, None, {}, max_bytes=max_bytes, follows=True), seconds)
    if answer.status != HTTPStatus.OK:
        raise NoAnswer(f"it answers with status {answer.status}")
    return answer.body


def _wait(receiving: Coroutine[None, None, HttpResponse], seconds: float) -> HttpResponse:
    try:
        return asyncio.run(asyncio.wait_for(receiving, seconds))
    except TimeoutError:
        raise NoAnswer(f"no whole answer in {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, OverflowError) as error:
        raise NoAnswer(visible(str(error)) or type(error).__name__) from None
    except ExceptionGroup as group:  # of the addresses of a host that were tried
        raise NoAnswer(visible(str(group.exceptions[0]))) from None


async def _receive(
    url: str,
    body: dict[str, object] | None,
    headers: dict[str, str],
    uses_proxy: bool = True,
    max_bytes: int = MAX_BYTES,
    follows: bool = False,
) -> HttpResponse:
    method = "GET" if body is None else "POST"
    # compressed answers have no size before they are unpacked
    headers = {**headers, "Accept-Encoding": "identity"}
    async with (
        httpx.AsyncClient(timeout=None, trust_env=uses_proxy, follow_redirects=follows) as client,
        client.stream(method, url, json=body, headers=headers) as answer,
    ):
        if answer.has_redirect_location:
            raise NoAnswer(
                f"it redirects to {visible(answer.headers['location'])}, which is not followed"
            )
        received = bytearray()
        async for part in answer.aiter_raw():
            received += part
            if len(received) > max_bytes:
                raise NoAnswer(f"its answer is longer than {max_bytes >> 20} MiB")
        return HttpResponse(answer.status_code, bytes(received))
