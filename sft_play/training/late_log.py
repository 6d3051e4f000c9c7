"""The log of a step, written while the GPU computes the next one.

Whoever reads a loss waits for the GPU, which then waits in turn: for the log's writers, the next
micro-batch and its first kernels. So the numbers of a step are copied behind it, and written once
the next micro-batch is launched. It is so on one GPU; several ranks exchange what they log, for
which they wait anyway. A step after which something else follows, such as an evaluation, a save
or the end, is logged at once.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from sft_play.errors import DivergedError

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

logger = logging.getLogger(__name__)
ANCHOR_SECONDS = 600  # after which a GPU's clock is compared with the host's anew


class _Numbers(NamedTuple):
    """What a step's log says, perhaps still on its way from the GPU."""

    values: torch.Tensor  # (1 or 2,) float64 in host memory: the summed loss, and a norm on a GPU
    arrival: torch.cuda.Event | None
    host_norm: float | None  # as DeepSpeed returns it
    learning_rate: float
    start_time: float


class EventClock:
    """Tells how long ago a GPU reached an event, though nobody was waiting for it.

    The GPU knows the time between two events; of one, the anchor, the host knows the time, too.
    """

    def __init__(self) -> None:
        self._anchor: torch.cuda.Event | None = None
        self._anchor_seconds = 0.0  # of the host's clock

    def record(self) -> torch.cuda.Event:
        """Return an event behind all that was launched; waits for the GPU where no anchor is new.

        Both clocks run apart by some millionths.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._anchor is None or time.perf_counter() - self._anchor_seconds > ANCHOR_SECONDS:
            event.synchronize()
            self._set_anchor(event)
        return event

    def seconds_since(self, event: torch.cuda.Event) -> float:
        """Wait for an event; return how long ago the GPU reached it."""
        if not event.query():
            event.synchronize()
            self._set_anchor(event)
        reached = self._anchor_seconds + self._anchor.elapsed_time(event) / 1e3
        return max(0.0, time.perf_counter() - reached)

    def _set_anchor(self, event: torch.cuda.Event) -> None:
        self._anchor = event
        self._anchor_seconds = time.perf_counter()


class LateLog:
    """Puts the logs of a trainer off until the next micro-batch is launched."""

    def __init__(self, trainer: "SftTrainer"):
        self.trainer = trainer
        process = trainer.process
        self.is_on = process.world_size == 1 and process.device.type == "cuda"
        self._clock = EventClock()
        self._numbers: _Numbers | None = None

    def put_off(
        self,
        summed_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        learning_rate: float,
        start_time: float,
    ) -> bool:
        """Keep what is logged of the step that has ended, and begin to sum losses anew.

        Returns False where nothing is to be logged, or at once.
        """
        if not self._may_wait():
            return False
        is_norm_here = not isinstance(grad_norm, torch.Tensor)  # to copy it there would wait
        numbers = [summed_loss] if is_norm_here else [summed_loss, grad_norm]
        parts = [each.detach().to(summed_loss.device).double().reshape(()) for each in numbers]
        values = torch.stack(parts)
        summed_loss -= summed_loss  # as Trainer does
        self.trainer.step_log.hold()
        if self.trainer.router_loss is not None:
            self.trainer.router_loss.hold(values.device)
        arrival = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)
            arrival = self._clock.record()
        host_norm = grad_norm if is_norm_here else None
        self._numbers = _Numbers(values, arrival, host_norm, learning_rate, start_time)
        return True

    def _may_wait(self) -> bool:
        """Return whether the step that has ended is to be logged, and nothing else follows it."""
        control, state = self.trainer.control, self.trainer.state
        if not self.is_on or not control.should_log:
            return False
        if state.global_step <= self.trainer._globalstep_last_logged:
            return False
        follows = (control.should_evaluate, control.should_save)
        ends = (control.should_training_stop, control.should_epoch_stop)
        return not any((*follows, *ends))

    def write(self) -> None:
        """Write the log that was put off, if one was. Raises: DivergedError as `log` does."""
        if self._numbers is None:
            return
        numbers, self._numbers = self._numbers, None
        if numbers.arrival is not None:
            self.trainer.step_log.date_held(self._clock.seconds_since(numbers.arrival))
        summed_loss, *norm = numbers.values.tolist()
        trainer = self.trainer
        step = trainer.state.global_step  # the next one has not ended
        logs = {"loss": summed_loss / (step - trainer._globalstep_last_logged)}
        if norm or numbers.host_norm is not None:
            logs["grad_norm"] = norm[0] if norm else numbers.host_norm
        logs["learning_rate"] = numbers.learning_rate
        trainer._total_loss_scalar += summed_loss
        trainer._globalstep_last_logged = step
        trainer.log(logs, numbers.start_time)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Write what was put off also where an error ends the steps inside this context.

        Raises: DivergedError as `log` does: what follows in the next step may be an effect of it.
        """
        try:
            yield
        except BaseException as error:
            self._write_before(error)
            raise

    def _write_before(self, error: BaseException) -> None:
        """Write what was put off before an error of the step that follows ends the run."""
        try:
            self.write()
        except DivergedError as cause:
            raise cause from error
        except Exception:  # the GPU does not respond, or a disk is full
            logger.warning("the log of the step before is not written", exc_info=True)
