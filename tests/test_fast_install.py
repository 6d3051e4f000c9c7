"""Tiny models of every architecture train the same with fused kernels as without them."""

import copy
import logging
from typing import Any

import peft
import plan_examples
import pytest
import torch
from marks import long
from peft.tuners.lora.layer import ParamWrapper
from test_packed_training import MAX_SEQ_LEN, VOCABULARY, documents, order_of, spread
from tiny_models import tiny_config, tiny_model, with_adapters
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4TextConfig,
    Ministral3Config,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention

from sft_kernels.attention.install import counts_tokens, reads_rows
from sft_kernels.install import FusedKernels, fused_kernels_of
from sft_kernels.loss.head import summed_nll
from sft_kernels.modules import decoder_of
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.errors import ConfigError
from sft_play.models import lora
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast import install_fused_kernels
from sft_play.plan.model_shape import LLAMA_LIKE
from sft_play.training.isolation import measure_cross_document

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 7  # shorter than most documents
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
}
# Tolerance of float32 sums in another order; a model of two layers has some hundred successive sums
SAME = 2e-6


def plain_model(
    name: str,
    mode: str = "lora",
    dropout: float = 0.0,
    std: float = 0.15,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Any:
    """Return a tiny model in training mode, without fused kernels.

    Its weights are large enough that attention is not uniform.
    """
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, **settings)
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if model_type == "gemma2" else "sdpa"
    )
    spread(model, std)
    model.to(dtype)
    if mode == "lora":
        model = with_adapters(model, lora_dropout=dropout)
    model.config.use_cache = False
    return model.train()


def settings(mode: str = "lora", **train: Any) -> Config:
    return Config.model_validate(
        {"tuning": {"mode": mode, "lora": {"dropout": 0.0}}, "train": train}
    )


def make(model: Any, mode: str = "lora", zero_stage: int = 0, **train: Any) -> FusedKernels:
    return install_fused_kernels(model, settings(mode, **train), Process.alone(CPU), zero_stage)


def batches(is_packed: bool, names_boundaries: bool, in_one_row: bool = False) -> list[Batch]:
    rows = TrainRows(documents(16))
    collator: PackCollator | PadCollator = PadCollator(0, MAX_SEQ_LEN)
    if is_packed:
        collator = PackCollator(0, MAX_SEQ_LEN, names_boundaries, in_one_row=in_one_row)
    return [
        collator([rows[sequence] for sequence in micro_batch])
        for micro_batch in order_of(rows.samples, is_packed, effective=16)
    ]


def step(
    model: Any, is_packed: bool, names_boundaries: bool = False, in_one_row: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of a step of 16 samples, from all logits."""
    model.zero_grad()
    total = 0.0
    for batch in batches(is_packed, names_boundaries, in_one_row):
        loss = summed_nll(model(**batch.arguments).logits, batch.labels) / 100
        loss.backward()
        total += loss.item()
    return total, {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gap(
    one: tuple[float, dict[str, torch.Tensor]], two: tuple[float, dict[str, torch.Tensor]]
) -> float:
    """Return the largest difference of two steps' gradients or losses.

    For gradients it is relative to the largest element of the tensor.
    """
    assert one[1].keys() == two[1].keys() and one[1]
    gradients = [
        ((gradient - two[1][name]).abs().max() / gradient.abs().max().clamp(min=1e-6)).item()
        for name, gradient in one[1].items()
    ]
    return max(*gradients, abs(one[0] - two[0]) / abs(one[0]))


# these differ in their norms, projections and windows; the others are like them
FULL = ("llama-bias", "gemma3", "phi3-partial", "qwen2-window")
OF_EACH_KIND = [*FULL, *(long(name) for name in MODELS if name not in FULL)]
NAMES_AND_MODES = [
    *((name, "lora") for name in MODELS),
    *((name, "full") for name in FULL),
    *(long(name, "full") for name in MODELS if name not in FULL),
]


def gap_to_plain(name: str, mode: str, is_packed: bool, layers: int = 0, **changes: bool) -> float:
    """Return how far the loss and the gradients of a fast step are from those of a plain one.

    It checkpoints the first `layers` layers. `changes` are those of how its rows are packed.
    """
    model = plain_model(name, mode)
    plain = step(model, is_packed)
    make(model, mode)
    checkpoint_layers(model, layers)
    packing = {"names_boundaries": fused_kernels_of(model).reads_boundaries, **changes}
    return gap(plain, step(model, is_packed, **packing))


@pytest.mark.parametrize("name, mode", NAMES_AND_MODES)
def test_a_fast_step_has_the_loss_and_gradients_of_a_plain_one(name, mode):
    assert gap_to_plain(name, mode, is_packed=True) <= SAME


CHANGES = [
    *((name, {"names_boundaries": False}) for name in ("llama", "gemma3", "phi3")),
    *((name, {"layers": n}) for name in ("llama", "mistral", "qwen3") for n in (1, 2)),
]


@pytest.mark.parametrize("name, changes", CHANGES)
def test_packed_rows_without_boundaries_and_checkpointed_layers_do_too(name, changes):
    assert gap_to_plain(name, "lora", is_packed=True, **changes) <= SAME


PADDED = [("llama", "lora"), ("phi3-partial", "lora"), ("gemma3", "full")]
PADDED_AND_LONG = [
    (name, mode) if (name, mode) in PADDED else long(name, mode)
    for name in MODELS
    for mode in ("lora", "full")
]


@pytest.mark.parametrize("name, mode", PADDED_AND_LONG)
def test_a_fast_step_of_padded_rows_does_too(name, mode):
    assert gap_to_plain(name, mode, is_packed=False) <= SAME


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3"])
def test_documents_in_one_row_train_the_same(name):
    assert gap_to_plain(name, "lora", is_packed=True, in_one_row=True) <= SAME
    (batch, *_) = batches(True, True, in_one_row=True)
    assert len(batch.ids) == 1 and batch.ids.shape[1] > 2 * MAX_SEQ_LEN


@pytest.mark.parametrize(
    "model_type, fast_path",
    [
        *((each, "auto") for each in sorted(LLAMA_LIKE - {"gemma3"})),  # its text: gemma3_text
        ("llama", "false"),
    ],
)
def test_a_plan_knows_which_models_take_one_row(model_type, fast_path, tmp_path):
    model = plain_model(model_type.removesuffix("_text"))
    make(model, fast_path=False if fast_path == "false" else "auto")
    model.config.save_pretrained(tmp_path)
    planned = plan_examples.plan_for(
        plan_examples.CPU, f"model.name={tmp_path}", f"train.fast_path={fast_path}"
    )
    assert planned.plan.step.model.model_type == model_type
    assert (
        planned.plan.request.row.in_one_row
        == fused_kernels_of(model).in_one_row
        == (fast_path == "auto")
    )


def test_a_gpu_without_fused_attention_keeps_rows():
    model = "model.name=meta-llama/Llama-3.2-1B-Instruct"
    assert plan_examples.plan_for("1xA100-80", model).plan.request.row.in_one_row
    assert not plan_examples.plan_for("1xT4", model).plan.request.row.in_one_row


def documents_joined(model: Any) -> None:
    packed = model.get_base_model().model.packed_documents
    packed.on = lambda device: None


def deep_mixture(experts: int = 32, layers: int = 24) -> Any:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    changes = {"num_hidden_layers": layers, "layer_types": kinds, "num_local_experts": experts}
    return tiny_model("gpt_oss", dtype=torch.bfloat16, **changes)


@pytest.mark.long
def test_rounding_in_a_deep_mixture_is_no_document_that_is_seen():
    """A document by itself took 1.4 of 7.2 for that: other kernels, so other experts."""
    model = lora.add_adapters(deep_mixture(), settings()).train()
    kernels = install_fused_kernels(model, settings(), Process.alone(CPU, torch.bfloat16))
    collator = PackCollator(0, MAX_SEQ_LEN, kernels.reads_boundaries)
    found = measure_cross_document(model, collator, VOCABULARY, CPU)
    assert found.is_coarse and found.holds
    assert found.apart < 0.05 * found.joined
    documents_joined(model)
    assert not measure_cross_document(model, collator, VOCABULARY, CPU).holds


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_evaluation_and_generation_are_the_same_to_the_bit(name):
    model = plain_model(name).eval()
    padded = batches(False, False)[0]
    mask = padded.inputs["attention_mask"].flip(1)  # prompts are padded on the left
    prompts = torch.where(mask == 1, padded.ids.flip(1), 0)

    @torch.no_grad()
    def outcome():
        logits = model(**padded.inputs).logits
        return logits, model.generate(
            input_ids=prompts,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            use_cache=True,
        )

    (logits, texts), _ = outcome(), make(model)
    now, texts_now = outcome()
    assert torch.equal(texts, texts_now)
    if (
        name == "gemma2"
    ):  # its linears are fused one by one, in evaluation too: a sum in another order
        assert torch.allclose(logits, now, atol=1e-4 * logits.abs().max().item())
    else:
        assert torch.equal(logits, now)


def test_all_layers_are_run_on_few_tokens_where_they_keep_activations():
    """Gemma 3 27B has windows of 1,024 tokens: 77 GiB of activations, of a card of 79."""
    model = plain_model("gemma3", sliding_window=500)
    kept: list[int] = []
    inner = model.get_base_model().model
    inner.register_forward_hook(
        lambda module, args, kwargs, output: kept.append(
            output.last_hidden_state.requires_grad * kwargs["input_ids"].numel()
        ),
        with_kwargs=True,
    )
    assert "attention" in make(model).on
    assert 0 < max(kept) < 50


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_documents_are_kept_apart_by_fast_attention(name):
    model = plain_model(name)
    make(model)
    collator = PackCollator(0, MAX_SEQ_LEN, fused_kernels_of(model).reads_boundaries)
    assert measure_cross_document(model, collator, VOCABULARY, CPU).holds
    if fused_kernels_of(model).reads_boundaries:
        documents_joined(model)
        assert not measure_cross_document(model, collator, VOCABULARY, CPU).holds


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_what_is_saved_is_plain_peft(name, tmp_path):
    model = plain_model(name)
    names = list(model.state_dict())
    make(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path / "adapter")
    model.get_base_model().config.save_pretrained(tmp_path / "config")
    assert "fast" not in (tmp_path / "config" / "config.json").read_text()
    bare = plain_model(name).unload()
    loaded = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    ids = batches(False, False)[0].ids
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
        merged = model.merge_and_unload()
        assert torch.allclose(
            merged(input_ids=ids).logits, loaded(input_ids=ids).logits, atol=1e-4
        )  # one product for two


def test_two_models_of_one_process_do_not_disturb_each_other():
    plain, fast = plain_model("qwen3"), plain_model("qwen3")
    before = step(plain, is_packed=True)
    make(fast)
    assert "forward" not in vars(plain.get_base_model().model.layers[0].self_attn)
    assert gap(before, step(plain, is_packed=True)) == 0
    copied = copy.deepcopy(fast)
    one = copied.get_base_model().model.layers[0]
    assert one.self_attn.forward.__self__ is one.self_attn, "a copy computes with its own weights"
    assert gap(step(fast, True, True), step(copied, True, True)) == 0


def test_what_is_on_and_what_is_not_is_said_in_one_line(caplog):
    caplog.set_level(logging.INFO)
    model = plain_model("llama")
    installed = make(model)
    assert fused_kernels_of(model) == installed and fused_kernels_of(model).reads_boundaries
    assert installed == FusedKernels(
        {"attention": 2, "linears": 8, "mlp": 2, "norms": 4, "loss": 1}, {}, in_one_row=True
    )
    assert "attention x2, linears x8, mlp x2, norms x4, loss x1" in caplog.text


def test_dropout_keeps_linears_or_attention_plain():
    installed = make(plain_model("llama", dropout=0.1))
    assert "dropout" in installed.off["linears"]
    assert {"attention", "mlp", "loss"} <= installed.on.keys()
    model = plain_model("llama")
    model.get_base_model().model.layers[1].self_attn.attention_dropout = 0.1
    installed = make(model)
    assert "dropout of 0.1" in installed.off["attention"]
    assert {"linears", "mlp"} <= installed.on.keys()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_of_attention_may_be_a_module(dropout):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "persimmon", **{**SMALL, "num_key_value_heads": 4, "attention_dropout": dropout}
    )
    installed = make(lora.add_adapters(AutoModelForCausalLM.from_config(config), settings()))
    assert ("attention" in installed.on) == (dropout == 0.0)


def test_the_user_has_the_last_word():
    model = plain_model("llama")
    off = {"fused kernels": "train.fast_path=false"}
    assert make(model, fast_path=False) == FusedKernels({}, off)
    assert not fused_kernels_of(model).reads_boundaries
    assert "forward" not in vars(model.get_base_model().model.layers[0].mlp)
    eager = settings().model.model_copy(update={"attn_implementation": "eager"})
    chosen = settings().model_copy(update={"model": eager})
    installed = install_fused_kernels(model, chosen, Process.alone(CPU))
    assert installed.off["attention"] == "attn_implementation=eager"


def test_an_architecture_of_another_structure_fuses_what_fits():
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    assert make(model, "qlora", zero_stage=3).on == {}
    with pytest.raises(ConfigError, match=r"train.fast_path=true: .*TRAIN_FAST_PATH=auto"):
        make(model, "qlora", zero_stage=3, fast_path=True)
    assert make(model, "full").on == {"loss": 1}
    assert "dropout of 0.1" in fused_kernels_of(model).off["attention"]


def test_mode_full_trains_weights_through_the_class_s_own_products():
    installed = make(plain_model("llama", "full"), "full")
    assert installed.on == {"attention": 2, "mlp": 2, "loss": 1}
    assert installed.off.keys() == {"linears", "norms"}


def test_adapted_experts_are_built_in_the_proof_of_one_layer_alone(monkeypatch):
    """PEFT's own code keeps a copy of all experts of a layer for its backward pass."""
    built: list[nn.Module] = []
    activate = ParamWrapper._activate_lora

    def count(self, *args):
        if torch.is_grad_enabled():
            built.append(self)
        return activate(self, *args)

    monkeypatch.setattr(ParamWrapper, "_activate_lora", count)
    model = tiny_model("qwen3_moe", num_hidden_layers=4)
    model = lora.add_adapters(model, settings())
    kernels = make(model)
    assert kernels.on["experts"] > 1
    assert len(set(built)) == 2  # the two linears of one layer


def test_attention_that_counts_the_tokens_of_a_row_keeps_its_rows():
    """Llama 4 scales queries by it, from 8,192 on; Ministral 3 by the position in a document."""
    config = Llama4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    assert reads_rows(Llama4TextAttention(config, layer_idx=3))
    other = Ministral3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    assert not reads_rows(Ministral3Attention(other, layer_idx=0))

    class OfRemoteCode(Ministral3Attention):
        @staticmethod
        def scales(states):
            return tuple(torch.arange(len(row)) for row in states)

    assert counts_tokens(OfRemoteCode(other, layer_idx=0)), "in a function inside of a method"


def test_attention_that_is_not_fused_stays_the_models_own():
    """DeepSeek V3.2 leaves out the tokens that it does not choose in sdpa and eager alone."""
    fields = tiny_config("deepseek_v3").to_dict()
    del fields["model_type"]
    choice = {"index_topk": 4, "index_n_heads": 8, "index_head_dim": 16}
    config = AutoConfig.for_model("deepseek_v32", **{**fields, **choice})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    spread(model)
    ids = torch.arange(2, 34)[None]
    own = model(input_ids=ids, use_cache=False).logits
    kernels = make(model, mode="full")
    assert "attention" in kernels.off and config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, own)


def test_a_head_that_is_called_decoder_is_not_taken_for_the_layers():
    """As ModernBERT's decoder calls it, so that get_decoder finds it."""
    sizes = {**SMALL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 2 * WINDOW}
    torch.manual_seed(0)
    base = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes))
    assert base.get_decoder() is base.get_output_embeddings()
    assert decoder_of(base) is base.model
    spread(base, 0.15)
    model = with_adapters(base)
    model.config.use_cache = False
    plain = step(model, is_packed=True)
    make(model)
    assert "attention" in fused_kernels_of(model).on
    assert gap(plain, step(model, True, names_boundaries=True, in_one_row=True)) <= SAME
