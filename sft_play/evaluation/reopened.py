"""What the evaluated model says of a few held-out rows, and saved weights that are held to it.

The reference is written once at the end of a run, in eval/reference.safetensors; a merge or an
export then needs no second copy of the trained model. Saved weights are opened by transformers and
PEFT alone.
Legend: N labelled positions of all rows, V vocabulary.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sft_play.data.image_inputs import ImageInputs
from sft_play.data.render import IGNORE_INDEX, RenderError, render_prompt, stop_ids
from sft_play.data.rows import Message
from sft_play.data.store import Sample, Split
from sft_play.data.templates import template_messages
from sft_play.errors import CheckpointError
from sft_play.evaluation import opener
from sft_play.evaluation.plain import IMAGES, Said, each_row, scored
from sft_play.models.float8.linear import has_float8
from sft_play.process import Process
from sft_play.runs.files import share

REFERENCE_FILE = "reference.safetensors"
MOST_ROWS = 8
MOST_TOKENS = 512  # of a row, from its beginning
MOST_IMAGE_TOKENS = 4096  # of a row with images, and of all such rows: 100 MB of pixels
MOST_LABELS = 64  # of a row
FLOAT8 = "float8"  # compute_dtype of a model over a float8 base
FACTS = ("stops", "prompts", "compute_dtype", "device")
OF_ROWS = ("ids", "ends", "positions", "position_ends")  # the others are what the model says


@dataclass(frozen=True)
class Reference:
    """Rows, what the evaluated model said of them, and prompts and stops as training had them."""

    rows: dict[str, Tensor]  # OF_ROWS: of all rows in one; positions (N,) count in their row
    said: Said
    stops: list[tuple[list[int], int]]  # prompt of a row, and the stop that was trained after it
    prompts: list[tuple[list[dict[str, Any]], list[int]]]  # messages, and their ids
    compute_dtype: str  # of the evaluated model's products
    device: str

    @property
    def loss(self) -> float:
        """The evaluated model's loss on these rows, nats a token."""
        return float(self.said["nats"].mean())

    def shortened(self, most_tokens: int) -> "Reference":
        """Return one of the first rows, as many as have so many tokens together, at least one."""
        count = max(1, int((self.rows["ends"] <= most_tokens).sum()))
        tokens, positions = (int(self.rows[name][count - 1]) for name in ("ends", "position_ends"))
        kept = zip(OF_ROWS, (tokens, count, positions, count), strict=True)
        # the images of rows that are left out are not looked at
        rows = self.rows | {name: self.rows[name][:end] for name, end in kept}
        said = {name: tensor[:positions] for name, tensor in self.said.items()}
        return replace(self, rows=rows, said=said)

    def write(self, folder: Path) -> None:
        """Write it into a run's folder of evaluations."""
        facts = {name: getattr(self, name) for name in FACTS}
        tensors = {name: tensor.contiguous() for name, tensor in {**self.rows, **self.said}.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / REFERENCE_FILE, metadata={"facts": json.dumps(facts)})
        share(folder)

    @classmethod
    def read(cls, folder: Path) -> "Reference | None":
        """Return that of a folder of evaluations, None if there is none."""
        if not (folder / REFERENCE_FILE).is_file():
            return None
        with safe_open(folder / REFERENCE_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(file.metadata()["facts"])
        rows = {name: tensors.pop(name) for name in OF_ROWS}
        rows |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(IMAGES)}
        return cls(rows, tensors, **facts)


@torch.no_grad()
def make_reference(
    model: torch.nn.Module,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    process: Process,
    system_prompt: str | None,
    images: ImageInputs | None = None,
) -> Reference | None:
    """Return what a model in evaluation mode says of rows of a split; None if none is labelled.

    `images` makes the inputs of a split that has some. Every rank of divided weights must call it.
    """
    samples = chosen_samples(split)
    if not samples:
        return None
    rows = as_tensors(samples, list(map(labelled_positions, samples)))
    for number, (sample, (ids, _, _)) in enumerate(zip(samples, each_row(rows), strict=True)):
        if images is not None and sample.images:
            for name, tensor in images([sample.images], ids[None]).items():
                rows[f"{IMAGES}{number}.{name}"] = tensor
    with process.autocast():
        said = scored(model, rows, process.device)
    return Reference(
        rows,
        said,
        trained_ends(samples, stop_ids(tokenizer)),
        checked_prompts(tokenizer, system_prompt),
        FLOAT8 if has_float8(model) else str(process.compute_dtype).removeprefix("torch."),
        process.device.type,
    )


def chosen_samples(split: Split) -> list[Sample]:
    """Return samples spread over a split that have a label among their first tokens.

    Those with images come first, as many as MOST_IMAGE_TOKENS allows and at least one: nothing else
    shows that a tower is as it was. Of each the last prompt is whole, and so has all of them.
    """
    places = np.unique(np.linspace(0, len(split) - 1, 4 * MOST_ROWS, dtype=np.int64))
    labelled = filter(labelled_positions, map(split.__getitem__, places.tolist()))
    found: list[Sample] = []
    for sample in sorted(labelled, key=lambda sample: not sample.images):
        image_tokens = sum(len(each.ids) for each in (*found, sample) if each.images)
        has_room = not sample.images or not found or image_tokens <= MOST_IMAGE_TOKENS
        if len(found) < MOST_ROWS and has_room:
            found.append(sample)
    return found


def labelled_positions(sample: Sample) -> list[int]:
    """Return the first positions of a sample that have a label."""
    labels = sample.labels[: MOST_IMAGE_TOKENS if sample.images else MOST_TOKENS]
    first = sample.answer_start if sample.images else 0
    return (first + np.flatnonzero(labels[first:] != IGNORE_INDEX))[:MOST_LABELS].tolist()


def as_tensors(samples: Sequence[Sample], positions: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return the rows of a reference: ids up to their last position, positions, where each ends."""
    pairs = zip(samples, positions, strict=True)
    ids = [sample.ids[: of_row[-1] + 1].tolist() for sample, of_row in pairs]
    return {
        "ids": torch.tensor(list(chain.from_iterable(ids))),
        "ends": torch.tensor([len(row) for row in ids]).cumsum(0),
        "positions": torch.tensor(list(chain.from_iterable(positions))),
        "position_ends": torch.tensor([len(row) for row in positions]).cumsum(0),
    }


def trained_ends(samples: Sequence[Sample], stops: set[int]) -> list[tuple[list[int], int]]:
    """Return the prompt of each sample and the last stop token that it trains."""
    ends: list[tuple[list[int], int]] = []
    for sample in samples:
        trained = sample.labels[np.isin(sample.labels, list(stops))]
        if len(trained):
            prompt = sample.prompt or sample.ids[:1].tolist()
            ends.append((prompt[-MOST_TOKENS:], int(trained[-1])))
    return ends


def checked_prompts(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return prompts of one and of three messages with the ids that training gives them."""
    start = [Message("system", system_prompt)] if system_prompt else []
    question = Message("user", "What is blue?")
    turns = [question, Message("assistant", "The sea."), Message("user", "And green?")]
    prompts: list[tuple[list[dict[str, Any]], list[int]]] = []
    for messages in ([*start, question], [*start, *turns]):
        try:
            ids = render_prompt(messages, tokenizer)
        except RenderError:  # a template that takes no such conversation
            continue
        prompts.append((template_messages(messages), ids))
    return prompts


TOKENS_FROM_DISK = 256  # a CPU without instructions for 16 bits takes seconds for each of an 8B


class Bound(NamedTuple):
    """How far saved weights may be from the evaluated model."""

    kl: float  # nats, mean over the labelled positions
    loss: float  # nats a token, either way


# The same float32 sums in another order; and products of 16 bits, whose rounding is about 1e-3
EXACT = Bound(kl=1e-6, loss=1e-4)
ROUNDED = Bound(kl=1e-2, loss=2e-2)
# A run over a float8 base, whose products have 3 bits of mantissa; plain transformers multiplies
# the base's own weights. The embedded model, whose matrices are small: 1.4e-2 and 8e-2
FROM_FLOAT8 = Bound(kl=5e-2, loss=2e-1)

# Beyond these no 16-bit rounding explains a difference: the folder is another model
OTHER_LOSS = 0.05  # nats a token
SAME_AGREEMENT = 0.9  # share of equal most likely tokens


@dataclass(frozen=True)
class Folder:
    """A folder of saved weights, and how a stranger loads it."""

    path: Path
    dtype: str  # of base weights, or "auto"
    device_map: Mapping[str, str]
    quantization: Mapping[str, Any] | None = None  # of the base of an adapter
    revision: str | None = None
    trust_remote_code: bool = False
    offload_folder: Path | None = None
    stored: Mapping[str, Any] | None = None  # how the base's quantised weights are read as plain

    @property
    def is_adapter(self) -> bool:
        return (self.path / "adapter_config.json").is_file()


@dataclass(frozen=True)
class Reopened:
    """What the opened folder says, beside what the evaluated model said."""

    rows: int  # of the reference: a few of the scored ones
    eval_loss: float  # nats a token, on these rows
    run_loss: float
    agreement: float  # share of positions with the same most likely token
    kl: float  # nats, of the evaluated model's probabilities against these
    stops: int  # trained stops at which plain generation ends
    all_stops: int
    changed_prompts: int  # prompts that the folder's chat template writes otherwise
    bound: Bound

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        return (
            f"{name} eval_loss={self.eval_loss:.4f} (run {self.run_loss:.4f}) on {self.rows} rows "
            f"top-1 agreement={self.agreement:.3f} KL={self.kl:.1e} (at most {self.bound.kl:g}) "
            f"stops={self.stops}/{self.all_stops}"
        )

    def differences(self) -> list[str]:
        """Return the scores that are beyond the bound."""
        found = []
        if not self.kl <= self.bound.kl:
            found.append(f"KL={self.kl:.2e} is above {self.bound.kl:g}")
        if not abs(self.eval_loss - self.run_loss) <= self.bound.loss:
            found.append(
                f"eval_loss={self.eval_loss:.4f} is not the run's {self.run_loss:.4f} within "
                f"{self.bound.loss:g}"
            )
        return found

    @property
    def is_another_model(self) -> bool:
        """Return whether the scores differ by more than rounding of large models could explain."""
        is_far = abs(self.eval_loss - self.run_loss) > max(OTHER_LOSS, self.bound.loss)
        return is_far or (self.agreement < SAME_AGREEMENT and self.bound != FROM_FLOAT8)

    def faults(self) -> list[str]:
        """Return all that is not as in the evaluated model."""
        found = self.differences()
        if self.stops < self.all_stops:
            missed = self.all_stops - self.stops
            found.append(f"generation runs on behind the trained stop of {missed} rows")
        if self.changed_prompts:
            found.append(f"the chat template writes {self.changed_prompts} prompts otherwise")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the facts for a report."""
        return {
            "rows": self.rows,
            "eval_loss": self.eval_loss,
            "run_eval_loss": self.run_loss,
            "top1_agreement": self.agreement,
            "kl": self.kl,
            "kl_bound": self.bound.kl,
            "stops": self.stops,
            "stops_of": self.all_stops,
            "changed_prompts": self.changed_prompts,
            "faults": self.faults(),
        }


def reopen(folder: Folder, reference: Reference) -> Reopened:
    """Score a folder in a fresh process without this project, against the evaluated model.

    Raises: CheckpointError where the folder cannot be opened.
    """
    if folder.offload_folder is not None:
        reference = reference.shortened(TOKENS_FROM_DISK)
    with tempfile.TemporaryDirectory() as temporary:
        tensors, facts = ask(folder, reference, Path(temporary))
    by_stop = dict(zip(_distinct_stops(reference), facts["stops"], strict=True))
    expected = [ids for _, ids in reference.prompts]
    return Reopened(
        rows=len(reference.rows["ends"]),
        eval_loss=float(tensors["nats"].mean()),
        run_loss=reference.loss,
        agreement=float((tensors["best"] == reference.said["best"]).double().mean()),
        kl=divergence(reference.said, tensors),
        stops=sum(by_stop[stop] for _, stop in reference.stops),
        all_stops=len(reference.stops),
        changed_prompts=sum(
            found != ids for found, ids in zip(facts["prompts"], expected, strict=True)
        ),
        bound=choose_bound(folder, reference),
    )


def choose_bound(folder: Folder, reference: Reference) -> Bound:
    """Return the bound: that of float32 where both sides computed in it on the CPU."""
    if reference.compute_dtype == FLOAT8:
        return FROM_FLOAT8
    on_cpu = set(folder.device_map.values()) <= {"cpu", "disk"} and reference.device == "cpu"
    in_float32 = reference.compute_dtype == "float32" and _stored_in_float32(folder)
    return EXACT if on_cpu and in_float32 else ROUNDED


def divergence(run: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the mean KL of a run's probabilities against others, nats.

    Over the run's most likely tokens, and all others as one.
    """
    kept = run["log_probs"].exp() * (run["log_probs"] - other["log_probs"])
    rest = run["rest"].exp() * (run["rest"] - other["rest"])
    return float((kept.sum(-1) + rest).mean())


def ask(
    folder: Folder, reference: Reference, temporary: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the script says of the reference's rows, and its facts."""
    rows = {**reference.rows, "tokens": reference.said["tokens"].contiguous()}
    save_file(rows, temporary / "rows.safetensors")
    first_prompt = {stop: prompt for prompt, stop in reversed(reference.stops)}
    request = {
        **vars(folder),
        "is_adapter": folder.is_adapter,
        "has_config": (folder.path / "config.json").is_file(),
        "rows": temporary / "rows.safetensors",
        "stops": [(first_prompt[stop], stop) for stop in _distinct_stops(reference)],
        "prompts": [messages for messages, _ in reference.prompts],
    }
    asked, answered = temporary / "request.json", temporary / "answer.safetensors"
    asked.write_text(json.dumps(request, default=str), encoding="utf-8")
    _run_script(asked, answered, folder.path)
    with safe_open(answered, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["facts"])


def _run_script(asked: Path, answered: Path, folder: Path) -> None:
    """Run the script. Raises CheckpointError with what it could not do."""
    said = answered.with_name("said.txt")
    code = opener.run(asked, answered, said)
    if code:
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = lines[-1] if lines and code > 0 else f"exit status {code}"
        raise CheckpointError(f"{folder}: transformers cannot open and use it: {why}")


def _distinct_stops(reference: Reference) -> list[int]:
    return sorted({stop for _, stop in reference.stops})


def _stored_in_float32(folder: Folder) -> bool:
    """Return whether the weights are in float32 when they are loaded."""
    if folder.dtype != "auto":
        return folder.dtype == "float32"
    for path in folder.path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if any(file.get_slice(name).get_dtype() != "F32" for name in names):
                return False
    return True
