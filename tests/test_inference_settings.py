"""What eval, infer and chat take from variables and --set, and what a chat on a terminal shows."""

import json
from contextlib import nullcontext
from functools import partial

import pytest
from terminals import called

from sft_play.data.rows import Message
from sft_play.evaluation.generate import Generator
from sft_play.inference import chat
from sft_play.inference.load import load_run
from sft_play.runs.files import read_json

TESTED = [("Say one.", "1"), ("Count to 9.", "1 2 3 4 5 6 7 8 9"), ("Count to 3.", "1 2 3")]


@pytest.fixture
def call(counting_run):
    """A function that runs a command on the run, in this process."""
    return partial(called, counting_run.path)


@pytest.fixture
def other_rows(tmp_path):
    """A CSV file of test rows with columns of its own; training has the second one."""
    lines = ["ask,say", *(f'"{question}","{answer}"' for question, answer in TESTED)]
    path = tmp_path / "held.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


# eval


def test_eval_scores_the_rows_of_data_test_path(call, counting_run, other_rows):
    result = call(
        "eval", DATA_TEST_PATH=str(other_rows), DATA_COLUMNS="{prompt: ask, completion: say}"
    )
    assert result.exit_code == 0, result.output
    first, warning, scores, answers = result.stdout.splitlines()
    assert first.startswith(f"test {other_rows} rows=3 used=3 dropped=0 tokens=")
    assert warning.startswith("warning: 1 of these rows were trained on")
    assert scores.endswith("rows=3") and answers.endswith("eval/held.jsonl")
    facts = read_json(counting_run.evaluation / "held.json")
    assert facts["test_path"] == str(other_rows) and facts["answers"] == facts["rows"] == 3
    assert facts["settings"]["data.columns"] == {"prompt": "ask", "completion": "say"}
    lines = (counting_run.evaluation / "held.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["expected"] for row in rows] == [answer for _, answer in TESTED]
    assert rows[0]["origin"].startswith(str(other_rows))
    assert sum(row["rougeL"] for row in rows) / 3 == pytest.approx(facts["rougeL"], abs=1e-4)
    assert rows[2]["rougeL"] == 1.0 and rows[2]["was_cut"] is False


def test_eval_takes_the_generation_settings(call, counting_run):
    result = call(
        *("eval", "--set", "train.generation_max_rows=2"),
        TRAIN_GENERATION_MAX_NEW_TOKENS="3",
        TRAIN_GENERATION_NUM_BEAMS="2",
        TRAIN_EVAL_BATCH_SIZE="1",
        TRAIN_METRICS="exact_match",
    )
    assert "exact_match=0.000" in result.stdout
    assert "answers=2 cut=2 at 3 tokens" in result.stdout
    facts = read_json(counting_run.evaluation / "again.json")
    assert facts["settings"] == {
        "train.predict_with_generate": True,
        "train.generation_max_new_tokens": 3,
        "train.generation_num_beams": 2,
        "train.generation_max_rows": 2,
        "train.metrics": ["exact_match"],
        "train.eval_batch_size": 1,
    }
    assert (facts["cut_answers"], facts["test_path"]) == (2, None)
    result = call("eval", TRAIN_PREDICT_WITH_GENERATE="false")
    assert "eval_loss=" in result.stdout and "rougeL" not in result.stdout


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({"TRAIN_GENERATION_NUM_BEAMS": "none"}, (), "train.generation_num_beams=none"),
        ({"DATA_COLUMNS": "{prompt: ask}"}, (), "DATA_TEST_PATH"),
        ({}, ("--set", "train.epochs=3"), "--set train.epochs: "),
        ({}, ("--set", "train.beams=3"), "train.beams"),
        ({"TRAIN_GENERATION_MAX_NEW_TOKENS": "4096"}, (), "no room"),
    ],
)
def test_what_eval_cannot_take_is_an_error(call, variables, words, message):
    assert message in str(call("eval", *words, **variables).exception)


# infer and chat


def test_infer_takes_the_generation_settings_and_says_what_was_cut(call):
    result = call("infer", PROMPT="Count to 6.", TRAIN_GENERATION_MAX_NEW_TOKENS="3")
    assert result.exit_code == 0 and "1 2 3 4 5 6".startswith(result.stdout.strip())
    assert "cut at 3 tokens; TRAIN_GENERATION_MAX_NEW_TOKENS=6 lets it continue" in result.stderr
    assert call("infer", PROMPT="Count to 6.").stdout == "1 2 3 4 5 6\n"


def test_the_limit_of_infer_and_chat_is_generous_unless_the_run_named_one(
    call, counting_run, monkeypatch
):
    limits = []
    really = Generator.generate

    def generate(self, *arguments):
        limits.append(self.train.generation_max_new_tokens)
        return really(self, *arguments)

    monkeypatch.setattr(Generator, "generate", generate)
    call("infer", PROMPT="Count to 3.")
    call("chat", typed="Count to 3.\n")
    call("infer", PROMPT="Count to 3.", TRAIN_GENERATION_MAX_NEW_TOKENS="30")
    assert limits[0] == limits[1] > 400  # of 512 positions, less the prompt
    assert limits[2] == 30
    assert counting_run.read_config().train.generation_max_new_tokens == 64


def test_infer_takes_a_system_prompt(call, monkeypatch):
    asked = []
    said = chat.GeneratedAnswer("Yes.", was_cut=False)
    monkeypatch.setattr(chat, "next_turn", lambda _, messages: asked.append(messages) or said)
    call("infer", PROMPT="And?", DATA_SYSTEM_PROMPT="Be brief.")
    assert asked == [[Message("system", "Be brief."), Message("user", "And?")]]


@pytest.fixture
def terminal(counting_run, monkeypatch, capsys):
    """A function that types lines into a chat on a terminal; returns stdout and stderr."""

    def chat_on_terminal(*lines: str):
        left = iter(lines)
        monkeypatch.setattr("builtins.input", lambda sign: next(left))
        chat.chat_with(counting_run, "cpu", is_terminal=True)
        return capsys.readouterr()

    return chat_on_terminal


def test_a_chat_on_a_terminal_begins_with_what_it_talks_to(terminal, counting_run, taught_base):
    shown = terminal("/exit").out
    assert f"run     {counting_run.path} (lora, 1 steps)" in shown
    assert str(taught_base) in shown and "cpu, float32" in shown
    assert "64 tokens" in shown and "512" in shown and "/exit" in shown


def test_a_chat_obeys_its_commands(terminal):
    lines = terminal("/help", "/bogus", "/system Be brief.", "/reset", "/exit").out.splitlines()[6:]
    names = ["/help", "/reset", "/system", "/image", "/save", "/exit"]
    assert [line.split()[0] for line in lines[:6]] == names
    assert lines[6:] == [
        "/bogus is no command; /help lists them",
        "the conversation is empty, with your system message",
        "the conversation is empty",
    ]


def test_commands_change_what_the_model_is_asked(counting_run, monkeypatch):
    trained = load_run(counting_run, "cpu")
    speaker = chat.Speaker("tuned", trained, nullcontext, chat.system_messages(trained))
    talk = chat.Chat([speaker], [], "")
    asked = []
    said = chat.GeneratedAnswer("Yes.", was_cut=False)
    monkeypatch.setattr(chat, "next_turn", lambda _, turn, *__: asked.append(list(turn)) or said)
    lines = iter(["a", "/system Be brief.", "b", "c", "/reset", "d", "/system", "e", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    talk.run()
    system = Message("system", "Be brief.")
    yes = Message("assistant", "Yes.")
    users = {name: Message("user", name) for name in "abcde"}
    assert asked == [
        [users["a"]],
        [system, users["b"]],
        [system, users["b"], yes, users["c"]],
        [system, users["d"]],
        [users["e"]],
    ]


def test_an_answer_is_shown_while_it_is_generated(counting_run, monkeypatch, capsys):
    trained = load_run(counting_run, "cpu")
    shown = []
    printer = chat.AnswerPrinter(trained.tokenizer)
    really = printer.put
    monkeypatch.setattr(
        printer, "put", lambda ids: (really(ids), shown.append(capsys.readouterr().out))
    )
    found = chat.next_turn(trained, [Message("user", "Count to 6.")], printer)
    assert "".join(shown) + capsys.readouterr().out == "1 2 3 4 5 6\n"
    assert len([part for part in shown if part]) > 3, "it came in parts"
    assert printer.text == found.text
