"""The probe: measure steps before training, choose the batch again, and try the choice.

All ranks measure the same steps and agree on the largest peak and the least free memory. They
choose only by these numbers, so all of them choose the same. In three cases the plan is tried
unchanged: under DeepSpeed, whose engine cannot change its batch; on a resumed run, whose optimizer
has a state; and on a CPU, which has no allocator to measure. On a GPU, the measured bytes then
replace the plan's.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

import torch

from sft_kernels.install import fused_kernels_of
from sft_play.data.order import fullest_step, padding
from sft_play.errors import OutOfMemory
from sft_play.evaluation.evaluator import Evaluator
from sft_play.plan import batch, counting, next_command, probe_fit
from sft_play.plan.memory import GIB, StepBytes, evaluation_rows, step_bytes
from sft_play.plan.probe_fit import MeasuredFit, ProbePoint, ProbeReport
from sft_play.plan.ranks import config_precision
from sft_play.plan.run_plan import PlannedRun
from sft_play.plan.step import Layout
from sft_play.runs import stamp
from sft_play.runs.folder import cache_folder
from sft_play.training.context import RunContext
from sft_play.training.dry_run import DryRun, image_samples
from sft_play.training.loop import TrainingLoop
from sft_play.training.recorder import RunRecorder

logger = logging.getLogger(__name__)

# What a step is made of: if rows are packed, it can be the same at another batch size
CUTS = attrgetter("micro_batches", "sequences", "checkpointed_layers")


@dataclass(frozen=True)
class ProbeResult:
    """The layout that will run, and its measurements."""

    layout: Layout
    points: tuple[ProbePoint, ...]  # the two of the fit first, if there is a fit
    fit: MeasuredFit | None  # None if nothing was chosen
    memory: StepBytes | None  # of the layout, as measured; None without a GPU
    budget_bytes: int
    is_cached: bool


class Probe:
    """Tries a run's steps on its wrapped model.

    Every rank creates one and calls `run` once, before the first step.
    """

    def __init__(self, context: RunContext, loop: TrainingLoop):
        self.context = context
        self.loop = loop
        self.process = context.process
        self.memory = context.memory
        plan = context.plan
        self.step = plan.step
        self.layout = plan.layout
        self.request = probe_fit.request_of_started_run(plan.request, plan.layout)
        self.is_resumed = context.config.train.resume_from is not None
        # DeepSpeed's batch is fixed; under FSDP a rank that is out of memory would block the others
        is_free = plan.ranks.strategy in ("single", "ddp") and not self.is_resumed
        self.chooses = self.memory.is_exact and is_free
        self.device = "a GPU" if plan.ranks.device == "cuda" else "this host"

    def run(self) -> ProbeResult:
        """Return the layout to run, after it was tried.

        Raises: OutOfMemory on every rank if no layout fits, or if the batch that the user set does
        not fit.
        """
        folder = cache_folder(self.context.config) / "probes"
        fingerprint = self._fingerprint()
        cached: tuple[ProbePoint, ...] = ()
        if self.chooses and self.process.is_main:
            cached = probe_fit.read_points(folder, fingerprint)
        cached = self.process.gather(cached)[0]
        allocatable = self.process.min(self.memory.allocatable_bytes())
        budget = probe_fit.budget_bytes(self.step, self.layout, allocatable)
        is_paged = self.context.config.train.optim.startswith("paged")
        has_state = self.is_resumed or self.loop.engine.is_deepspeed or is_paged
        with DryRun(self.loop, steps_optimizer=not has_state) as dry_run:
            if not self.chooses:
                return self._as_planned(dry_run, budget)
            small_and_large = cached or self._two_points(dry_run, budget)
            fit = MeasuredFit(self.step, small_and_large[0], small_and_large[1])
            layout, points = self._choose(dry_run, fit, small_and_large, budget)
        is_cached = len(points) == len(cached)
        if self.process.is_main and not is_cached:
            probe_fit.write_points(folder, fingerprint, points)
        point = probe_fit.point_of(layout, points)
        at_layout = MeasuredFit(self.step, point, point) if point else fit
        return ProbeResult(layout, points, fit, at_layout.memory(layout), budget, is_cached)

    def _as_planned(self, dry_run: DryRun, budget: int) -> ProbeResult:
        """Try the unchanged plan, and replace its bytes with the measured ones."""
        point = self._measure(dry_run, self.layout)
        if point is None:
            raise OutOfMemory(
                f"train.batch_size={self.layout.batch_size}: out of memory when it was tried "
                f"before training, of {budget / GIB:.1f} GiB; try half of it, "
                "TRAIN_GRADIENT_CHECKPOINTING=true, or "
                f"{next_command.smaller_rows(self.layout.max_seq_len)}"
            )
        memory = None
        if self.memory.is_exact:
            used = self.process.max(self.memory.used_bytes()) + self._later_state_bytes()
            memory = probe_fit.memory_as_measured(self.step, self.layout, point, used)
        return ProbeResult(self.layout, (point,), None, memory, budget, is_cached=False)

    def _two_points(self, dry_run: DryRun, budget: int) -> tuple[ProbePoint, ...]:
        """Measure half a row and a full row.

        If they do not fit as planned, measure them with the most checkpointed layers.
        """
        max_seq_len = self.layout.capacity
        tries = self.layout, batch.smallest(self.request)
        for layers in dict.fromkeys(each.checkpointed_layers for each in tries):
            row = Layout(
                batch_size=1,
                grad_accum=2 if self.layout.accumulates else 1,
                world_size=self.layout.world_size,
                context_parallel=self.layout.context_parallel,
                max_seq_len=max_seq_len,
                checkpointed_layers=layers,
            )
            half = replace(row, max_seq_len=max(1, max_seq_len // 2))
            small = self._measure(dry_run, half)
            if small is None:
                continue
            large = self._measure(dry_run, row)
            if large is not None:
                return small, large
        raise OutOfMemory(
            f"model.max_seq_len={max_seq_len}: out of memory when one row was tried before "
            f"training, of {budget / GIB:.1f} GiB; try {next_command.smaller_rows(max_seq_len)}"
        )

    def _choose(
        self, dry_run: DryRun, fit: MeasuredFit, tried: tuple[ProbePoint, ...], budget: int
    ) -> tuple[Layout, tuple[ProbePoint, ...]]:
        """Choose a layout by the fit and try it; return the layout and all points.

        The line through two small steps is 13 to 20 % too high for a MoE model at 8,192 tokens. So
        the planned layout of such a model is tried first, even if it does not fit by the line. If a
        layout does not fit, the next one must need less than its expected peak. Once one fits, what
        it needs less than expected is given to the choice, and a faster one is tried, once.
        """
        allowed = budget
        planned = step_bytes(self.step, self.layout).predicted_peak
        if self.step.model.counts.experts and planned <= budget:
            allowed = max(budget, fit.peak(self.layout))
        last = found = None
        while True:
            layout = batch.choose_layout(self.request, fit.peak, allowed)
            if layout is not None and CUTS(layout) == CUTS(self.layout):
                layout = self.layout
            if found is not None and layout in (None, found):
                return found, tried
            if layout is None or layout == last:
                layout = layout or batch.smallest(self.request)
                raise next_command.probe_does_not_fit(
                    fit, self.request, layout, allowed, budget, self.device
                )
            fits = probe_fit.is_known_to_fit(self.step, layout, tried, budget)
            point = probe_fit.point_of(layout, tried)
            if not fits and point is None:
                point = self._measure(dry_run, layout)
                if point is not None:
                    tried += (point,)
                    fits = self.needs(point, layout) <= budget
            if not fits:
                if found is not None:
                    return found, tried
                is_set = self.request.batch_size != "auto"
                if point is not None and is_set and layout == batch.smallest(self.request):
                    self._warn_of_tight_batch(layout, point, budget)  # it runs, nevertheless
                    return layout, tried
                last = layout
                allowed = min(budget, allowed, fit.peak(layout)) - 1
                continue
            if found is not None or point is None:
                return layout, tried
            found = layout
            allowed = budget + fit.peak(layout) - self.needs(point, layout)

    def _warn_of_tight_batch(self, layout: Layout, point: ProbePoint, budget: int) -> None:
        logger.warning(
            "train.batch_size=%d takes %.1f GiB, and beyond %.1f GiB a tensor may find no room; "
            "TRAIN_BATCH_SIZE=auto chooses one that does",
            layout.batch_size,
            self.needs(point, layout) / GIB,
            budget / GIB,
        )

    def needs(self, point: ProbePoint, layout: Layout) -> int:
        """Return the measured bytes of a step, context included."""
        return point.peak + probe_fit.context_bytes(self.step, layout)

    def _measure(self, dry_run: DryRun, layout: Layout) -> ProbePoint | None:
        """Return the largest peaks of a step over all ranks; None if it does not fit on one."""
        self.context.checkpoint_layers(self.loop.engine.model, layout.checkpointed_layers)
        point = dry_run.measure(layout)
        if not self.process.min(int(point is not None)):
            return None
        later = self._later_state_bytes()
        peaks = {name: self.process.max(peak) + later for name, peak in point.phases.items()}
        return replace(point, phases=peaks)

    def _later_state_bytes(self) -> int:
        """Return the bytes of the moments that DeepSpeed allocates in its first step."""
        is_later = self.loop.engine.is_deepspeed and not self.is_resumed
        if not is_later or not self.memory.is_exact or self.step.offload:
            return 0
        return self.step.state_bytes // self.layout.world_size

    def _fingerprint(self) -> str:
        """Return a digest of everything that determines the bytes of a step, except its layout."""
        config = self.context.config
        plan = self.context.plan
        device = self.process.device
        gpu = ("cpu", 0)
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            gpu = (torch.cuda.get_device_name(device), memory)
        model_settings = {"name", "revision", "dtype", "attn_implementation"}
        ddp_settings = {"ddp_find_unused_parameters", "ddp_bucket_cap_mb"}
        samples = image_samples(self.loop, self.layout.max_seq_len)
        return counting.fingerprint(
            step=asdict(self.step),
            max_seq_len=self.layout.capacity,
            has_trees=self.layout.tree_tokens is not None,
            tuning=config.tuning.model_dump(mode="json"),
            model=config.model.model_dump(mode="json", include=model_settings),
            precision=config_precision(config),
            packing=plan.packing,
            strategy=plan.ranks.strategy,
            deepspeed=plan.deepspeed and plan.deepspeed.settings,
            ddp=config.train.model_dump(mode="json", include=ddp_settings),
            images=[image.size for sample in samples for image in sample.images],
            fast_parts=sorted(fused_kernels_of(self.loop.engine.model).on),
            gpus=self.process.gather(gpu),
            versions=stamp.versions(),
            code=probe_fit.digest_of_step(),
        )


def apply_probe(probe: Probe, evaluators: Sequence[Evaluator], recorder: RunRecorder) -> None:
    """Probe the plan, apply the chosen layout to the run, and record both.

    Every rank must call it, after the model is wrapped and before the first step.

    Raises: OutOfMemory, on every rank.
    """
    started = time.perf_counter()
    context = probe.context
    result = probe.run()
    planned = context.planned
    if result.memory is not None:
        planned = _apply_layout(probe, result, evaluators)
        memory, report = planned.plan.memory, recorder.report
        recorder.note(
            peak_bytes=replace(report.peak_bytes, predicted=memory.predicted_peak),
            memory=replace(report.memory, predicted=memory.totals()),
        )
    facts = _probe_report(probe, result, time.perf_counter() - started)
    context.planned = replace(planned, plan=replace(planned.plan, probe=facts))
    if context.process.is_main:
        context.planned.write(context.folder)
        if facts.changed:
            recorder.note(padding=_note_padding(probe, result.layout))
    logger.info("%s", _line(probe, result, facts))
    recorder.update(probe=asdict(facts), checkpointing=context.plan.checkpointing)


def _apply_layout(probe: Probe, result: ProbeResult, evaluators: Sequence[Evaluator]) -> PlannedRun:
    """Set the chosen layout on loop and evaluators, and return the run with it."""
    layout = result.layout
    probe.context.checkpoint_layers(probe.loop.engine.model, layout.checkpointed_layers)
    if layout.batch_size != probe.layout.batch_size:
        split_steps(probe.loop, layout)
    for evaluator in evaluators:
        evaluator.batch_size = evaluation_rows(probe.step, layout)
    planned = probe.context.planned.with_layout(layout, result.memory)
    return replace(planned, plan=replace(planned.plan, budget_bytes=result.budget_bytes))


def split_steps(loop: TrainingLoop, layout: Layout) -> None:
    """Split the same steps into the micro-batches of `layout`, before the first step.

    The number of steps stays the same, and therefore also the learning rate schedule.
    """
    assert loop.state.global_step == 0, "steps were taken already"
    assert not loop.engine.is_deepspeed, "DeepSpeed's engine has its batch built in"
    assert layout.rows_per_step == loop.order.layout.rows_per_step, "the steps would differ"
    loop.order.layout = layout


def _note_padding(probe: Probe, layout: Layout) -> dict[str, int]:
    """Write the padding of the chosen layout to data.json, and return it."""
    folder = probe.context.folder
    order = probe.loop.order
    packed = layout
    if not layout.is_packed:
        fullest = fullest_step(order.lengths, layout, order.seed, 1, order.row_ends)
        packed = layout.packed(fullest)
    tokens = vars(padding(order.lengths, layout.unpacked(), packed, order.seed, order.row_ends))
    folder.write_data({**folder.read_data(), "padding": tokens})
    return tokens


def _probe_report(probe: Probe, result: ProbeResult, seconds: float) -> ProbeReport:
    layout, verified = result.layout, None
    point = probe_fit.point_of(layout, result.points)
    if probe.memory.is_exact and point:
        verified = probe.needs(point, layout)
    return ProbeReport(
        points=result.points,
        predicted_before=step_bytes(probe.step, layout).totals(),
        predicted_after=result.memory.totals() if result.memory else None,
        verified_bytes=verified,
        seconds=round(seconds, 3),
        cached=result.is_cached,
        changed=layout != probe.layout,
    )


def _line(probe: Probe, result: ProbeResult, facts: ProbeReport) -> str:
    """Return the log line of a probe."""
    layout = result.layout
    context = probe_fit.context_bytes(probe.step, layout) if probe.memory.is_exact else 0
    point = probe_fit.point_of(layout, result.points) or result.points[-1]
    peaks = point.phases.items()
    measured = " ".join(f"{name}={(peak + context) / GIB:.2f}GiB" for name, peak in peaks)
    predicted = f"{max(facts.predicted_before.values()) / GIB:.2f}"
    if facts.predicted_after is not None:
        predicted += f"->{max(facts.predicted_after.values()) / GIB:.2f}"
    changed = ""
    if facts.changed:
        was = probe.layout
        checkpointing = replace(probe.context.plan, layout=layout).checkpointing
        changed = (
            f" (was {was.batch_size} x {was.world_size} x {was.grad_accum}) "
            f"checkpointing={checkpointing}:"
            f"{layout.checkpointed_layers}/{probe.step.model.layers}"
        )
    cached = " cached" if result.is_cached else ""
    return (
        f"probe{cached} {measured} predicted={predicted}GiB "
        f"of {result.budget_bytes / GIB:.2f}GiB batch {layout.batch_size} x {layout.world_size} "
        f"x {layout.grad_accum} = {layout.rows_per_step}{changed} in {facts.seconds:.1f}s"
    )
