"""Whether a GPU waits for its CPU to launch kernels, seen without making either wait."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from sft_play.config.schema import Config
from sft_play.models.architecture import decoder_layers, decoder_of
from sft_play.models.fast.graphs.decoder import graph_setup
from sft_play.models.fast.setup import base_model_of, is_training
from sft_play.plan.graphs import why_not_recorded
from sft_play.plan.ranks import Ranks

logger = logging.getLogger(__name__)

LOOKED_AT = 50  # micro-batches
MOST_WAITING = 0.5  # of them


class Event(Protocol):
    """A point in what a GPU was given to do."""

    def record(self) -> None:
        """Be behind all that was launched so far."""

    def query(self) -> bool:
        """Return whether the GPU has come to this point."""


class HostWatch:
    """Counts early micro-batches in whose forward pass the GPU keeps up with the CPU.

    At the end of a forward pass a GPU that sets the pace is layers behind what was launched. One
    that has computed three quarters of the layers by then waits for most of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        new_event: Callable[[], Event] = torch.cuda.Event,
    ):
        self.event = new_event()
        self.was_recorded = False
        self.waited = 0
        self.seen = 0
        base = base_model_of(model)
        layers = decoder_layers(base)
        late = layers[len(layers) * 3 // 4]
        self.hooks = [
            late.register_forward_pre_hook(self.note_layer),
            decoder_of(base).register_forward_hook(self.note_end),
        ]

    def note_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the layer behind three quarters of all."""
        self.was_recorded = is_training(layer)
        if self.was_recorded:
            self.event.record()

    def note_end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the decoder."""
        if self.was_recorded:
            self.was_recorded = False
            self.seen += 1
            self.waited += self.event.query()
            if self.seen == LOOKED_AT:
                self.conclude()

    def conclude(self) -> None:
        """Look no further, and say where the GPU has too little to do."""
        for hook in self.hooks:
            hook.remove()
        if self.waited > MOST_WAITING * self.seen:
            logger.info(
                "the GPU waited for the CPU in %d of %d micro-batches: where make plan finds "
                "memory for it, TRAIN_CUDA_GRAPHS=true may be faster",
                self.waited,
                self.seen,
            )


def watch_host(model: PreTrainedModel, config: Config, ranks: Ranks) -> None:
    """Watch a run that could record its layers as CUDA graphs and was not asked to."""
    is_possible = why_not_recorded(graph_setup(model, config, ranks)) is None
    if is_possible and not config.train.cuda_graphs:
        HostWatch(model)
