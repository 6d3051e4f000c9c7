"""Scores depend only on the model and the rows, and an evaluation does not change the model."""

import contextlib
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from casts import Casts
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from rouge_score.tokenizers import DefaultTokenizer
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from sft_kernels.loss.head import fuse_loss
from sft_kernels.modules import decoder_of
from sft_kernels.process import Process
from sft_play.config.schema import Config, TrainSection
from sft_play.data.render import IGNORE_INDEX, RenderedSample, render_prompt
from sft_play.data.row_hashes import RowHashes
from sft_play.data.rows import Message
from sft_play.data.splits import answer_token_limit, drawn
from sft_play.data.store import Split, Store, StoredSample, StoreWriter, to_arrays
from sft_play.errors import DivergedError
from sft_play.evaluation import generate
from sft_play.evaluation.evaluator import EvaluationStopped, Evaluator
from sft_play.evaluation.generate import (
    GeneratedAnswer,
    Generator,
    Room,
    split_batches,
    take_rank_share,
)
from sft_play.evaluation.rouge import UnicodeTokenizer
from sft_play.evaluation.scores import rouge
from sft_play.models.fast import install_fused_kernels
from sft_play.plan.run_plan import read_plan
from sft_play.progress import Stage
from sft_play.training.callbacks import EvalSpeedCallback

HERE = Process.alone(torch.device("cpu"))


@pytest.fixture(scope="module")
def split(prepared_rows) -> Split:
    """Six rows; neither their prompts nor their answers are of one length."""
    return prepared_rows.validation


@pytest.fixture(scope="module")
def records(rows) -> list[dict[str, str]]:
    """The same as they stand in the file."""
    return [json.loads(line) for line in rows["val"].read_text().splitlines()]


@pytest.fixture(scope="module")
def model(taught_base):
    """A model whose answers end, differ, and are longer for longer questions."""
    return AutoModelForCausalLM.from_pretrained(taught_base).eval()


@pytest.fixture(scope="module")
def untrained(tiny_base):
    """The tiny model as it is: its loss is far from 0, where float32 would leave few digits."""
    return AutoModelForCausalLM.from_pretrained(tiny_base).eval()


def evaluator(split, tokenizer, process=HERE, **changes) -> Evaluator:
    settings = {"eval_batch_size": 3, "generation_max_new_tokens": 24, "generation_max_rows": None}
    return Evaluator(
        split, tokenizer, TrainSection.model_validate({**settings, **changes}), process
    )


def texts(answers: Sequence[GeneratedAnswer]) -> list[str]:
    return [answer.text for answer in answers]


# Loss


def test_a_loss_that_is_not_finite_names_the_weight_that_is_not(tiny_base, split, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(
        DivergedError, match=r"eval_loss=nan .*model\.norm\.weight has NaN .* get the model again"
    ):
        evaluator(split, tokenizer).score(model)


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_loss_is_the_mean_over_all_labelled_tokens_row_by_row(
    tiny_base, split, tokenizer, is_fused
):
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    alone = []
    for row in split:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(row.ids[None])).logits[0]
        scores = logits.double().log_softmax(-1)
        labelled = [(t, id_) for t, id_ in enumerate(row.labels[1:]) if id_ != IGNORE_INDEX]
        assert len(labelled) == row.trained_tokens
        alone.append(-sum(scores[t, id_].item() for t, id_ in labelled))
    if is_fused:
        fuse_loss(model)
    found = evaluator(split, tokenizer, eval_batch_size=4, predict_with_generate=False).score(model)
    assert [row.nats for row in found.row_losses] == pytest.approx(alone, rel=1e-5)
    tokens = [row.tokens for row in found.row_losses]
    assert tokens == [row.trained_tokens for row in split]
    assert found.eval_loss == pytest.approx(sum(alone) / sum(tokens), rel=1e-6)  # float32 logits
    assert found.generation is None
    assert found.as_metrics().keys() == {"eval_loss", "eval_loss_seconds"}


@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", "gpt_oss", "qwen3_5", "deepseek_v3", "gpt2"]
)
def test_padded_rows_are_scored_without_a_mask_by_the_attention_of_training(
    split, tokenizer, model_type, monkeypatch
):
    model = tiny_model(model_type).eval()
    scored = evaluator(split, tokenizer, eval_batch_size=4, predict_with_generate=False)
    own = [row.nats for row in scored.score(model).row_losses]
    kernels = install_fused_kernels(model, Config(), HERE)
    assert "attention" in kernels.on, kernels.off
    code = sys.modules[type(decoder_of(model)).__module__]
    monkeypatch.setattr(code, "eager_attention_forward", None, raising=False)
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_without_mask(*args: torch.Tensor, attn_mask: None = None, **kwargs: Any) -> Any:
        assert attn_mask is None
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, attend.__name__, attend_without_mask)
    rows = scored.score(model.eval()).row_losses
    assert [row.nats for row in rows] == pytest.approx(own, rel=1e-5)


# Samples, if all rows would take too long


def test_a_sample_is_the_same_each_time_and_a_smaller_one_is_a_part_of_it():
    rows = np.arange(100, 200)
    assert drawn(rows, 100).tolist() == drawn(rows, 500).tolist() == rows.tolist()
    few, more = drawn(rows, 10).tolist(), drawn(rows, 30).tolist()
    assert len(few) == 10 and few == sorted(few) and set(few) < set(more) < set(rows.tolist())
    assert few == drawn(rows, 10).tolist() != rows[:10].tolist()


def test_rows_of_a_sample_score_as_they_do_among_all(model, split, tokenizer):
    whole = evaluator(split, tokenizer).score(model)
    part = evaluator(split, tokenizer)
    part.limit(4, 2)
    scores = part.score(model)
    indices = drawn(np.arange(len(split)), 4).tolist()
    assert [row.nats for row in scores.row_losses] == pytest.approx(
        [whole.row_losses[index].nats for index in indices], rel=1e-5
    )
    answered = drawn(np.arange(len(split)), 2).tolist()
    assert part.question_indices == answered
    assert scores.generation.answers == tuple(whole.generation.answers[i] for i in answered)


# Answers


def test_answers_come_in_the_order_of_the_rows_whatever_the_batch_size(
    model, split, tokenizer, records
):
    alone = texts(evaluator(split, tokenizer, generation_batch_size=1).answers(model))
    assert len(alone) == len(split) and len(set(alone)) > 1, (
        "a model that always says one thing proves nothing"
    )
    for batch_size in (2, 3, 5, None):
        batched = evaluator(split, tokenizer, generation_batch_size=batch_size)
        assert texts(batched.answers(model)) == alone
    for record, answer in zip(records, alone, strict=True):
        ids = torch.tensor([render_prompt([Message("user", record["question"])], tokenizer)])
        generated = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(generated, skip_special_tokens=True).strip()


@pytest.mark.parametrize("most", [1, 4])
def test_no_answer_is_longer_than_generation_max_new_tokens(model, split, tokenizer, most):
    answers = texts(evaluator(split, tokenizer, generation_max_new_tokens=most).answers(model))
    lengths = [len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers]
    assert max(lengths) <= most and max(lengths) == most, lengths


def test_a_model_that_answers_as_it_should_scores_1(model, split, tokenizer, records, monkeypatch):
    answers = evaluator(split, tokenizer).answers(model)
    assert texts(answers) == [record["answer"] for record in records], "it was taught these rows"
    generation = evaluator(split, tokenizer).score(model).generation
    assert generation.scores[0].estimate.mean == 1.0 and set(generation.scores[0].of_answers) == {
        1.0
    }
    wrong = GeneratedAnswer("nothing of it", was_cut=False)
    monkeypatch.setattr(Evaluator, "answers", lambda *_: [wrong] * len(split))
    assert evaluator(split, tokenizer).score(model).generation.scores[0].estimate.mean == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_accumulation_steps": 2},
        {"eval_accumulation_steps": 50},
        {"eval_do_concat_batches": True},
    ],
)
def test_how_answers_are_held_changes_no_score(model, split, tokenizer, changes):
    short = {
        "generation_batch_size": 2,
        "generation_max_new_tokens": 5,
    }  # too short for most answers
    plain = evaluator(split, tokenizer, **short).score(model)
    held = evaluator(split, tokenizer, **short, **changes).score(model)
    assert held.eval_loss == plain.eval_loss
    assert held.generation.answers == plain.generation.answers
    expected = plain.generation.scores[0].estimate.mean
    assert held.generation.scores[0].estimate.mean == pytest.approx(expected, abs=1e-12)
    assert 0 < expected < 1, "an extreme score would hide a difference"


def test_answers_without_a_stop_token_are_counted_as_cut(model, split, tokenizer, records):
    limit = 12
    generation = (
        evaluator(split, tokenizer, generation_max_new_tokens=limit).score(model).generation
    )
    for record, answer in zip(records, generation.answers, strict=True):
        assert answer.was_cut == (answer.text != record["answer"])
    assert 0 < generation.cut_answers < len(split)
    assert generation.as_metrics()["cut_answers"] == generation.cut_answers
    expected = f"answers={len(split)} cut={generation.cut_answers} at {limit} tokens"
    assert generation.as_text().endswith(expected)


# Batches of prompts


def test_prompts_are_answered_longest_first_as_many_at_once_as_the_memory_holds():
    # half of 4,000 bytes: 20 for a prompt's scores, 2 a token of its cache, 3 a token that is read
    room = Room(4000, cached_token_bytes=2, read_token_bytes=3, prompt_bytes=20, most=8)
    assert room.prompts(prompt_tokens=100, new_tokens=90) == 2000 // (2 * 190 + 300 + 20) == 2
    assert room.prompts(10, 10) == 8 and room.prompts(10_000, 1) == 1
    lengths = [10, 100, 10, 99, 98, 10]
    assert split_batches(lengths, lambda tokens: room.prompts(tokens, 90)) == [
        [1, 3],
        [4, 0],
        [2, 5],
    ]
    assert split_batches(lengths, lambda _: 99, world_size=4) == [[1, 3], [4, 0], [2, 5]]


def test_prompts_that_do_not_fit_are_answered_in_halves(model, split, tokenizer, monkeypatch):
    whole = evaluator(split, tokenizer)
    expected = whole.answers(model)
    really = model.generate

    def generate(**options):
        if len(options["input_ids"]) > 2:
            raise torch.OutOfMemoryError
        return really(**options)

    monkeypatch.setattr(model, "generate", generate)
    assert whole.answers(model) == expected
    whole.generator = replace(whole.generator, synced_gpus=True)
    with pytest.raises(torch.OutOfMemoryError):
        whole.answers(model)


def test_a_stop_ends_a_batch_of_answers_at_the_next_token(model, split, tokenizer, monkeypatch):
    stopped = evaluator(split, tokenizer, generation_max_new_tokens=24)
    widths = []
    really = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **options: (ids := really(**options), widths.append(ids.shape))[0]
    )
    stopped.is_stopping = lambda: True
    with pytest.raises(EvaluationStopped):
        stopped.answers(model)
    ((_, width),) = widths
    assert width == max(len(split[index].prompt) for index in range(len(split))) + 1


def test_the_lines_of_answers_count_tokens_and_say_what_leaves_them_out(
    model, split, tokenizer, monkeypatch
):
    made = evaluator(split, tokenizer, generation_max_new_tokens=5)
    stages: list[Stage] = []
    lines: list[str] = []
    monkeypatch.setattr(
        "sft_play.evaluation.evaluator.watched_stage",
        lambda stage, _: (stages.append(stage), contextlib.nullcontext(stage))[1],
    )

    def within_a_batch() -> bool:
        lines.append(stages[0].line())
        stages[0].started_at -= 5  # a token takes 5 s here
        return False

    made.is_stopping = within_a_batch
    made.answers(model)
    assert re.search("0/.* 5 s so far, token 2 of at most 5$", lines[1])
    assert "TRAIN_PREDICT_WITH_GENERATE=false" in lines[-1]


# How long generated answers may become


def test_a_run_is_given_a_number_for_auto(plan_run):
    folder = plan_run({"train.generation_max_new_tokens": "auto"})
    assert folder.read_config().train.generation_max_new_tokens == 64
    assert read_plan(folder).has_auto_answer_limit
    assert not read_plan(plan_run({})).has_auto_answer_limit


@pytest.mark.parametrize(
    ("answers", "max_seq_len", "limit"),
    [
        ([200, 40], 2048, 256),  # a quarter more is 250, in steps of 16
        ([40, 200], 2048, 64),  # only scored rows count: the first one here
        ([5000], 8192, 1024),
        ([], 2048, 64),
        ([200], 240, 230),  # prompt and answer stay within max_seq_len
        ([30], 40, 30),
    ],
)
def test_the_answer_limit_follows_the_scored_rows(tmp_path, answers, max_seq_len, limit):
    samples = []
    for number, tokens in enumerate(answers):
        ids = [1] * (10 + tokens)
        labels = [IGNORE_INDEX] * 10 + ids[10:]
        rendered = RenderedSample(ids, labels, answer_start=10)
        samples.append(StoredSample(rendered, 0, number, RowHashes(number, number, number), 0))
    with StoreWriter(tmp_path) as writer:
        writer.append(to_arrays(samples))
    rows = Split.whole([Store(tmp_path)])
    assert answer_token_limit([rows], 1, max_seq_len) == limit


# Ranks: the scores of several processes are compared in test_distributed


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 9])
def test_ranks_share_each_row_once_in_equally_many_batches(world_size, batch_size):
    order = [4, 2, 0, 1, 5, 3]
    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    shares = [
        take_rank_share(batches, Process(rank, rank, world_size, HERE.device))
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    real = [index for share in shares for batch in share for index in batch if index >= 0]
    fillers = [index for share in shares for batch in share for index in batch if index < 0]
    assert sorted(real) == sorted(order)
    assert set(fillers) <= {~3}, "fillers repeat the last row, the shortest"


def test_a_rank_without_a_row_of_its_own_adds_nothing_to_the_loss(split, tokenizer):
    idle = evaluator(split, tokenizer, Process(1, 1, 2, HERE.device), eval_batch_size=6)
    assert [batch.tokens for batch in idle._loss_batches] == [[0]]


# ROUGE-L

ANSWERS = ["the cat sat on the mat", "", "one two", "Completely different words", "a b c d"]
REFERENCES = ["the cat is on the mat", "something", "One, two!", "nothing shared here", "d c b a"]


@pytest.mark.parametrize("batch_rows", [1, 2, 4, 99])
def test_rouge_l_in_batches_is_rouge_l_at_once(batch_rows):
    in_batches = rouge("rougeL", ANSWERS, REFERENCES, batch_rows)
    assert in_batches == rouge("rougeL", ANSWERS, REFERENCES)


SCRIPTS = [
    ("猫坐在垫子上", "猫在垫子上睡觉", 10 / 13),  # 5 of 6 and of 7 characters, in order
    ("ビールを飲む", "ビルを飲む", 10 / 11),
    ("Кот сидит на коврике", "кот спит на коврике!", 3 / 4),
    ("القطة على الحصيرة", "القطة تحت الحصيرة", 2 / 3),
    ("बिल्ली चटाई पर है", "बिल्ली चटाई पर थी", 3 / 4),
    ("고양이가 매트 위에", "고양이가 침대 위에", 2 / 3),
    ("η γάτα κοιμάται", "η γάτα τρώει", 2 / 3),
    ("ответ: 42", "ответ: 43", 1 / 2),
    ("й Й", "и\u0306 И\u0306", 1.0),
]


@pytest.mark.parametrize(("answer", "reference", "score"), SCRIPTS)
def test_rouge_l_reads_words_of_every_script(answer, reference, score):
    assert rouge("rougeL", [answer, answer], [answer, reference]).of_answers == (
        1.0,
        pytest.approx(score),
    )


def test_text_in_latin_script_has_the_words_of_the_rouge_score_package():
    letters = "abcXYZ019 \n.,-_'´éÉßøœİıñçµ²½ªº°€“”–…\u0301\u00a0ﬁＡ"
    random.seed(0)
    latin = UnicodeTokenizer()
    for _ in range(2000):
        text = "".join(random.choices(letters, k=30))
        assert latin.tokenize(text) == DefaultTokenizer().tokenize(text), text


# The model, before and after


def traits(model) -> dict[str, object]:
    """What an evaluation changes in a model, module by module."""
    return {
        "training": [module.training for module in model.modules()],
        "use_cache": model.config.use_cache,
        "checkpointing": [
            module.gradient_checkpointing
            for module in model.modules()
            if hasattr(module, "gradient_checkpointing")
        ],
    }


@pytest.mark.parametrize("error", [None, RuntimeError("in the middle of an evaluation")])
def test_a_model_is_after_an_evaluation_what_it_was_before_also_when_the_evaluation_fails(
    tiny_base, error
):
    model = AutoModelForCausalLM.from_pretrained(tiny_base).train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False  # as Trainer sets it
    model.model.norm.eval()  # one module that was frozen stays frozen
    before, speed, trace = traits(model), EvalSpeedCallback(), [model.config.use_cache]
    try:
        with speed.evaluating(model):
            inside = traits(model)
            trace.append(model.config.use_cache)
            if error:
                raise error
    except RuntimeError as caught:
        assert caught is error
    trace.append(model.config.use_cache)
    assert trace == [False, True, False]
    assert not any(inside["training"]) and not any(inside["checkpointing"])
    assert any(before["checkpointing"]) and traits(model) == before
    assert speed.seconds > 0


# Speed of generation in 16 bits, with adapters


def test_generation_casts_no_input_of_an_adapter_to_float32_and_back(
    taught_base, split, tokenizer, monkeypatch
):
    base = AutoModelForCausalLM.from_pretrained(taught_base, dtype=torch.bfloat16)
    torch.manual_seed(0)
    names = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=names)).eval()
    linears = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for linear in linears:
        torch.nn.init.normal_(linear.lora_B["default"].weight, std=0.02)
    assert {linear.lora_A["default"].weight.dtype for linear in linears} == {torch.float32}
    process = Process.alone(torch.device("cpu"), torch.bfloat16)
    train = TrainSection.model_validate({"generation_max_new_tokens": 8})
    prompts = [split[index].prompt for index in range(3)]
    found = []
    for is_active in (True, False):
        if not is_active:
            plain = lambda model, active: contextlib.nullcontext()  # noqa: E731
            monkeypatch.setattr(generate, "disable_input_dtype_casting", plain)
        with Casts(torch.bfloat16, torch.float32) as casts:
            ids = Generator(tokenizer, train, process).generate(model, prompts)
        found.append((ids, casts.count))
    (ids, casts), (plain_ids, plain_casts) = found
    assert torch.equal(ids, plain_ids)
    assert plain_casts - casts == len(linears) * ids.shape[1]
    assert all(linear.cast_input_dtype_enabled for linear in linears)
