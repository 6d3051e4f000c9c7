"""Packing changes only the speed of a run: loss, gradients and whole runs, on real models."""

import copy
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_two
from test_data_packing import Document
from test_runs import facts
from tiny_models import with_adapters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from sft_kernels.loss.head import summed_nll
from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.data.batch import Batch
from sft_play.data.collate import PackCollator, PadCollator, TrainRows
from sft_play.data.order import StepSampler, fullest_step
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample
from sft_play.errors import ConfigError
from sft_play.models import bnb
from sft_play.plan.step import Layout
from sft_play.training import runtime
from sft_play.training.batches import StepLoss
from sft_play.training.best import LossWatch
from sft_play.training.callbacks import EvalSpeedCallback
from sft_play.training.engine import Engine
from sft_play.training.events import Events
from sft_play.training.guards import GradientWatch, StepGuard
from sft_play.training.isolation import (
    CrossDocumentEffect,
    check_cross_document,
    measure_cross_document,
)
from sft_play.training.loop import TrainingLoop
from sft_play.training.memory import MemoryMeter
from sft_play.training.step_log import StepLog

VOCABULARY, MAX_SEQ_LEN, SEED = 97, 64, 3
CPU = torch.device("cpu")
Change = Callable[[Batch], Batch]


def documents(count: int) -> list[Document]:
    """Samples of 2 to 40 tokens, the second half of each trained."""
    draw = random.Random(count)
    ids = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 40))] for _ in range(count)]
    return [
        Document(one, [IGNORE_INDEX] * (len(one) - len(one) // 2) + one[len(one) - len(one) // 2 :])
        for one in ids
    ]


def llama(attention: str = "sdpa", is_lora: bool = False, dropout: float = 0.0) -> Any:
    """Return a two-layer Llama in training mode, with large weights: attention is not uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    spread(model, std=0.15)
    if is_lora:
        model = with_adapters(model, lora_dropout=dropout)
    model.config.use_cache = False
    return model.train()


def spread(model: torch.nn.Module, std: float = 0.3) -> None:
    """Make every matrix of a new model so large that tokens matter to each other."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)


def order_of(
    samples: list[Document],
    packed: bool,
    batch: int = 4,
    effective: int = 8,
    world: int = 1,
    epochs: int = 3,
) -> StepSampler:
    lengths = [len(sample.ids) for sample in samples]
    layout = Layout(batch, effective // (batch * world), world, MAX_SEQ_LEN)
    if packed:
        layout = layout.packed(fullest_step(lengths, layout, SEED, epochs))
    return StepSampler(lengths, layout, SEED)


def collator_of(packed: bool) -> PadCollator | PackCollator:
    return PackCollator(0, MAX_SEQ_LEN) if packed else PadCollator(0, MAX_SEQ_LEN)


def step(
    model: Any, packed: bool, change: Change = lambda batch: batch
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a step of 16 samples in micro-batches of 4 sequences."""
    rows = TrainRows(documents(16))
    labelled = sum(label != IGNORE_INDEX for sample in rows.samples for label in sample.labels)
    model.zero_grad()
    total = 0.0
    for micro_batch in order_of(rows.samples, packed, effective=16):
        assert not packed or max(map(len, micro_batch)) > 1
        batch = change(collator_of(packed)([rows[sequence] for sequence in micro_batch]))
        loss = summed_nll(model(**batch.arguments).logits, batch.labels) / labelled
        loss.backward()
        total += loss.item()
    return total, [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def gap(one: tuple[float, list[torch.Tensor]], two: tuple[float, list[torch.Tensor]]) -> float:
    """Return the largest difference of two steps' losses or relative gradients."""
    largest = max(gradient.abs().max() for gradient in one[1])
    assert largest > 1e-3 and len(one[1]) == len(two[1]) > 0
    gradients = max(
        ((a - b).abs().max() / largest).item() for a, b in zip(one[1], two[1], strict=True)
    )
    return max(gradients, abs(one[0] - two[0]) / abs(one[0]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_packed_step_has_the_loss_and_gradients_of_a_padded_one(
    attention, is_lora, checkpointing
):
    model = llama(attention, is_lora)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert (
        gap(step(model, packed=False), step(model, packed=True)) <= 1e-6
    )  # float32 adds up in another order


def all_ones_mask(batch: Batch) -> Batch:
    return batch.with_inputs({"attention_mask": torch.ones_like(batch.ids)})


def positions_that_run_on(batch: Batch) -> Batch:
    return batch.with_inputs(
        {"position_ids": torch.arange(batch.ids.shape[1]).expand_as(batch.ids)}
    )


def key_value_cache(batch: Batch) -> Batch:
    return batch.with_inputs({"use_cache": True})


def test_a_packed_step_over_a_4_bit_base_is_the_padded_one(tmp_path):
    llama().save_pretrained(tmp_path)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantisation, device_map={"": "cpu"}
    )
    bnb.keep_differentiable(base)
    model = with_adapters(base)
    model.config.use_cache = False
    # the same rounded weights both times; what differs is the order of float32 sums, in kernels of
    # lower accuracy
    assert gap(step(model, packed=False), step(model, packed=True)) <= 1e-5
    assert gap(step(model, packed=False), step(model, packed=True, change=all_ones_mask)) > 1e-2


# Architectures

SIZES = (
    dict.fromkeys(("hidden_size", "n_embd"), 32)
    | dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner"), 48)
    | dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_key_value_heads", "num_experts_per_tok"), 2
    )
    | dict.fromkeys(("num_attention_heads", "n_head", "num_local_experts", "num_experts"), 4)
    | {
        "vocab_size": VOCABULARY,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "max_position_embeddings": 128,
    }
    | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
)
# Architectures whose sdpa and eager attention keeps documents apart by their position ids, sliding
# windows included, without any code of ours
ATTENTION_ALONE = """
    apertus arcee cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2
    gpt_bigcode gpt_neox granite granitemoe helium llama mistral mixtral olmo olmo2 olmo3 phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
""".split()
WINDOW = 8  # tokens: shorter than the documents of the check


def tiny(model_type: str, attention: str) -> PreTrainedModel:
    """Return a model of an architecture with random weights.

    Every second layer has a sliding window, if the architecture supports it.
    """
    config = AutoConfig.for_model(model_type)
    for name, value in SIZES.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "sliding_window"):
        config.sliding_window = WINDOW
    if getattr(config, "layer_types", None):
        config.layer_types = (
            ["sliding_attention", "full_attention"]
            if hasattr(config, "sliding_window")
            else config.layer_types[:2]
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    spread(model)
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ATTENTION_ALONE)
def test_an_architecture_that_auto_packs_keeps_documents_apart(model_type, attention):
    try:
        model = tiny(model_type, attention)
    except ValueError as error:  # Gemma 2 with sdpa, of newer versions
        pytest.skip(str(error))
    found = measure_cross_document(model, PackCollator(0, MAX_SEQ_LEN), VOCABULARY, CPU)
    assert found.seen == 0, "the same kernels on the same tokens give the same bits"
    assert found.apart <= 1e-4 * found.joined and found.joined > 0.1


@pytest.mark.parametrize("model_type", ["opt", "bloom", "qwen3_next"])
def test_a_model_that_joins_documents_is_refused_before_the_first_step(model_type):
    model = tiny(model_type, "eager")
    with pytest.raises(
        ConfigError,
        match=rf"^train.packing: {type(model).__name__} does not isolate packed documents.*; set TRAIN_PACKING=false$",
    ):
        check_cross_document(model, PackCollator(0, MAX_SEQ_LEN), VOCABULARY, CPU)


@dataclass(frozen=True)
class Changed(PackCollator):
    """A collator that does not do its part."""

    change: Change = dataclasses.field(default=lambda batch: batch)

    def __call__(self, sequences: Any) -> Batch:
        return self.change(super().__call__(sequences))


def mask_of_nan(batch: Batch) -> Batch:
    rows, width = batch.ids.shape
    return batch.with_inputs({"attention_mask": torch.full((rows, 1, width, width), torch.nan)})


JOINING = [all_ones_mask, positions_that_run_on, key_value_cache, mask_of_nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("change", JOINING)
def test_the_check_sees_whatever_joins_documents_and_not_rounding(change, attention, dtype):
    model = llama(attention)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        check_cross_document(model, PackCollator(0, MAX_SEQ_LEN), VOCABULARY, CPU)
        with pytest.raises(ConfigError, match="TRAIN_PACKING=false"):
            check_cross_document(model, Changed(0, MAX_SEQ_LEN, change=change), VOCABULARY, CPU)


def test_a_model_that_gives_no_numbers_is_left_to_its_evaluation():
    model = llama()
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    check_cross_document(model, PackCollator(0, MAX_SEQ_LEN), VOCABULARY, CPU)


@pytest.mark.parametrize(
    "seen, apart, first, is_coarse, holds",
    [
        (0.0, 5.0, 4.6, True, True),  # gpt-oss-120b with random weights: rounding chooses experts
        (0.0, 5.0, 0.1, True, False),
        (0.1, 5.0, 4.6, True, False),
        (0.0, 5.0, 4.6, False, False),
        (0.0, 1.9, 0.1, False, True),
    ],
)
def test_logits_of_a_packed_document_may_change_as_much_as_rounding_changes_the_first(
    seen, apart, first, is_coarse, holds
):
    found = CrossDocumentEffect(seen, apart, joined=8.1, first=first, is_coarse=is_coarse)
    assert found.holds == holds


def test_the_check_runs_without_dropout_and_leaves_the_model_as_it_was():
    model = llama(is_lora=True, dropout=0.5)
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = measure_cross_document(model, PackCollator(0, MAX_SEQ_LEN), VOCABULARY, CPU)
    assert found.seen == 0 and found.holds
    assert modes == [module.training for module in model.modules()]
    assert True in modes and False in modes
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()), "the steps draw what they would have drawn"
    assert all(parameter.grad is None for parameter in model.parameters())


# Whole runs

SAMPLES, EPOCHS = 19, 2  # steps of 8: the third of each epoch holds 3
CUTS = [(1, False), (4, False), (8, False), (1, True), (4, True), (8, True)]  # (batch_size, packed)


ALONE = Process(rank=0, local_rank=0, world_size=1, device=CPU)
QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
}
RUN = {
    "num_train_epochs": EPOCHS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
}


def trainer_of(
    output_dir: Path,
    batch: int,
    packed: bool,
    process: Process = ALONE,
    tokenizer: Any = None,
    model: Any = None,
    **arguments: Any,
) -> TrainingLoop:
    """The trainer of a model, a new one where none is given."""
    samples = documents(SAMPLES)
    order = order_of(samples, packed, batch, world=process.world_size, epochs=EPOCHS)
    cut = {
        "per_device_train_batch_size": order.layout.batch_size,
        "gradient_accumulation_steps": order.layout.micro_batches,
    }
    args = TrainingArguments(str(output_dir), **{**QUIET, **RUN, **cut, **arguments})
    model = model or llama(is_lora=True)
    return loop_of(model, args, process, samples, collator_of(packed), order, tokenizer)


CALLED_ALIKE = """
    learning_rate fp16 save_total_limit lr_scheduler_type warmup_steps max_grad_norm
    dataloader_pin_memory
"""


def config_of(args: TrainingArguments) -> Config:
    """Return the settings that transformers' arguments say."""
    train = {name: getattr(args, name) for name in CALLED_ALIKE.split()}
    train |= {
        "epochs": args.num_train_epochs,
        "max_steps": args.max_steps if args.max_steps > 0 else None,
        "logging_steps": args.logging_steps,
        "save_strategy": args.save_strategy.value,
        "save_steps": args.save_steps,
    }
    return Config.model_validate({"train": train})


def loop_of(
    model: Any,
    args: TrainingArguments,
    process: Process,
    samples: list[Sample],
    collator: Any,
    order: StepSampler,
    tokenizer: Any = None,
) -> TrainingLoop:
    """A loop that evaluates nothing."""
    set_seed(args.seed)
    engine = Engine(model, args, process, config_of(args), tokenizer)
    return TrainingLoop(
        engine=engine,
        loss=StepLoss(model),
        rows=TrainRows(samples),
        collator=collator,
        order=order,
        evaluator=None,
        step_log=StepLog(EvalSpeedCallback(), MemoryMeter(process)),
        guard=StepGuard(process),
        gradients=GradientWatch(process),
        loss_watch=LossWatch(model.config.vocab_size, args.learning_rate),
        events=Events(engine, order),
        stamp=facts(),
    )


def losses_of(
    trainer: TrainingLoop, resume: Path | None = None, prepare: Callable[[], object] = bool
) -> list[float]:
    """Train, and return the losses of all steps; `prepare()` comes before the first one."""
    trainer.start(resume)
    prepare()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_stamp_has_the_types_that_were_loaded(tmp_path):
    trainer = trainer_of(tmp_path, 2, packed=False)
    trainer.engine.model.to(torch.bfloat16)  # as DeepSpeed casts a model when training begins
    assert trainer.stamp.dtypes == {"trained": ["float32"], "frozen": ["float32"]}


def test_a_model_stays_where_it_was_loaded(tmp_path):
    model = llama(is_lora=True).to("meta")
    trainer_of(tmp_path, 2, packed=False, model=model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """The losses of a run that pads, two samples at a time."""
    return losses_of(trainer_of(tmp_path_factory.mktemp("padded"), 2, packed=False))


@pytest.mark.parametrize("batch, packed", CUTS)
def test_runs_have_the_same_losses_packed_and_padded(tmp_path, curve, batch, packed):
    trainer = trainer_of(tmp_path, batch, packed)
    losses = losses_of(trainer)
    assert len(losses) == 6 and losses[0] - losses[-1] > 0.01
    assert losses == pytest.approx(
        curve, abs=1e-5
    )  # six Adam steps on gradients that differ in the last bits
    assert int(trainer.step_log.tokens) == EPOCHS * sum(
        len(sample.ids) for sample in documents(SAMPLES)
    ), "neither padding nor fillers"
    assert trainer.engine.model.config.use_cache is False


def test_a_resumed_packed_run_goes_on_with_the_samples_that_were_left(tmp_path, curve, tokenizer):
    left = trainer_of(
        tmp_path,
        1,
        packed=True,
        tokenizer=tokenizer,
        save_strategy="steps",
        save_steps=2,
        max_steps=2,
    )
    assert len(losses_of(left)) == 2
    losses = losses_of(
        trainer_of(tmp_path, 1, packed=True, tokenizer=tokenizer), resume=tmp_path / "checkpoint-2"
    )
    assert losses == pytest.approx(curve, abs=1e-5)


def train_one_rank(folder: Path, packed: bool) -> None:
    """Be one of two processes of a run, and leave the losses in `folder`."""
    rank = runtime.rank()
    trainer = trainer_of(
        folder / f"rank-{rank}",
        1,
        packed,
        Process(rank, rank, 2, CPU),
        ddp_find_unused_parameters=False,
    )
    losses = losses_of(trainer)
    assert type(trainer.engine.wrapped).__name__ == "DistributedDataParallel"
    if packed:
        check_cross_document(trainer.engine.wrapped, trainer.collator, VOCABULARY, CPU)
    torch.save((losses, int(trainer.step_log.tokens)), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_two_processes_have_the_losses_of_one(tmp_path, curve, packed):
    assert run_two(train_one_rank, tmp_path, packed) == [0, 0]
    (losses, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert losses == pytest.approx(curve, abs=1e-5)
    assert first + second == EPOCHS * sum(len(sample.ids) for sample in documents(SAMPLES))
