"""Install the fused kernels of `sft_kernels` on the model of a run."""

from peft import PeftModel
from transformers import PreTrainedModel

from sft_kernels.install import FusedKernels, install_kernels
from sft_kernels.process import Process
from sft_kernels.training_setup import TrainingSetup, base_model_of
from sft_play import timeline
from sft_play.config.schema import Config
from sft_play.errors import ConfigError
from sft_play.models.architecture import encoders_of
from sft_play.models.proofs import ProofStore
from sft_play.progress import Stage, watched_stage


def setup_of(
    model: PreTrainedModel | PeftModel, config: Config, process: Process, zero_stage: int = 0
) -> TrainingSetup:
    """Return how the model of a run will be trained."""
    tuning, tokens = config.tuning, config.model.max_seq_len
    return TrainingSetup(
        model,
        process,
        zero_stage,
        is_full=tuning.mode == "full",
        is_quantized=tuning.mode == "qlora",
        why_off=None if config.train.fast_path else "train.fast_path=false",
        attention=config.model.attn_implementation,
        longest_row=tokens if isinstance(tokens, int) else None,
        encoders=tuple(encoders_of(base_model_of(model)).values()),
        settings=(repr(tuning),),
        timed=timeline.span,
    )


def install_fused_kernels(
    model: PreTrainedModel | PeftModel,
    config: Config,
    process: Process,
    zero_stage: int = 0,
    proofs: ProofStore | None = None,
) -> FusedKernels:
    """Fuse and log every part of a model whose fused result is the same; return the parts.

    Proofs of earlier starts are read from `proofs`, and new ones are written there.

    Raises: ConfigError for train.fast_path=true if nothing can be fused.
    """
    stage = Stage("checking fused kernels against the model's own code")
    with watched_stage(stage, process.is_main):
        kernels = install_kernels(setup_of(model, config, process, zero_stage), proofs)
    if config.train.fast_path is True and not kernels.on:
        reason = next(iter(kernels.off.values()))
        raise ConfigError(f"train.fast_path=true: {reason}; set TRAIN_FAST_PATH=auto")
    return kernels
