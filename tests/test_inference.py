"""Use of a finished run: eval, infer, chat, and merging it into a plain model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from marks import long
from run_files import run_json
from typer.testing import CliRunner

from sft_play import cli
from sft_play.data.rows import Message
from sft_play.errors import CheckpointError, ExitClass
from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.generate import GeneratedAnswer
from sft_play.inference import chat
from sft_play.inference.evaluate import evaluate_run, prepared_data
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models import expert_adapters
from sft_play.runs.files import read_json

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def answering(train_run, taught_base):
    """A lora run on a base that answers: `Count to 6.` and its like."""
    folder = train_run(
        {
            "model.name": taught_base,
            "train.learning_rate": 1e-4,
            "train.predict_with_generate": True,
            "train.generation_max_new_tokens": 24,
        }
    )
    return folder


def typed_lines(*lines: str):
    """Return an `input` that a person would give: lines, then the end of the file."""
    left = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


# Scoring again


@pytest.mark.parametrize("mode", ["lora", "full", "qlora"])
def test_eval_finds_the_scores_that_the_run_ended_with(finished, mode):
    folder = finished(mode)
    after = run_json(folder)["metrics"]["after"]
    line, answers = evaluate_run(folder, "cpu")
    assert answers == f"answers {folder.evaluation / 'again.jsonl'}"
    again = read_json(folder.evaluation / "again.json")
    assert again["eval_loss"] == pytest.approx(
        after["eval_loss"], abs=1e-6
    )  # the same float32 sums
    assert again["rougeL"] == after["rougeL"]
    assert (
        line == f"run eval_loss={after['eval_loss']:.4f} rougeL={after['rougeL']:.3f} answers=4 "
        f"cut={after['cut_answers']} at 8 tokens rows=6"
    )


def test_eval_of_answers_that_differ_finds_their_scores_too(answering):
    after = run_json(answering)["metrics"]["after"]
    evaluate_run(answering, "cpu")
    again = read_json(answering.evaluation / "again.json")
    assert again["rougeL"] == after["rougeL"] > 0.9
    assert again["eval_loss"] == pytest.approx(after["eval_loss"], abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", long("qlora")])
def test_eval_of_a_bfloat16_run_gives_the_answers_that_the_run_ended_with(
    train_run, taught_base, mode
):
    half_taught_away = {  # answers whose next token is often a close call
        "model.name": taught_base,
        "tuning.mode": mode,
        "train.bf16": True,
        "train.max_steps": 6,
        "train.predict_with_generate": True,
        "train.generation_max_new_tokens": 48,
        "train.generation_max_rows": None,
    }
    folder = train_run(half_taught_away)
    after = run_json(folder)["metrics"]["after"]
    lines = (folder.evaluation / "after.jsonl").read_text().splitlines()
    evaluate_run(folder, "cpu")
    again = read_json(folder.evaluation / "again.json")
    assert again["rougeL"] == after["rougeL"] and 0 < after["rougeL"] < 1
    assert again["eval_loss"] == pytest.approx(after["eval_loss"], abs=1e-6)
    trained = load_run(folder, "cpu")
    test = prepared_data(folder, trained.config, trained.tokenizer).test
    evaluator = Evaluator(test, trained.tokenizer, trained.config.train, trained.process)
    answers = [answer.text for answer in evaluator.answers(trained.model)]
    assert answers == [json.loads(line)["answer"] for line in lines]
    assert (folder.evaluation / "again.jsonl").read_text().splitlines() == lines


# Answers


def test_a_run_with_flash_attention_2_answers_where_it_cannot_be_used(copied, caplog):
    config = copied.read_config()
    asked = config.model.model_copy(update={"attn_implementation": "flash_attention_2"})
    trained = load_run(copied, "cpu", config.model_copy(update={"model": asked}))
    assert trained.model.config._attn_implementation == "sdpa"
    assert "model.attn_implementation=flash_attention_2 of the run needs a GPU" in caplog.text


def test_the_conversation_so_far_is_part_of_a_chats_prompt(answering, monkeypatch, capsys):
    asked = []
    really = chat.next_turn
    monkeypatch.setattr("builtins.input", typed_lines("Count to 3.", "Count to 6."))
    said = lambda messages: [{"role": turn.role, "content": turn.content} for turn in messages]  # noqa: E731
    monkeypatch.setattr(
        chat,
        "next_turn",
        lambda loaded, messages, printer=None: (
            asked.append(said(messages)) or really(loaded, messages, printer)
        ),
    )
    chat.chat_with(answering, "cpu")
    first = {"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": "1 2 3"}
    assert asked == [[first[0]], [*first, {"role": "user", "content": "Count to 6."}]]
    replies = capsys.readouterr().out.splitlines()
    loaded = load_run(answering, "cpu")
    conversation = [Message(**turn) for turn in asked[1]]
    assert replies == ["1 2 3", *chat.next_turn(loaded, conversation).text.splitlines()]


def test_the_system_prompt_of_the_run_goes_before_every_question(train_run, monkeypatch):
    folder = train_run({"data.system_prompt": "Be brief.", "train.predict_with_generate": False})
    asked = []
    said = GeneratedAnswer("Yes.", was_cut=False)
    monkeypatch.setattr(chat, "next_turn", lambda _, messages, *__: asked.append(messages) or said)
    monkeypatch.setattr("builtins.input", typed_lines("And this?"))
    list(chat.answer_all(folder, "cpu", ["Count to 3.", "And that?"]))
    chat.chat_with(folder, "cpu")
    system = Message("system", "Be brief.")
    assert asked[:2] == [
        [system, Message("user", "Count to 3.")],
        [system, Message("user", "And that?")],
    ]
    assert asked[2][:2] == [system, Message("user", "And this?")]


@pytest.fixture
def command(answering, monkeypatch):
    """Return a function that runs a command on the run with given input and returns its output."""

    def run(name: str, typed: str = "", **variables: str) -> str:
        result = CliRunner().invoke(
            cli.app,
            [name],
            input=typed,
            env={"RUN": str(answering.path), "DEVICE": "cpu", **variables},
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_infer_answers_prompt_or_else_each_line_of_standard_input(command):
    assert command("infer", PROMPT="Count to 3.") == "1 2 3\n"
    assert command("infer", "Count to 6.\n\nCount to 3.\n", PROMPT="") == "1 2 3 4 5 6\n1 2 3\n"


def test_chat_takes_turns_from_standard_input(command):
    shown = command("chat", "Count to 3.\nCount to 6.\n")
    assert shown.startswith("1 2 3\n") and ">" not in shown


@pytest.mark.long
def test_make_infer_shows_the_answer_and_nothing_else(answering):
    words = {
        "RUN": str(answering.path),
        "DEVICE": "cpu",
        "PY": sys.executable,
        "PROMPT": "Count to 3.",
    }
    command = ["make", "infer", *(f"{name}={value}" for name, value in words.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 2 3\n", "")


# What cannot be used


def test_a_run_without_weights_is_class_12_with_its_status(plan_run):
    folder = plan_run({})
    with pytest.raises(CheckpointError, match=r"no adapter/: .* planned; .*RUN="):
        load_run(folder, "cpu")
    with pytest.raises(CheckpointError, match="has no adapter/: the run's status is"):
        merge_run(folder)


@pytest.mark.parametrize("name", ["stamp.json", "adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_lacks_a_file_is_class_12(copied, name):
    (copied.weights("lora") / name).unlink()
    with pytest.raises(CheckpointError):
        load_run(copied, "cpu")


def test_an_adapter_that_finds_no_memory_is_not_taken_for_a_damaged_one(copied, monkeypatch):
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(expert_adapters, "load_frozen_adapter", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        load_run(copied, "cpu")


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (torch.OutOfMemoryError("CUDA: tried 2 GiB\nmore"), ["CUDA: tried 2 GiB", "DEVICE=cpu"]),
        (MemoryError(), ["MemoryError", "make memory-check"]),
    ],
)
def test_a_command_that_runs_out_of_memory_is_class_15_with_one_sentence(error, facts, capsys):
    with pytest.raises(SystemExit) as end, cli._errors_as_messages():
        raise error
    assert end.value.code == ExitClass.OUT_OF_MEMORY
    said, exit_class = capsys.readouterr().err.splitlines()
    assert all(fact in said for fact in facts) and exit_class == "exit class 15 (out_of_memory)"
    with pytest.raises(RuntimeError, match="shapes"), cli._errors_as_messages():
        raise RuntimeError("shapes differ")
