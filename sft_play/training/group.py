"""The ranks of a run as a group: joined, watched, and left."""

from dataclasses import dataclass
from typing import Self

import torch

from sft_play.training import runtime
from sft_play.training.collectives import limited
from sft_play.training.context import RunContext
from sft_play.training.failure_broadcast import FailureBroadcast
from sft_play.training.rank_watch import RankWatch
from sft_play.training.recorder import RunRecorder
from sft_play.training.trainer import SftTrainer


@dataclass(frozen=True)
class RankGroup:
    """What this rank hears of the others; both are None for a single one."""

    broadcast: FailureBroadcast | None
    watch: RankWatch | None

    @classmethod
    def join(cls, context: RunContext, recorder: RunRecorder) -> Self:
        """Join the other ranks, and from then on fail with them; give up where they do not come."""
        process = context.process
        with limited(process, recorder.abandon, is_joining=True):
            runtime.join_group(context.plan, process.timeout)
        if process.world_size == 1:
            return cls(None, None)
        broadcast = FailureBroadcast.start(process, recorder.follow)
        recorder.broadcast = broadcast
        seconds = context.config.train.hang_timeout
        watch = RankWatch(process, context.folder.logs, seconds, recorder.abandon)
        recorder.find_gone = watch.find_gone
        return cls(broadcast, watch)

    def attach(self, trainer: SftTrainer) -> None:
        """Let the watch see the steps."""
        if self.watch is not None:
            trainer.add_callback(self.watch)

    def leave(self) -> None:
        """Wait for the other ranks, if any, and destroy the process group."""
        if not torch.distributed.is_initialized():
            return
        # launchers end the other ranks as soon as the first rank of a stopped run exits with 75
        torch.distributed.barrier()
        if self.watch is not None:
            self.watch.close()
        if self.broadcast is not None:
            self.broadcast.stop()
        torch.distributed.destroy_process_group()
