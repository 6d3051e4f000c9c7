"""The causality check on real tiny models."""

import pytest
import torch
from tiny_models import TINY, draw_weights, tiny_model
from transformers import BertConfig, BertLMHeadModel

from sft_play.errors import ConfigError
from sft_play.training.checks import check_causality

CPU = torch.device("cpu")


def bert(is_decoder: bool) -> BertLMHeadModel:
    torch.manual_seed(0)
    fields = {**TINY.common(), "is_decoder": is_decoder}
    return BertLMHeadModel(BertConfig(**fields))


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gpt_oss", "mamba2"])
def test_a_causal_model_passes_and_keeps_its_mode(model_type):
    model = tiny_model(model_type)
    check_causality(model, TINY.vocabulary, CPU)
    assert model.training


def test_an_encoder_is_refused_even_with_weights_that_hardly_mix_tokens():
    with pytest.raises(ConfigError, match="BertLMHeadModel sees tokens that come later"):
        check_causality(bert(is_decoder=False), TINY.vocabulary, CPU)
    check_causality(bert(is_decoder=True), TINY.vocabulary, CPU)


def test_a_model_that_looks_ahead_in_training_alone_is_refused():
    model = bert(is_decoder=True)
    draw_weights(model)
    encoder = model.bert

    def mixing(module, args, output):
        return output + output.mean(1, keepdim=True) if module.training else output

    encoder.embeddings.register_forward_hook(mixing)
    with pytest.raises(ConfigError, match="causal language model"):
        check_causality(model, TINY.vocabulary, CPU)


def test_dropout_is_no_look_ahead():
    model = bert(is_decoder=True)
    model.bert.embeddings.dropout.p = 0.5
    check_causality(model.train(), TINY.vocabulary, CPU)
