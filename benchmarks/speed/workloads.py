"""What is trained, by whom, and which of them meet: tables alone. Loads no torch."""

from dataclasses import dataclass

ONE, EIGHT = "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
FOURTEEN, THIRTY_TWO = "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-32B-Instruct"
TOY = "toy"  # the tiny model that ships
LORA_RANK, LORA_ALPHA = 16, 32
WARM_UP = (
    5  # steps before the clock starts, for everyone; a loss is logged every so many steps, too
)
SEED = 42


@dataclass(frozen=True)
class Work:
    """Rows, model and what is trained of it; everybody's optimizer step holds the same `rows_per_step` rows."""

    name: str
    shape: str  # a name in sft_play/plan/known_models.json, or toy
    mode: str  # lora, qlora, full (weights in bfloat16)
    tokens: int | None  # of every row; None: log-normal, median `RAGGED_MEDIAN`
    max_seq_len: int
    rows_per_step: int
    learning_rate: float
    steps: int  # that are timed, behind WARM_UP
    reference: str  # float32, tf32 (float32 weights, products on tensor cores), bfloat16 for the largest and where weights are trained
    padded_rows: tuple[
        int, ...
    ]  # rows of a micro-batch that the arms at their best try, until one fits without checkpointing


def _fixed(
    name: str,
    shape: str,
    mode: str,
    tokens: int,
    steps: int,
    reference: str,
    padded_rows: tuple[int, ...],
    rate: float = 2e-4,
) -> Work:
    return Work(
        name, shape, mode, tokens, tokens, 8192 // tokens, rate, steps, reference, padded_rows
    )


FULL_RATE = 5e-5  # bfloat16 weights round a step of 1e-5 away
EIGHT_FULL_RATE = 2e-5  # at 5e-5 an 8B model leaps (a gradient norm of 28 at step 13), and where it lands is chance
RAGGED_MEDIAN = 300
WORKS = {
    work.name: work
    for work in (
        _fixed("8b-lora-2048", EIGHT, "lora", 2048, 20, "tf32", (4, 2, 1)),
        _fixed("8b-lora-4096", EIGHT, "lora", 4096, 20, "tf32", (2, 1)),
        _fixed("8b-qlora-2048", EIGHT, "qlora", 2048, 20, "tf32", (4, 2, 1)),
        _fixed("8b-qlora-4096", EIGHT, "qlora", 4096, 20, "tf32", (2, 1)),
        _fixed("1b-lora-2048", ONE, "lora", 2048, 60, "float32", (4,)),
        Work("1b-ragged", ONE, "lora", None, 2048, 32, 2e-4, 60, "tf32", (16, 8, 4)),
        Work("8b-ragged", EIGHT, "lora", None, 2048, 32, 2e-4, 20, "tf32", (8, 4, 2)),
        _fixed("1b-full-2048", ONE, "full", 2048, 60, "bfloat16", (4,), FULL_RATE),
        _fixed("8b-full-2048", EIGHT, "full", 2048, 20, "bfloat16", (4, 2, 1), EIGHT_FULL_RATE),
        _fixed("14b-lora-2048", FOURTEEN, "lora", 2048, 20, "bfloat16", (1,)),
        _fixed("32b-lora-2048", THIRTY_TWO, "lora", 2048, 10, "bfloat16", (1,)),
        Work("toy-fixed", TOY, "lora", 64, 64, 4, 2e-3, 5, "float32", (4,)),
        Work("toy-ragged", TOY, "lora", None, 128, 8, 2e-3, 5, "float32", (4,)),
    )
}


@dataclass(frozen=True)
class Arm:
    """A program and its settings; `tries` are walked until one fits into memory."""

    name: str
    program: str  # hf, trl, unsloth; bnb and unsloth backends of ours: ours-bnb, ours-unsloth
    told: str  # for the table
    is_best: bool = False  # rows sorted by length within a step, workers that collate, no checkpointing where it fits
    uses_liger: bool = False
    packs: bool = False  # several rows a sequence, as the program groups them: steps hold other rows than the reference's

    @property
    def is_ours(self) -> bool:
        return self.program.startswith("ours")

    def tries(self, work: Work) -> list[tuple[int, bool]]:
        """Return (rows of a micro-batch, checkpointing) in the order to try."""
        most = min(8, work.rows_per_step)
        if self.is_ours:
            return [(0, False)]  # its plan decides
        if self.packs:
            return [(1, False), (1, True)]
        if self.is_best:
            return [*((rows, False) for rows in work.padded_rows), (most, True)]
        return [
            (min(2, most) if self.program == "unsloth" else most, True)
        ]  # 2 is what Unsloth's notebooks say


ARMS = {
    arm.name: arm
    for arm in (
        Arm(
            "hf-tutorial",
            "hf",
            "Trainer + PEFT as tutorials have it: checkpointing, padded batches",
        ),
        Arm(
            "hf-best",
            "hf",
            "Trainer + PEFT, no checkpointing where it fits, rows of a step by length",
            is_best=True,
        ),
        Arm("liger", "hf", "hf-best with Liger's kernels", is_best=True, uses_liger=True),
        Arm("trl-default", "trl", "SFTTrainer as it is"),
        Arm(
            "trl-best", "trl", "SFTTrainer without checkpointing, largest micro-batch", is_best=True
        ),
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
        Arm(
            "unsloth-packed", "unsloth", "packing=True, no checkpointing", is_best=True, packs=True
        ),
        Arm("ours-bnb", "ours-bnb", "make train-bnb"),
        Arm("ours-unsloth", "ours-unsloth", "make train-unsloth"),
    )
}


def meets(work: Work, arm: Arm) -> bool:
    """Return whether an arm runs on a work unless it is named: packing is for ragged rows."""
    return work.tokens is None or not arm.packs
