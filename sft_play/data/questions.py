"""The rows whose answers are generated, and how long those answers may become. Loads no torch."""

from collections.abc import Iterable

import numpy as np

from sft_play.data.store import Split

MIN_ANSWER_TOKENS = 64
MAX_ANSWER_TOKENS = 1024  # an untrained base may run on to the limit in every answer
TOKENS_STEP = 16


def question_indices(split: Split, max_rows: int | None) -> np.ndarray:
    """Return the first samples that end in an answer to a prompt; None for `max_rows` is all."""
    has_answer = np.flatnonzero(split.records["answer_start"])
    return has_answer[:max_rows]


def answer_token_limit(splits: Iterable[Split], max_rows: int | None, max_seq_len: int) -> int:
    """Return how many tokens the generated answers to the rows of `splits` may have.

    It is the longest answer of those rows and a quarter more, so that a right answer ends before
    it. Prompt and answer stay within `max_seq_len` tokens, unless that would cut the longest one.
    """
    longest_answer = 0
    longest_prompt = 0
    for split in splits:
        indices = question_indices(split, max_rows)
        if len(indices):
            prompts = split.records["answer_start"][indices]
            answers = split.lengths[indices] - prompts
            longest_prompt = max(longest_prompt, int(prompts.max()))
            longest_answer = max(longest_answer, int(answers.max()))
    with_room = longest_answer + longest_answer // 4
    rounded = -(-with_room // TOKENS_STEP) * TOKENS_STEP
    wanted = min(max(rounded, MIN_ANSWER_TOKENS), MAX_ANSWER_TOKENS)
    room = max(longest_answer, max_seq_len - longest_prompt)
    return max(1, min(wanted, room))
