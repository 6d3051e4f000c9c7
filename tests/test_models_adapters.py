"""What adapters train next to A and B: counted, fused where exact, trained, saved and merged."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from plan_examples import STEP, load_shape
from safetensors.torch import load_file
from traced_steps import traced_point
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sft_kernels.install import fused_kernels_of
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models import lora
from sft_play.models.embedding_noise import EmbeddingNoise, row_lengths
from sft_play.models.load import load_model
from sft_play.models.parameters import count_parameters
from sft_play.models.step_meter import StepSetup
from sft_play.plan.activations import layer_bytes_per_token
from sft_play.plan.fast import FastSetup, plan_kernels
from sft_play.plan.step import Adapters
from sft_play.plan.traced import TracedSize
from sft_play.training.engine import raise_learning_rate_of_b

CPU = Process.alone(torch.device("cpu"))
CPU_BF16 = Process.alone(torch.device("cpu"), torch.bfloat16)
TOKENS = ["<|user|>", "<|assistant|>"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "dora": {"use_dora": True},
    "dora-of-some": {"use_dora": True, "layers_to_transform": [1], "target_modules": ["q_proj"]},
    "one-layer": {"layers_to_transform": [1]},
    "mlp-alone": {"target_modules": ["up_proj", "down_proj"]},
    "modules": {"modules_to_save": ["embed_tokens", "norm", "input_layernorm"]},
    "head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_tokens": TOKENS},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
SAME = 2e-6  # float32 sums in another order


@pytest.fixture(scope="module")
def untied_base(tiny_base, tokenizer, tmp_path_factory):
    """The tiny model with an output head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_base)
    config.tie_word_embeddings = False
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(base: Path, mode: str = "lora", fast_path: Any = "auto", **options: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": str(base)},
            "tuning": {"mode": mode, "lora": {"r": 4, **options}},
            "train": {"fast_path": fast_path},
        }
    )


def loaded(config: Config, process: Process = CPU) -> Any:
    """Return the model in training mode, with adapters that do something."""
    torch.manual_seed(0)
    model = load_model(config, process).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise.to(parameter.dtype))
    return model


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(8, 500, (2, 24), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} is not trained"
            gradients[name] = parameter.grad
    return loss.item(), gradients


def check_plan(base: Path, mode: str, options: dict[str, Any]) -> None:
    config = config_of(base, mode, **options)
    shape = load_shape(str(base), None, {})
    adapters = Adapters.of(config)
    planned = adapters.weights(shape) + adapters.other_weights(shape)
    model = load_model(config, CPU)
    assert count_parameters(model).trainable == planned
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    installed = fused_kernels_of(model)
    kernels = plan_kernels(FastSetup(config, "llama", is_gpu=False, is_half=False, zero_stage=0))
    assert set(kernels.on) == installed.on.keys()
    assert kernels.off == installed.off


@pytest.mark.parametrize("name", OPTIONS)
def test_the_plan_counts_what_is_trained_and_says_what_is_fused(tiny_base, untied_base, name):
    check_plan(untied_base, "lora", OPTIONS[name])
    if name in ("modules", "head", "tokens"):
        check_plan(tiny_base, "lora", OPTIONS[name])
    if name == "dora":
        check_plan(untied_base, "qlora", {"use_dora": True, "modules_to_save": ["norm", "lm_head"]})


@pytest.mark.long
def test_the_plan_covers_what_peft_keeps_of_a_token_for_dora(tmp_path):
    LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    ).save_pretrained(tmp_path)
    train = {"batch_size": 1, "packing": False, "bf16": True, "fp16": False}
    config = config_of(tmp_path, use_dora=True)
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "model": config.model.model_copy(update={"max_seq_len": 256}),
        }
    )
    setup = StepSetup(config, "cuda", zero_stage=0)
    one, two = (traced_point(setup, size=TracedSize(rows, 256)).kept for rows in (1, 2))
    traced = (two - one) / 256 / 2  # of a token in one of both layers
    step = replace(
        STEP,
        model=load_shape(str(tmp_path), None, {}),
        adapters=Adapters.of(config),
        fuses_loss=True,
    )
    assert traced <= layer_bytes_per_token(step) <= 1.35 * traced


@pytest.mark.parametrize("name", ["dora", "dora-of-some", "one-layer", "modules", "head", "tokens"])
def test_a_fused_step_has_the_loss_and_gradients_of_peft(untied_base, name):
    options = OPTIONS[name]
    plain_loss, plain = loss_and_gradients(
        loaded(config_of(untied_base, fast_path=False, **options))
    )
    fused_loss, fused = loss_and_gradients(loaded(config_of(untied_base, **options)))
    assert fused.keys() == plain.keys()
    assert fused_loss == pytest.approx(plain_loss, rel=SAME)
    for parameter, gradient in plain.items():
        largest = gradient.abs().max().clamp(min=1e-6)
        assert ((fused[parameter] - gradient).abs().max() / largest) <= 10 * SAME, parameter


@pytest.mark.parametrize("name", ["dora", "modules", "head", "tokens"])
def test_a_16_bit_base_trains_and_generates_with_float32_weights_beside_it(tiny_base, name):
    model = loaded(config_of(tiny_base, **OPTIONS[name]), CPU_BF16)
    with torch.autocast("cpu", torch.bfloat16):
        loss_and_gradients(model)
    model.eval()
    ids = torch.arange(8, 20)[None]
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape[1] > 12


@dataclass(frozen=True)
class RunCase:
    """A run with several options, and words in the names of tensors that must be saved."""

    settings: dict[str, object]
    saved: tuple[str, ...]


RUNS = {
    "dora": RunCase(
        {
            "tuning.lora.use_dora": True,
            "tuning.lora.layers_to_transform": "1",
            "tuning.lora.modules_to_save": "embed_tokens,norm",
            "tuning.lora.loraplus_lr_ratio": 4,
            "train.neftune_noise_alpha": 5,
        },
        ("layers.1.self_attn.q_proj.lora_magnitude_vector", "model.embed_tokens", "model.norm"),
    ),
    "tokens": RunCase(
        {"tuning.lora.trainable_tokens": ",".join(TOKENS), "tuning.mode": "qlora"},
        ("trainable_tokens_delta",),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_saves_reads_back_and_merges_it(train_run, tiny_base, opens_here, name):
    case = RUNS[name]
    folder = train_run(case.settings)
    saved = load_file(folder.path / "adapter" / "adapter_model.safetensors")
    for word in case.saved:
        assert any(word in tensor for tensor in saved), word
    begin = load_model(folder.read_config(), CPU)
    trained = load_run(folder, "cpu").model
    for parameter, before in begin.named_parameters():
        if before.requires_grad and "lora_A" not in parameter:
            assert not torch.equal(before, trained.get_parameter(parameter)), parameter
    merge_run(folder)
    ids = torch.randint(8, 500, (2, 24), generator=torch.Generator().manual_seed(0))
    merged = AutoModelForCausalLM.from_pretrained(folder.path / "merged").eval()
    with torch.no_grad():
        difference = merged(input_ids=ids).logits - trained(input_ids=ids).logits
    assert difference.abs().max() < 1e-4


def test_norm_names_the_last_norm_alone(tiny_base):
    model = load_model(config_of(tiny_base, modules_to_save=["norm"]), CPU)
    names = [name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name]
    assert names == ["base_model.model.model.norm.modules_to_save.default.weight"]


# LoRA+


def test_b_learns_faster_in_the_groups_of_peft(tiny_base):
    model = load_model(config_of(tiny_base, use_dora=True), CPU)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = torch.optim.AdamW(trained, lr=1e-3)
    raise_learning_rate_of_b(ours, model, 16.0)
    peft = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    assert rates(ours) == rates(peft)
    assert ours.param_groups[0]["lr"] == 1e-3


def rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[id(parameter)] = group["lr"]
    return found


def test_the_trainer_raises_the_rate_of_b_and_adds_noise(plan_run, build_loop):
    folder = plan_run({"tuning.lora.loraplus_lr_ratio": 4, "train.neftune_noise_alpha": 5})
    trainer, _ = build_loop(folder)
    of_b: set[float] = set()
    of_a: set[float] = set()
    by_id = rates(trainer.engine.create_optimizer())
    for name, parameter in trainer.engine.model.named_parameters():
        if parameter.requires_grad:
            (of_b if "lora_B" in name else of_a).add(by_id[id(parameter)])
    assert (of_a, of_b) == ({0.01}, {0.04})
    ids = torch.arange(8, 24)[None]
    model = trainer.engine.model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


# NEFTune


def test_the_length_of_a_row_does_not_depend_on_packing():
    ids = torch.ones(2, 6, dtype=torch.int64)
    packed = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])
    assert row_lengths(ids, position_ids=packed).tolist() == [[2, 2, 4, 4, 4, 4], [3] * 6]
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert row_lengths(ids, attention_mask=mask).tolist() == [[2] * 6, [6] * 6]
    assert row_lengths(ids).tolist() == [[6] * 6] * 2


def test_noise_is_as_large_as_the_paper_says_and_in_training_alone(tiny_base):
    model = load_model(config_of(tiny_base), CPU)
    embeddings = model.get_input_embeddings()
    seen: list[torch.Tensor] = []
    EmbeddingNoise(5.0).attach(model)
    embeddings.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    ids = torch.arange(8, 40).reshape(2, 16)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    model.eval()(input_ids=ids, attention_mask=mask)
    torch.manual_seed(0)  # the mean of few draws is now and then further away
    model.train()(input_ids=ids, attention_mask=mask)
    quiet, noisy = seen
    assert torch.equal(quiet, embeddings.weight[ids])
    for row, tokens in ((0, 16), (1, 4)):
        limit = 5.0 / (tokens * 64) ** 0.5
        noise = (noisy - quiet)[row, :tokens].abs()
        assert 0.95 * limit < noise.max() <= 1.001 * limit
        assert noise.mean() == pytest.approx(limit / 2, rel=0.1)


def test_tokens_are_found_by_their_text(tiny_base, tokenizer):
    ids = lora.trainable_token_ids(config_of(tiny_base, trainable_tokens=TOKENS))
    assert ids == sorted(tokenizer.convert_tokens_to_ids(TOKENS))
