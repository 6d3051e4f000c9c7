"""`make init FROM=`: configs and command lines of other programs, translated."""

import shutil

import pytest
from conftest import ROOT

from sft_play.commands.call import read_call
from sft_play.commands.init import init
from sft_play.config.foreign import translate
from sft_play.config.loader import load_merged
from sft_play.errors import ConfigError

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
chat_template: llama3
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
    name: plain
    split: train
adapter: lora
lora_r: 16
lora_target_linear: true
wandb_project:
optimizer: adamw_bnb_8bit
micro_batch_size: 2
gradient_checkpointing: unsloth
hub_token: hf_abcdefghijklmnopqrstuvwxyz
chat_template_jinja: |
  {{ messages }}
  train: {epochs: 99}
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: full
cutoff_len: 2048
num_train_epochs: 3.0
warmup_ratio: 0.1
lora_target: all
"""
TRL = (
    "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset-name=trl-lib/Capybara --packing "
    "--learning_rate 2e-4 --lora_target_modules q_proj v_proj --push_to_hub"
)


@pytest.mark.parametrize(
    ("text", "said", "left"),
    [
        (
            AXOLOTL,
            {
                "model.name": "NousResearch/Llama-3.2-1B",
                "tuning.mode": "qlora",
                "tuning.lora.r": 16,
                "tuning.lora.target_modules": "all-linear",
                "train.batch_size": 2,
                "train.optim": "adamw_8bit",
                "train.gradient_checkpointing": True,
                "data.train_path": [
                    {"path": "tatsu-lab/alpaca", "subset": "plain", "split": "train"}
                ],
            },
            ["tokenizer_type", "chat_template", "hub_token", "chat_template_jinja"],
        ),
        (
            LLAMA_FACTORY,
            {
                "model.name": "meta-llama/Llama-3.1-8B",
                "model.max_seq_len": 2048,
                "tuning.mode": "full",
                "tuning.lora.target_modules": "all-linear",
                "train.warmup_steps": 0.1,
                "train.epochs": 3.0,
            },
            ["stage"],
        ),
        (
            TRL,
            {
                "model.name": "Qwen/Qwen2.5-0.5B",
                "tuning.lora.target_modules": ["q_proj", "v_proj"],
                "train.learning_rate": 2e-4,
                "train.packing": True,
                "data.train_path": "trl-lib/Capybara",
            },
            ["push_to_hub"],
        ),
    ],
    ids=["axolotl", "llama-factory", "trl"],
)
def test_what_can_be_said_is_a_setting_and_the_rest_has_its_reason(tmp_path, text, said, left):
    source = text
    if "\n" in text:
        (tmp_path / "other.yml").write_text(text)
        source = str(tmp_path / "other.yml")
    found = translate(source)
    assert {line.path: line.value for line in found.lines} == said
    assert [line.partition(":")[0] for line in found.left] == left
    assert not any("hf_abc" in line or "\n" in line for line in found.left)


def test_the_file_that_is_written_loads(tmp_path):
    (tmp_path / "other.yml").write_text(AXOLOTL)
    out = tmp_path / "config.yaml"
    told = init(read_call(environ={"FROM": str(tmp_path / "other.yml"), "OUT": str(out)}))
    assert told[0] == f"wrote {out}: 8 settings" and told[-1] == f"next make plan CONFIG={out}"
    loaded = load_merged(str(out))
    assert loaded.config.tuning.mode == "qlora" and loaded.config.train.epochs == "auto"
    assert "hf_abc" not in out.read_text()


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--sample_packing --sequence_len 2048 --micro_batch_size 2 --grad_accum 4", 16384),
        ("--packing --max_length 1024 --per_device_train_batch_size 8", 8192),
        ("--neat_packing true --cutoff_len 512 --gradient_accumulation_steps 4", "left"),
        ("--packing --per_device_train_batch_size 8", "left"),
        ("--padding_free --max_length 1024 --per_device_train_batch_size 8", None),
        ("--sample_packing false --sequence_len 64 --micro_batch_size 2", None),
    ],
)
def test_packed_sequences_are_converted_by_tokens(words, tokens):
    found = translate(words)
    paths = [line.path for line in found.lines]
    if tokens is None:
        assert found.packed_tokens is None and "train.batch_size" in paths
        return
    assert "train.batch_size" not in paths and "train.grad_accum" not in paths
    if tokens == "left":
        assert found.packed_tokens is None and "counts packed sequences there" in found.left[0]
    else:
        assert found.packed_tokens == tokens and not found.left


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_step_of_packed_sequences_becomes_rows_of_their_mean_length(tmp_path, has_rows):
    """Paths in a file are relative to the file."""
    (tmp_path / "data").mkdir()
    if has_rows:
        shutil.copyfile(ROOT / "data" / "desk" / "train.jsonl", tmp_path / "data" / "rows.jsonl")
    (tmp_path / "other.yml").write_text(
        f"base_model: {ROOT}/data/tiny_llama\nsample_packing: true\nsequence_len: 2048\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "datasets:\n- path: ./data/rows.jsonl\n"
    )
    out = tmp_path / "config.yaml"
    environ = {"FROM": str(tmp_path / "other.yml"), "OUT": str(out), "DEVICE": "cpu"}
    environ["DATA_CACHE_DIR"] = str(tmp_path / "cache")
    told = init(read_call(environ=environ))
    data, train = (getattr(load_merged(str(out)).config, name) for name in ("data", "train"))
    assert data.train_path[0].path == str(tmp_path / "data" / "rows.jsonl")
    assert "a step there is 16,384 tokens in packed sequences" in told[1]
    if has_rows:
        mean = int(told[1].split()[-3])
        assert 40 < mean < 80
        assert train.effective_batch_size == pytest.approx(16384 / mean, rel=0.02)
    else:
        assert train.effective_batch_size == 32 and "divide them by the tokens of a row" in told[1]


def test_a_source_that_is_none_is_an_error():
    with pytest.raises(
        ConfigError, match=r"FROM=nothing\.yml: no such file; write a YAML file, or"
    ):
        translate("nothing.yml")
