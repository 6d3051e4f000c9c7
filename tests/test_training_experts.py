"""Experts in training: which ones a run reaches, adapters that stay as they were, the balance."""

import logging

import pytest
import torch
from tiny_models import tiny_model

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models import lora
from sft_play.models.experts import BALANCE
from sft_play.training.experts import (
    ExpertUse,
    RouterLoss,
    experts_report,
    log_experts,
    router_loss_of,
    untrained_adapters,
)

CPU = Process.alone(torch.device("cpu"))
ONE_TOKEN = torch.full((1, 8), 7)


def adapted(model_type: str) -> torch.nn.Module:
    config = Config.model_validate({"tuning": {"lora": {"r": 4}}})
    return lora.add_adapters(tiny_model(model_type), config).train()


def take_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_experts_that_no_token_reached_are_named(caplog):
    model = adapted("gpt_oss")
    use = ExpertUse(model)
    with torch.no_grad():
        model(input_ids=torch.arange(200)[None])  # no training step: not counted
    take_step(model, ONE_TOKEN)
    report = experts_report(use, model, CPU)
    assert (report.layers, report.experts) == (2, 12)
    counts = use.tokens_of_experts(CPU)
    for name, tokens in counts.items():
        assert sum(tokens) == 2 * ONE_TOKEN.numel()  # each token goes to two experts
        missed = [number for number, count in enumerate(tokens) if count == 0]
        public = name.removeprefix("base_model.model.")
        assert missed and report.never_reached[public] == missed
        # an expert that no token reached has an adapter that no gradient reached
        assert report.untrained[f"{public}.gate_up_proj"] == missed
        assert report.untrained[f"{public}.down_proj"] == missed
    with caplog.at_level(logging.INFO, "sft_play"):
        log_experts(report)
    assert "experts that no token reached: model.layers.0.mlp.experts" in caplog.text
    assert "no gradient" not in caplog.text  # the same experts are not named twice


def test_an_adapter_that_no_gradient_reached_is_named(caplog):
    model = adapted("llama")
    assert untrained_adapters(model, CPU) == {}  # no step was taken
    layer = model.get_decoder().layers[1]
    layer.mlp.forward = lambda x: layer.mlp.down_proj(layer.mlp.up_proj(x))
    take_step(model, ONE_TOKEN)
    assert untrained_adapters(model, CPU) == {"model.layers.1.mlp.gate_proj": []}
    with caplog.at_level(logging.INFO, "sft_play"):
        log_experts(experts_report(ExpertUse(model), model, CPU))
    assert "adapters that no gradient reached: model.layers.1.mlp.gate_proj" in caplog.text


def test_a_dense_model_whose_adapters_were_trained_has_no_report():
    model = adapted("llama")
    take_step(model, ONE_TOKEN)
    assert experts_report(ExpertUse(model), model, CPU) is None


def config_of(coefficient: float | str) -> Config:
    return Config.model_validate({"train": {"router_aux_loss_coef": coefficient}})


def test_the_load_balancing_loss_is_that_of_transformers_and_weighs_by_share():
    ids = torch.arange(3, 43)[None]
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    expected = model(input_ids=ids, labels=ids)
    balance = router_loss_of(model, config_of("auto"))  # as the model's config says
    assert balance.coefficient == 0.5
    outputs = model(input_ids=ids, **{BALANCE: True})
    assert outputs.loss is None  # without labels transformers adds nothing by itself
    half = balance.of_micro_batch(0.5)
    torch.testing.assert_close(half, 0.25 * expected.aux_loss)
    gradient = torch.autograd.grad(half, model.model.layers[0].mlp.gate.weight)[0]
    assert gradient.abs().sum() > 0
    model(input_ids=ids, **{BALANCE: True})
    balance.of_micro_batch(0.5)
    assert balance.mean_since_log(CPU) == pytest.approx(expected.aux_loss.item())
    assert balance.mean_since_log(CPU) is None


def test_the_load_balancing_loss_is_off_unless_config_or_setting_has_it():
    model = tiny_model("mixtral")
    assert router_loss_of(model, config_of("auto")) is None
    assert router_loss_of(model, config_of(0)) is None
    assert router_loss_of(model, config_of(0.01)).coefficient == 0.01
    assert router_loss_of(adapted("mixtral"), config_of(0.01)).coefficient == 0.01
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0\.01: llama computes no"):
        router_loss_of(tiny_model("llama"), config_of(0.01))
    assert router_loss_of(tiny_model("llama"), config_of("auto")) is None


def test_evaluations_leave_the_load_balancing_loss_alone():
    model = tiny_model("mixtral")
    balance = RouterLoss(model, 1.0)
    model(input_ids=ONE_TOKEN, **{BALANCE: True})
    trained = balance._taken
    model.eval()(input_ids=ONE_TOKEN)
    assert balance._taken is trained


@pytest.mark.long
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_run_reports_its_experts_and_its_balance(train_run, base_of, mode):
    settings = {
        "model.name": base_of("mixtral", mode),
        "tuning.mode": mode,
        "train.router_aux_loss_coef": 0.01,
    }
    folder = train_run(settings)
    report = folder.read_report()
    assert (report.experts.layers, report.experts.experts) == (2, 12)
    assert all(step.router_aux_loss > 0 for step in report.history if step.loss is not None)
