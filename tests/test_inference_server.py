"""`make serve` without vLLM: started as a user starts it, asked as a client asks it."""

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from rank_processes import start_command

from sft_play.commands.check_server import RemoteServer, check_server
from sft_play.inference.export import export_run
from sft_play.plan.launch import free_port
from sft_play.runs import seal
from sft_play.runs.exports import PARITY, ExportAsked, read_parity

SECONDS = float(os.environ.get("SERVE_SECONDS", "5"))  # of the load test
CLIENTS = 16
STARTS_WITHIN = 120
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
NEVER_ENDS = {**ASKED, "max_tokens": 1000}  # the tiny base has no stop for it
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def said(content: object, role: object = "user", **more: object) -> dict:
    """Return a change of the messages."""
    return {"messages": [{"role": role, "content": content, **more}]}


FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def change(path: Path, **values: object) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Change of ASKED, status, words of the error
REFUSED = (
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0: .content is null"),
    (said("x", "wizard"), 400, "role 'wizard'"),
    (said("x", "tool"), 400, "the chat template refuses"),
    (said({"a": 1}), 400, "messages.0: .content"),
    (said([{"toolUse": 5}]), 400, "messages.0"),
    (said([IMAGE]), 400, "data:image/"),
    (said("\ud800"), 400, "Invalid JSON"),
    (said(None, "assistant", tool_calls=[{"function": 5}]), 400, "messages.0"),
    (said("word " * 2000), 400, "1024"),
    (said("x" * 10_000_000), 413, "below 10 MB"),
    ({"max_tokens": 2000}, 400, "2000"),
    ({"max_tokens": -3}, 400, "max_tokens"),
    ({"temperature": float("nan")}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"seed": -1}, 400, "seed"),
    ({"stop": list("abcde")}, 400, "stop"),
    ({"stop": ["x" * 1001]}, 400, "stop.0"),
    ({"stream": "yes"}, 400, "stream"),
    ({"n": 9}, 400, "n: "),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logit_bias": {"999999": 100}}, 400, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"tools": [FIND]}, 400, "no response_template for"),
    ({"tools": [{"type": "function", "function": 5}]}, 400, "tools:  is malformed"),
    ({"tools": [FIND], "tool_choice": "required"}, 400, "tool_choice"),
    ({"max_tokens": 1, "max_completion_tokens": 2000}, 400, "2000"),
    ({"unknown": 1}, 400, "unknown"),
    ({"model": "gpt-4o"}, 404, "gpt-4o"),
)
ANSWERED = (
    {"tools": [FIND], "tool_choice": "none"},
    {"max_tokens": 2000, "max_completion_tokens": 3},
    {"n": 1, "stop": None, "logprobs": False, "response_format": {"type": "text"}, "tools": []},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "stream_options": {}},
    {"max_tokens": None, "max_completion_tokens": 3, "temperature": 1e-60},
    {"temperature": 1.5, "top_p": 0.9, "seed": 7},
    said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    said("x", "developer"),
)


class Served:
    """A server that `make serve` has started, and what it printed."""

    def __init__(self, process, log: Path, port: int, name: str) -> None:
        self.process, self.log, self.port, self.name = process, log, port, name

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = json.dumps(body) if isinstance(body, dict) else body
            connection.request("GET" if body is None else "POST", path, sent, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def chat(self, **changes: object) -> dict:
        status, answer = self.ask(CHAT, ASKED | changes)
        assert status == 200, answer
        return answer["choices"][0]

    def texts(self, path: str, body: dict) -> list[tuple[str, str]]:
        """Return the text of each choice, and why it ended."""
        answer = self.ask(path, body)[1]
        return [
            (each["text"] if path == TEXT else each["message"]["content"], each["finish_reason"])
            for each in answer["choices"]
        ]

    def events(self, path: str, body: dict) -> list[dict]:
        """Return the events of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        *events, done, _ = connection.getresponse().read().decode().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event[6:]) for event in events]

    def streamed(self, path: str, body: dict) -> list[tuple[str, str]]:
        """Return what `texts` returns, by a stream."""
        found = [("", "")] * body["n"]
        for event in self.events(path, body):
            for each in event["choices"]:
                text = each["text"] if path == TEXT else each["delta"]["content"]
                found[each["index"]] = found[each["index"]][0] + text, each["finish_reason"]
        return found

    @contextmanager
    def stream(self, body: dict) -> Iterator[socket.socket]:
        """Ask for a stream, and wait for its beginning."""
        data = json.dumps(body | {"stream": True}).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(b"POST %b HTTP/1.1\r\n" % CHAT.encode())
            client.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
            assert client.recv(1 << 16)
            yield client


@contextmanager
def serving(run: Path, tmp_path: Path) -> Iterator[Served]:
    """Serve a run's export, on a machine without a Hugging Face cache."""
    port, log = free_port(), tmp_path / "log"
    environ = {
        "PATH": os.environ["PATH"],
        "TRAIN_OUTPUT_DIR": str(run.parent),
        "RUN": run.name,
        "PORT": str(port),
        "DEVICE": "cpu",
        "HF_HOME": str(tmp_path / "no-cache"),
    }
    process = start_command(["serve"], environ, log)
    found = Served(process, log, port, run.name)
    deadline = time.monotonic() + STARTS_WITHIN
    while process.is_alive() and time.monotonic() < deadline:
        try:
            found.ask("/health")
            break
        except OSError:
            process.join(0.1)
    assert process.is_alive(), log.read_text()
    try:
        yield found
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def run(plan_run) -> Path:
    """A run whose export is the tiny base."""
    folder = plan_run({}).path
    export = folder / "export" / "safetensors"
    shutil.copytree(ROOT / "data" / "tiny_llama", export)
    (export / seal.NAME).write_text("{}")
    return folder


@pytest.fixture(scope="module")
def served(run, tmp_path_factory) -> Iterator[Served]:
    with serving(run, tmp_path_factory.mktemp("served")) as found:
        yield found


def test_what_is_not_done_is_refused_with_its_field_and_no_traceback(served):
    for change, status, words in REFUSED:
        found, answer = served.ask(CHAT, ASKED | change)
        assert (found, words in answer["error"]["message"]) == (status, True), (change, answer)
        assert answer["error"].keys() == {"message", "type", "param", "code"}
    for body in (b"", b"{", b"[]", b"\xff{}", b"[" * 10_000):
        assert served.ask(CHAT, body)[0] == 400
    chunks = {"Transfer-Encoding": "chunked"}
    assert served.ask(CHAT, b"400000\r\n" + b"x" * 0x400000, **chunks)[0] == 413
    for prompt in (None, [], "", [1.5], [-1], [99_999], ["a", "b"], "word " * 2000):
        status, answer = served.ask(TEXT, {"prompt": prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt"), (prompt, answer)
    for path in ("/v1/responses", "/load_model", "/reset"):
        assert served.ask(path, {})[0] == 404
    for change in ANSWERED:
        assert served.chat(**change)["message"]["role"] == "assistant"
    assert "Traceback" not in served.log.read_text()


def test_the_model_is_listed_and_the_printed_curl_line_works_as_it_is(served):
    status, models = served.ask("/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, [served.name])
    (line,) = [line for line in served.log.read_text().splitlines() if line.startswith("curl ")]
    assert shlex.split(line)[1].endswith(CHAT)
    done = subprocess.run(["bash", "-c", f"{line} -sS"], capture_output=True, text=True)
    assert json.loads(done.stdout)["model"] == served.name, done.stderr


def test_a_stream_has_the_texts_of_the_answers_and_both_end_before_a_stop_text(served):
    for path, asked in ((CHAT, ASKED), (TEXT, {"prompt": "Hello"})):
        asked = asked | {"temperature": 2, "seed": 5, "max_tokens": 40, "n": 2}
        (complete, _), other = served.texts(path, asked)
        assert len(complete) > 20 and other[0] != complete
        stop = complete[len(complete) // 2 :][:3]
        for stops in ([], [stop, "\u27e6"]):
            body = asked | {"stop": stops}
            found = served.texts(path, body)
            assert served.streamed(path, body) == found
            if stops:
                assert found[0] == (complete.partition(stop)[0], "stop")


def test_only_what_may_begin_a_stop_text_is_held_back(served):
    body = {"prompt": "Hello", "temperature": 2, "seed": 5, "max_tokens": 40, "stop": ["\u27e6"]}
    assert len(served.events(TEXT, body)) > 20


def test_calls_of_tools_are_parsed_as_the_tokenizer_says(run, tmp_path):
    folder = shutil.copytree(run, run.with_name("with-tools")) / "export" / "safetensors"
    call = {"type": "function", "function": {"name": "find", "arguments": {"what": "{content}"}}}
    field = {"open_pattern": ".", "content": "text", "transform": call}
    template = {"start_anchor": "<|assistant|>", "fields": {"tool_calls": field}}
    change(folder / "tokenizer_config.json", response_template=template)
    change(folder / "generation_config.json", eos_token_id=list(range(1000)))
    jinja = "{{ tools | tojson }}{{ messages | tojson }}{{ '<|assistant|>' }}"
    (folder / "chat_template.jinja").write_text(jinja)
    with serving(folder.parents[1], tmp_path) as served:
        choice = served.chat(tools=[FIND])
        (called,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], called["function"]["name"]) == ("tool_calls", "find")
        assert json.loads(called["function"]["arguments"]).keys() == {"what"}
        (event,) = served.events(CHAT, ASKED | {"tools": [FIND]})
        assert event["choices"][0]["delta"]["tool_calls"][0]["function"] == called["function"]
        result = {"role": "tool", "content": "red", "tool_call_id": called["id"]}
        turns = {"messages": [*ASKED["messages"], choice["message"], result], "tools": [FIND]}
        (first, *_), (second, *_) = (
            served.ask(CHAT, ASKED | each)[1]["usage"].values() for each in ({}, turns)
        )
        assert second > first + 30


def test_sixteen_clients_are_answered_and_a_wrong_request_does_not_wait(served):
    with served.stream(NEVER_ENDS):
        started = time.monotonic()
        assert served.ask(CHAT, ASKED | {"max_tokens": 2000})[0] == 400
        assert time.monotonic() - started < 1
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda _: served.chat(temperature=0), range(CLIENTS)))
    assert found == found[:1] * CLIENTS


def test_the_answer_of_a_client_that_leaves_ends_and_ctrl_c_ends_any(run, tmp_path):
    with serving(run, tmp_path) as served:
        with served.stream(NEVER_ENDS):
            pass
        started = time.monotonic()
        served.chat(max_tokens=1)
        assert time.monotonic() - started < 1.5  # all of it takes several seconds
        with served.stream(NEVER_ENDS):
            os.kill(served.process.pid, signal.SIGINT)
            served.process.join(5)
        assert served.process.exitcode == 0
        assert "Traceback" not in served.log.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("opens_here")
def test_the_export_of_a_run_answers_as_the_run_did(finished, tmp_path):
    folder = finished("lora")
    export = folder.path / "export" / "safetensors"
    if not export.is_dir():
        export_run(folder, ExportAsked("safetensors"), "cpu")
    with serving(folder.path, tmp_path) as served:
        server = RemoteServer.at(f"http://127.0.0.1:{served.port}", None, None)
        lines = check_server(server, read_parity(export / PARITY))
    assert lines[-1] == "the server answers as the evaluated model does"


@pytest.mark.long
def test_many_clients_at_once_all_get_their_answers(served):
    """SERVE_SECONDS=60 takes a minute."""
    process = psutil.Process(served.process.pid)
    served.chat()
    memory: list[int] = []
    end = time.monotonic() + SECONDS

    def client(number: int) -> tuple[int, float]:
        count, longest = 0, 0.0
        while time.monotonic() < end:
            started = time.monotonic()
            served.chat(max_tokens=4 + number)
            count += 1
            longest = max(longest, time.monotonic() - started)
            if number == 0:
                memory.append(process.memory_info().rss)
        return count, longest

    with ThreadPoolExecutor(CLIENTS) as pool:
        counts, longest = zip(*pool.map(client, range(CLIENTS)), strict=True)
    settled = memory[len(memory) // 2 :]
    first, last, most = memory[0] / 1e6, memory[-1] / 1e6, max(memory) / 1e6
    print(f"{sum(counts)} answers, the slowest in {max(longest):.2f} s")
    print(f"memory {first:.0f} MB at first, {last:.0f} MB at the end, {most:.0f} MB at most")
    assert max(settled) - min(settled) < 50e6
