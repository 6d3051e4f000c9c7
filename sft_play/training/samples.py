"""Some answers of an evaluation, to be shown. Pure."""

from collections.abc import Sequence

from sft_play.evaluation.scores import GenerationScores, Question
from sft_play.runs.metrics import SampleAnswer

SAMPLES = 3


def sample_indices(count: int) -> list[int]:
    """Return the indices of up to three rows, spread over the set."""
    if count == 0:
        return []
    return sorted({i * count // SAMPLES for i in range(SAMPLES)})


def sample_answers(questions: Sequence[Question], scores: GenerationScores) -> list[SampleAnswer]:
    """Return up to three answers, spread over the set, each with its question."""
    answers = []
    for index in sample_indices(len(scores.answers)):
        question = questions[index]
        answer = scores.answers[index].text
        answers.append(SampleAnswer(question.plain_prompt, question.expected, answer))
    return answers
