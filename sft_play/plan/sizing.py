"""How large a step of a run is: where config, model and devices meet, as plain data. Pure: no torch, no I/O."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from sft_play.config.schema import Config
from sft_play.errors import OutOfMemory
from sft_play.plan import batch, cards, memory, speed
from sft_play.plan.fast import is_fast
from sft_play.plan.launch import Ranks
from sft_play.plan.model_shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Setup:
    """All that the size of a step follows from."""

    config: Config
    is_effective_set: bool  # train.effective_batch_size, by the user
    shape: ModelShape
    ranks: Ranks
    is_half: bool  # products in 16 bits
    zero_stage: int  # 0 without DeepSpeed
    offload: bool  # of the optimizer's state
    budget_bytes: int  # that one rank may take
    offload_weights: bool = False  # of ZeRO-3
    gpu_names: tuple[str, ...] = ()  # of this machine's ranks; none on a CPU
    fullest_step: int | None = None  # see batch.Wanted

    @property
    def device(self) -> str:
        """What has the budget, for messages."""
        return "a GPU" if self.ranks.device == "cuda" else "this host for each process"

    @property
    def wanted(self) -> batch.Wanted:
        """What the config says of batch, accumulation and checkpointing."""
        train = self.config.train
        return batch.Wanted(
            batch_size=train.batch_size,
            grad_accum=train.grad_accum,
            effective_batch=train.effective_batch_size,
            is_effective_set=self.is_effective_set,
            gradient_checkpointing=train.gradient_checkpointing,
            seq_len=self.config.model.max_seq_len,
            world_size=self.ranks.world_size,
            layers=self.shape.layers,
            is_by_layer=self.config.tuning.backend != "unsloth",
            fullest_step=self.fullest_step,
        )

    @property
    def step(self) -> memory.StepShape:
        """The step with one row a micro-batch and nothing checkpointed: what `memory.at_batch` makes others of."""
        model, tuning, train = self.config.model, self.config.tuning, self.config.train
        compute = 2 if self.is_half else 4
        return memory.StepShape(
            mode=tuning.mode,
            batch_size=1,
            seq_len=model.max_seq_len,
            compute_bytes=compute,
            weight_bytes=DTYPE_BYTES.get(model.dtype) or (4 if tuning.mode == "full" else compute),
            lora_rank=tuning.lora.r,
            lora_targets=tuning.lora.target_modules,
            optim=train.optim,
            double_quant=tuning.bnb_4bit_use_double_quant,
            checkpointed_layers=0,
            is_fast=is_fast(
                self.config, self.shape.model_type, self.ranks.device, self.is_half, self.zero_stage
            ),
            world_size=self.ranks.world_size,
            zero_stage=self.zero_stage,
            offload=self.offload,
            is_gpu=self.ranks.device == "cuda",
            eval_rows=None if train.eval_batch_size == "auto" else train.eval_batch_size,
            generates=train.predict_with_generate,
            offload_weights=self.offload_weights,
        )

    @property
    def card(self) -> cards.Card | None:
        """What is known of the GPUs, if they are of one model, and it of CARDS."""
        names = set(self.gpu_names)
        return cards.CARDS.get(cards.key_of(names.pop()) or "") if len(names) == 1 else None

    def step_of(self, chosen: batch.Chosen) -> memory.StepShape:
        """Return the step that was chosen."""
        return self.choice.step_of(chosen.batch_size, chosen.checkpointed_layers)

    def speed_of(self, chosen: batch.Chosen) -> speed.Speed | None:
        """Return what is predicted where all rows are full; None where nothing is known of the device."""
        step = replace(self.step_of(chosen), batch_size=chosen.batch_size)
        return speed.predict(
            self.shape, step, speed.full_rows(step, chosen.grad_accum), self.card, self.ranks.nodes
        )

    @property
    def choice(self) -> "Choice":
        """What of this the choice is made from."""
        return Choice(self.wanted, self.step, self.shape)


@dataclass(frozen=True)
class Choice:
    """What batch and checkpointing are chosen from, as plain values: plan.json takes it to the worker, who may choose again."""

    wanted: batch.Wanted
    step: memory.StepShape
    shape: ModelShape

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Self:
        """Return what `as_json` gave."""
        return cls(
            batch.Wanted(**facts["wanted"]),
            memory.StepShape(**facts["step"]),
            ModelShape(**facts["shape"]),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def step_of(self, batch_size: int, checkpointed_layers: int) -> memory.StepShape:
        """Return the step on a micro-batch of up to `batch_size` rows, with so many layers checkpointed."""
        step = memory.at_batch(self.step, batch_size, checkpointed_layers)
        eval_rows = step.eval_rows or memory.evaluation_rows(self.shape, step)
        accumulates = batch.micro_batches(self.wanted, batch_size) > 1
        return replace(
            step,
            batch_size=batch.sequences(self.wanted, batch_size),
            eval_rows=eval_rows,
            accumulates=accumulates,
        )

    def bytes_of(self, batch_size: int, checkpointed_layers: int) -> memory.StepBytes:
        """Return the closed form of its bytes."""
        return memory.step_bytes(self.shape, self.step_of(batch_size, checkpointed_layers))


@dataclass(frozen=True)
class Sized:
    """A step and its bytes; `shortage` says why it does not fit where it does not."""

    chosen: batch.Chosen
    memory: memory.StepBytes
    shortage: str | None

    @property
    def fits(self) -> bool:
        return self.shortage is None


def size(setup: Setup) -> Sized:
    """Return the fastest step that fits, or the smallest one with what it lacks. Raises ConfigError for numbers that contradict each other."""
    choice = setup.choice

    def peak(batch_size: int, checkpointed_layers: int) -> int:
        return choice.bytes_of(batch_size, checkpointed_layers).predicted_peak

    shortage = None
    try:
        chosen = batch.choose(choice.wanted, peak, setup.budget_bytes, setup.device)
    except OutOfMemory as error:
        chosen, shortage = batch.smallest(choice.wanted), str(error)
    found = choice.bytes_of(chosen.batch_size, chosen.checkpointed_layers)
    if shortage is None and found.predicted_peak > setup.budget_bytes:  # an explicit batch survives
        shortage = (
            f"train.batch_size={chosen.batch_size} is estimated to need {found.predicted_peak / batch.GIB:.1f} GiB and "
            f"{setup.budget_bytes / batch.GIB:.1f} GiB are there"
        )
    return Sized(chosen, found, shortage)
