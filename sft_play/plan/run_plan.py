"""The plan of one run: the front end writes plan.json, and the worker reads it once at its start.

Loads no torch. Values that follow from chosen numbers are properties and never stored.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from sft_play.config.schema import Config
from sft_play.errors import EnvironmentFault
from sft_play.plan import cards
from sft_play.plan.advice import Advised
from sft_play.plan.batch import BatchRequest, LongestRows, longest_rows, merged_layout
from sft_play.plan.launch import Launch
from sft_play.plan.memory import StepBytes, evaluation_rows, peak_bytes, step_bytes
from sft_play.plan.probe_fit import ProbeReport
from sft_play.plan.ranks import Ranks
from sft_play.plan.speed import Speed, predict
from sft_play.plan.step import Layout, StepSpec
from sft_play.runs.files import json_text, write_text
from sft_play.runs.folder import RunFolder, first_fault

ROOM_STEP = 512  # tokens by which the room for large trees grows


@dataclass(frozen=True)
class DeepSpeedPlan:
    """DeepSpeed's settings. Its batch counts sequences, so the total is right for packed rows."""

    settings: dict[str, Any]  # in DeepSpeed's format, no number is "auto"
    source: str  # the JSON file that they come from
    source_digest: str = ""  # SHA-256 of that file, shortened

    @property
    def zero_stage(self) -> int:
        return self.settings["zero_optimization"]["stage"]

    def with_layout(self, layout: Layout) -> Self:
        """Return the plan with the micro-batches of a layout."""
        rows = layout.batch_size * layout.micro_batches * layout.world_size
        numbers = {
            "train_micro_batch_size_per_gpu": layout.batch_size,
            "gradient_accumulation_steps": layout.micro_batches,
            "train_batch_size": rows,
        }
        return replace(self, settings={**self.settings, **numbers})


@dataclass(frozen=True)
class RunPlan:
    """One run as it will be started; its settings are in config.yaml, with no auto left."""

    ranks: Ranks
    request: BatchRequest  # the user's settings of batch and checkpointing
    step: StepSpec  # what each rank computes
    layout: Layout  # how the rows of a step are split into micro-batches
    packing: bool  # whether rows share sequences; the counted ones are in `layout`
    unpacked_because: str | None  # if train.packing=auto is off
    memory: StepBytes  # by the closed form; after a probe, by measurement
    budget_bytes: int  # that a rank may use
    gpu_names: tuple[str, ...]  # of this machine's ranks; () on a CPU
    used_before_bytes: tuple[int, ...]  # by others, of each GPU of this machine's ranks; 0 on a CPU
    deepspeed: DeepSpeedPlan | None = None
    shortage: str | None = None  # why it is not expected to fit
    changes: tuple[Advised, ...] = ()  # that would make it fit
    warnings: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()  # learning rate, epochs, longest row: where each comes from
    launch: Launch | None = None  # the command; None until the run has a folder
    probe: ProbeReport | None = None
    has_auto_answer_limit: bool = False  # train.generation_max_new_tokens follows from the rows

    @property
    def fits(self) -> bool:
        return self.shortage is None

    @property
    def is_batch_explicit(self) -> bool:
        """Whether the micro-batch is the user's number, which is used even if it may not fit."""
        return self.request.batch_size != "auto"

    @property
    def may_grow(self) -> bool:
        """Whether micro-batches may become larger once packed rows are counted.

        False if the user set a number, or if a larger one might not fit into host memory, which
        has no budget.
        """
        is_auto = self.request.batch_size == self.request.grad_accum == "auto"
        return is_auto and self.step.is_gpu and not self.step.offload_activations

    def tree_room(self, largest: int) -> int:
        """Return the tokens of a packed micro-batch, or more if trees have more and they fit."""
        tokens = self.layout.tokens
        while tokens < largest:
            larger = replace(self.layout, tree_tokens=tokens + ROOM_STEP)
            if peak_bytes(self.step, larger) > self.budget_bytes:
                break
            tokens += ROOM_STEP
        return tokens

    @property
    def zero_stage(self) -> int:
        return self.deepspeed.zero_stage if self.deepspeed else 0

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP shards the base weights across the ranks."""
        return self.ranks.strategy == "fsdp"

    @property
    def is_expert_parallel(self) -> bool:
        """Whether each rank stores a part of the experts."""
        return self.ranks.strategy == "ep"

    @property
    def checkpointing(self) -> Literal["none", "selective", "full"]:
        """How many layers are recomputed in the backward pass."""
        if self.layout.checkpointed_layers == self.step.model.layers:
            return "full"
        return "selective" if self.layout.checkpointed_layers else "none"

    @property
    def gpu(self) -> str | None:
        """The name of the first GPU, None on a CPU."""
        return self.gpu_names[0] if self.gpu_names else None

    @property
    def card(self) -> cards.Card | None:
        """What is known of the GPUs."""
        return cards.card_of(self.gpu_names)

    @property
    def speed(self) -> Speed | None:
        """The predicted speed if all rows are full; None if the device is not known."""
        return self.speed_of(self.step, self.layout)

    def speed_of(self, step: StepSpec, layout: Layout) -> Speed | None:
        """Return the predicted speed of another step, or of another layout."""
        return predict(step, layout, self.card, self.ranks.nodes)

    @property
    def longest_rows(self) -> LongestRows:
        """The longest rows that fit into memory, with and without offloaded activations."""
        return longest_rows(self.step, self.request, self.budget_bytes, self.speed_of)

    @property
    def gpus(self) -> str:
        """The names of the GPUs, each once."""
        return " and ".join(sorted(set(self.gpu_names)))

    def used_before(self, local_rank: int) -> tuple[int, ...]:
        """Return the bytes others used on each GPU of a rank of this machine; 0 on a CPU."""
        gpus = self.ranks.gpus_per_process
        return self.used_before_bytes[local_rank * gpus : (local_rank + 1) * gpus]

    def to_json(self) -> str:
        """Return the text of a plan.json."""
        return json_text(_adapter().dump_python(self, mode="json"))


@dataclass(frozen=True)
class PlannedRun:
    """The worker's input: settings with no auto left, and the plan."""

    config: Config
    plan: RunPlan

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Return the input of a run. Raises EnvironmentFault if this is not a run folder."""
        return cls(folder.read_config(), read_plan(folder))

    def write(self, folder: RunFolder) -> None:
        """Write config.yaml and plan.json."""
        folder.write_config(self.config)
        write_text(folder.path / "plan.json", self.plan.to_json())

    def packed(self, fullest_step: int, step_tokens: float) -> Self:
        """Return the run after the rows are counted: it has fewer micro-batches.

        `step_tokens` are the tokens of a usual step, over all ranks.
        """
        plan = self.plan
        request = replace(plan.request, row=plan.request.row.packed(fullest_step))
        if plan.may_grow:
            request = replace(request, step_tokens=step_tokens)
        peak = partial(peak_bytes, plan.step)
        layout = merged_layout(request, plan.layout.packed(fullest_step), peak, plan.budget_bytes)
        return replace(self, plan=replace(plan, request=request)).with_layout(layout)

    def with_units(self, **found: int | None) -> Self:
        """Return the run after the samples or trees of its rows are counted.

        `found` are `most_samples`, `tree_tokens` and `fullest_step` of a layout.
        """
        plan = self.plan
        request = replace(plan.request, row=replace(plan.request.row, **found))
        return replace(self, plan=replace(plan, request=request)).with_layout(
            replace(plan.layout, **found)
        )

    def as_before(self, earlier: RunPlan) -> Self:
        """Return a resumed run with its previous micro-batches, if these need no more memory.

        A probe may have found less memory than planned; a resumed run has no probe. For the same
        rows and settings on the same GPUs, equal micro-batches also give equal numbers.
        """
        plan = self.plan
        asked = replace(earlier.request, is_effective_set=plan.request.is_effective_set)
        is_same = (asked, earlier.gpu_names) == (plan.request, plan.gpu_names)
        layout, now = earlier.layout, plan.layout
        needs_no_more = layout.tokens <= now.tokens
        needs_no_more &= layout.checkpointed_layers >= now.checkpointed_layers
        if not is_same or not needs_no_more or layout == now:
            return self
        return self.with_layout(layout)

    def with_layout(self, layout: Layout, memory: StepBytes | None = None) -> Self:
        """Return the same run with another layout, before its first step.

        Its bytes are `memory`, or those of the plan. Code that needs a batch reads the layout; the
        config and DeepSpeed's settings repeat it for people and libraries.
        """
        plan = self.plan
        settings = {
            "train.batch_size": layout.batch_size,
            "train.grad_accum": layout.grad_accum,
            "train.effective_batch_size": layout.rows_per_step,
            "train.gradient_checkpointing": layout.checkpointed_layers > 0,
            "train.eval_batch_size": evaluation_rows(plan.step, layout),
        }
        memory = memory or step_bytes(plan.step, layout)
        deepspeed = plan.deepspeed.with_layout(layout) if plan.deepspeed else None
        plan = replace(plan, layout=layout, memory=memory, deepspeed=deepspeed)
        return replace(self, config=self.config.changed(settings), plan=plan)


def read_plan(folder: RunFolder) -> RunPlan:
    """Return the plan of a run. Raises EnvironmentFault if this is not a run folder."""
    text = folder.read_input("plan.json")
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        raise EnvironmentFault(
            f"{folder.path / 'plan.json'}: cannot be read ({first_fault(error)}); it was edited, "
            "or written by another version: train again"
        ) from None


@cache
def _adapter() -> TypeAdapter[RunPlan]:
    return TypeAdapter(RunPlan)
