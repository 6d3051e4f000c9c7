"""tuning.lora.experts=shared: one adapter for all experts, published as an adapter of each."""

from types import MethodType

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import move_trained, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sft_kernels.expert_modules import find_experts
from sft_kernels.experts import function as experts_function
from sft_kernels.experts.install import bind_gate, experts_forward, why_experts_not_fusable
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models import lora
from sft_play.models.adapter_state import as_kept, as_published, load_published, published_state
from sft_play.models.experts import expert_weights
from sft_play.models.parameters import count_parameters
from sft_play.training.experts import untrained_adapters

IDS = torch.arange(32)[None] % 50 + 3
EXACT = {"rtol": 1e-5, "atol": 1e-5}
RANK = 3
ALONE = Process.alone(torch.device("cpu"))


def adapted(model_type: str, experts: str = "shared", seed: int = 1) -> PeftModel:
    """Return a tiny model with adapters that do something."""
    section = {"r": RANK, "experts": experts}
    config = Config.model_validate({"tuning": {"mode": "lora", "lora": section}})
    model = lora.add_adapters(tiny_model(model_type).eval(), config)
    move_trained(model, seed)
    return model


def passed(model: nn.Module) -> dict[str, Tensor]:
    """Return the logits of a model, and the gradients of what is trained."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"logits": out.logits.detach(), **gradients}


def fuse(model: nn.Module) -> None:
    for experts in find_experts(model):
        assert why_experts_not_fusable(experts) is None
        bind_gate(experts)
        experts.forward = MethodType(experts_forward, experts)


def summed_over_experts(gradients: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Return the gradients of factors that are equal, as that of the one they are copies of."""
    summed = dict(gradients)
    for name, gradient in gradients.items():
        if ".experts." in name and "lora_A" in name:
            summed[name] = gradient.view(experts, RANK, -1).sum(0)
        elif ".experts." in name and "lora_B" in name:
            summed[name] = gradient.view(-1, RANK, experts).sum(-1)
    return summed


# (experts, out, in); (experts, in, out) with biases; without a gate
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_shared_adapter_computes_what_peft_computes_with_equal_factors(model_type, tmp_path):
    shared = adapted(model_type)
    weights = expert_weights(tiny_model(model_type))
    published = published_state(shared)
    shared.save_pretrained(tmp_path, state_dict=as_published(shared, shared.state_dict()))
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == published.keys()
    plain = PeftModel.from_pretrained(tiny_model(model_type).eval(), tmp_path, is_trainable=True)
    expected = passed(plain)
    expected = summed_over_experts(expected, weights[0].experts)
    for is_fused in (False, True):
        if is_fused:
            fuse(shared)
        found = passed(shared)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **EXACT, msg=name)


def test_a_gradient_of_one_expert_alone_shows(monkeypatch):
    model = adapted("gpt_oss")
    expected = passed(model)
    fuse(model)
    right = experts_function.gradient_of_b

    def without_first_row(xa, dy, *others):
        return right(torch.cat((xa[:1] * 0, xa[1:])), dy, *others)

    monkeypatch.setattr(experts_function, "gradient_of_b", without_first_row)
    found = passed(model)
    differing = [n for n, t in expected.items() if not torch.allclose(found[n], t, **EXACT)]
    assert differing and all("experts" in name and "lora_B" in name for name in differing)


def test_experts_share_an_adapter_of_the_rank_that_was_set():
    sizes = {}
    for experts in ("none", "shared", "per_expert"):
        sizes[experts] = count_parameters(adapted("qwen3_moe", experts)).trainable
    weights = expert_weights(tiny_model("qwen3_moe"))
    of_one = sum(RANK * sum(weight.shape[1:]) for weight in weights)
    assert sizes["shared"] - sizes["none"] == of_one
    assert sizes["per_expert"] - sizes["none"] == of_one * weights[0].experts
    model = adapted("qwen3_moe")
    assert untrained_adapters(model, ALONE) == {}
    experts = find_experts(model)[0]
    nn.init.zeros_(experts.lora_B["default"].weight)
    assert untrained_adapters(model, ALONE) == {"model.layers.1.mlp.experts.down_proj": []}


def test_what_is_published_is_read_back_and_experts_that_differ_are_refused(tmp_path):
    model = adapted("gpt_oss")
    state = model.state_dict()
    back = as_kept(model, as_published(model, state))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    model.save_pretrained(tmp_path, state_dict=as_published(model, state))
    other = adapted("gpt_oss", seed=2)
    load_published(other, tmp_path, is_trainable=True)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in state.items())
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.experts.lora_B.weight"))
    tensors[name][3, 7] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"a different lora_B of down_proj.*EXPERTS=per_expert"):
        load_published(other, tmp_path)


@pytest.fixture(scope="module")
def run(train_run, base_of):
    """A finished run of a mixture whose experts share adapters, with checkpoints at each step."""
    changes = {
        "model.name": base_of("qwen3_moe"),
        "tuning.lora.experts": "shared",
        "tuning.lora.r": 4,
        "train.max_steps": 4,
        "train.save_strategy": "steps",
        "train.save_steps": 2,
        "train.predict_with_generate": False,
    }
    folder = train_run(changes, may_trace=False)
    return changes, folder


def test_plain_peft_opens_what_a_run_with_shared_adapters_has_trained(run, losses_of):
    changes, folder = run
    losses = losses_of(folder)
    assert losses[-1] < losses[0] - 0.1, "nothing was learned"
    base = AutoModelForCausalLM.from_pretrained(changes["model.name"], dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, folder.path / "adapter").eval()
    tensors = load_file(folder.path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"
    experts = plain.config.num_experts
    by_expert = tensors[name].view(experts, 4, -1)
    assert torch.equal(by_expert, by_expert[:1].expand_as(by_expert))
    with torch.no_grad():
        expected = plain(input_ids=IDS).logits
        with plain.disable_adapter():
            assert not torch.allclose(plain(input_ids=IDS).logits, expected, atol=0.05)


def test_a_run_with_shared_adapters_resumes_as_if_it_had_not_stopped(train_run, run):
    changes, folder = run
    checkpoint = folder.checkpoints / "checkpoint-2"
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    largest = max(moments["exp_avg"].numel() for moments in state)
    published = load_file(checkpoint / "adapter_model.safetensors").values()
    assert largest < max(tensor.numel() for tensor in published), "the optimizer's is expanded"
    resumed = train_run({**changes, "train.resume_from": checkpoint}, may_trace=False)
    whole, again = (
        load_file(each.path / "adapter" / "adapter_model.safetensors") for each in (folder, resumed)
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_one_adapter_begins_the_same_whatever_was_drawn_before():
    config = Config.model_validate({"tuning": {"lora": {"experts": "shared"}}})
    states = []
    for seed in (1, 2):
        model = tiny_model("qwen3_moe")
        torch.manual_seed(seed)
        states.append(lora.add_adapters(model, config).state_dict())
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())
