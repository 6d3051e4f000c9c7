"""What each backend can do, as a table for the plan and the models. Pure data: no torch, no I/O."""

from dataclasses import dataclass

from sft_play.config.schema import Config

# Architectures that do not keep the documents of a packed sequence apart, or do not count each
# document's positions from its beginning. Measured on every causal architecture of transformers
# 5.17 that can be made tiny: the others do, recurrent mixers included, which start again at each
# document. Every packed run checks its own model before the first step.
BNB_NEVER_PACKED = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small bloom camembert cpmant data2vec-text doge fuyu
    marian mbart mvp openai-gpt pegasus roberta roberta-prelayernorm roformer trocr xlm xlm-roberta
    xlm-roberta-xl
    """.split()
)
# Architectures that Unsloth computes, under adapters, with code that takes the lengths
# of a packed sequence's documents. Checked on an H200.
UNSLOTH_PACKED_MODEL_TYPES = frozenset("llama mistral qwen2 qwen3 gemma".split())
# Settings of tuning.lora that a backend may lack
LORA_OPTIONS = frozenset(
    """
    experts use_dora init_lora_weights loraplus_lr_ratio layers_to_transform modules_to_save
    trainable_tokens
    """.split()
)


@dataclass(frozen=True)
class PackingSupport:
    """Where a backend keeps the documents of a packed sequence apart."""

    modes: frozenset[str]  # values of tuning.mode
    # As config.json names the architectures
    model_types: frozenset[str] | None = None  # that are packed, None for all
    except_types: frozenset[str] = frozenset()  # that are not packed
    max_seq_len: int | None = None  # longest sequence, in tokens, that packing speeds up
    mode_reason: str = ""  # why the other modes are not packed
    length_reason: str = ""  # why longer sequences are not packed


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What one value of tuning.backend needs and can do; the defaults are those of bnb."""

    name: str
    title: str  # as messages to the user spell it
    default_config: str  # of configs/, for `make train-NAME` without CONFIG
    requirements: str  # the file with the pins of its packages
    install_command: str
    package: str | None = None  # the package to check for, besides those that every run needs
    needs_gpu: bool = False
    min_capability: tuple[int, int] = (0, 0)  # of a GPU, (0, 0) if any will do
    computes_in_float32: bool = True
    runs_under_deepspeed: bool = True
    runs_under_fsdp: bool = True
    takes_device_map: bool = True  # one model over the GPUs of one process
    recomputes_by_layer: bool = True  # checkpoints any number of layers; else all or none
    is_traceable: bool = True  # by `make plan EXACT=1`
    supports_probe: bool = True  # train.probe=auto measures a step before training
    has_own_kernels: bool = False  # its own fused kernels, whatever train.fast_path is
    patches_transformers: bool = False  # when imported, so it must be imported before transformers
    lora_options: frozenset[str] = LORA_OPTIONS  # that it has
    has_embedding_noise: bool = True  # train.neftune_noise_alpha
    stretches_as_told: bool = True  # model.rope_scaling
    packing: PackingSupport


BNB = Backend(
    name="bnb",
    title="bitsandbytes",
    default_config="run_bnb",
    requirements="requirements.txt",
    install_command="make install",
    packing=PackingSupport(frozenset({"lora", "qlora", "full"}), except_types=BNB_NEVER_PACKED),
)
UNSLOTH = Backend(
    name="unsloth",
    title="Unsloth",
    default_config="run_unsloth",
    requirements="requirements-unsloth.txt",
    install_command="make install-unsloth",
    package="unsloth",
    needs_gpu=True,
    min_capability=(7, 0),  # the least that Unsloth's documentation asks for
    computes_in_float32=False,
    runs_under_deepspeed=False,
    runs_under_fsdp=False,
    takes_device_map=False,
    recomputes_by_layer=False,
    is_traceable=False,
    supports_probe=False,
    has_own_kernels=True,
    patches_transformers=True,
    lora_options=frozenset({"loraplus_lr_ratio"}),
    has_embedding_noise=False,
    stretches_as_told=False,
    packing=PackingSupport(
        frozenset({"lora", "qlora"}),
        model_types=UNSLOTH_PACKED_MODEL_TYPES,
        max_seq_len=8192,  # without flash-attn Unsloth masks the full sequence
        mode_reason="Unsloth keeps packed documents apart only with adapters",
        length_reason="Unsloth masks complete packed rows, which costs more than padding "
        "beyond 8192 tokens",
    ),
)
BACKENDS = {backend.name: backend for backend in (BNB, UNSLOTH)}


def backend_of(config: Config) -> Backend:
    """Return what the backend of a config can do."""
    return BACKENDS[config.tuning.backend]
