"""chat and infer, driven as a person does: in a pseudo-terminal, and with files."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import psutil
import pytest
import torch
from terminals import SECONDS, Terminal, called, lines_of

from sft_play.errors import ConfigError, DataError, EnvironmentFault, StoppedOnRequest
from sft_play.evaluation.generate import Generator
from sft_play.inference import chat
from sft_play.runs.answer_file import AnswerFile
from sft_play.runs.files import read_json


@pytest.fixture
def terminal(counting_run):
    """Return a function that runs a command on the run in a terminal."""

    def run(*words: str, prepare: Callable[[], None] = lambda: None, **variables: str) -> Terminal:
        environ = {"RUN": str(counting_run.path), "DEVICE": "cpu", **variables}
        return Terminal(list(words), environ, prepare)

    return run


def slow_answers() -> None:
    """Let each token take so long that a person can interrupt."""
    really = chat.AnswerPrinter.put

    def put(self, ids) -> None:
        time.sleep(0.3)
        really(self, ids)

    chat.AnswerPrinter.put = put


def test_a_chat_in_a_terminal_edits_streams_stops_saves_and_leaves(terminal, tmp_path):
    saved = tmp_path / "talk.jsonl"
    talk = terminal("chat")
    assert "Ctrl-C stops an answer" in talk.wait_for("> ")
    left = "\x1b[D"
    talk.type(f"Count to .{left}3\n")  # the arrow goes back before the dot
    talk.wait_for("1 2 3\r\n")
    talk.type(f"/save {saved}\n/reset\n")
    assert f"saved {saved}" in talk.wait_for("the conversation is empty")
    talk.wait_for("> ")
    assert talk.exit_code("\x04") == 0  # Ctrl-D
    (row,) = lines_of(saved)
    assert [turn["content"] for turn in row["messages"]] == ["Count to 3.", "1 2 3"]


def test_ctrl_c_stops_an_answer_and_behind_it_leaves_the_chat(terminal):
    talk = terminal("chat", prepare=slow_answers)
    talk.wait_for("> ")
    talk.type("Count to 6.\n")
    talk.wait_for("1 2")
    talk.type("\x03")
    assert "6" not in talk.wait_for("stopped")
    talk.wait_for("> ")
    assert talk.exit_code("\x03") == 0


def test_compare_answers_with_base_and_tuned_model(terminal, counting_run, monkeypatch):
    talk = terminal("chat", COMPARE="1")
    talk.wait_for("> ")
    talk.type("Count to 3.\n")
    talk.wait_for("base:")
    assert "1 2 3" in talk.wait_for("tuned:")
    talk.wait_for("1 2 3\r\n")
    talk.type("/exit\n")
    assert talk.exit_code() == 0


def test_the_base_of_a_comparison_is_the_model_without_its_adapter(counting_run):
    trained = chat.load_run(counting_run, "cpu").sampled(chat.NOTHING_ASKED)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for name, tensor in trained.model.named_parameters():
            if "lora_B" in name:
                tensor.fill_(0.1)
        tuned = trained.model(ids).logits
        with chat.base_of(trained)[1]():
            base = trained.model(ids).logits
        trained.model.unload()
        plain = trained.model.get_base_model()(ids).logits
    assert torch.equal(base, plain) and not torch.equal(base, tuned)


# Files


@pytest.fixture
def infer(counting_run, tmp_path):
    """A function that answers a file of lines, and returns what was printed."""

    def run(text: str, name: str = "asked.jsonl", **variables: str):
        asked = tmp_path / name
        asked.write_text(text)
        files = {"IN": asked, "OUT": tmp_path / "out.jsonl"}
        return called(counting_run.path, "infer", **(files | variables))

    return run


def asked(*numbers: int) -> str:
    return "".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in numbers)


def counted(number: int) -> str:
    return " ".join(map(str, range(1, number + 1)))


NUMBERS = (6, 3, 1, 6, 3)


def test_each_prompt_of_a_file_has_a_line_in_order(infer, tmp_path):
    done = infer(asked(*NUMBERS))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"answers {tmp_path / 'out.jsonl'} rows=5\n"
    found = lines_of(tmp_path / "out.jsonl")
    assert [line["answer"] for line in found][:2] == [counted(6), counted(3)]
    assert [line["prompt"] for line in found] == [f"Count to {n}." for n in NUMBERS]
    assert found[1]["origin"].endswith("asked.jsonl:2") and found[1]["was_cut"] is False
    assert infer(asked(*NUMBERS)).stdout == done.stdout, "what is complete is not asked again"
    other = infer(asked(*NUMBERS), TRAIN_GENERATION_MAX_NEW_TOKENS="3").exception
    assert isinstance(other, ConfigError) and "answers of another call are there" in str(other)


def test_a_call_that_was_stopped_goes_on_and_drops_half_a_line(infer, tmp_path, monkeypatch):
    really = Generator.generate
    calls = []

    def generate(self, model, prompts, **rest):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return really(self, model, prompts, **rest)

    monkeypatch.setattr(Generator, "generate", generate)
    stopped = infer(asked(*NUMBERS), TRAIN_GENERATION_BATCH_SIZE="1")
    assert isinstance(stopped.exception, StoppedOnRequest)
    assert "2 of 5 prompts are answered; the same command continues" in str(stopped.exception)
    file = AnswerFile(tmp_path / "out.jsonl")
    (part,) = file.parts.glob("*.jsonl")
    with part.open("ab") as broken:
        broken.write(b'{"number": 4, "ans')
    calls.append(0)
    assert infer(asked(*NUMBERS), TRAIN_GENERATION_BATCH_SIZE="2").exit_code == 0
    assert calls[4:] == [2, 1], "three are left"
    assert [line["answer"] for line in lines_of(file.path)][3:] == [counted(6), counted(3)]
    assert not file.parts.exists()


def test_prompts_come_from_conversations_texts_and_rows_with_answers(infer, tmp_path):
    texts = {"system": "Count.", "user": "Count to 3."}
    turns = [{"role": role, "content": text} for role, text in texts.items()]
    records = [
        {"messages": turns},
        {"messages": [*turns, {"role": "assistant", "content": "1 2 3"}]},
        {"question": "Count to 3.", "answer": "1 2 3"},
        {"instruction": "Count", "input": "to 3."},
        {"prompt": turns[1:]},
    ]
    assert infer("".join(json.dumps(record) + "\n" for record in records)).exit_code == 0
    found = lines_of(tmp_path / "out.jsonl")
    assert [line.get("expected") for line in found] == [None, "1 2 3", "1 2 3", None, None]
    assert found[0]["messages"] == found[1]["messages"] == turns
    assert found[0]["answer"] == found[1]["answer"]
    prompts = ["Count to 3.", "Count\n\nto 3.", "Count to 3."]
    assert [line.get("prompt") for line in found[2:]] == prompts
    out = tmp_path / "lines.jsonl"
    assert infer("Count to 3.\n\nCount to 6.\n", "asked.txt", OUT=str(out)).exit_code == 0
    assert [line["answer"] for line in lines_of(out)] == [counted(3), counted(6)]


def test_what_asks_nothing_is_an_error_and_what_is_too_long_a_reason(infer, tmp_path):
    bad = infer('{"prompt": "a"}\n{"other": 1}\n').exception
    assert isinstance(bad, DataError) and "asked.jsonl:2" in str(bad)
    long = json.dumps({"prompt": "Count to 3. " * 300}) + "\n"
    done = infer(asked(3) + long)
    assert done.stdout.startswith("warning: 1 prompts have no answer; their lines say why")
    first, second = lines_of(tmp_path / "out.jsonl")
    assert first["answer"] == counted(3)
    assert second["answer"] is None and "the model takes 512" in second["error"]


def test_sampling_is_asked_for_by_variables_and_repeats_with_its_seed(infer, tmp_path):
    def answers(name: str, **variables: str) -> list[object]:
        out = tmp_path / f"{name}.jsonl"
        done = infer(asked(*NUMBERS), OUT=str(out), **variables)
        assert done.exit_code == 0, done.output
        return [line["answer"] for line in lines_of(out)]

    hot = {"TEMPERATURE": "3", "TRAIN_GENERATION_MAX_NEW_TOKENS": "8"}
    first = answers("first", **hot)
    assert first == answers("again", **hot) != answers("other", SEED="1", **hot)
    assert len(set(first)) > 3
    wrong = infer(asked(3), TEMPERATURE="-1", TOP_P="2").exception
    assert isinstance(wrong, ConfigError)
    assert "TEMPERATURE=-1: write a number of at least 0" in str(wrong) and "TOP_P=2" in str(wrong)


def test_a_terminal_shows_a_bar_while_a_file_is_answered(terminal, tmp_path):
    (tmp_path / "asked.jsonl").write_text(asked(*NUMBERS))
    out = tmp_path / "out.jsonl"
    call = terminal("infer", IN=str(tmp_path / "asked.jsonl"), OUT=str(out))
    assert "answering: 100%" in call.wait_for(f"answers {out} rows=5")
    assert call.exit_code() == 0


@pytest.mark.long
def test_several_processes_share_a_file(infer, tmp_path):
    done = infer(asked(*NUMBERS), NUM_GPUS="2")
    assert done.exit_code == 0, done.output
    alone = tmp_path / "alone.jsonl"
    assert infer(asked(*NUMBERS), OUT=str(alone)).exit_code == 0
    assert (tmp_path / "out.jsonl").read_text() == alone.read_text()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_of_a_command_that_is_ended(counting_run, tmp_path, number):
    (tmp_path / "asked.jsonl").write_text(asked(*NUMBERS) * 2000)
    names = {"IN": "asked.jsonl", "OUT": "out.jsonl"}
    environ = {name: str(tmp_path / file) for name, file in names.items()}
    environ |= {"RUN": str(counting_run.path), "DEVICE": "cpu", "NUM_GPUS": "2"}
    line = [sys.executable, "-m", "sft_play", "infer"]
    command = psutil.Popen(line, env={**os.environ, **environ}, start_new_session=True)
    deadline = time.monotonic() + SECONDS
    shares: list[psutil.Process] = []
    while len(shares) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        shares = command.children()
    assert len(shares) == 2
    command.send_signal(number)
    _, alive = psutil.wait_procs([command, *shares], timeout=SECONDS)
    for process in alive:
        process.kill()
    assert alive == []


@pytest.fixture
def evaluate(counting_run):
    """A function that scores the run, and returns what was printed."""
    return partial(called, counting_run.path, "eval")


def test_eval_scores_the_base_beside_the_run(evaluate, counting_run):
    done = evaluate(COMPARE="1", TRAIN_PREDICT_WITH_GENERATE="false")
    assert done.exit_code == 0, done.output
    tuned, base, _ = done.stdout.splitlines()
    assert tuned.startswith("run eval_loss=") and base.startswith("base eval_loss=")
    before = read_json(counting_run.path / "run.json")["metrics"]["before"]
    facts = read_json(counting_run.evaluation / "again.base.json")
    assert facts["eval_loss"] == pytest.approx(before["eval_loss"], abs=1e-6)
    again = read_json(counting_run.evaluation / "again.json")
    assert again["eval_loss"] != facts["eval_loss"]


@pytest.mark.long
def test_several_processes_share_the_rows_of_an_evaluation(evaluate, counting_run, capfd):
    assert evaluate().exit_code == 0
    alone = read_json(counting_run.evaluation / "again.json")
    done = evaluate(NUM_GPUS="2")
    assert done.exit_code == 0, done.output
    assert capfd.readouterr().out.count("eval_loss=") == 1, "the first process prints"
    shared = read_json(counting_run.evaluation / "again.json")
    assert shared["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)


def test_two_calls_do_not_write_the_same_answers_at_once(tmp_path):
    file = AnswerFile(tmp_path / "out.jsonl")
    other = AnswerFile(file.path)
    refused = pytest.raises(EnvironmentFault, match="another call writes these answers now")
    with file.held(), refused, other.held():
        pass
    with file.held():  # once it has ended
        file.append_to_part(0).write([(0, {"answer": "yes"})])
        assert file.answered() == {0}
        file.finish(1)
    assert file.is_complete() and not file.parts.exists()
