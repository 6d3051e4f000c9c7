"""The order of an epoch: the same steps however they are cut up, and little padding."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard

from sft_play.config import loader
from sft_play.config.metrics import is_higher_better
from sft_play.data import order as data_order
from sft_play.data.order import StepSampler, epoch_order, fullest_step, padding, steps
from sft_play.data.packing import pack_documents
from sft_play.errors import ConfigError
from sft_play.plan.step import Layout

MAX_SEQ_LEN, EFFECTIVE, SEED = 64, 8, 5
LAYOUTS = [(1, 1), (2, 1), (8, 1), (2, 2), (1, 4), (2, 4), (1, 8)]  # (batch_size, world_size)


def lengths_of(samples: int) -> list[int]:
    draw = random.Random(samples)
    return [min(MAX_SEQ_LEN, 1 + int(draw.expovariate(1 / 12))) for _ in range(samples)]


def layout_of(max_seq_len: int, batch: int, effective: int, world: int = 1) -> Layout:
    return Layout(batch, effective // (batch * world), world, max_seq_len)


def sampler(
    lengths: list[int], batch: int, world: int, packed: bool, seed: int | None = SEED
) -> StepSampler:
    layout = layout_of(MAX_SEQ_LEN, batch, EFFECTIVE, world)
    if packed:
        layout = layout.packed(fullest_step(lengths, layout, seed, epochs=3))
    return StepSampler(lengths, layout, seed)


def steps_of(
    lengths: list[int],
    batch: int,
    world: int,
    packed: bool,
    epoch: int = 0,
    seed: int | None = SEED,
) -> list[list[int]]:
    """Return the real samples of each optimizer step, over all `world` ranks of accelerate."""
    order = sampler(lengths, batch, world, packed, seed)
    order.set_epoch(epoch)
    per_rank = [list(BatchSamplerShard(order, world, rank)) for rank in range(world)]
    assert [len(batches) for batches in per_rank] == [len(order) // world] * world
    assert all(1 <= len(batch_) <= batch for batches in per_rank for batch_ in batches)
    sequences = [sequence for batch_ in order for sequence in batch_]
    assert max(sum(lengths[max(i, ~i)] for i in one) for one in sequences) <= MAX_SEQ_LEN
    fillers = [sequence for sequence in sequences if sequence[0] < 0]
    assert all(filler == [~lengths.index(min(lengths))] for filler in fillers)
    accum = order.layout.micro_batches
    cut = [
        [one for batches in per_rank for one in batches[start : start + accum]]
        for start in range(0, len(order) // world, accum)
    ]
    return [
        sorted(i for batch_ in step for sequence in batch_ for i in sequence if i >= 0)
        for step in cut
    ]


@pytest.mark.parametrize("seed", [SEED, None])
@pytest.mark.parametrize("samples", [1, 7, 8, 9, 23, 64])
def test_a_step_trains_the_same_samples_however_it_is_cut_up(samples, seed):
    lengths = lengths_of(samples)
    one = steps_of(lengths, 2, 1, packed=False, seed=seed)
    assert one == [sorted(step) for step in steps(samples, EFFECTIVE, seed, 0)]
    for batch, world in LAYOUTS:
        for packed in (False, True):
            assert steps_of(lengths, batch, world, packed, seed=seed) == one
    assert sorted(index for step in one for index in step) == list(range(samples))
    assert all(len(step) == EFFECTIVE for step in one[:-1])


def test_a_curriculum_keeps_the_order_of_the_files_in_every_epoch():
    for epoch in (0, 1):
        found = list(steps(23, 8, None, epoch))
        assert found == [list(range(8)), list(range(8, 16)), list(range(16, 23))]
    assert sampler(lengths_of(23), 2, 2, False, None).find_samples(2, 0, 0)[0] in range(8, 16)
    assert loader.load_merged("base", {}, ["data.order=as_given"]).config.epoch_seed is None
    assert loader.load_merged("base", {}, ["train.seed=3"]).config.epoch_seed == 3


@pytest.mark.parametrize("packed", [False, True])
def test_epochs_differ_and_none_depends_on_those_before_it(packed):
    """A resumed run begins with the epoch that was left and skips its first micro-batches."""
    lengths, epochs = lengths_of(23), []
    through = sampler(lengths, 2, 2, packed)
    for epoch in range(3):
        resumed = sampler(lengths, 2, 2, packed)
        for order in (through, resumed):
            order.set_epoch(epoch)
        epochs.append(list(through))
        assert list(resumed) == epochs[epoch]
    assert epochs[0] != epochs[1] != epochs[2]
    assert steps_of(lengths, 2, 2, packed, seed=6) != steps_of(lengths, 2, 2, packed)


@pytest.mark.parametrize("packed", [False, True])
def test_an_order_that_is_cut_anew_is_the_one_that_was_cut_so(packed):
    set_micro_batch, other = (sampler(lengths_of(64), batch, 1, packed) for batch in (8, 1))
    assert list(set_micro_batch) != list(other)
    set_micro_batch.layout = other.layout
    assert list(set_micro_batch) == list(other) and len(set_micro_batch) == len(other)


def test_micro_batches_hold_samples_of_similar_length_the_longest_first():
    lengths = [9, 1, 7, 3, 8, 2, 6, 5]
    batches = sampler(lengths, 2, 1, packed=False)
    found = [[lengths[sequence[0]] for sequence in batch] for batch in batches]
    assert found == [[9, 8], [7, 6], [5, 3], [2, 1]]


@pytest.mark.parametrize("lengths", [(1, 64), (20, 24), (33, 40), (5, 6)], ids=str)
@pytest.mark.parametrize("rows_per_step", [1, 7, 64])
def test_the_fullest_step_is_found_as_if_each_were_packed(lengths, rows_per_step):
    documents = [random.Random(n).randint(*lengths) for n in range(500)]
    layout = layout_of(64, 1, rows_per_step)
    packed = [
        len(pack_documents([documents[index] for index in samples], 64))
        for epoch in range(3)
        for samples in steps(500, rows_per_step, SEED, epoch)
    ]
    assert fullest_step(documents, layout, SEED, 3) == max(packed)


def test_a_sample_that_is_too_long_for_a_sequence_is_an_error():
    with pytest.raises(ConfigError, match="set MODEL_MAX_SEQ_LEN=11"):
        fullest_step([4, 11, 2], layout_of(10, 1, 4), SEED, 1)


def test_padding_of_a_long_epoch_is_taken_from_its_first_steps(monkeypatch):
    lengths = [random.Random(n).randint(20, 900) for n in range(4000)]
    layout = layout_of(1024, 2, 16)
    packed = layout.packed(fullest_step(lengths, layout, SEED, 1))
    exact = padding(lengths, layout, packed, SEED)
    monkeypatch.setattr(data_order, "MEASURED_ROWS", 1000)
    found = padding(lengths, layout, packed, SEED)
    assert found.real == exact.real and found != exact
    assert found.unpacked == pytest.approx(exact.unpacked, rel=0.02)
    assert found.packed == pytest.approx(exact.packed, rel=0.02)


@pytest.mark.parametrize("samples", [1, 2, 1000, 52_002])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 126), (2**40 + 5, 1)])
def test_an_order_is_that_of_torch(samples, seed, epoch):
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    expected = torch.randperm(samples, generator=generator)
    assert epoch_order(samples, seed, epoch).tolist() == expected.tolist()


def test_the_loss_of_a_named_source_may_choose_the_best_checkpoint():
    sources = "data.val_path=[{path: a.jsonl, name: math}, {path: b.jsonl}]"
    best = "train.metric_for_best_model=eval_math_loss"
    config = loader.load_merged("base", {}, [sources, best]).config
    assert config.train.metric_for_best_model == "eval_math_loss"
    assert not is_higher_better("eval_math_loss") and is_higher_better("eval_rougeL")
    for words in ([best], [sources, best.replace("math", "code")]):
        with pytest.raises(ConfigError, match=r"train\.metric_for_best_model"):
            loader.load_merged("base", {}, words)


@pytest.mark.parametrize("packed", [False, True])
def test_all_samples_of_a_row_are_in_its_step(packed):
    counts = np.array([1, 3, 1, 5, 2, 4, 1, 1, 6, 2] * 3)
    row_ends, lengths = np.cumsum(counts), lengths_of(int(counts.sum()))
    layout = layout_of(MAX_SEQ_LEN, 2, EFFECTIVE, world=2)
    wanted = []
    for rows in np.split(epoch_order(30, SEED, 0), range(8, 30, 8)):
        wanted.append(
            {i for row in rows for i in range(row_ends[row] - counts[row], row_ends[row])}
        )
    layout = replace(layout, most_samples=max(map(len, wanted)))
    if packed:
        layout = layout.packed(fullest_step(lengths, layout, SEED, 1, row_ends))
    order = StepSampler(lengths, layout, SEED, row_ends)
    batches = list(order)
    assert len(order) == len(batches) == 4 * layout.micro_batches * 2
    found: list[set[int]] = [set() for _ in wanted]
    for number, batch in enumerate(batches):
        found[number * 4 // len(batches)] |= {i for one in batch for i in one if i >= 0}
    assert found == wanted
