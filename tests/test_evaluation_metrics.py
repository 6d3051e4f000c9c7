"""Scores of answers by name: each of a few known answers, intervals, and the user's own function."""

import json
import socket

import pytest
from rouge_score.rouge_scorer import RougeScorer

from sft_play.config import metrics as names
from sft_play.errors import ConfigError
from sft_play.evaluation.generate import GeneratedAnswer
from sft_play.evaluation.scores import Answered, GenerationScores, rouge, score_answers

ANSWERS = ["the cat sat on the mat", "", "one two", "Completely different words", "a b c d"]
EXPECTED = ["the cat is on the mat", "something", "one two", "nothing shared here", "d c b a"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("scoring opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def scored(metric: str, answers=ANSWERS, expected=EXPECTED):
    rows = [
        Answered(f"prompt {number}", *pair)
        for number, pair in enumerate(zip(answers, expected, strict=True))
    ]
    (found,) = score_answers([metric], rows)
    return found


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_that_of_the_rouge_score_package(kind):
    scorer = RougeScorer([kind])
    by_hand = [
        scorer.score(reference, answer)[kind].fmeasure
        for answer, reference in zip(ANSWERS, EXPECTED, strict=True)
    ]
    found = scored(kind)
    assert list(found.of_answers) == by_hand and found.name == kind
    assert found.estimate.mean == pytest.approx(sum(by_hand) / 5)


def test_exact_match_is_of_whole_answers():
    assert scored("exact_match").of_answers == (0.0, 0.0, 1.0, 0.0, 0.0)
    assert scored("exact_match", ["A"], ["a"]).of_answers == (0.0,)


def test_json_is_valid_as_it_stands_and_fits_a_schema(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "required": ["city"]}))
    answers = ['{"city": "Rome"}', '{"town": 1}', "null", "{city: Rome}", '{"a": NaN}']
    valid = scored("json_valid", answers, answers)
    assert valid.of_answers == (1.0, 1.0, 1.0, 0.0, 0.0)
    fits = scored(f"json_schema:{schema}", answers, answers)
    assert fits.of_answers == (1.0, 0.0, 0.0, 0.0, 0.0) and fits.name == "json_schema"


def test_a_function_of_the_users_scores_each_answer(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def shorter(answer, expected):\n    return len(answer) < len(expected)\n\n"
        "def asked(answer, expected, prompt):\n    return int(prompt.split()[1])\n\n"
        "def broken(answer, expected):\n    return 1 / len(answer)\n\n"
        "def nothing(answer, expected):\n    return float('nan')\n"
    )
    assert scored(f"{file}:shorter").of_answers == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert scored(f"{file}:asked").of_answers == (0.0, 1.0, 2.0, 3.0, 4.0)
    with pytest.raises(ConfigError, match=r"for the answer '': ZeroDivisionError: "):
        scored(f"{file}:broken")
    with pytest.raises(ConfigError, match="nan for the answer"):
        scored(f"{file}:nothing")


def test_scores_of_ten_answers_have_an_interval_that_repeats():
    answers = ["one two", "one"] * 10
    found = scored("exact_match", answers, ["one two"] * 20).estimate
    assert found.mean == 0.5 and 0.2 <= found.low < 0.5 < found.high <= 0.8
    assert found == scored("exact_match", answers, ["one two"] * 20).estimate
    assert scored("exact_match").estimate.low is None, "five are too few"


def test_the_scores_of_an_evaluation_carry_names_and_intervals():
    answers = ["one two", "one"] * 10
    generation = GenerationScores(
        scores=(
            rouge("rougeL", answers, ["one two"] * 20),
            scored("exact_match", answers, ["one two"] * 20),
        ),
        answers=tuple(GeneratedAnswer(text, was_cut=False) for text in answers),
        max_new_tokens=8,
        seconds=1.0,
    )
    found = generation.as_metrics()
    assert found["exact_match"] == 0.5 and found["exact_match_low"] < 0.5 < found["rougeL_high"]
    assert "exact_match=0.500 [0." in generation.as_text()


def test_bleu_and_chrf_without_sacrebleu_say_what_to_install(monkeypatch):
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    expected = "bleu needs sacrebleu, which is not installed: pip install sacrebleu"
    assert names.find_metric_problems(["bleu"]) == [expected]


def test_bleu_and_chrf_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["the cat sat on the mat today", "a dog ran in the park"] * 6
    expected = ["the cat is on the mat today", "a dog ran in the green park"] * 6
    for name, score in (("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)):
        found = scored(name, answers, expected)
        assert found.estimate.mean == pytest.approx(score(answers, [expected]).score)
        assert found.estimate.low < found.estimate.mean < found.estimate.high
        assert found == scored(name, answers, expected) and len(found.of_answers) == 12
