"""Which architectures the fused kernels fit, part by part: what the installer puts on a model and the memory estimate counts on. Loads no torch."""

from sft_play.config.schema import Config

PARTS = frozenset({"linears", "mlp", "norms", "attention", "loss"})
# Models whose layers are made like Llama's. Gemma 2 caps the scores of its attention, which no fused attention does.
FAST_PARTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "gemma3_text", "phi3"), PARTS
    ),
    "gemma2": PARTS - {"attention"},
}


def is_fast(config: Config, model_type: str, device: str, is_half: bool, zero_stage: int) -> bool:
    """Return whether a run is planned on the fused kernels: a known architecture in 16 bits on a GPU, and not switched off.

    ZeRO-3 gathers a weight where its own module runs, which a fused call leaves out; a dropout on the adapters' input is PEFT's alone.
    """
    if device != "cuda" or not is_half or zero_stage == 3 or model_type not in FAST_PARTS:
        return False
    if config.tuning.mode != "full" and config.tuning.lora.dropout:
        return False
    return config.tuning.backend == "unsloth" or (
        config.train.fast_path is not False and config.model.attn_implementation in ("auto", "sdpa")
    )
