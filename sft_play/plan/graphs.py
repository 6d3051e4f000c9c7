"""Whether a run records its layers as CUDA graphs, and what the recordings hold. Pure: no torch.

`models.fast.graphs` asks with what it finds in the loaded model, a plan with what is known before.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sft_play.config.schema import Config
from sft_play.plan.activations import working_of
from sft_play.plan.fast import ALL_PARTS
from sft_play.plan.layout import Layout
from sft_play.plan.ranks import Ranks
from sft_play.plan.step import StepSpec

# Fused parts without which nothing is recorded, and those that no recording can have
NEEDED = {"attention": "attention is not fused", "loss": "the loss is not fused"}
HINDERING = {
    "experts": "tokens choose their experts",
    "mixers": "mixers begin anew at each document",
}
# While a recording proves itself: gradients in memory that stays, what they held, the layers' own
GRADIENT_COPIES = 3
# Shapes of micro-batches that are recorded: documents in one row have so many, others but a few
MOST_RECORDINGS = 16
HIDDEN_COPIES = 2  # of the last hidden states in each recording: its output, and the gradient


@dataclass(frozen=True)
class GraphSetup:
    """What decides whether the layers of a run are recorded."""

    config: Config
    ranks: Ranks
    fused: Collection[str] | None  # parts; None: not known before the model is loaded
    unfused: Mapping[str, str] = field(default_factory=dict)  # why other parts are not
    is_recomputed: bool = False  # a layer, in the backward pass


def records_graphs(setup: GraphSetup) -> bool:
    """Return whether layers are recorded; not where too little is known of the model."""
    is_asked = setup.config.train.cuda_graphs
    return is_asked and setup.fused is not None and why_not_recorded(setup) is None


def without_effect(setup: GraphSetup) -> str | None:
    """Return the sentence for train.cuda_graphs where it records nothing, else None."""
    reason = why_not_recorded(setup) if setup.config.train.cuda_graphs else None
    return None if reason is None else f"train.cuda_graphs=true has no effect: {reason}"


def graph_warnings(setup: GraphSetup, layout: Layout) -> list[str]:
    """Return what a plan says of train.cuda_graphs where nothing will be recorded."""
    is_recomputed = layout.checkpointed_layers > 0
    sentence = without_effect(replace(setup, is_recomputed=is_recomputed))
    return [] if sentence is None else [sentence]


def why_not_recorded(setup: GraphSetup) -> str | None:
    """Return why layers are not recorded, None where nothing known is against it."""
    ranks, tuning = setup.ranks, setup.config.tuning
    reasons = {
        "the model is not on a GPU": ranks.device != "cuda",
        f"strategy={ranks.strategy}, and layers are recorded on one GPU and under ddp": (
            ranks.strategy not in ("single", "ddp")
        ),
        "the model is on several GPUs": ranks.gpus_per_process > 1,
        "tuning.mode=full": tuning.mode == "full",
        f"tuning.lora.dropout={tuning.lora.dropout}": tuning.lora.dropout > 0,
        "train.neftune_noise_alpha": setup.config.train.neftune_noise_alpha is not None,
        **_reasons_of_parts(setup),
        "layers are recomputed, as train.gradient_checkpointing says": setup.is_recomputed,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _reasons_of_parts(setup: GraphSetup) -> dict[str, bool]:
    """Return what fused parts may have against a recording, and whether it holds."""
    if setup.fused is None:
        return {}
    reasons = {}
    for part, words in NEEDED.items():
        why = setup.unfused.get(part) or setup.unfused.get(ALL_PARTS)
        reasons[f"{words} ({why})" if why else words] = part not in setup.fused
    for part, words in HINDERING.items():
        reasons[words] = part in setup.fused
    return reasons


def graph_bytes(step: StepSpec, layout: Layout) -> int:
    """Return what recordings hold beside a step, from the first one to the end of the run.

    Their activations are in memory that nothing else may use, so while a recording is proven they
    are there twice. An H200 reserved 18.3 GiB in place of 10.2 for a 1B Llama and 4 rows of 2,048
    tokens, of which this is 7.9. A recording of another shape has hidden states of its own.
    """
    if not step.records_graphs or layout.checkpointed_layers:
        return 0
    recordings = MOST_RECORDINGS if layout.in_one_row else 1
    copies = HIDDEN_COPIES * recordings + 1  # those of the layers in a proof
    hidden = copies * layout.tokens * step.compute_bytes * step.model.hidden
    gradients = GRADIENT_COPIES * step.trained_bytes * step.trained_weights
    return working_of(step, layout).backward + hidden + gradients
