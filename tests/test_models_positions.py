"""Models with a table of learned positions: nothing is read after its end."""

import pytest
import torch
from families import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from sft_kernels.process import Process
from sft_play.config.schema import TrainSection
from sft_play.errors import ConfigError, DataError
from sft_play.evaluation.generate import Generator
from sft_play.models.positions import learned_positions, refuse_longer_rows

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 320}
POSITIONS = 24


def model_of(model_type: str, **sizes: int) -> torch.nn.Module:
    config = AutoConfig.for_model(
        model_type, **SIZES, max_position_embeddings=POSITIONS, pad_token_id=1, **sizes
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["gpt2", "opt"])
def learned(request):
    own = {"opt": {"ffn_dim": 32, "word_embed_proj_dim": 16}}
    return model_of(request.param, **own.get(request.param, {}))


def test_an_answer_ends_where_the_learned_positions_do(learned, caplog):
    """It ended in an IndexError, on a GPU in an assertion of the device."""
    assert learned_positions(learned) == POSITIONS
    train = TrainSection.model_validate({"generation_max_new_tokens": 100})
    generator = Generator(
        tokenizer(None), train, Process.alone(torch.device("cpu")), saved_stops=(319,)
    )
    ids = generator.generate(learned, [list(range(5, 25)), list(range(5, 15))])
    assert ids.shape[1] <= 4
    assert "end after 4 tokens instead of 100: the model has 24 learned positions" in caplog.text
    with pytest.raises(DataError, match="a prompt has 24 tokens, and the model takes 24"):
        generator.generate(learned, [list(range(5, 29))])


def test_rows_that_are_longer_than_the_learned_positions_are_refused(learned):
    refuse_longer_rows(learned, POSITIONS)
    with pytest.raises(ConfigError, match=r"max_seq_len=25: .* set MODEL_MAX_SEQ_LEN=24"):
        refuse_longer_rows(learned, POSITIONS + 1)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_positions_that_are_computed_have_no_end(model_type):
    model = model_of(model_type, intermediate_size=32)
    assert learned_positions(model) is None
    refuse_longer_rows(model, 10 * POSITIONS)
