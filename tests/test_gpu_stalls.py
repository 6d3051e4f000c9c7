"""On a GPU: steps that never wait for it, and the loss's kernel against float64."""

import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed_training import MAX_SEQ_LEN, QUIET, SEED, VOCABULARY, documents, loop_of
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from sft_kernels.install import fused_kernels_of
from sft_kernels.loss.linear_cross_entropy import fused_linear_cross_entropy
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.collate import PackCollator, PadCollator
from sft_play.data.order import StepSampler, fullest_step
from sft_play.models import lora
from sft_play.models.fast import install_fused_kernels
from sft_play.plan.step import Layout
from sft_play.training.loop import TrainingLoop

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
FROM, TO = (
    2,
    6,
)  # steps that are watched: kernels are compiled, and the epoch does not end among them


class Watch(TrainerCallback):
    """Collects where the CPU waits for the GPU between the ends of two steps."""

    def __init__(self) -> None:
        self.sites: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn" if FROM <= state.global_step < TO else "default")

    def note(self, message: Any, *rest: Any) -> None:
        """Stand in for warnings.showwarning."""
        if "synchronizing CUDA operation" in str(message):
            frames = [
                frame
                for frame in traceback.extract_stack()
                if "/torch/" not in frame.filename and "warnings" not in frame.filename
            ]
            self.sites.append(
                " < ".join(
                    f"{Path(frame.filename).name}:{frame.lineno}"
                    for frame in frames[:-4:-1]
                    if frame.name != "note"
                )
            )


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", watch.note)
        yield watch
    torch.cuda.set_sync_debug_mode("default")


def trainer_on_gpu(folder: Path, mode: str, packed: bool, fast: bool = True) -> TrainingLoop:
    """Return the trainer of a two-layer model as in a run on a GPU, with 3 micro-batches a step."""
    train = {"fast_path": fast, "logging_steps": 100}  # a log waits for the GPU
    config = Config.model_validate({"tuning": {"mode": mode}, "train": train})
    samples = documents(160)
    lengths = [len(sample.ids) for sample in samples]
    layout = Layout(batch_size=2, grad_accum=8, world_size=1, max_seq_len=MAX_SEQ_LEN)
    if packed:
        layout = layout.packed(fullest_step(lengths, layout, SEED, 1))
    order = StepSampler(lengths, layout, SEED)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(shape).to(GPU, torch.float32 if mode == "full" else torch.bfloat16)
    model = lora.add_adapters(model, config) if mode == "lora" else model
    install_fused_kernels(model, config, Process.alone(GPU, torch.bfloat16))
    model.config.use_cache = False
    arguments = {
        "bf16": True,
        "max_steps": TO + 2,
        "logging_steps": 100,
        "accelerator_config": {"non_blocking": True},
        "optim": "adamw_torch_fused",
    }
    arguments |= {
        "per_device_train_batch_size": order.layout.batch_size,
        "gradient_accumulation_steps": order.layout.micro_batches,
    }
    arguments |= {"dataloader_pin_memory": True, "use_cpu": False}
    process = Process(0, 0, 1, GPU)
    args = TrainingArguments(str(folder), **{**QUIET, **arguments})
    collator = PackCollator(0, MAX_SEQ_LEN, varlen=True)
    if not packed:
        collator = PadCollator(0, MAX_SEQ_LEN)
    return loop_of(model, args, process, samples, collator, order)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_no_step_waits_for_the_gpu(tmp_path, watch, mode, packed):
    trainer = trainer_on_gpu(tmp_path, mode, packed)
    assert {"attention", "loss"} <= fused_kernels_of(trainer.engine.model).on.keys(), (
        fused_kernels_of(trainer.engine.model)
    )
    trainer.events.add(watch)
    trainer.start()
    trainer.train()
    assert trainer.state.global_step > TO and trainer.order.layout.micro_batches > 1
    assert watch.sites == []


def test_a_step_that_waits_is_seen(tmp_path, watch):
    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            torch.ones((), device=GPU).item()

    trainer = trainer_on_gpu(tmp_path, "lora", packed=True)
    for callback in (watch, Reads()):
        trainer.events.add(callback)
    trainer.start()
    trainer.train()
    assert len(watch.sites) == TO - FROM and all(
        site.startswith("test_gpu_stalls.py") for site in watch.sites
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)], ids=str
)
def test_the_loss_is_that_of_float64(dtype, most, softcap):
    """The vocabulary has many blocks, and the tokens several chunks.

    Errors are relative to the largest number.
    """
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden = torch.randn(2500, 64, device=GPU).to(dtype).requires_grad_()
    weight = torch.randn(128_256, 64, device=GPU).mul(0.3).to(dtype).requires_grad_()
    targets = torch.randint(len(weight), (len(hidden),), device=GPU)
    nll = fused_linear_cross_entropy(hidden, weight, targets, softcap)
    (nll / len(hidden)).backward()
    exact_hidden, exact_weight = (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
    )
    logits = exact_hidden @ exact_weight.t()
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    exact = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (exact / len(hidden)).backward()
    pairs = ((nll, exact), (hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad))
    errors = [
        ((ours.double() - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs
    ]
    assert max(errors) <= most, errors
    for ours, theirs in pairs[
        1:
    ]:  # roundings cancel out but for one of the factor 1 / 2500 itself, 1.4e-3 in bfloat16
        assert ((ours.double() * theirs).sum() / (theirs * theirs).sum()).item() == pytest.approx(
            1, abs=3e-4
        )
