"""One model on two real GPUs of one process (model.device_map): needs two, and changes nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from make_runs import check_losses, losses, run_make

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).resolve().parents[1]
LAYERS = 16
ROWS = "rows.jsonl"
SETTINGS = {
    "CONFIG": "configs/tiny.yaml",
    "TRAIN_MAX_STEPS": "12",
    "TRAIN_LOGGING_STEPS": "1",
    "TRAIN_LEARNING_RATE": "2e-3",
    "TRAIN_LR_SCHEDULER_TYPE": "constant",
    "TRAIN_WARMUP_STEPS": "0",
    "DATA_VAL_PATH": "data/desk/val.jsonl",
    "TRAIN_GENERATION_MAX_ROWS": "8",
    "TRAIN_SAVE_STRATEGY": "steps",
    "TRAIN_SAVE_STEPS": "3",
    "TRAIN_BATCH_SIZE": "4",
    "TRAIN_GRAD_ACCUM": "2",
    "MODEL_MAX_SEQ_LEN": "256",
}
ORIGINAL = {"TRAIN_FAST_PATH": "false"}  # as one model on several GPUs computes
# float32 rounds in another order at most, as kernels are those of one GPU
TOLERANCE = {"bf16": 2e-3, "float32": 1e-5}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """A function that returns the folder of a random base of 16 layers of a model type."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folders: dict[str, Path] = {}

    def base(model_type: str) -> Path:
        if model_type not in folders:
            tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")
            config = AutoConfig.for_model(
                model_type,
                vocab_size=len(tokenizer),
                hidden_size=512,
                intermediate_size=1024,
                num_hidden_layers=LAYERS,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=64,
                max_position_embeddings=1024,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(model_type)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            rows = (ROOT / "data" / "desk" / "train.jsonl").read_text().splitlines(keepends=True)
            (folder / ROWS).write_text("".join(rows[:8]))  # random weights learn them by heart
            folders[model_type] = folder
        return folders[model_type]

    return base


def train(folder: Path, base: Path, precision: str, **variables: str) -> dict[str, Any]:
    """Train a run and return its run.json."""
    if precision == "float32":
        variables |= {"TRAIN_BF16": "false", "TRAIN_FP16": "false"}
    words = {**SETTINGS, "MODEL_NAME": str(base), "DATA_TRAIN_PATH": str(base / ROWS), **variables}
    run_make("train", folder, 400, **words)
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("mode", "precision"),
    [("lora", "bf16"), ("lora", "float32"), ("qlora", "bf16"), ("full", "bf16")],
)
def test_two_gpus_train_what_one_trains(
    tmp_path: Path, base_of, model_type: str, mode: str, precision: str
) -> None:
    base = base_of(model_type)
    settings = {"TUNING_MODE": mode}
    if mode == "full":
        settings["TRAIN_LEARNING_RATE"] = "3e-4"
    one = train(tmp_path / "one", base, precision, NUM_GPUS="1", **ORIGINAL, **settings)
    two = train(tmp_path / "two", base, precision, MODEL_DEVICE_MAP="balanced", **settings)
    check_losses(losses(two), losses(one), TOLERANCE[precision])
    for when in ("before", "after"):
        found, expected = (report["metrics"][when]["eval_loss"] for report in (two, one))
        assert found == pytest.approx(expected, rel=TOLERANCE[precision])
    assert two["fast_path"]["on"] == {}
    assert [gpu["device"] for gpu in two["memory_by_rank"]] == ["cuda:0", "cuda:1"]
    assert all(gpu["before_bytes"] > 0 for gpu in two["memory_by_rank"])
    assert (two["engine"], two["world_size"]) == (one["engine"], 1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_weights_are_balanced_and_gradients_stay_on_their_gpus(base_of, model_type: str) -> None:
    from sft_kernels.process import Process
    from sft_play.config.schema import Config
    from sft_play.models.load import load_model

    config = Config.model_validate(
        {
            "model": {"name": str(base_of(model_type)), "device_map": "balanced"},
            "train": {"fast_path": False},  # as a plan of several GPUs says
        }
    )
    process = Process(0, 0, 1, torch.device("cuda", 0), torch.bfloat16, gpus=2)
    model = load_model(config, process)
    held = [0, 0]
    for parameter in model.parameters():
        held[parameter.device.index] += parameter.nbytes
    assert max(held) < 1.2 * min(held)
    ids = torch.randint(5, 2000, (2, 64), device="cuda:0")
    with process.autocast():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert logits.device.index == 0, "where the inputs are"
    logits.float().square().mean().backward()
    devices = {p.grad.device for p in model.parameters() if p.grad is not None}
    assert devices == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert torch.cuda.current_device() == 0


def test_a_placed_run_resumes_answers_and_is_opened_by_others(tmp_path: Path, base_of) -> None:
    base = base_of("llama")
    train(tmp_path, base, "bf16", MODEL_DEVICE_MAP="auto", TRAIN_SAVE_TOTAL_LIMIT="null")
    adapter = tmp_path / "run" / "adapter"
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    resumed = tmp_path / "resumed"
    words = {
        "MODEL_DEVICE_MAP": "auto",
        "TRAIN_RESUME_FROM": str(checkpoint),
        "TRAIN_SAVE_TOTAL_LIMIT": "null",
    }
    train(resumed, base, "bf16", **words)
    from safetensors.torch import load_file

    name = "adapter_model.safetensors"
    torch.testing.assert_close(
        load_file(resumed / "run" / "adapter" / name), load_file(adapter / name), rtol=0, atol=1e-3
    )
    assert "rougeL" in run_make("eval", tmp_path, 400)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert torch.isfinite(model(input_ids=torch.arange(5, 25)[None]).logits).all()


@pytest.mark.parametrize("device_map", ["sequential", "balanced_low_0"])
def test_other_maps_train_too(tmp_path: Path, base_of, device_map: str) -> None:
    report = train(tmp_path, base_of("qwen3"), "bf16", MODEL_DEVICE_MAP=device_map)
    assert report["status"] == "done"


def test_modules_go_where_a_mapping_says(tmp_path: Path, base_of) -> None:
    mapping = (
        "{model.embed_tokens: 1, model.layers: 0, model.layers.15: 1, model.norm: 1, lm_head: 0}"
    )
    placed = train(tmp_path / "two", base_of("llama"), "bf16", MODEL_DEVICE_MAP=mapping)
    one = train(tmp_path / "one", base_of("llama"), "bf16", NUM_GPUS="1", **ORIGINAL)
    check_losses(losses(placed), losses(one), TOLERANCE["bf16"])
