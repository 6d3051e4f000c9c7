"""Recording what is launched on a GPU, and what has to be so before that."""

import functools
import gc
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
recording_stream = functools.cache(torch.cuda.Stream)  # of all recordings


def accumulators_for_recordings(model: nn.Module) -> list[GradientEdge]:
    """Return the nodes of autograd that accumulate gradients, made on the recording stream.

    A node keeps the stream on which it was made, and no recording may wait for the default stream.
    Passes of the layers and DDP take the nodes that they find: hold these.
    """
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with torch.cuda.stream(recording_stream()):
        return [get_gradient_edge(each) for each in model.parameters() if each.requires_grad]


def free_gpu_memory() -> None:
    """Free what earlier passes have left, in cycles of Python objects too, before a recording."""
    gc.collect()
    torch.cuda.empty_cache()


def record_on_gpu() -> Record:
    """Return a function that records kernels; all recordings share one pool of memory.

    They may: between a forward pass and its backward pass no other is replayed.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(launch: Callable[[], None]) -> Replay:
        """Return what launches the same kernels again. Raises: RuntimeError if one cannot be."""
        graph = torch.cuda.CUDAGraph()
        # a recording that fails leaves its own stream behind
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            # threads that load data may use the GPU meanwhile
            torch.cuda.graph(graph, pool, recording_stream(), "thread_local"),
        ):
            launch()
        return graph.replay

    return record
