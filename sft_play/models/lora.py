"""Add LoRA adapters through PEFT, over frozen base weights."""

from collections.abc import Sequence

import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, TaskType
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from sft_kernels.e4m3.linear import has_float8, refuse_merging
from sft_play.config.schema import Config, LoraSection
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError
from sft_play.models import bnb, expert_adapters
from sft_play.models.architecture import text_modules
from sft_play.models.experts import is_named, linear_names
from sft_play.models.stored_weights import replaced


def add_adapters(
    model: PreTrainedModel, config: Config, token_ids: Sequence[int] = ()
) -> PeftModel:
    """Return the model with trainable adapters in float32 over frozen base weights.

    `token_ids` are the tokens whose rows of embedding and head are trained.

    peft.prepare_model_for_kbit_training is not used: it copies embeddings, norms and head to
    float32. This needs 4 GiB for an 8B model and does not change the loss.

    Raises: ConfigError when a setting names a layer, a module or a token that the model lacks.
    """
    lora = config.tuning.lora
    if lora.layers_to_transform is not None:
        _check_layers(model, lora.layers_to_transform)
    targets = expert_adapters.choose_targets(model, lora, config.tuning.encoders == "lora")
    if not (targets.linears or targets.experts):
        raise ConfigError(
            f"tuning.mode={config.tuning.mode}: no layer can have adapters; set TUNING_MODE=full"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=True if lora.init_lora_weights == "default" else lora.init_lora_weights,
        bias="none",
    )
    if expert_adapters.names_targets(model):
        adapters = expert_adapters.adapter_config(model, targets, adapters)
    elif lora.layers_to_transform is not None:
        adapters.layers_to_transform = sorted(set(lora.layers_to_transform))
        adapters.target_modules = _target_names(model, lora)
    if lora.modules_to_save:
        adapters.modules_to_save = _find_modules(model, lora.modules_to_save)
        trained = [model.get_submodule(name) for name in adapters.modules_to_save]
        matrices = (model.get_input_embeddings(), model.get_output_embeddings())
        trains_a_matrix = any(each in matrices for each in trained)
        adapters.ensure_weight_tying = _is_tied(model) and trains_a_matrix
    if token_ids:
        adapters.trainable_token_indices = _token_rows(model, token_ids)
    # PEFT draws on the CPU: the initial weights of a seed do not depend on strategy, GPU or earlier
    # draws
    torch.default_generator.manual_seed(config.train.seed)
    with replaced(bnb, has_shapes_alone=True):
        adapted = expert_adapters.add_expert_adapters(model, adapters, lora.experts == "shared")
    if config.model.adapter and not config.train.resume_from:
        expert_adapters.load_adapter_weights(adapted, config.model.adapter)
    _train_modules_in_float32(adapted)
    refuse_merging(adapted)
    return adapted


def trainable_token_ids(config: Config) -> list[int]:
    """Return the ids of the tokens whose rows are trained in addition to adapters, in order.

    Raises: ConfigError for a text that is not a single token of the tokenizer.
    """
    tokens = config.trained_tokens
    if not tokens:
        return []
    vocabulary = load_tokenizer(config).get_vocab()
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        raise ConfigError(
            f"tuning.lora.trainable_tokens: the tokenizer of {config.model.name} has no token "
            f"{', '.join(unknown)}; write tokens as its tokenizer.json has them"
        )
    return sorted({vocabulary[token] for token in tokens})


def _check_layers(model: PreTrainedModel, layers: list[int]) -> None:
    count = model.config.get_text_config().num_hidden_layers
    unknown = [str(layer) for layer in layers if layer >= count]
    if unknown:
        raise ConfigError(
            f"tuning.lora.layers_to_transform: the model has no layer {', '.join(unknown)}; "
            f"its {count} layers are 0 to {count - 1}"
        )


def _target_names(model: PreTrainedModel, lora: LoraSection) -> list[str]:
    """Return the targets as names: PEFT can restrict layers only for a list of names."""
    if isinstance(lora.target_modules, list):
        return lora.target_modules
    head = model.get_output_embeddings()
    names = [name for name in linear_names(model) if model.get_submodule(name) is not head]
    return sorted({name.rpartition(".")[2] for name in names})


def _find_modules(model: nn.Module, wanted: list[str]) -> list[str]:
    """Return the full names of the modules to train in full.

    PEFT would train every module whose name has the same ending: input_layernorm for norm.

    Raises: ConfigError for a name that the model lacks, or of a module that cannot be trained.
    """
    found: list[str] = []
    names = [name for name, _ in text_modules(model) if name]
    for target in wanted:
        named = [name for name in names if is_named(name, [target])]
        if not named:
            last_words = sorted({name.rpartition(".")[2] for name in names})
            known = [word for word in last_words if not word.isdecimal()]
            raise ConfigError(
                f"tuning.lora.modules_to_save: the model has no module {target}; "
                f"it has {', '.join(known)}"
            )
        found += named
    for name in found:
        module = model.get_submodule(name)
        if has_float8(module):
            raise ConfigError(
                f"tuning.lora.modules_to_save: {name} is quantized to float8, which cannot be "
                "trained; set TUNING_BASE_DTYPE=auto, or leave it to the adapters"
            )
        if any(isinstance(part, Linear4bit) for part in module.modules()):
            raise ConfigError(
                f"tuning.lora.modules_to_save: {name} is quantized to 4 bits, which cannot be "
                "trained; set TUNING_MODE=lora, or leave it to the adapters"
            )
    return found


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _token_rows(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[str, list[int]]:
    """Return the rows of each matrix to train; PEFT finds a tied head by itself."""
    matrices = {model.get_input_embeddings()}
    if not _is_tied(model):
        matrices.add(model.get_output_embeddings())
    return {name: [*token_ids] for name, module in model.named_modules() if module in matrices}


def _train_modules_in_float32(model: PeftModel) -> None:
    """Train these modules in float32, while their inputs and outputs keep the base's dtype.

    A 16-bit weight would round most updates away.
    """
    for module in model.modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        dtype = next(module.original_module.parameters()).dtype
        for trained in module.modules_to_save.values():
            trained.to(torch.float32)
            if dtype != torch.float32:
                trained.register_forward_pre_hook(_cast_input)
                trained.register_forward_hook(lambda *call, dtype=dtype: call[-1].to(dtype))


def _cast_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast a floating-point input to the dtype of the module's weights."""
    x, *others = args
    if x.is_floating_point():
        x = x.to(next(module.parameters()).dtype)
    return (x, *others)
