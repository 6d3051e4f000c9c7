"""Which architectures the fused kernels fit, part by part. Loads no torch.

The installer puts these parts on a model, and the memory estimate counts on them.
"""

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config

PARTS = frozenset({"linears", "mlp", "norms", "attention", "loss"})
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "gemma3_text", "phi3")
# Gemma 2 caps its attention scores, which no fused attention does.
FAST_PARTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(LLAMA_LIKE, PARTS),
    "gemma2": PARTS - {"attention"},
}


def is_fast(config: Config, model_type: str, is_gpu: bool, is_half: bool, zero_stage: int) -> bool:
    """Return whether a run is planned on the fused kernels.

    They need a known architecture in 16 bits on a GPU. Not under ZeRO-3, which gathers a weight
    where its own module runs, and a fused call leaves that module out; not with a dropout on the
    adapters' input, which is PEFT's alone.
    """
    if not is_gpu or not is_half or zero_stage == 3 or model_type not in FAST_PARTS:
        return False
    if config.tuning.mode != "full" and config.tuning.lora.dropout:
        return False
    if backend_of(config).has_own_kernels:
        return True
    has_sdpa = config.model.attn_implementation in ("auto", "sdpa")
    return config.train.fast_path is not False and has_sdpa
