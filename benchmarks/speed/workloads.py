"""Workloads, arms, and which arm runs on which workload: tables alone. Loads no torch.

A workload is a model, its rows and what is trained of it. An arm is a program with its settings, as
in a trial.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

LLAMA_1B = "meta-llama/Llama-3.2-1B-Instruct"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
QWEN_14B = "Qwen/Qwen2.5-14B-Instruct"
QWEN_32B = "Qwen/Qwen2.5-32B-Instruct"
QWEN3_8B = "Qwen/Qwen3-8B"
GEMMA3_4B = "google/gemma-3-4b-it"
SMOLLM3_3B = "HuggingFaceTB/SmolLM3-3B"
MINISTRAL3_8B = "mistralai/Ministral-3-8B-Instruct-2512"
GRANITE_8B = "ibm-granite/granite-3.3-8b-instruct"
OLMO2_7B = "allenai/OLMo-2-1124-7B-Instruct"
QWEN35_4B = "Qwen/Qwen3.5-4B"
QWEN3_30B = "Qwen/Qwen3-30B-A3B"
GPT_OSS_20B = "openai/gpt-oss-20b"
TOY = "toy"  # the tiny model that ships

LORA_RANK = 16
LORA_ALPHA = 32
WARM_UP = 5  # steps before the clock starts, for every arm; a loss is logged every so many steps
SEED = 42
FULL_RATE = 5e-5  # bfloat16 weights round a step of 1e-5 away
# At 5e-5 an 8B model leaps (a gradient norm of 28 at step 13), and where it lands is chance.
FULL_RATE_8B = 2e-5
RAGGED_MEDIAN = 300  # tokens
RECIPE_ARM = "recipe"
SCALED = "-times-"  # in the name of a workload with more rows a step


class Variable(NamedTuple):
    """A variable of make that a guide's recipe or an arm sets."""

    name: str
    value: int | str


@dataclass(frozen=True)
class Workload:
    """Rows, a model and what is trained of it; a step of every arm holds `rows_per_step` rows."""

    name: str
    shape: str  # a name in architectures.json or sft_play/plan/known_models.json, or toy
    mode: str  # lora, qlora, full (weights in bfloat16)
    tokens: int | None  # of every row; None: log-normal, median `RAGGED_MEDIAN`
    max_seq_len: int
    rows_per_step: int
    learning_rate: float
    steps: int  # that are timed, after WARM_UP
    # Precision of the reference: float32, tf32 (float32 weights, products on tensor cores), or
    # bfloat16 for the largest models and where all weights are trained.
    reference: str
    # Rows of a micro-batch that tuned arms try, until one fits without activation checkpointing.
    padded_rows: tuple[int, ...]
    layers: int | None = None  # how many of the model's; None: all
    recipe: tuple[Variable, ...] = ()  # what a guide to several GPUs sets for its rows
    recipe_strategy: str = "ddp"

    def scaled(self, times: int) -> "Workload":
        """Return the workload with `times` as many rows a step, which ends its name."""
        if times == 1:
            return self
        name = f"{self.name}{SCALED}{times}"
        return replace(self, name=name, rows_per_step=times * self.rows_per_step)


def _fixed(
    name: str,
    shape: str,
    mode: str,
    *,
    steps: int,
    reference: str,
    padded_rows: tuple[int, ...],
    rate: float = 2e-4,
    layers: int | None = None,
) -> Workload:
    """Return a workload of rows of one length, which ends its name.

    A step holds 8192 tokens, and a longer row by itself.
    """
    tokens = int(name.rpartition("-")[2])
    return Workload(
        name,
        shape,
        mode,
        tokens,
        tokens,
        rows_per_step=max(1, 8192 // tokens),
        learning_rate=rate,
        steps=steps,
        reference=reference,
        padded_rows=padded_rows,
        layers=layers,
    )


def _bfloat16(
    name: str, shape: str, mode: str = "lora", rows: tuple[int, ...] = (4, 2, 1), **options: int
) -> Workload:
    """Return a workload of rows of one length whose reference is in bfloat16."""
    return _fixed(name, shape, mode, steps=20, reference="bfloat16", padded_rows=rows, **options)


def _recipe(
    name: str, shape: str, rows: int, accumulation: int, strategy: str, tokens: int, steps: int
) -> Workload:
    """Return rows of one length as a guide's recipe cuts them on each GPU."""
    return Workload(
        name,
        shape,
        "lora",
        tokens,
        tokens,
        rows_per_step=rows * accumulation,
        learning_rate=2e-4,
        steps=steps,
        reference="bfloat16",
        padded_rows=(rows,),
        recipe=(
            Variable("TRAIN_BATCH_SIZE", rows),
            Variable("TRAIN_GRAD_ACCUM", accumulation),
        ),
        recipe_strategy=strategy,
    )


_WORKLOADS = (
    _fixed("8b-lora-2048", LLAMA_8B, "lora", steps=20, reference="tf32", padded_rows=(4, 2, 1)),
    _fixed("8b-lora-4096", LLAMA_8B, "lora", steps=20, reference="tf32", padded_rows=(2, 1)),
    _fixed("8b-qlora-2048", LLAMA_8B, "qlora", steps=20, reference="tf32", padded_rows=(4, 2, 1)),
    _fixed("8b-qlora-4096", LLAMA_8B, "qlora", steps=20, reference="tf32", padded_rows=(2, 1)),
    _fixed("1b-lora-2048", LLAMA_1B, "lora", steps=60, reference="float32", padded_rows=(4,)),
    Workload("1b-ragged", LLAMA_1B, "lora", None, 2048, 32, 2e-4, 60, "tf32", (16, 8, 4)),
    Workload("8b-ragged", LLAMA_8B, "lora", None, 2048, 32, 2e-4, 20, "tf32", (8, 4, 2)),
    _fixed(
        "1b-full-2048",
        LLAMA_1B,
        "full",
        steps=60,
        reference="bfloat16",
        padded_rows=(4,),
        rate=FULL_RATE,
    ),
    _fixed(
        "8b-full-2048",
        LLAMA_8B,
        "full",
        steps=20,
        reference="bfloat16",
        padded_rows=(4, 2, 1),
        rate=FULL_RATE_8B,
    ),
    _fixed("14b-lora-2048", QWEN_14B, "lora", steps=20, reference="bfloat16", padded_rows=(1,)),
    _fixed("32b-lora-2048", QWEN_32B, "lora", steps=10, reference="bfloat16", padded_rows=(1,)),
    _bfloat16("qwen3-8b-lora-2048", QWEN3_8B),
    _bfloat16("gemma3-4b-lora-2048", GEMMA3_4B),
    _bfloat16("smollm3-3b-lora-2048", SMOLLM3_3B),
    _bfloat16("ministral3-8b-lora-2048", MINISTRAL3_8B),
    _bfloat16("granite-8b-lora-2048", GRANITE_8B),
    _bfloat16("olmo2-7b-lora-2048", OLMO2_7B),
    _bfloat16("qwen3.5-4b-lora-2048", QWEN35_4B),
    Workload("qwen3.5-4b-ragged", QWEN35_4B, "lora", None, 2048, 32, 2e-4, 20, "bfloat16", (4, 2)),
    _bfloat16("qwen3-30b-12-layers-lora-2048", QWEN3_30B, layers=12),
    _bfloat16("qwen3-30b-lora-2048", QWEN3_30B, rows=(2, 1)),
    _bfloat16("qwen3-30b-qlora-2048", QWEN3_30B, "qlora", rows=(2, 1)),
    _bfloat16("gpt-oss-20b-8-layers-lora-2048", GPT_OSS_20B, layers=8),
    _bfloat16("8b-lora-32768", LLAMA_8B, rows=(1,)),
    _bfloat16("8b-lora-131072", LLAMA_8B, rows=(1,)),
    _bfloat16("8b-lora-262144", LLAMA_8B, rows=(1,)),  # its activations on the host
    # "speed-optimized" and "memory-constrained" training of a guide to several GPUs
    _recipe("8b-recipe-2048", LLAMA_8B, 8, 4, "ddp", 2048, steps=10),
    _recipe("8b-recipe-1024", LLAMA_8B, 1, 64, "zero2", 1024, steps=10),
    _recipe("toy-recipe", TOY, 2, 2, "ddp", 64, steps=5),
    Workload("toy-fixed", TOY, "lora", 64, 64, 4, 2e-4, 5, "float32", (4,)),
    Workload("toy-ragged", TOY, "lora", None, 128, 8, 2e-4, 5, "float32", (4,)),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}


class Attempt(NamedTuple):
    """A micro-batch that an arm tries."""

    rows: int
    checkpointing: bool


def find_workload(name: str) -> Workload:
    """Return a workload by its name, also one with more rows a step."""
    base, _, times = name.partition(SCALED)
    return WORKLOADS[base].scaled(int(times or 1))


@dataclass(frozen=True)
class Launch:
    """How many processes, a GPU each, train together, and how ours share the model."""

    ranks: int = 1
    strategy: str = "auto"  # a value of train.strategy


ALONE = Launch()


@dataclass(frozen=True)
class Arm:
    """A program and its settings."""

    name: str
    program: str  # hf, trl, unsloth, or a backend of ours: ours-bnb, ours-unsloth
    description: str  # for the table
    # Rows sorted by length within a step, workers that collate, no checkpointing where it fits.
    is_best: bool = False
    uses_liger: bool = False
    # Several rows a sequence, grouped by the program: steps hold other rows than the reference's.
    packs: bool = False
    follows_recipe: bool = False  # of the workload, where ours chooses
    variables: tuple[Variable, ...] = ()  # of ours, that are not their defaults

    @property
    def is_ours(self) -> bool:
        """Whether SFT-Play runs it."""
        return self.program.startswith("ours")

    def attempts(self, workload: Workload, ranks: int = 1) -> list[Attempt]:
        """Return the micro-batches to try until one fits. Ours plans its own."""
        rows_per_rank = workload.rows_per_step // ranks
        largest = min(8, rows_per_rank)
        if self.packs:
            return [Attempt(1, False), Attempt(1, True)]
        if self.is_best:
            fitting = [rows for rows in workload.padded_rows if rows <= rows_per_rank]
            padded = [Attempt(rows, False) for rows in fitting]
            return [*padded, Attempt(largest, True)]
        if self.program == "unsloth":
            return [Attempt(min(2, largest), True)]  # 2 is what Unsloth's notebooks say
        return [Attempt(largest, True)]


def _with_variable(name: str, variable: str, value: str) -> Arm:
    """Return our arm with one setting that is not its default."""
    description = f"make train-bnb {variable}={value}"
    return Arm(name, "ours-bnb", description, variables=(Variable(variable, value),))


_ARMS = (
    Arm("hf-tutorial", "hf", "Trainer + PEFT as tutorials have it: checkpointing, padded batches"),
    Arm(
        "hf-best",
        "hf",
        "Trainer + PEFT, no checkpointing where it fits, rows of a step by length",
        is_best=True,
    ),
    Arm("liger", "hf", "hf-best with Liger's kernels", is_best=True, uses_liger=True),
    Arm("trl-default", "trl", "SFTTrainer as it is"),
    Arm("trl-best", "trl", "SFTTrainer without checkpointing, largest micro-batch", is_best=True),
    Arm(
        "trl-packed",
        "trl",
        "SFTTrainer, packing=True, no checkpointing",
        is_best=True,
        packs=True,
    ),
    Arm(
        "unsloth-default",
        "unsloth",
        "as its notebooks have it: its checkpointing, micro-batches of 2",
    ),
    Arm("unsloth-best", "unsloth", "no checkpointing, largest micro-batch", is_best=True),
    Arm("unsloth-packed", "unsloth", "packing=True, no checkpointing", is_best=True, packs=True),
    Arm("ours-bnb", "ours-bnb", "make train-bnb"),
    Arm("ours-unsloth", "ours-unsloth", "make train-unsloth"),
    Arm(RECIPE_ARM, "ours-bnb", "make train-bnb with a guide's numbers", follows_recipe=True),
    _with_variable("ours-float8", "TUNING_BASE_DTYPE", "float8"),
    _with_variable("ours-graphs", "TRAIN_CUDA_GRAPHS", "true"),
    _with_variable("ours-flash4", "MODEL_ATTN_IMPLEMENTATION", "flash_attention_4"),
)
ARMS = {arm.name: arm for arm in _ARMS}


def runs_by_default(workload: Workload, arm: Arm) -> bool:
    """Return whether an arm runs on a workload without being named.

    Packing is for ragged rows, and a recipe for the rows that it cuts.
    """
    if arm.variables or (arm.follows_recipe and not workload.recipe):
        return False
    return workload.tokens is None or not arm.packs
