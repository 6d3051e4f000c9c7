"""The plan of a run, checked before its first step: steps are measured, the batch is chosen anew by them, and the choice is tried.

All ranks measure the same steps, agree on the largest bytes and the least room before anyone goes on, and choose by these numbers
alone, so that they choose alike. Under DeepSpeed, whose engine has its batch built in, on a resumed run, whose optimizer has a state
already, and on a CPU, which has no allocator to ask, the plan is tried as it is.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sft_play.config.schema import Config
from sft_play.data.cache import root_of
from sft_play.data.order import Layout, StepSampler, fullest_step, padding
from sft_play.errors import OutOfMemory
from sft_play.evaluation.evaluator import Evaluator
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast.install import installed_on
from sft_play.plan import batch, probe_fit
from sft_play.plan.probe_fit import Fit, Point, Subject
from sft_play.plan.resolve import precision
from sft_play.plan.sizing import Choice
from sft_play.process import Process
from sft_play.runs import stamp
from sft_play.runs.folder import RunFolder
from sft_play.training.dry_run import DryRun
from sft_play.training.report import Report
from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True)
class Outcome:
    """What a probe found: the step that will run, and how well it is known."""

    chosen: batch.Chosen
    points: tuple[Point, ...]  # the two of the fit first, where there is one
    fit: Fit | None  # None where nothing was chosen
    budget_bytes: int
    is_cached: bool


class Probe:
    """Tries a run's steps on its wrapped model. Every rank makes one and calls `run`, once, before the first step."""

    def __init__(self, trainer: SftTrainer, config: Config, plan: dict[str, Any], process: Process):
        self.trainer, self.config, self.plan, self.process = trainer, config, plan, process
        self.memory = trainer.memory
        self.is_resumed = config.train.resume_from is not None
        self.chooses = (
            self.memory.is_exact and plan["strategy"] != "deepspeed" and not self.is_resumed
        )
        self.choice = probe_fit.to_choose_again(
            Choice.from_json(plan["choice"]), plan["effective_batch"], plan["checkpointed_layers"]
        )
        self.device = "a GPU" if plan["device"] == "cuda" else "this host"
        wanted = self.choice.wanted
        self.planned = batch.Chosen(
            plan["per_device_batch_size"],
            plan["grad_accum"],
            plan["checkpointed_layers"],
            wanted.layers,
            plan["effective_batch"],
        )

    def run(self) -> Outcome:
        """Return the step to run, which has been tried. Raises OutOfMemory on every rank when none fits, or a batch that the user set does not."""
        folder = root_of(self.config) / "probes"
        fingerprint = self._subject().fingerprint()
        cached = self.process.gather(
            probe_fit.remembered(folder, fingerprint)
            if self.chooses and self.process.is_main
            else ()
        )[0]
        budget = probe_fit.budget_bytes(
            self.choice, self.process.min(self.memory.allocatable_bytes())
        )
        with DryRun(self.trainer, self.memory, self._may_step_optimizer) as dry_run:
            if not self.chooses:
                return Outcome(
                    self.planned,
                    (self._try_as_planned(dry_run, budget),),
                    None,
                    budget,
                    is_cached=False,
                )
            points = cached or self._points(dry_run, budget)
            fit = Fit(self.choice, points[0], points[1])
            chosen, tried = self._choose(dry_run, fit, points, budget)
        if not self.process.is_main:  # the main rank tells more, once it is settled
            logger.info(
                "probe chose batch=%d accum=%d checkpointed_layers=%d",
                chosen.batch_size,
                chosen.grad_accum,
                chosen.checkpointed_layers,
            )
        if self.process.is_main and len(tried) > len(cached):
            probe_fit.remember(folder, fingerprint, tried)
        return Outcome(chosen, tried, fit, budget, is_cached=len(tried) == len(cached))

    @property
    def _may_step_optimizer(self) -> bool:
        return not (
            self.is_resumed
            or self.trainer.is_deepspeed_enabled
            or self.config.train.optim.startswith("paged")
        )

    def _try_as_planned(self, dry_run: DryRun, budget: int) -> Point:
        point = self._measure_step(dry_run, self.planned)
        if point is None:
            raise OutOfMemory(
                f"train.batch_size={self.planned.batch_size}: out of memory when it was tried before training, of {budget / GIB:.1f} GiB; "
                f"try half of it, TRAIN_GRADIENT_CHECKPOINTING=true, or {probe_fit.smaller(self.choice.wanted.seq_len)}"
            )
        return point

    def _points(self, dry_run: DryRun, budget: int) -> tuple[Point, Point]:
        """Measure half a row and a whole one, with more layers checkpointed where they do not fit as planned."""
        seq_len = self.choice.wanted.seq_len
        for layers in dict.fromkeys(
            (
                self.planned.checkpointed_layers,
                batch.smallest(self.choice.wanted).checkpointed_layers,
            )
        ):
            accumulates = self.choice.step_of(self.planned.batch_size, layers).accumulates
            small = self._measure(dry_run, 1, max(1, seq_len // 2), layers, accumulates)
            large = small and self._measure(dry_run, 1, seq_len, layers, accumulates)
            if small and large:
                return small, large
        raise OutOfMemory(
            f"model.max_seq_len={seq_len}: out of memory when one row was tried before training, of {budget / GIB:.1f} GiB; try {probe_fit.smaller(seq_len)}"
        )

    def _choose(
        self, dry_run: DryRun, fit: Fit, points: Sequence[Point], budget: int
    ) -> tuple[batch.Chosen, tuple[Point, ...]]:
        """Choose by the fit and try it; what does not fit lowers the budget to below what it was expected to need."""
        wanted, allowed, tried, last = self.choice.wanted, budget, tuple(points), None
        while True:
            try:
                chosen = batch.choose(wanted, fit.peak, allowed, self.device)
                chosen = self.planned if self._cuts_as_planned(chosen) else chosen
            except OutOfMemory:
                chosen = last = batch.smallest(wanted)
            if chosen == last:
                raise probe_fit.no_room(fit, chosen, allowed, budget, self.device)
            if probe_fit.is_known_to_fit(chosen, self.choice, tried, budget):
                return chosen, tried
            point = self._measure_step(dry_run, chosen)
            tried += (point,) if point else ()
            if point and self._needs(point) <= budget:
                return chosen, tried
            if (
                point and isinstance(wanted.batch_size, int) and chosen == batch.smallest(wanted)
            ):  # the user's number, and it runs
                logger.warning(
                    "train.batch_size=%d takes %.1f GiB, and beyond %.1f GiB a tensor may find no room; TRAIN_BATCH_SIZE=auto chooses one that does",
                    *(chosen.batch_size, self._needs(point) / GIB, budget / GIB),
                )
                return chosen, tried
            last, allowed = (
                chosen,
                min(allowed, fit.peak(chosen.batch_size, chosen.checkpointed_layers)) - 1,
            )

    def _cuts_as_planned(self, chosen: batch.Chosen) -> bool:
        """Whether steps would be the planned ones: packed micro-batches may be as many and as large at another batch size."""
        wanted, both = self.choice.wanted, (chosen, self.planned)
        return (
            len(
                {
                    (
                        batch.micro_batches(wanted, one.batch_size),
                        batch.sequences(wanted, one.batch_size),
                        one.checkpointed_layers,
                    )
                    for one in both
                }
            )
            == 1
        )

    def _needs(self, point: Point) -> int:
        return point.peak + probe_fit.context_bytes(self.choice)

    def _measure_step(self, dry_run: DryRun, chosen: batch.Chosen) -> Point | None:
        step = self.choice.step_of(chosen.batch_size, chosen.checkpointed_layers)
        return self._measure(
            dry_run, step.batch_size, step.seq_len, step.checkpointed_layers, step.accumulates
        )

    def _measure(
        self, dry_run: DryRun, rows: int, length: int, layers: int, accumulates: bool
    ) -> Point | None:
        """Return what all ranks agree that a step takes, None where it does not fit on one of them."""
        self.checkpoint(layers)
        point = dry_run.measure(rows, length, layers, accumulates)
        if not self.process.min(int(point is not None)):
            return None
        phases = {name: self.process.max(peak) for name, peak in point.phases.items()}
        return replace(point, phases=phases)

    def checkpoint(self, layers: int) -> None:
        """Checkpoint the first `layers` layers of the model."""
        if self.choice.wanted.is_by_layer:  # else Unsloth has done it, once and for all
            checkpoint_layers(self.trainer.model, layers)

    def _subject(self) -> Subject:
        config, plan, train = self.config, self.plan, self.config.train
        device = self.process.device
        is_gpu = device.type == "cuda"
        gpu = (
            (
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_properties(device).total_memory,
            )
            if is_gpu
            else ("cpu", 0)
        )
        return Subject(
            shape=self.choice.shape,
            step=self.choice.step,
            tuning=config.tuning.model_dump(mode="json"),
            model=config.model.model_dump(
                mode="json", include={"name", "revision", "dtype", "attn_implementation"}
            ),
            precision=precision(config),
            packing=plan["packing"],
            strategy=plan["strategy"],
            deepspeed=plan["deepspeed"],
            ddp={
                name: getattr(train, name)
                for name in ("ddp_find_unused_parameters", "ddp_bucket_cap_mb")
            },
            fast_parts=sorted(installed_on(self.trainer.model).on),
            gpus=self.process.gather(gpu),
            versions=stamp.versions(),
            code=probe_fit.digest_of_code(),
        )


def apply_probe(
    probe: Probe, evaluators: Sequence[Evaluator], folder: RunFolder, report: Report
) -> tuple[Config, dict[str, Any]]:
    """Try the plan, let the run follow what was found, write it down, and return config and plan as they then are.

    Every rank must call it, with the model wrapped and no step taken. Raises OutOfMemory, on every rank.
    """
    started, config, plan = time.perf_counter(), probe.config, probe.plan
    outcome = probe.run()
    facts = _facts(probe, outcome, time.perf_counter() - started)
    if outcome.fit is not None:
        config, plan = _follow(probe, outcome, evaluators)
        report.facts["peak_bytes"]["predicted"] = plan["memory"]["predicted_peak"]
        report.facts["memory"]["predicted"] = {
            name: phase["total"] for name, phase in plan["phases"].items()
        }
    plan = {**plan, "probe": facts}
    if probe.process.is_main:
        folder.write_inputs(config, plan)
        if facts["changed"]:
            data, order = folder.read_data(), probe.trainer.order
            data["padding"] = vars(
                padding(order.lengths, *_layouts(order, outcome.chosen), order.seed)
            )
            folder.write_data(data)
            report.facts["padding"] = data["padding"]
        logger.info("%s", _line(probe, outcome, facts))
    report.update(probe=facts, checkpointing=plan["checkpointing"])
    return config, plan


def _follow(
    probe: Probe, outcome: Outcome, evaluators: Sequence[Evaluator]
) -> tuple[Config, dict[str, Any]]:
    """Let trainer and evaluators take the chosen step, and return config and plan with it."""
    chosen, trainer, train, plan = outcome.chosen, probe.trainer, probe.config.train, probe.plan
    probe.checkpoint(chosen.checkpointed_layers)
    step, micro_batches = (
        probe.choice.step_of(chosen.batch_size, chosen.checkpointed_layers),
        batch.micro_batches(probe.choice.wanted, chosen.batch_size),
    )
    if chosen.batch_size != probe.planned.batch_size:
        layout = replace(
            trainer.order.layout,
            batch_size=step.batch_size,
            packed_into=micro_batches if plan["packing"] else None,
        )
        trainer.set_micro_batch(layout, chosen.batch_size)
    for evaluator in evaluators:
        evaluator.batch_size = step.eval_rows
    resolved = {
        "batch_size": chosen.batch_size,
        "grad_accum": chosen.grad_accum,
        "eval_batch_size": step.eval_rows,
    }
    resolved["gradient_checkpointing"] = chosen.checkpointed_layers > 0
    closed = probe.choice.bytes_of(chosen.batch_size, chosen.checkpointed_layers)
    phases = probe_fit.phases_json(
        outcome.fit.phases(chosen.batch_size, chosen.checkpointed_layers), closed
    )
    peak = max(phases.values(), key=lambda phase: phase["total"])
    return probe.config.model_copy(update={"train": train.model_copy(update=resolved)}), {
        **plan,
        "per_device_batch_size": chosen.batch_size,
        "grad_accum": chosen.grad_accum,
        "micro_batches": micro_batches,
        "sequences": step.batch_size,
        "checkpointing": chosen.checkpointing,
        "checkpointed_layers": chosen.checkpointed_layers,
        "gradient_checkpointing": chosen.checkpointed_layers > 0,
        "budget_bytes": outcome.budget_bytes,
        "phases": phases,
        "memory": {
            **{name: value for name, value in peak.items() if name != "total"},
            "predicted_peak": peak["total"],
        },
    }


def _layouts(order: StepSampler, chosen: batch.Chosen) -> tuple[Layout, Layout]:
    """Return how a run's steps are cut up, or would be: not packed, and packed."""
    own = order.layout
    unpacked = replace(own, batch_size=chosen.batch_size, packed_into=None)
    if own.packed_into:
        return unpacked, own
    return unpacked, unpacked.packed(fullest_step(order.lengths, own, order.seed, epochs=1))


def _facts(probe: Probe, outcome: Outcome, seconds: float) -> dict[str, Any]:
    chosen, choice = outcome.chosen, probe.choice
    context = probe_fit.context_bytes(choice)
    closed = choice.bytes_of(chosen.batch_size, chosen.checkpointed_layers)
    tokens = batch.sequences(choice.wanted, chosen.batch_size) * choice.wanted.seq_len
    like_it = [
        point
        for point in outcome.points
        if (point.tokens, point.checkpointed_layers) == (tokens, chosen.checkpointed_layers)
    ]
    return {
        "points": [vars(point) for point in outcome.points],
        "predicted_before": {name: phase.total for name, phase in closed.phases.items()},
        "predicted_after": outcome.fit.phases(chosen.batch_size, chosen.checkpointed_layers)
        if outcome.fit
        else None,
        "verified_bytes": like_it[-1].peak + context if like_it and probe.memory.is_exact else None,
        "seconds": round(seconds, 3),
        "cached": outcome.is_cached,
        "changed": chosen != probe.planned,
    }


def _line(probe: Probe, outcome: Outcome, facts: dict[str, Any]) -> str:
    """Return the probe as one line of facts."""
    chosen, planned, world = outcome.chosen, probe.planned, probe.plan["world_size"]
    context = probe_fit.context_bytes(probe.choice) if probe.memory.is_exact else 0
    measured = " ".join(
        f"{name}={(peak + context) / GIB:.2f}GiB"
        for name, peak in outcome.points[-1].phases.items()
    )
    before, after = (
        max(phases.values()) / GIB if phases else None
        for phases in (facts["predicted_before"], facts["predicted_after"])
    )
    predicted = (
        f"predicted={before:.2f}GiB" if after is None else f"predicted={before:.2f}->{after:.2f}GiB"
    )
    was = (
        f" (was {planned.batch_size} x {world} x {planned.grad_accum})" if facts["changed"] else ""
    )
    layers = (
        f" checkpointing={chosen.checkpointing}:{chosen.checkpointed_layers}/{chosen.layers}"
        if facts["changed"]
        else ""
    )
    return (
        f"probe{' cached' if outcome.is_cached else ''} {measured} {predicted} of {outcome.budget_bytes / GIB:.2f}GiB "
        f"batch {chosen.batch_size} x {world} x {chosen.grad_accum} = {chosen.effective_batch}{was}{layers} in {facts['seconds']:.1f}s"
    )
