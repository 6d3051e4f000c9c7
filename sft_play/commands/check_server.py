"""`make check-server`: hold an OpenAI-compatible server to an export. Loads no torch.

The server is asked what the evaluated model was asked, without sampling. Its count of prompt tokens
shows another chat template or a second BOS, its finish_reason a stop that it does not know, its
text everything else.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.commands.call import Call
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.runs.exports import ParityRow

SECONDS = 300.0  # for an answer
NEAR_TIE = 0.1  # nats: other kernels, in 16 bits, may choose the other token below it
SHOWN = 60  # characters of a text in a line
NOT_SERVED = (404, 405, 501)
ANY_MODEL = "default"  # for servers of one model that list none


class NotServed(Exception):
    """The server does not have this endpoint."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server."""

    url: str  # up to /v1
    model: str
    key: str | None = None

    @classmethod
    def asked(cls, call: Call) -> "Server":
        """Return the server of URL and SERVED_NAME; a key is OPENAI_API_KEY of the environment."""
        words = call.words
        url = words.text("URL")
        if url is None:
            raise ConfigError("URL: write where the server is, such as URL=http://127.0.0.1:8000")
        return cls.at(url, words.text("SERVED_NAME"), words.text("OPENAI_API_KEY"))

    @classmethod
    def at(cls, url: str, model: str | None, key: str | None) -> "Server":
        """Return the server at a URL; its model is the only one that it lists, or `model`.

        Raises: ConfigError, EnvironmentFault.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"URL={url}: write http://host:port, such as http://127.0.0.1:8000")
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        return cls(base, model or only_model(base, key), key)

    def chat(self, row: ParityRow) -> dict[str, Any]:
        """Return what /chat/completions answers."""
        return self._ask("chat/completions", row, {"messages": row.messages})

    def complete(self, row: ParityRow) -> dict[str, Any]:
        """Return what /completions answers."""
        return self._ask("completions", row, {"prompt": row.prompt})

    def _ask(self, path: str, row: ParityRow, asked: Mapping[str, Any]) -> dict[str, Any]:
        limit = {"max_tokens": len(row.answer_ids), "temperature": 0, "stream": False}
        if row.has_ended:  # room to run on behind the stop
            limit["max_tokens"] += 8
        return request(f"{self.url}/{path}", {"model": self.model, **asked, **limit}, self.key)


@dataclass
class Tally:
    """What one endpoint answered."""

    name: str
    rows: int = 0
    prompts: int = 0  # with as many tokens as in training
    counted: int = 0  # prompts whose tokens the server counts
    stops: int = 0  # of the texts that do not part at a near tie
    texts: int = 0
    ties: int = 0  # texts that part at a token that is as good as the other
    differences: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the line that is printed."""
        counts = f"{self.prompts}/{self.counted}" if self.counted else "not counted by the server"
        ties = f" ({self.ties} more part at a near tie)" if self.ties else ""
        return (
            f"{self.name} rows={self.rows} prompt tokens={counts} "
            f"stops={self.stops}/{self.rows - self.ties} texts={self.texts}/{self.rows}{ties}"
        )

    def compare(self, row: ParityRow, answer: Mapping[str, Any]) -> None:
        """Count one answer, and record what differs."""
        self.rows += 1
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        self._count_prompt(row, (answer.get("usage") or {}).get("prompt_tokens"))
        if self._is_near_tie(row, text or ""):
            return  # where it ends says nothing
        if choice.get("finish_reason") == row.finish_reason:
            self.stops += 1
            return
        about = "it stops where the model goes on"
        if row.has_ended:
            about = "it runs on behind the trained stop"
        self._differs(
            row,
            f"it ended by {choice.get('finish_reason')}, and the model by {row.finish_reason}: "
            f"{about}",
        )

    def _count_prompt(self, row: ParityRow, found: int | None) -> None:
        """Compare the server's count of prompt tokens, where it gives one."""
        expected = len(row.prompt_ids)
        if found is None:
            return
        self.counted += 1
        if found == expected:
            self.prompts += 1
            return
        cause = "it uses another chat template or system prompt"
        if self.name == "completions":
            cause = "it splits the text otherwise"
        if found == expected + 1:
            cause = "it may add a BOS token to a prompt that has all it needs"
        self._differs(
            row, f"the prompt has {found} tokens there and {expected} in training: {cause}"
        )

    def _is_near_tie(self, row: ParityRow, text: str) -> bool:
        """Compare an answer's text; return whether it parts from the model's at a near tie."""
        expected, found = row.answer.strip(), text.strip()
        if found == expected:
            self.texts += 1
            return False
        pairs = enumerate(zip(expected, found, strict=False))
        shorter = min(len(expected), len(found))
        same = next((at for at, (one, other) in pairs if one != other), shorter)
        margin = row.margin_at(same + len(row.answer) - len(row.answer.lstrip()))
        if margin < NEAR_TIE:
            self.ties += 1
            return True
        self._differs(
            row,
            f"it answers {_short(found)!r}, and the model {_short(expected)!r}; they part after "
            f"{same} characters, where the model was sure by {margin:.2f} nats",
        )
        return False

    def _differs(self, row: ParityRow, how: str) -> None:
        where = f"{self.name} {self.rows} ({_short(row.prompt[-SHOWN:])})"
        self.differences.append(f"{where}: {how}")


def check_server(server: Server, rows: Sequence[ParityRow]) -> list[str]:
    """Return the lines to print. Raises: CheckpointError where the server answers otherwise."""
    with_messages = [row for row in rows if row.messages is not None]
    tallies = []
    for name, ask, asked in (
        ("chat/completions", server.chat, with_messages),
        ("completions", server.complete, list(rows)),
    ):
        tally = Tally(name)
        try:
            for row in asked:
                tally.compare(row, ask(row))
        except NotServed:
            continue
        tallies.append(tally)
    if not tallies:
        raise EnvironmentFault(f"{server.url} has neither chat/completions nor completions")
    lines = [f"server {server.url} model={server.model}", *(tally.line() for tally in tallies)]
    differences = [line for tally in tallies for line in tally.differences]
    if differences:
        told = "\n".join([*lines, *differences])
        raise CheckpointError(f"{told}\n{server.url} does not answer as the evaluated model does")
    return [*lines, "the server answers as the evaluated model does"]


def only_model(base: str, key: str | None) -> str:
    """Return the model that a server lists. Raises: ConfigError where it lists several."""
    try:
        listed = request(f"{base}/models", None, key).get("data", [])
    except NotServed:
        return ANY_MODEL
    names = [entry["id"] for entry in listed]
    if len(names) != 1:
        raise ConfigError(
            f"{base}/models lists {', '.join(names) or 'no model'}; SERVED_NAME= says which one "
            "to check"
        )
    return names[0]


def request(url: str, body: Mapping[str, Any] | None, key: str | None) -> dict[str, Any]:
    """Return what a URL answers, as JSON. Raises: NotServed, EnvironmentFault."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    asked = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in NOT_SERVED or body is None:
            raise NotServed from None
        said = error.read(300).decode(errors="replace")
        raise EnvironmentFault(f"{url} answers {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EnvironmentFault(
            f"{url} does not answer ({reason}); make serve RUN=name starts a server"
        ) from None


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else f"{flat[: SHOWN - 3]}..."
