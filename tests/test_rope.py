"""model.rope_scaling: the base's rope is stretched, and stays so in all that follows from a run."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sft_kernels.process import Process
from sft_play.config import loader
from sft_play.config.schema import ModelSection
from sft_play.config.sections.model import RopeScalingSection
from sft_play.errors import CheckpointError, ConfigError
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models.load import load_base
from sft_play.models.positions import keep_angles_exact, with_stretched_rope
from sft_play.plan.config_json import load_positions, positions_of, stretch
from sft_play.runs import stamp

THETA = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"model.rope_scaling.rope_type": "yarn", "model.rope_scaling.factor": 4.0}


def rope(rope_type: str, factor: float = 4.0, **more: float) -> RopeScalingSection:
    return RopeScalingSection(rope_type=rope_type, factor=factor, **more)


@pytest.mark.parametrize(
    ("rope_type", "parameters", "max_position_embeddings"),
    [
        ("linear", {}, 4096),
        ("dynamic", {}, 1024),  # transformers stretches beyond this number
        ("yarn", {"original_max_position_embeddings": 1024}, 4096),
        (
            "llama3",
            {
                "original_max_position_embeddings": 1024,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            4096,
        ),
    ],
)
def test_a_rope_is_stretched_in_the_words_of_transformers(
    rope_type, parameters, max_position_embeddings
):
    stretched = stretch(THETA, 1024, rope(rope_type))
    common = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    assert stretched.parameters == common | parameters
    assert stretched.positions == 4096
    assert stretched.max_position_embeddings == max_position_embeddings
    # what a run saves is read with its settings: nothing is stretched twice
    assert stretch(stretched.parameters, max_position_embeddings, rope(rope_type)) == stretched


def test_a_base_that_is_stretched_already_begins_at_what_it_was_trained_on():
    assert stretch(LLAMA31, 131072, rope("yarn", 32.0)).positions == 262144
    assert stretch(LLAMA31, 131072, rope("yarn", 32.0)).original == 8192


def test_a_rope_for_each_kind_of_layer_is_refused():
    with pytest.raises(ConfigError, match="full_attention, sliding_attention"):
        stretch({"full_attention": THETA, "sliding_attention": THETA}, 1024, rope("yarn"))


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
def test_the_frequencies_are_those_of_transformers(rope_type, tiny_base):
    section = ModelSection(name=str(tiny_base), rope_scaling=rope(rope_type))
    config = loader.load_merged(overrides=[f"model.name={tiny_base}"]).config
    model = load_base(
        config.model_copy(update={"model": section}), Process.alone(torch.device("cpu"))
    )
    expected, scale = ROPE_INIT_FUNCTIONS[rope_type](model.config, "cpu")
    rotary = model.model.rotary_emb
    assert torch.equal(rotary.inv_freq, expected) and rotary.attention_scaling == scale
    own = load_base(config, Process.alone(torch.device("cpu"))).model.rotary_emb
    assert torch.equal(own.inv_freq, rotary.inv_freq) is (rope_type == "dynamic")  # beyond 512 only
    longest = 4 * 512
    logits = model(torch.randint(0, 2000, (1, longest))).logits
    assert torch.isfinite(logits).all()
    assert load_positions(section, {}, may_fetch=False) == longest
    assert positions_of(model.config.to_dict()) == longest


def test_a_base_without_a_rope_is_refused():
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(ConfigError, match="gpt2 has no rotary positions"):
        with_stretched_rope(config, ModelSection(rope_scaling=rope("yarn")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.rope_scaling.factor=2"], "a stretched rope has both"),
        (["model.rope_scaling.rope_type=yarn"], "a stretched rope has both"),
        (
            [
                "model.rope_scaling.rope_type=linear",
                "model.rope_scaling.factor=2",
                "model.rope_scaling.low_freq_factor=1",
            ],
            "low_freq_factor is for rope_type llama3",
        ),
        (
            [
                "model.rope_scaling.rope_type=linear",
                "model.rope_scaling.factor=2",
                "tuning.backend=unsloth",
            ],
            "Unsloth stretches a rope by itself",
        ),
    ],
)
def test_settings_that_say_half_or_too_much_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        loader.load_merged(overrides=settings)


def test_a_longer_row_is_warned_of_with_the_number_of_the_base(plan_run, tmp_path):
    from sft_play.plan.run_plan import PlannedRun

    def warnings(**settings: object) -> list[str]:
        folder = plan_run({"model.max_seq_len": 1500, **settings})
        return [text for text in PlannedRun.read(folder).plan.warnings if "max_seq_len" in text]

    (text,) = warnings()
    assert "more than the 512 tokens of the model's config.json" in text
    assert "MODEL_ROPE_SCALING_ROPE_TYPE=yarn MODEL_ROPE_SCALING_FACTOR=3" in text
    assert warnings(**YARN) == []
    (text,) = warnings(**{**YARN, "model.rope_scaling.factor": 2.0})
    assert "the 1024 tokens that yarn with factor 2 reaches" in text


@pytest.mark.slow
def test_a_stretched_run_is_used_as_it_was_trained(train_run, opens_here):
    quick = {"train.max_steps": 1, "train.predict_with_generate": False}
    folder = train_run({**YARN, **quick, "model.max_seq_len": 1024})
    adapter = folder.weights("lora")
    saved = json.loads((adapter / "config.json").read_text())
    assert saved["rope_parameters"]["rope_type"] == "yarn"
    assert saved["max_position_embeddings"] == 2048
    assert "AutoConfig.from_pretrained(folder)" in (adapter / "README.md").read_text()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):  # and not another rope
        AutoModelForCausalLM.from_pretrained(adapter)

    trained = load_run(folder, "cpu")
    assert trained.model.config.rope_parameters["factor"] == 4.0
    merge_run(folder)
    merged = AutoConfig.from_pretrained(folder.path / "merged")
    assert merged.rope_parameters == trained.model.config.rope_parameters

    config = folder.read_config()
    other = config.model.model_copy(update={"rope_scaling": rope("yarn", 2.0)})
    for changed in (other, config.model.model_copy(update={"rope_scaling": RopeScalingSection()})):
        wanted = stamp.wanted_stamp(config.model_copy(update={"model": changed}))
        with pytest.raises(CheckpointError, match="rope_scaling: the checkpoint has"):
            stamp.refuse_mismatch(adapter, wanted)


def test_another_rope_is_another_run(tmp_path):
    config = loader.load_merged().config
    stretched = config.model.model_copy(update={"rope_scaling": rope("yarn")})
    now = stamp.wanted_stamp(config.model_copy(update={"model": stretched}))
    (line,) = stamp.differences(stamp.wanted_stamp(config), now)
    assert line.startswith("rope_scaling: the checkpoint has {}, this run ")


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "olmo2", "deepseek_v3"]
)
def test_angles_are_computed_in_full_precision(model_type: str, monkeypatch) -> None:
    """Of a matrix product in TF32 positions over 2,048 would be rounded."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0}
    sizes |= {"num_key_value_heads": 4, "head_dim": 16}
    if model_type == "deepseek_v3":
        sizes |= {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
        del sizes["head_dim"]
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    keep_angles_exact(model)
    seen: list[str] = []
    product = torch.Tensor.__matmul__

    def noting(one, other):
        if one.shape[-1] == 1:  # a position and a frequency
            seen.append(torch.get_float32_matmul_precision())
        return product(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noting)
    torch.set_float32_matmul_precision("high")
    try:
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
        with pytest.raises(TypeError):
            model.base_model.rotary_emb()
        assert torch.get_float32_matmul_precision() == "high", "after an error, too"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen and set(seen) == {"highest"}
