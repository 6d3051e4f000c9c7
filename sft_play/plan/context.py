"""How many ranks share each row: `train.context_parallel`, decided where it is auto. Pure."""

from dataclasses import replace

from sft_play.config.backends import backend_of
from sft_play.config.loader import LoadedConfig
from sft_play.errors import ConfigError
from sft_play.plan.inputs import PlanInputs, choose_layout, with_offloading
from sft_play.plan.step import LONG_ROW

COUNTS = (1, 2, 4, 8)


def with_context(inputs: PlanInputs, loaded: LoadedConfig) -> PlanInputs:
    """Return the inputs with the ranks that share a row, and with activation offloading decided.

    Where it is auto they are as few as a step fits with, and has rows for; one where none fits.
    Raises: ConfigError for a number that model or ranks do not allow.
    """
    asked = inputs.config.train.context_parallel
    if asked == "auto":
        return _fewest(inputs)
    reason = why_not_shared(inputs, asked)
    if asked > 1 and reason is not None:
        raise ConfigError(
            f"{loaded.described('train.context_parallel')}: {reason}; set TRAIN_CONTEXT_PARALLEL=1"
        )
    return with_offloading(replace(inputs, context_parallel=asked))


def _fewest(inputs: PlanInputs) -> PlanInputs:
    first: PlanInputs | None = None
    refused: ConfigError | None = None  # fewer rows a step than ranks
    is_long = inputs.config.model.max_seq_len >= LONG_ROW  # shorter ones have other ways to fit
    for count in COUNTS if is_long else COUNTS[:1]:
        if count > 1 and why_not_shared(inputs, count) is not None:
            continue
        try:
            shared = with_offloading(replace(inputs, context_parallel=count))
            if shared.fits(choose_layout(shared)):
                return shared
        except ConfigError as error:
            refused = refused or error
        else:
            first = first or shared
    if first is None:
        assert refused is not None
        raise refused
    return first


def why_not_shared(inputs: PlanInputs, count: int) -> str | None:
    """Return why `count` ranks cannot share each row, None if they can."""
    model, ranks = inputs.model, inputs.ranks
    if ranks.world_size % count:
        return f"{ranks.world_size} ranks are no multiple of it"
    if model.heads % count:
        return f"the {model.heads} heads of attention cannot be divided by it"
    if model.kv_heads % count and count % model.kv_heads:
        return f"the {model.kv_heads} heads of keys and values cannot be divided among as many"
    if model.counts.recurrent_layers:
        return "recurrent layers need the tokens before theirs"
    if inputs.layers_by_gpu:
        return "model.device_map places one model on several GPUs"
    if backend_of(inputs.config).has_own_kernels or not backend_of(inputs.config).is_traceable:
        return f"tuning.backend={inputs.config.tuning.backend} has attention of its own"
    kernels = inputs.kernels
    if kernels is not None and "attention" not in kernels.on:
        return "attention is not that of the fused kernels"
    if inputs.config.train.router_aux_loss_coef not in (None, "auto", 0):
        return "the balance of experts is counted over whole rows"
    return None
