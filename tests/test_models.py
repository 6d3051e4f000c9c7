"""Weights, adapters and the loss: dtypes after loading, what is trained, and what is refused."""

import importlib.util
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import bitsandbytes
import pytest
import torch
from transformers import AutoTokenizer, core_model_loading

from sft_kernels.loss.head import nll_of_rows, summed_nll
from sft_kernels.loss.tokens import labelled
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.templates import DEFAULT_TEMPLATE
from sft_play.data.tokenizer import load_tokenizer
from sft_play.models.load import load_base, load_model, weight_dtype
from sft_play.models.parameters import count_parameters

CPU = Process.alone(torch.device("cpu"))
CPU_BF16 = Process.alone(torch.device("cpu"), torch.bfloat16)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def config_of(tiny_base):
    """A function that returns a config of the tiny model, or of another folder."""

    def config(mode="lora", name=None, **tuning):
        return Config.model_validate(
            {"model": {"name": str(name or tiny_base)}, "tuning": {"mode": mode, **tuning}}
        )

    return config


@pytest.fixture
def copied(tiny_base, tmp_path):
    """A copy of the tiny model's folder, to break."""
    return shutil.copytree(tiny_base, tmp_path / "model")


def edit_json(path, **changes) -> None:
    """Change keys of a JSON file; None deletes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


# The tokenizer


def test_a_tokenizer_without_pad_token_and_template_gets_eos_and_the_default_template(
    config_of, copied, tmp_path
):
    edit_json(copied / "tokenizer_config.json", pad_token=None)
    (copied / "chat_template.jinja").unlink()
    own = load_tokenizer(config_of())
    assert own.pad_token_id != own.eos_token_id and own.chat_template != DEFAULT_TEMPLATE
    loaded = load_tokenizer(config_of(name=copied))
    assert (loaded.pad_token_id, loaded.chat_template) == (loaded.eos_token_id, DEFAULT_TEMPLATE)
    loaded.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == DEFAULT_TEMPLATE


# Adapters


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_nothing_else_is_trained(config_of, compute_dtype):
    model = load_model(config_of(), Process.alone(torch.device("cpu"), compute_dtype))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert parameter.dtype == (torch.float32 if "lora_" in name else compute_dtype), name


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_trainable_parameters_are_r_times_inputs_plus_outputs_of_each_target(
    config_of, tiny_base, mode, targets
):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_base)
    chosen = LINEARS if targets == "all-linear" else targets
    sizes = [
        (m.in_features, m.out_features)
        for n, m in plain.named_modules()
        if n.rpartition(".")[2] in chosen
    ]
    assert len(sizes) == 2 * len(chosen), "the tiny model has two layers"
    model = load_model(config_of(mode, lora={"r": 4, "target_modules": targets}), CPU)
    adapters = 4 * sum(inputs + outputs for inputs, outputs in sizes)
    assert count_parameters(model) == (adapters, adapters + plain.num_parameters())


def test_full_trains_every_weight_in_float32_whatever_the_compute_type(config_of, tiny_base):
    model = load_model(config_of("full"), CPU_BF16)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, True)}
    trainable, total = count_parameters(model)
    assert trainable == total == model.num_parameters()


def test_full_leaves_frozen_what_the_class_of_the_model_freezes(config_of, base_of):
    model = load_model(config_of("full", base_of("ernie4_5_moe")), CPU)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert frozen
    assert all(name.endswith("e_score_correction_bias") for name in frozen)


@pytest.mark.parametrize(
    "mode, dtype, expected",
    [
        ("full", "auto", torch.float32),
        ("full", "bfloat16", torch.bfloat16),
        ("lora", "auto", torch.bfloat16),
        ("qlora", "auto", torch.bfloat16),
        ("lora", "float32", torch.float32),
    ],
)
def test_base_weights_take_the_type_that_was_set_or_that_mode_and_device_call_for(
    mode, dtype, expected
):
    config = Config.model_validate({"model": {"dtype": dtype}, "tuning": {"mode": mode}})
    assert weight_dtype(config, torch.bfloat16) == expected


# 4-bit weights


def test_qlora_holds_blocks_in_4_bits_and_leaves_norms_and_embeddings_as_they_are(config_of):
    model = load_model(config_of("qlora"), CPU_BF16)
    quantized = {
        name
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
    assert len(quantized) == 2 * len(LINEARS)
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            assert parameter.dtype == torch.bfloat16, f"{name} was copied to {parameter.dtype}"
        elif "lora_" not in name:
            assert isinstance(parameter, bitsandbytes.nn.Params4bit), name
            assert parameter.quant_state.quant_type == "nf4" and parameter.quant_state.nested, name


def test_an_evaluation_leaves_the_gradients_of_a_4_bit_model_as_they_were(config_of):
    """On a CPU with AVX512-BF16 bitsandbytes repacks weights for evaluation, without a gradient."""
    torch.manual_seed(0)
    model = load_model(config_of("qlora"), CPU)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(8, 500, (2, 20))

    def gradients():
        model.zero_grad()
        model.train()
        summed_nll(model(input_ids=ids).logits, ids).backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
    after = gradients()
    assert all(torch.equal(before[name], after[name]) for name in before)


# Weights that are not there


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="unsloth is installed")
@pytest.mark.parametrize("model_type, threads", [("llama", 1), ("qwen3_moe", 0)])
def test_experts_are_read_no_faster_than_they_are_joined(
    config_of, base_of, monkeypatch, model_type, threads
):
    """Threads that read ahead could hold a mixture of experts twice."""
    pools = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, *args, **kwargs):
            pools.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", Pool)
    load_base(config_of(name=str(base_of(model_type))), CPU)
    assert len(pools) == threads
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


# The loss


def naive_nll(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Return (nats, tokens), token by token in float64: position t predicts label t + 1."""
    nats, tokens = 0.0, 0
    for row, answers in zip(logits.double().tolist(), labels.tolist(), strict=True):
        for scores, label in zip(row[:-1], answers[1:], strict=True):
            if label != IGNORE_INDEX:
                highest = max(scores)
                nats += (
                    highest
                    + math.log(sum(math.exp(score - highest) for score in scores))
                    - scores[label]
                )
                tokens += 1
    return nats, tokens


def some_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (3, 9, 11) and labels (3, 9), of which some are ignored."""
    torch.manual_seed(1)
    logits, labels = torch.randn(3, 9, 11) * 5, torch.randint(0, 11, (3, 9))
    labels[torch.rand(3, 9) < 0.4] = IGNORE_INDEX
    return logits, labels


def test_summed_nll_is_the_sum_over_labelled_tokens():
    logits, labels = some_logits()
    nats, tokens = naive_nll(logits, labels)
    assert len(labelled(labels).targets) == tokens
    assert summed_nll(logits, labels).item() == pytest.approx(
        nats, rel=1e-6
    )  # float32 sums 16 numbers
    # logits in 16 bits are summed in float32 too: their own rounding is the only difference
    half = logits.bfloat16()
    assert summed_nll(half, labels).item() == pytest.approx(
        naive_nll(half.float(), labels)[0], rel=1e-6
    )


def test_the_loss_of_a_row_is_that_of_the_row_alone():
    logits, labels = some_logits()
    labels[1] = IGNORE_INDEX
    alone = [summed_nll(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(nll_of_rows(logits, labels), torch.stack(alone))
    assert alone[1] == 0.0


def test_a_batch_without_labels_gives_zero_with_a_gradient_of_zero():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = summed_nll(logits, torch.full((2, 5), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
