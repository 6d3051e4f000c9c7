"""The layers of a decoder as CUDA graphs, so that no step waits for the CPU to launch kernels.

The first micro-batch of a shape runs without a graph, while kernels are chosen and compiled. At the
second, the forward and backward pass of the layers are recorded. Later micro-batches of that shape
replay them: two launches instead of thousands. The output head is not recorded, because the number
of labeled tokens differs between micro-batches.

A recording reads `recorded.StaticInputs` and adds to `recorded.StaticGradients`. There are few
shapes: rows have few widths (`packing.padded_width`), and documents are padded with empty ones to a
power of two.

The first recording of a shape is verified before it is used. It is recorded with the first
micro-batch; its output and gradients for the second are compared with those of the layers.

Nothing else can use the memory of recordings. It is therefore freed before the layers run without a
graph, for an evaluation or a new shape. A shape is recorded again when it recurs. These recordings
are not verified again: the layers would need the memory of all other recordings for that.

Ranks that share experts compute together. They also record and replay together, in a shape that
they agree on.

Legend: B rows, T tokens per row, N documents, H hidden features.
"""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from sft_play.config.schema import Config
from sft_play.models.architecture import decoder_of
from sft_play.models.experts import find_experts
from sft_play.models.fast.graphs.recorded import (
    Computed,
    DecoderCall,
    Record,
    RecordedPass,
    Replay,
    Shape,
    StaticGradients,
    StaticHidden,
    common_shape,
    readable_call,
)
from sft_play.models.fast.install import fused_kernels_of
from sft_play.models.fast.setup import base_model_of, is_training
from sft_play.plan.fast import MOST_RECORDINGS, FastPlan, GraphSetup, without_effect
from sft_play.plan.ranks import Ranks
from sft_play.plan.run_plan import RunPlan
from sft_play.process import Process

logger = logging.getLogger(__name__)

# Relative difference of a tensor. Backward kernels that sum in a different order each time differ
# by 1e-3 in bfloat16; a recording that reads the wrong memory differs by 1.
MAX_DIFFERENCE = 2e-2
# A padded row is multiplied by other kernels, which round differently: gradients of a 1B model in
# bfloat16 differed by 4e-2. Rounding can also change which experts are chosen: gpt-oss-20b differed
# by 2e-2. A recording that joins two documents is still detected.
MAX_DIFFERENCE_ROUNDED = 1e-1


@dataclass
class GraphCounts:
    """How the micro-batches of a run were computed."""

    replayed: int = 0
    launched: int = 0  # kernel by kernel
    difference: float = 0.0  # the largest of a recording when it was verified
    stopped: str | None = None  # why nothing is replayed anymore

    def line(self) -> str:
        """Return the log line."""
        proved = f", which differ by {self.difference:.0e} at most" if self.replayed else ""
        reason = f"; {self.stopped}" if self.stopped else ""
        total = self.replayed + self.launched
        return f"cuda graphs: {self.replayed} of {total} micro-batches replayed{proved}{reason}"


class GraphedDecoder:
    """The forward method of a model's decoder in training: recorded passes for shapes that recur.

    A replay calls none of DDP's hooks. Under DDP, the gradients of all micro-batches, replayed or
    launched, are therefore summed in static buffers. They are averaged over ranks once per step
    (`in_place_of_ddp`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        new_record: Callable[[], Record],
        free_cache: Callable[[], None] = lambda: None,
        ranks: int = 1,
        most_tokens: int | None = None,
        sharing: Process | None = None,
    ):
        self.decoder = decoder = decoder_of(base_model_of(model))
        self.new_record = new_record
        self.record = new_record()  # in memory that all recordings share
        self.free_cache = free_cache  # frees memory that the layers themselves no longer need
        self.ranks = ranks
        self.most_tokens = most_tokens  # in a micro-batch: the plan has no memory for more
        self.sharing = sharing  # the process, if it shares experts with other ranks
        self.forward = decoder.forward
        self.has_experts = bool(find_experts(decoder))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients = StaticGradients(trained)
        self.hidden = StaticHidden(most_tokens)
        self.anchor = torch.zeros((), device=trained[0].device, requires_grad=True)
        self.first: dict[Shape, DecoderCall] = {}  # the first micro-batch of each shape
        self.proven: set[Shape] = set()
        self.recorded: dict[Shape, RecordedPass] = {}  # the verified ones
        self.counts = GraphCounts()

    def __call__(
        self, *args: Any, **kwargs: Any
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """Return the decoder's output; in training only its hidden states."""
        if not is_training(self.decoder):
            return self._launch(*args, **kwargs)
        self.gradients.use_static_buffers()
        recorded = None
        call = self._agreed(readable_call(args, kwargs, self.most_tokens))
        if call is not None and not self.counts.stopped:
            recorded = self.recorded.get(call.shape) or self._record_what_comes_again(call, kwargs)
        if recorded is None:
            self.counts.launched += 1
            return self._launch(*args, **kwargs)
        self.counts.replayed += 1
        # the head of an MoE model also reads the router outputs
        return MoeModelOutputWithPast(last_hidden_state=recorded.run(call, self.anchor))

    @contextlib.contextmanager
    def in_place_of_ddp(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """Run a micro-batch without DDP's hooks; average the gradients after a step's last one."""
        if self.ranks == 1:
            yield
            return
        with wrapped.no_sync():
            yield
        if is_last:
            self.gradients.average(self.ranks)

    def _launch(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """Return what the layers compute without a recording."""
        if self.recorded:
            self._give_back()
        return self.forward(*args, **kwargs)

    def _give_back(self) -> None:
        """Free the memory of all recordings."""
        self.recorded.clear()
        self.record = self.new_record()
        self.free_cache()

    def _agreed(self, call: DecoderCall | None) -> DecoderCall | None:
        """Return the call in the shape of all ranks that share experts; None if there is none."""
        if self.sharing is None:
            return call
        shape = common_shape(self.sharing.gather(None if call is None else call.shape))
        return None if call is None or shape is None else call._replace(shape=shape)

    def _largest(self, number: float) -> float:
        return number if self.sharing is None else self.sharing.max(number)

    def _record_what_comes_again(
        self, call: DecoderCall, kwargs: dict[str, Any]
    ) -> RecordedPass | None:
        """Return a recording if the shape of a call was seen before."""
        first = self.first.setdefault(call.shape, call)
        if len(self.first) > MOST_RECORDINGS:
            self._stop(f"micro-batches have more than {MOST_RECORDINGS} shapes")
        if first is call:
            return None
        computed = None
        if call.shape not in self.proven:  # before a recording uses memory
            computed = Computed.by_layers(
                self._launch(**kwargs).last_hidden_state, self.gradients.parameters
            )
        hidden = self.hidden.parts(call.shape, computed and computed.hidden)
        self.free_cache()
        recorded, failure = None, "on another rank"
        try:
            packed = self.decoder.packed_documents
            recorded = RecordedPass(
                self.forward, packed, first, self.gradients, hidden, self.record
            )
        except RuntimeError as error:  # code that waits for the GPU cannot be recorded
            failure = str(error).splitlines()[0]
        if self._largest(float(recorded is None)):
            self._stop(f"the layers cannot be recorded: {failure}")
            return None
        if computed is not None and not self._is_equal(recorded, call, computed):
            return None
        self.recorded[call.shape] = recorded
        return recorded

    def _is_equal(self, recorded: RecordedPass, call: DecoderCall, computed: Computed) -> bool:
        found = self._largest(recorded.difference(call, computed))
        is_rounded = recorded.is_filled_up or self.has_experts
        if found <= (MAX_DIFFERENCE_ROUNDED if is_rounded else MAX_DIFFERENCE):
            self.proven.add(call.shape)
            self.counts.difference = max(self.counts.difference, found)
            return True
        self._stop(f"a replay of {recorded.inputs.shape} differs by {found:.1e}")
        return False

    def _stop(self, reason: str) -> None:
        self.counts.stopped = reason
        self._give_back()
        logger.warning("cuda graphs: %s; training continues without them", reason)


def graph_layers(
    model: PreTrainedModel, config: Config, plan: RunPlan, process: Process
) -> GraphedDecoder | None:
    """Return a model's decoder that records its layers from here on; None if it does not.

    Layers are recorded if train.cuda_graphs asks for it. Call this before the first step, when
    micro-batches are those of the run. If layers cannot be recorded, a warning reports why, unless
    the plan did.
    """
    if not config.train.cuda_graphs:
        return None
    ranks = plan.ranks
    offloading = plan.step.offloading(plan.layout.checkpointed_layers)
    sentence = without_effect(graph_setup(model, config, ranks, offloading))
    if sentence is not None:
        if sentence not in plan.warnings:
            logger.warning("warning: %s", sentence)
        return None
    graphed = GraphedDecoder(
        model,
        record_on_gpu,
        free_gpu_memory,
        ranks.world_size,
        plan.layout.tokens,
        sharing=process if ranks.strategy == "ep" else None,
    )
    graphed.decoder.forward = graphed
    return graphed


def graph_setup(
    model: PreTrainedModel, config: Config, ranks: Ranks, offloading: str | None = None
) -> GraphSetup:
    """Return the facts of a loaded model that decide whether its layers can be recorded."""
    kernels = fused_kernels_of(model)
    return GraphSetup(config, ranks, FastPlan(kernels.on, kernels.off), offloading)


recording_stream = functools.cache(torch.cuda.Stream)  # one for all recordings


def accumulators_for_recordings(model: nn.Module) -> list[GradientEdge]:
    """Return the autograd nodes that accumulate gradients, created on the recording stream.

    A node always uses the stream on which it was created, and no recording may wait for the default
    stream. Passes of the layers and DDP reuse existing nodes, so keep a reference to these.
    """
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with torch.cuda.stream(recording_stream()):
        return [get_gradient_edge(each) for each in model.parameters() if each.requires_grad]


def free_gpu_memory() -> None:
    """Free memory of earlier passes before a recording, also in cycles of Python objects."""
    gc.collect()
    torch.cuda.empty_cache()


def record_on_gpu() -> Record:
    """Return a function that records kernels; all recordings share one pool of memory.

    Sharing is safe: no other pass is replayed between a forward pass and its backward pass.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(launch: Callable[[], None]) -> Replay:
        """Return what launches the same kernels again. Raises: RuntimeError if it cannot."""
        graph = torch.cuda.CUDAGraph()
        # a failed recording does not restore the previous stream
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            # threads that load data may use the GPU meanwhile
            torch.cuda.graph(graph, pool, recording_stream(), "thread_local"),
        ):
            launch()
        return graph.replay

    return record
