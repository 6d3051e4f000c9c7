"""`make check-server`: compare an OpenAI-compatible server with an export. Loads no torch.

The server gets the evaluated model's prompts, without sampling. Its count of prompt tokens
reveals another chat template or a second BOS, its finish_reason reveals a stop token that it does
not know, and its text reveals everything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Annotated
from urllib.parse import urlsplit

from annotated_types import MinLen
from pydantic import BaseModel

from sft_play.commands.call import Call
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.http_client import AnswerType, NoAnswer, fetch
from sft_play.masking import mask_secrets
from sft_play.progress import visible
from sft_play.runs.exports import ParityRow

SECONDS = 300.0  # for an answer
NEAR_TIE = 0.1  # nats: below it, other kernels in 16 bits may choose the other token
SHOWN = 60  # characters of a text in a line
CHAT, COMPLETIONS = "chat/completions", "completions"  # endpoints
NOT_SERVED = (404, 405, 501)
ANY_MODEL = "default"  # for servers with one model that list none


class NotServed(Exception):
    """The server does not have this endpoint."""


class ServerMessage(BaseModel):
    """The server's message for the assistant."""

    content: str | None = None


class ServerChoice(BaseModel):
    """One answer: a message of /chat/completions, or a text of /completions."""

    message: ServerMessage | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def answer(self) -> str:
        """The text, "" if there is none."""
        return (self.message.content if self.message else self.text) or ""


class Usage(BaseModel):
    """Token counts of the server."""

    prompt_tokens: int | None = None


class Completion(BaseModel):
    """The response of /chat/completions and /completions."""

    choices: Annotated[list[ServerChoice], MinLen(1)]
    usage: Usage = Usage()


class ListedModel(BaseModel):
    """An entry of /models."""

    id: str


class ModelList(BaseModel):
    """The response of /models."""

    data: list[ListedModel] = []


@dataclass(frozen=True)
class RemoteServer:
    """An OpenAI-compatible server."""

    url: str  # up to /v1
    model: str
    key: str | None

    @classmethod
    def asked(cls, call: Call) -> "RemoteServer":
        """Return the server of URL and SERVED_NAME; a key is OPENAI_API_KEY of the environment."""
        words = call.words
        url = words.text("URL")
        if url is None:
            raise ConfigError(
                "URL: write the address of the server, such as URL=http://127.0.0.1:8000"
            )
        return cls.at(url, words.text("SERVED_NAME"), words.text("OPENAI_API_KEY"))

    @classmethod
    def at(cls, url: str, model: str | None, key: str | None) -> "RemoteServer":
        """Return the server at a URL; its model is the only one that it lists, or `model`.

        Raises: ConfigError, EnvironmentFault.
        """
        try:
            is_url = url.startswith(("http://", "https://")) and urlsplit(url).port != 0
        except ValueError:  # a port that is not a number, or above 65535
            is_url = False
        if not is_url:
            raise ConfigError(
                f"URL={url}: write http://host:port with a port of at most 65535, such as "
                "http://127.0.0.1:8000"
            )
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "OPENAI_API_KEY: holds a line break or a character that no key has; export it again"
            )
        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        return cls(base, model or only_model(base, key), key)

    def ask(self, path: str, row: ParityRow) -> Completion:
        """Return the response of CHAT or COMPLETIONS."""
        asked = {"messages": row.messages} if path == CHAT else {"prompt": row.prompt}
        # extra tokens to detect a missed stop
        max_tokens = len(row.answer_ids) + 8 * row.has_ended
        limit = {"max_tokens": max_tokens, "temperature": 0, "stream": False}
        body = {"model": self.model, **asked, **limit}
        return request(f"{self.url}/{path}", Completion, self.key, body)


@dataclass
class EndpointResults:
    """The results of one endpoint."""

    name: str
    rows: int = 0
    prompts: int = 0  # with the same number of tokens as in training
    counted: int = 0  # prompts whose tokens the server counts
    stops: int = 0  # of the texts that do not differ at a near tie
    texts: int = 0
    ties: int = 0  # texts that first differ at an equally good token
    differences: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the line that is printed."""
        counts = f"{self.prompts}/{self.counted}" if self.counted else "not counted by the server"
        ties = f" ({self.ties} more part at a near tie)" if self.ties else ""
        return (
            f"{self.name} rows={self.rows} prompt tokens={counts} "
            f"stops={self.stops}/{self.rows - self.ties} texts={self.texts}/{self.rows}{ties}"
        )

    def compare(self, row: ParityRow, answer: Completion) -> None:
        """Count one answer, and record what differs."""
        self.rows += 1
        choice = answer.choices[0]
        self._count_prompt(row, answer.usage.prompt_tokens)
        if self._is_near_tie(row, choice.answer):
            return  # its end has no meaning
        if choice.finish_reason == row.finish_reason:
            self.stops += 1
            return
        about = "it stops if the model continues"
        if row.has_ended:
            about = "it continues after the trained stop"
        self._differs(
            row,
            f"it ended by {choice.finish_reason}, and the model by {row.finish_reason}: {about}",
        )

    def _count_prompt(self, row: ParityRow, found: int | None) -> None:
        """Compare the server's count of prompt tokens, if it gives one."""
        expected = len(row.prompt_ids)
        if found is None:
            return
        self.counted += 1
        if found == expected:
            self.prompts += 1
            return
        cause = "it uses another chat template or system prompt"
        if self.name == COMPLETIONS:
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
        same = len(commonprefix((expected, found)))  # noqa: RUF071 - of texts, not of paths
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


def check_server(server: RemoteServer, rows: Sequence[ParityRow]) -> list[str]:
    """Return the lines to print. Raises: CheckpointError if the server's answers differ."""
    with_messages = [row for row in rows if row.messages is not None]
    tallies = []
    for path, asked in {CHAT: with_messages, COMPLETIONS: rows}.items():
        tally = EndpointResults(path)
        try:
            for row in asked:
                tally.compare(row, server.ask(path, row))
        except NotServed:
            continue
        if asked:
            tallies.append(tally)
    if not tallies:
        raise EnvironmentFault(
            f"{server.url} has no endpoint that takes the prompts of this export"
        )
    named = visible(mask_secrets(f"server {server.url} model={server.model}"))
    lines = [named, *(tally.line() for tally in tallies)]
    differences = [line for tally in tallies for line in tally.differences]
    if differences:
        told = "\n".join([*lines, *differences])
        raise CheckpointError(f"{told}\n{server.url} does not answer as the evaluated model does")
    return [*lines, "the server answers as the evaluated model does"]


def only_model(base: str, key: str | None) -> str:
    """Return the model that a server lists. Raises: ConfigError if it lists several."""
    try:
        names = [model.id for model in request(f"{base}/models", ModelList, key).data]
    except NotServed:
        return ANY_MODEL
    if len(names) != 1:
        raise ConfigError(
            f"{base}/models lists {', '.join(names) or 'no model'}; SERVED_NAME= selects the one "
            "to check"
        )
    return names[0]


def request(
    url: str, kind: type[AnswerType], key: str | None, body: dict[str, object] | None = None
) -> AnswerType:
    """Return the response of a URL. Raises: NotServed, EnvironmentFault."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = fetch(url, SECONDS, body, headers)
        if answer.status in NOT_SERVED or (answer.status >= 400 and body is None):
            raise NotServed
        if answer.status != 200:
            raise NoAnswer(f"status {answer.status}, {answer.text()!r}")
        return answer.parse(kind)
    except NoAnswer as error:
        raise EnvironmentFault(
            f"{url} gives no answer that can be compared: {error}; see that URL= names an "
            "OpenAI-compatible server (make serve RUN=name starts a server)"
        ) from None


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else f"{flat[: SHOWN - 3]}..."
