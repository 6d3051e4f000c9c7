"""Whether a run records its layers as CUDA graphs, and what the recordings hold. Pure: no torch.

`models.fast.graphs` records by what it finds in the loaded model; this says so before there is one.
"""

from collections.abc import Collection

from sft_play.config.schema import Config
from sft_play.plan.activations import working_of
from sft_play.plan.layout import Layout
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import StepSpec

NEEDED = frozenset({"attention", "loss"})  # fused parts without which nothing is recorded
HINDERING = frozenset({"experts", "mixers"})  # fused parts that no recording can have
# While a recording proves itself: gradients in memory that stays, what they held, the layers' own
GRADIENT_COPIES = 3
HIDDEN_COPIES = 3  # of the last hidden states: the recording's output, its gradient, the proof's


def records_graphs(config: Config, ranks: Ranks, fused: Collection[str]) -> bool:
    """Return whether layers are recorded where none is recomputed; `fused` are the fused parts."""
    tuning = config.tuning
    has_whole_model = ranks.device == "cuda" and ranks.gpus_per_process == 1
    has_whole_model &= ranks.strategy in ("single", "ddp")
    has_same_kernels_each_time = (
        tuning.mode != "full"
        and tuning.lora.dropout == 0
        and config.train.neftune_noise_alpha is None
        and set(fused) >= NEEDED
        and not HINDERING & set(fused)
    )
    return config.train.cuda_graphs and has_whole_model and has_same_kernels_each_time


def graph_bytes(step: StepSpec, layout: Layout) -> int:
    """Return what recordings hold beside a step, from the first one to the end of the run.

    Their activations are in memory that nothing else may use, so while a recording is proven they
    are there twice. An H200 reserved 18.3 GiB in place of 10.2 for a 1B Llama and 4 rows of 2,048
    tokens, of which this is 7.9.
    """
    if not step.records_graphs or layout.checkpointed_layers:
        return 0
    hidden = HIDDEN_COPIES * layout.tokens * step.compute_bytes * step.model.hidden
    gradients = GRADIENT_COPIES * step.trained_bytes * step.trained_weights
    return working_of(step, layout).backward + hidden + gradients
