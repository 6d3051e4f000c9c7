"""A plan that cannot run is refused: the message names what was set and what to type instead."""

import json

import pytest
from plan_examples import CPU, plan_for

from sft_play.errors import ConfigError, DataError, EnvironmentFault

LLAMA = "model.name=meta-llama/Llama-3.1-8B-Instruct"
MIXTURE = "model.name=Qwen/Qwen3-30B-A3B"  # 128 experts in 48 layers
SHARED = f"{LLAMA} train.context_parallel=2"
EP = f"{MIXTURE} train.strategy=ep"
ZERO_3 = "DEEPSPEED_CONFIG=configs/deepspeed_zero3.json deepspeed"
FLASH_2 = "model.attn_implementation=flash_attention_2"
OTHER_ATTENTION = f"{FLASH_2} MODEL_ATTN_IMPLEMENTATION=auto"
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

# By class: the GPUs; settings, variables of make and whether DeepSpeed runs; what the message names
REFUSED: dict[type[Exception], list[tuple[str, str, str]]] = {
    ConfigError: [
        # batch
        (
            "3xH200",
            "train.batch_size=4 train.grad_accum=4 train.effective_batch_size=32",
            "train.batch_size=4 3 train.grad_accum=4 48 train.effective_batch_size=32",
        ),
        (
            "1xH200",
            "train.batch_size=5 train.effective_batch_size=32",
            "TRAIN_EFFECTIVE_BATCH_SIZE=30 TRAIN_EFFECTIVE_BATCH_SIZE=35",
        ),
        (
            "1xH200",
            "train.grad_accum=3 train.effective_batch_size=32",
            "train.grad_accum=3 TRAIN_EFFECTIVE_BATCH_SIZE=30 TRAIN_EFFECTIVE_BATCH_SIZE=33",
        ),
        (
            "8xH200",
            "train.effective_batch_size=4",
            "train.effective_batch_size=4 8 TRAIN_EFFECTIVE_BATCH_SIZE=8",
        ),
        # rows that several GPUs share
        ("4xH200", f"{LLAMA} train.effective_batch_size=1", "train.effective_batch_size=1 4"),
        (
            "4xH200",
            "model.name=Qwen/Qwen2.5-0.5B-Instruct train.context_parallel=4",
            "14 heads TRAIN_CONTEXT_PARALLEL=1",
        ),
        ("4xH200", f"{SHARED} train.fast_path=false", "fused TRAIN_CONTEXT_PARALLEL=1"),
        ("4xH200", f"{SHARED} train.router_aux_loss_coef=0.01", "experts TRAIN_CONTEXT_PARALLEL=1"),
        ("4xH200", f"{LLAMA} train.context_parallel=8", "4 ranks TRAIN_CONTEXT_PARALLEL=1"),
        # ranks
        ("2xH200", "NNODES=2", "NNODES=2 MASTER_ADDR"),
        ("2xH200", "NNODES=2 MASTER_ADDR=", "NNODES=2 MASTER_ADDR"),
        *(
            ("2xH200", f"NCCL_TIMEOUT={text}", f"NCCL_TIMEOUT={text} NCCL_TIMEOUT=1800")
            for text in ("soon", "0", "-1", "1.5", "²")
        ),
        # number types
        ("cpu", "train.fp16=true", "train.fp16=true (--set TRAIN_FP16=auto"),
        ("2xH200", "tuning.base_dtype=float8 deepspeed", "DeepSpeed train-distributed"),
        # adapters
        ("1xH200", "tuning.lora.target_modules=[q_proj,vv_proj,lm_head]", "vv_proj; v_proj?"),
        # strategies
        ("1xH200", "train.strategy=fsdp", "NUM_GPUS=2"),
        ("cpu", "train.strategy=fsdp", "NUM_GPUS=2"),
        ("2xH200", "train.strategy=fsdp deepspeed", "train-deepspeed ZeRO"),
        ("2xH200", "train.strategy=ddp deepspeed", "train-distributed ddp"),
        ("2xH200", "train.strategy=fsdp tuning.lora.use_dora=true", "use_dora"),
        (
            "2xH200",
            "train.strategy=fsdp tuning.lora.modules_to_save=[norm]",
            "TRAIN_STRATEGY=ddp zero2",
        ),
        (
            "2xH200",
            "train.strategy=fsdp tuning.mode=full train.optim=adamw_8bit",
            "TRAIN_OPTIM=adamw_torch_fused",
        ),
        *(
            (gpus, f"tuning.mode=full train.optim={optim} {strategy}", "TRAIN_STRATEGY=ddp")
            for optim in ("muon", "adafactor")
            for gpus, strategy in (("2xH200", "train.strategy=fsdp"), ("2xH200", ZERO_3))
        ),
        ("2xH200", "tuning.mode=full train.optim=lion train.strategy=fsdp", "TRAIN_STRATEGY=zero2"),
        ("2xT4", "train.strategy=fsdp tuning.mode=full", "float16"),
        ("2xH200", "train.strategy=zero3 tuning.lora.use_dora=true", "ZeRO-3"),
        ("2xH200", f"{LLAMA} train.strategy=ep", "TRAIN_STRATEGY=ddp"),
        ("1xH200", EP, "NUM_GPUS=2"),
        ("3xH200", EP, "3 2, 4, 8, 16, 32"),
        ("2xH200", f"{EP} deepspeed", "train-distributed ep"),
        ("2xH200", f"{EP} tuning.mode=full", "TRAIN_STRATEGY=fsdp"),
        ("2xH200", f"{EP} train.optim=adamw_8bit", "TRAIN_OPTIM=adamw_torch_fused"),
        ("2xH200", f"{EP} tuning.base_dtype=float8", "TUNING_BASE_DTYPE=auto"),
        ("2xH200", f"{EP} train.context_parallel=2", "TRAIN_CONTEXT_PARALLEL=1"),
        ("2xH200", f"{EP} model.device_map=auto", "MODEL_DEVICE_MAP=null"),
        ("2xH200", f"{EP} train.fsdp_offload=true", "TRAIN_STRATEGY=fsdp"),
        ("2xT4", EP, "float16 TRAIN_STRATEGY=ddp"),
        ("2xH200", "train.fsdp_offload=true train.strategy=ddp", "TRAIN_STRATEGY=fsdp"),
        ("2xH200", "train.fsdp_offload=true train.strategy=zero3", "offload_param"),
        ("2xH200", "train.fsdp_offload=true deepspeed", "train-deepspeed"),
        ("1xH200", "train.fsdp_offload=true", "TRAIN_FSDP_OFFLOAD=false"),
        ("cpu", f"tuning.mode=qlora {ZERO_3}", "tuning.mode=qlora TUNING_MODE=lora fsdp"),
    ],
    EnvironmentFault: [
        ("2xH200", "NUM_GPUS=3", "NUM_GPUS=3 NUM_GPUS=2 gpu-info"),
        ("cpu", "NUM_GPUS=64", "NUM_GPUS=64 DEVICE=cpu 8"),
        ("cpu", "NUM_GPUS=9 DEVICE=cpu", "NUM_GPUS=9 NUM_GPUS=8"),
        ("cpu", "WORLD_SIZE=8", "WORLD_SIZE=8 NNODES NODE_RANK MASTER_ADDR"),
        ("cpu", f"tuning.backend=unsloth {ZERO_3}", "TUNING_BACKEND=bnb"),
        ("2xA100-80", "tuning.base_dtype=float8", "tuning.base_dtype=float8 8.0 8.9"),
        ("1xV100-16", "tuning.base_dtype=float8", "tuning.base_dtype=float8 7.0 8.9"),
        ("cpu", FLASH_2, OTHER_ATTENTION),
        ("1xT4", FLASH_2, f"cuda:0 T4 7.5 {OTHER_ATTENTION}"),
    ],
    DataError: [
        (
            "cpu",
            f"data.{name}_path=/nowhere/a.jsonl",
            f"data.{name}_path=/nowhere/a.jsonl (--set DATA_{name.upper()}_PATH",
        )
        for name in ("train", "val", "test")
    ],
}


def refusal(error: type[Exception], gpus: str, asked: str, **environ: str) -> str:
    """Return the message that refuses a plan. `asked` has settings, variables, or `deepspeed`."""
    words = asked.split()
    settings = [word for word in words if word[0].islower() and word != "deepspeed"]
    environ |= dict(word.split("=", 1) for word in words if word[0].isupper())
    hardware = CPU if gpus == "cpu" else gpus
    with pytest.raises(error) as refused:
        plan_for(hardware, *settings, environ=environ, use_deepspeed="deepspeed" in words)
    return str(refused.value)


@pytest.mark.parametrize(
    "error, gpus, asked, named",
    [(error, *case) for error, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_run_is_refused_with_what_to_type(error, gpus, asked, named):
    message = refusal(error, gpus, asked)
    assert [word for word in named.split() if word not in message] == [], message


@pytest.mark.long  # traces the model
def test_recurrent_layers_need_whole_rows():
    asked = "model.name=Qwen/Qwen3-Next-80B-A3B-Instruct train.context_parallel=2"
    message = refusal(ConfigError, "4xH200", asked)
    assert "recurrent" in message and "TRAIN_CONTEXT_PARALLEL=1" in message


@pytest.mark.parametrize(
    "gpus, settings, content, named",
    [
        ("cpu", "", {"fp16": {"enabled": True}}, 'fp16.enabled=true "auto"'),
        ("cpu", "", {"bf16": {"enabled": True}}, 'bf16.enabled=true "auto"'),
        ("cpu", "train.bf16=true", {"bf16": {"enabled": "auto"}}, 'train.bf16=true "auto"'),
        (
            "2xH200",
            "train.bf16=true",
            {"fp16": {"enabled": True}},
            "fp16.enabled=true train.fp16=false",
        ),
        ("2xH200", "train.strategy=zero3", {}, "zero3 stage=2 TRAIN_STRATEGY=zero2"),
        *(
            ("2xH200", f"train.optim={optim}", OFFLOAD, f"train.optim={optim} offload_optimizer")
            for optim in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "sgd")
        ),
    ],
)
def test_a_deepspeed_json_that_cannot_run_is_refused_with_what_to_change(
    gpus, settings, content, named, tmp_path
):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **content}))
    asked = f"{settings} deepspeed"
    message = refusal(ConfigError, gpus, asked, DEEPSPEED_CONFIG=str(path))
    assert [word for word in named.split() if word not in message] == [], message


@pytest.mark.parametrize("misspelt", ["rows/trian.jsonl", "rosw/train.jsonl"])
def test_a_data_file_that_is_misspelt_is_named_with_the_nearest(misspelt, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").touch()
    message = refusal(DataError, "cpu", f"data.train_path={tmp_path / misspelt}")
    assert f"{tmp_path}/rows/train.jsonl?" in message
