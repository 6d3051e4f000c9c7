"""sft_play.compat.unsloth: the trainer and the arguments that the multi-GPU guides write."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rank_processes import run_two

from sft_play.config.loader import SHIPPED_MODEL
from sft_play.errors import ConfigError, EnvironmentFault

ROWS = [{"text": f"row {number} of a small set with words"} for number in range(16)]
LINES = [
    "evaluation_strategy is called eval_strategy now: eval_strategy=no",
    "warmup_ratio is called warmup_steps now: warmup_steps=0.1",
    "overwrite_output_dir=True is no argument any more: files in output_dir are always overwritten",
    "group_by_length is train_sampling_strategy now: train_sampling_strategy=random",
    "fp16=True needs a GPU: computing in float32",
]


@pytest.fixture
def unsloth(monkeypatch):
    pytest.importorskip("trl", reason="trl is in requirements-bench.txt")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    from sft_play.compat import unsloth

    return unsloth


def test_without_trl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "sft_play.compat.unsloth", raising=False)
    with pytest.raises(EnvironmentFault, match=r"needs trl; install it with .* pip install trl=="):
        importlib.import_module("sft_play.compat.unsloth")


def test_old_names_are_passed_on_under_the_new_ones(unsloth, tmp_path, capsys):
    arguments = unsloth.UnslothTrainingArguments(
        output_dir=str(tmp_path),
        evaluation_strategy="no",
        warmup_ratio=0.1,
        overwrite_output_dir=True,
        group_by_length=False,
        fp16=True,
        report_to=None,
        distributed_backend="nccl",
        enable_distributed_training=True,
    )
    assert (arguments.eval_strategy.value, arguments.warmup_steps) == ("no", 0.1)
    assert (arguments.fp16, arguments.bf16, arguments.report_to) == (False, False, [])
    assert arguments.distributed_backend == "nccl"
    assert capsys.readouterr().out.splitlines() == LINES


def test_the_arguments_that_a_guide_writes_for_several_gpus_are_taken(unsloth, tmp_path):
    written = {
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "gradient_checkpointing": False,
        "auto_find_batch_size": False,
        "ddp_bucket_cap_mb": 25,
        "ddp_broadcast_buffers": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "save_total_limit": 1,
    }
    arguments = unsloth.UnslothTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, fp16=True, bf16=True, report_to=None, **written
    )
    assert {name: getattr(arguments, name) for name in written} == written
    assert (arguments.fp16, arguments.bf16, arguments.report_to) == (False, True, [])


def test_steps_win_over_a_ratio(unsloth):
    assert unsloth.today({"warmup_steps": 5, "warmup_ratio": 0.1}) == {"warmup_steps": 5}


def be_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    "named, words",
    [
        ({"enable_distributed_training": False}, "a launcher has started 2 processes"),
        ({"distributed_backend": "nccl"}, "write gloo"),
        ({"distributed_backend": "mpi"}, "write nccl for GPUs or gloo for CPUs"),
    ],
)
def test_several_processes_that_cannot_be_are_refused(unsloth, monkeypatch, named, words):
    be_one_of_two(monkeypatch)
    with pytest.raises(ConfigError, match=words):
        unsloth.UnslothTrainingArguments(**named)


def test_a_tokenizer_is_given_once(unsloth):
    with pytest.raises(ConfigError, match="leave tokenizer out"):
        unsloth.UnslothTrainer(None, None, tokenizer=1, processing_class=2)


def test_a_quantized_model_and_a_forced_single_gpu_are_on_one_of_one_process(
    unsloth, monkeypatch, capsys
):
    def gpus(**model: bool) -> int:
        arguments = SimpleNamespace(n_gpu=2, _n_gpu=2, device="cuda:0")
        unsloth._limit_data_parallel(arguments, SimpleNamespace(**model))
        return arguments._n_gpu

    assert gpus(is_loaded_in_4bit=True) == 1
    assert "training on cuda:0; start with torchrun to use all" in capsys.readouterr().out
    assert gpus() == 2  # transformers copies a 16-bit model
    monkeypatch.setenv("UNSLOTH_FORCE_SINGLE_GPU", "1")
    assert gpus() == 1
    assert "UNSLOTH_FORCE_SINGLE_GPU=1: training on cuda:0 alone" in capsys.readouterr().out


def test_processes_that_would_train_alone_are_refused(unsloth, monkeypatch, tmp_path):
    arguments = unsloth.UnslothTrainingArguments(output_dir=str(tmp_path))  # of one process
    be_one_of_two(monkeypatch)
    with pytest.raises(ConfigError, match="each of the 2 processes would train alone"):
        unsloth._refuse_lonely(arguments)


def train(folder: Path) -> None:
    """Train as the guides' cells do, in this process or as one of several."""
    import torch
    from datasets import Dataset
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sft_play.compat.unsloth import SFTConfig, SFTTrainer
    from sft_play.distributed import choose_device_map, get_world_size

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, device_map=choose_device_map())
    trainer = SFTTrainer(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(SHIPPED_MODEL),
        train_dataset=Dataset.from_list(ROWS),
        dataset_text_field="text",
        max_seq_length=128,
        packing=False,
        args=SFTConfig(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            distributed_backend="gloo",
            output_dir=str(folder / "outputs"),
            max_steps=2,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    assert trainer.args.max_length == 128
    stats = trainer.train()
    is_wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert is_wrapped is (get_world_size() > 1)
    assert 10 < stats.training_loss < 20  # a mean over tokens, however many ranks and batches


@pytest.mark.slow
def test_the_guides_trainer_trains_alone(unsloth, tmp_path, capsys):
    train(tmp_path)
    printed = capsys.readouterr().out
    assert "Mode: one process on cpu\nEffective batch size: 2 x 1 x 2 = 4 samples" in printed
    assert "max_seq_length of the trainer is max_length of its args now" in printed


@pytest.mark.slow
@pytest.mark.long
def test_the_guides_trainer_trains_on_two_ranks(unsloth, tmp_path):
    output = tmp_path / "output.txt"
    assert run_two(train, tmp_path, output=output) == [0, 0], output.read_text()
    assert "Effective batch size: 2 x 2 x 2 = 8 samples" in output.read_text()
