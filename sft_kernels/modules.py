"""Find the parts of a transformers model."""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the stack of layers of a model without adapters, without its output head.

    get_decoder returns the wrong module for some models. For ModernBERT's decoder it returns the
    head, which is called `decoder` there. For Llama 4 with its encoder it returns the language
    model with its head.
    """
    found = model.get_decoder()
    if found is model.get_output_embeddings():
        return model.base_model
    while (
        found is not model
        and isinstance(found, PreTrainedModel)
        and found.get_output_embeddings() is not None
    ):
        inside = found.get_decoder()
        if inside is found:
            models = (part for part in found.children() if isinstance(part, PreTrainedModel))
            inside = next(models, found)
        model, found = found, inside
    return found


# In newer versions a layer's class checkpoints only its forward method, in older ones its full call
FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)


ATTRIBUTE = "offloaded_layers"  # of a base model whose layers wait in host memory: `bring`s them


def bring_layer_of(module: nn.Module, base: nn.Module) -> None:
    """Copy the weights of a module's layer to the GPU, to run the module by itself."""
    offloaded = vars(base).get(ATTRIBUTE)
    if offloaded is not None:
        offloaded.bring(module)
