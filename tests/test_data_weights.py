"""Weights of rows, messages and segments in the loss: from the file to the gradient."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_two_workers
from record_files import run_data
from test_packed_training import IGNORE_INDEX, Document, collator_of, documents, llama
from torch.nn import functional
from transformers import AutoTokenizer

from sft_kernels.loss.head import fuse_loss
from sft_play.data.chunk_tokenizer import WEIGHTS, fit_sample
from sft_play.data.collate import TrainRows
from sft_play.data.preview import weight_note
from sft_play.data.render import RenderedSample, Renderer
from sft_play.data.row_formats import match_format
from sft_play.data.row_hashes import RowHashes
from sft_play.data.row_parsing import NO_SYSTEM_PROMPT, parse_record
from sft_play.data.rows import Row
from sft_play.data.store import Sample, Store, StoredSample, StoreWriter, to_arrays
from sft_play.models.loss import sum_nll

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny_llama"
TURNS = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": "A rose.", "weight": 0.25},
    {"role": "user", "content": "And blue?"},
    {"role": "assistant", "content": "The sea."},
]


def read(record: dict[str, Any]) -> Row:
    (row,) = parse_record(record, match_format([record], {}), "a.jsonl:1", NO_SYSTEM_PROMPT)
    return row


def render(record: dict[str, Any]) -> RenderedSample | None:
    (samples,) = Renderer(AutoTokenizer.from_pretrained(TINY)).render([read(record)])
    return samples[0] if samples else None


def trained_weights(sample: RenderedSample) -> list[float]:
    weights = sample.weights or [1.0] * len(sample.ids)
    pairs = zip(sample.labels, weights, strict=True)
    return [weight for label, weight in pairs if label != IGNORE_INDEX]


def test_an_answer_s_tokens_have_its_weight():
    plain = [{**turn, "weight": None} for turn in TURNS]
    sample, other = render({"messages": TURNS}), render({"messages": plain})
    assert other.weights is None
    assert (sample.ids, sample.labels) == (other.ids, other.labels)
    found = trained_weights(sample)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    first = len(tokenizer.encode("A rose.", add_special_tokens=False)) + 1  # and the stop token
    assert found == [0.25] * first + [1.0] * (len(found) - first)


@pytest.mark.parametrize("column", ["weight", "sample_weight"])
def test_a_row_s_weight_is_that_of_all_it_trains(column):
    found = set(trained_weights(render({"messages": TURNS, column: 0.5})))
    assert found == {0.125, 0.5}
    assert set(trained_weights(render({"text": "The sea is blue.", column: 2}))) == {2.0}
    question = {"question": "What is red?", "answer": "A rose."}
    assert set(trained_weights(render({**question, column: 0.5}))) == {0.5}
    assert render({**question, column: 0}) is None
    assert render({"text": "The sea is blue.", column: 0}) is None
    segments = [
        {"label": True, "text": "The sea", "weight": 0.5},
        {"label": False, "text": " is"},
        {"label": True, "text": " blue."},
    ]
    assert set(trained_weights(render({"segments": segments, column: 0.5}))) == {0.25, 0.5}


def test_pieces_of_a_cut_sample_keep_their_weights():
    ids = list(range(1, 9))
    sample = RenderedSample(ids, [IGNORE_INDEX, *ids[1:]], 0, weights=[float(i) for i in ids])
    pieces = fit_sample(sample, 3, "split")
    assert [piece.weights for piece in pieces] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    (kept,) = fit_sample(sample, 4, "truncate_left", bos_id=1)
    assert (kept.ids, kept.weights) == ([1, 6, 7, 8], [1.0, 6, 7, 8])


def test_the_preview_says_what_answers_weigh():
    labels = np.array([IGNORE_INDEX, 1, 2, IGNORE_INDEX, 3, 4])
    weights = np.array([1, 0.25, 0.25, 1, 1, 0.5], np.float32)
    sample = Sample(labels, labels, 0, weights)
    assert weight_note(sample) == "its trained tokens weigh 0.25, 1, 0.5 in the loss"
    assert weight_note(Sample(labels, labels, 0)) is None


def test_a_store_has_the_weights_of_samples_that_have_some(tmp_path):
    weights = [None, [1.0, 0.5, 0.5], None, [1.0, 0.25]]
    with StoreWriter(tmp_path) as writer:
        for part in (weights[:2], weights[2:]):
            samples = []
            for given in part:
                ids = list(range(2, 2 + len(given or "abcd")))
                rendered = RenderedSample(ids, [IGNORE_INDEX, *ids[1:]], weights=given)
                samples.append(StoredSample(rendered, 0, 0, RowHashes(0, 0, 0), 0))
            writer.append(to_arrays(samples))
    found = [sample.weights for sample in map(Store(tmp_path).__getitem__, range(4))]
    assert [None if one is None else one.tolist() for one in found] == weights


def weighted(samples: list[Document]) -> list[Document]:
    choices = (1.0, 0.5, 0.0625, 3.0)
    weights = [[choices[number % 4]] * len(one.ids) for number, one in enumerate(samples)]
    weights[0] = None
    weights[1][-2:] = [0.75] * 2
    return [
        Document(one.ids, one.labels, given) for one, given in zip(samples, weights, strict=True)
    ]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_is_the_weighted_mean_over_tokens(packed, is_fused):
    samples = weighted(documents(8))
    plain = llama()
    nats = weights = 0.0
    for sample in samples:
        logits = plain(input_ids=torch.tensor([sample.ids])).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        nll = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        of_tokens = torch.tensor((sample.weights or [1.0] * len(sample.ids))[1:])
        nats = nats + (nll * of_tokens).sum()
        weights += of_tokens[labels != IGNORE_INDEX].sum().item()
    (nats / weights).backward()

    model = llama()
    if is_fused:
        fuse_loss(model)
    rows, collate = TrainRows(samples), collator_of(packed)
    halves = [range(4), range(4, 8)]
    batches = [collate([rows[half]] if packed else [rows[one] for one in half]) for half in halves]
    total = sum(batch.loss.total_weight for batch in batches)
    assert total == pytest.approx(weights)
    loss = 0.0
    for batch in batches:
        share = sum_nll(model, model, batch) / total
        share.backward()
        loss += share.item()
    assert loss == pytest.approx((nats / weights).item(), rel=1e-6)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    largest = max(parameter.grad.abs().max() for parameter in plain.parameters())
    assert all((a.grad - b.grad).abs().max() < 1e-5 * largest for a, b in pairs)


def rows_with(folder: Path, weights: list[float | None]) -> Path:
    words = "red blue green grey pink gold".split()
    with (folder / "rows.jsonl").open("w") as file:
        for number, word in enumerate(words * 2):
            row = {
                "question": f"Say {number} {word}",
                "answer": " ".join([word] * (number % 3 + 1)),
            }
            weight = weights[number % len(weights)]
            row |= {} if weight is None else {"weight": weight}
            file.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


def test_the_ledger_counts_rows_with_weights(tmp_path):
    notes = {}
    for name, weights in {"some": [0.5, None, 1], "none": [None]}.items():
        path = rows_with(tmp_path, weights)
        ledger = run_data(path, AutoTokenizer.from_pretrained(TINY), val_size=0.2).ledger
        notes[name] = [note for note in ledger.notes if "weigh" in note]
    assert notes == {"some": [f"{path}: 4 rows: {WEIGHTS}"], "none": []}


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_train_weighted_rows_as_one_process_does(
    plan_run, run_worker, losses_of, tmp_path
):
    settings = {
        "data.train_path": rows_with(tmp_path, [1, 0.5, None, 0.1]),
        "train.predict_with_generate": False,
    }
    alone = plan_run(settings)
    assert run_worker(alone) == 0
    both = plan_run({**settings, "train.grad_accum": 1}, num_gpus=2)  # the same four rows per step
    assert run_two_workers(both) == [0, 0]
    assert losses_of(both) == pytest.approx(losses_of(alone), rel=1e-4)
    unweighted = plan_run({**settings, "data.train_path": rows_with(tmp_path, [None])})
    assert run_worker(unweighted) == 0
    assert losses_of(unweighted) != pytest.approx(losses_of(alone), rel=1e-3)
