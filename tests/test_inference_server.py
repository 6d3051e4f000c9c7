"""`make serve` with transformers' server: started as a user starts it, asked as a client asks it."""

import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from sft_play.commands.exports import NEEDED
from sft_play.inference.export import export_run
from sft_play.plan.launch import free_port
from sft_play.runs.exports import ExportAsked

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("opens_here")]
SECONDS = float(os.environ.get("SERVE_SECONDS", "5"))  # of the load test
CLIENTS = 16
STARTS_WITHIN = 120


class Served:
    """A server that `make serve` has started, and what it printed."""

    def __init__(self, process: subprocess.Popen, log: Path, port: int, name: str) -> None:
        self.process, self.log, self.port, self.name = process, log, port, name

    def ask(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            verb = "GET" if body is None else "POST"
            connection.request(verb, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def chat(self, model: str | None, tokens: int = 8) -> tuple[int, dict]:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens}
        return self.ask("/v1/chat/completions", body | ({"model": model} if model else {}))

    def end(self) -> float:
        """Press Ctrl-C, and return how many seconds the server takes to end."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)
        return time.monotonic() - started


@pytest.fixture
def served(finished, tmp_path) -> Iterator[Served]:
    """A lora run's export, served on a machine without a Hugging Face cache."""
    for package in NEEDED:
        pytest.importorskip(package)
    folder, port = finished("lora"), free_port()
    if not (folder.path / "export" / "safetensors").is_dir():
        export_run(folder, ExportAsked("safetensors"), "cpu")
    environ = {
        "PATH": os.environ["PATH"],
        "TRAIN_OUTPUT_DIR": str(folder.path.parent),
        "RUN": folder.name,
        "PORT": str(port),
        "DEVICE": "cpu",
        "HF_HOME": str(tmp_path / "no-cache"),
    }
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sft_play", "serve"],
            env=environ,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    found = Served(process, log, port, folder.name)
    deadline = time.monotonic() + STARTS_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        try:
            found.ask("/health")
            break
        except OSError:
            time.sleep(0.2)
    assert process.poll() is None, log.read_text()
    yield found
    process.kill()
    process.wait()


def test_the_model_is_listed_and_answers_under_the_name_of_its_run(served):
    status, models = served.ask("/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, [served.name])
    for asked in (served.name, None):
        status, answer = served.chat(asked)
        assert (status, answer["model"]) == (200, served.name)
        assert answer["choices"][0]["message"]["role"] == "assistant"
    status, error = served.chat("gpt-4o")
    assert status == 400 and served.name in error["detail"] and "gpt-4o" in error["detail"]
    status, error = served.ask("/load_model", {"model": "gpt-4o"})
    assert status == 404 and served.name in error["detail"]
    assert served.chat(served.name)[0] == 200


def test_the_printed_curl_line_works_as_it_is(served):
    (line,) = [line for line in served.log.read_text().splitlines() if line.startswith("curl ")]
    assert shlex.split(line)[1].endswith("/v1/chat/completions")
    done = subprocess.run(["bash", "-c", f"{line} -sS"], capture_output=True, text=True)
    assert json.loads(done.stdout)["model"] == served.name, done.stderr


def test_ctrl_c_ends_the_server_while_it_answers(served):
    with ThreadPoolExecutor() as pool:
        body = {"model": served.name, "prompt": "a", "max_tokens": 100_000}
        body["generation_config"] = json.dumps({"max_new_tokens": 100_000, "eos_token_id": -1})
        asked = pool.submit(served.ask, "/v1/completions", body)
        time.sleep(2)
        assert not asked.done()
        assert served.end() < 5
        assert asked.exception() is not None or asked.result()[0] >= 500
    assert "Traceback" not in served.log.read_text()


def test_many_clients_at_once_all_get_their_answers(served):
    """SERVE_SECONDS=60 takes a minute."""
    process = psutil.Process(served.process.pid)
    served.chat(served.name)
    memory: list[int] = []
    end = time.monotonic() + SECONDS

    def client(number: int) -> tuple[int, float]:
        count, longest = 0, 0.0
        while time.monotonic() < end:
            started = time.monotonic()
            status, answer = served.chat(served.name, 4 + number)
            assert status == 200 and answer["usage"]["completion_tokens"] <= 4 + number
            count += 1
            longest = max(longest, time.monotonic() - started)
            if number == 0:
                memory.append(process.memory_info().rss)
        return count, longest

    with ThreadPoolExecutor(CLIENTS) as pool:
        counts, longest = zip(*pool.map(client, range(CLIENTS)), strict=True)
    answers = [line for line in served.log.read_text().splitlines() if "completions HTTP" in line]
    assert len(answers) == sum(counts) + 1 and all(" 200" in line for line in answers)
    settled = memory[len(memory) // 2 :]
    first, last, most = memory[0] / 1e6, memory[-1] / 1e6, max(memory) / 1e6
    print(f"{sum(counts)} answers, the slowest in {max(longest):.2f} s")
    print(f"memory {first:.0f} MB at first, {last:.0f} MB at the end, {most:.0f} MB at most")
    assert max(settled) - min(settled) < 50e6
