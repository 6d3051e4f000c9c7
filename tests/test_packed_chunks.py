"""Packed rows longer than Llama 4's chunks: each document sees what it sees alone."""

from typing import Any

import published_models
import pytest
import torch
from architecture_steps import CPU, adapted, fused, gap, reference_step, settings, trained_step
from marks import long
from published_corrections import small_fields
from tiny_models import TINY

from sft_kernels.install import fused_kernels_of
from sft_play.config.schema import Config
from sft_play.data.collate import PackCollator
from sft_play.errors import ConfigError
from sft_play.training.isolation import check_cross_document

ROW = 64  # tokens; the documents have 19, 27 and 9
PUBLISHED_FLOOR = 8192


def llama4(chunk: int, floor: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tiny Llama 4 of chunks of tokens, which scales queries again at each floor."""

    def fields(sizes):
        own = {"attention_chunk_size": chunk, "floor_scale": floor, "attn_scale": 2.0}
        return {**small_fields(sizes), **own}

    monkeypatch.setattr(published_models, "small_fields", fields)
    model = published_models.published_model("llama4").train()
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    return model


def with_rows(tokens: int) -> Config:
    lora = settings("lora")
    return lora.model_copy(update={"model": lora.model.model_copy(update={"max_seq_len": tokens})})


@pytest.mark.parametrize(
    "chunk, floor, is_packed",
    [
        (7, PUBLISHED_FLOOR, True),
        (40, PUBLISHED_FLOOR, False),
        (ROW, 20, True),
        (7, 20, False),
        long(7, PUBLISHED_FLOOR, False),
        long(40, PUBLISHED_FLOOR, True),
        long(ROW, 20, False),
        long(7, 20, True),
    ],
)
def test_a_step_is_that_of_each_document_alone(chunk, floor, is_packed, monkeypatch):
    plain = adapted(llama4(chunk, floor, monkeypatch), settings("lora"))
    found = gap(reference_step(plain), trained_step(fused(plain, with_rows(ROW)), is_packed))
    assert found.is_rounding, found


def test_attention_stays_fused_in_rows_no_longer_than_a_chunk(monkeypatch):
    plain = adapted(llama4(ROW, ROW, monkeypatch), settings("lora"))
    made = fused(plain, with_rows(ROW))
    kernels = fused_kernels_of(made)
    assert kernels.on["attention"] == 2 and "mixers" not in kernels.on
    assert gap(reference_step(plain), trained_step(made, is_packed=True)).is_rounding


@pytest.mark.parametrize("chunk, tokens", [(7, 48), (64, 128), (512, 1000)])
def test_chunks_of_the_row_are_refused_before_the_first_step(chunk, tokens, monkeypatch):
    """As transformers cuts them: a model without the masks of `mask_chunks`."""
    model = llama4(chunk, PUBLISHED_FLOOR, monkeypatch)
    collator = PackCollator(0, tokens)
    with pytest.raises(ConfigError, match=r"does not isolate.*TRAIN_PACKING=false"):
        check_cross_document(model, collator, TINY.vocabulary, CPU)
    ours = fused(model, with_rows(tokens))
    check_cross_document(ours, PackCollator(0, tokens, True), TINY.vocabulary, CPU)


def test_rows_of_one_chunk_need_no_masks(monkeypatch):
    model = llama4(ROW, PUBLISHED_FLOOR, monkeypatch)
    check_cross_document(model, PackCollator(0, ROW), TINY.vocabulary, CPU)


def test_evaluation_and_answers_keep_the_masks_of_transformers(monkeypatch):
    model = llama4(7, PUBLISHED_FLOOR, monkeypatch).eval()
    made = fused(model, with_rows(ROW)).eval()
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        torch.testing.assert_close(made(input_ids=ids).logits, model(input_ids=ids).logits)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    assert made.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
