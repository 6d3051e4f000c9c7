"""Saved weights that are opened again, and compared with the evaluated model's outputs.

Only transformers and PEFT open them. Legend: N labeled positions of all rows.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.evaluation import opener
from sft_play.evaluation.plain import Facts, Folder, Outputs
from sft_play.evaluation.reference import FLOAT8, Reference
from sft_play.models import bnb
from sft_play.models.base_files import plain_reading
from sft_play.models.load import weight_dtype
from sft_play.models.parameters import dtype_name
from sft_play.runs.files import Json

TOKENS_FROM_DISK = 256  # a CPU without instructions for 16 bits takes seconds for each of an 8B


class Bound(NamedTuple):
    """How far saved weights may be from the evaluated model."""

    kl: float  # nats, mean over the labeled positions
    loss: float  # nats a token, either way


# The same float32 sums in another order; and products of 16 bits, whose rounding is about 1e-3
EXACT = Bound(kl=1e-6, loss=1e-4)
ROUNDED = Bound(kl=1e-2, loss=2e-2)
# A run over a float8 base, whose products have 3 bits of mantissa; plain transformers multiplies
# the base's weights. The embedded model, whose matrices are small: 1.4e-2 and 8e-2
FROM_FLOAT8 = Bound(kl=5e-2, loss=2e-1)

# Beyond these no 16-bit rounding explains a difference: the folder is another model
OTHER_LOSS = 0.05  # nats a token
SAME_AGREEMENT = 0.9  # share of equal most likely tokens


def folder_of_run(
    path: Path, config: Config, compute_dtype: torch.dtype, device: torch.device | str
) -> Folder:
    """Return a run's saved weights, an adapter over its base as training loaded that."""
    return Folder(
        path,
        dtype_name(weight_dtype(config, compute_dtype)),
        {"": str(device)},
        bnb.plain_quantization(config, compute_dtype),
        config.model.revision,
        config.model.trust_remote_code,
        stored=plain_reading(config),
    )


@dataclass(frozen=True)
class Reopened:
    """The outputs of an opened folder, compared with those of the evaluated model."""

    rows: int  # of the reference: a few of the scored ones
    eval_loss: float  # nats a token, on these rows
    run_eval_loss: float
    top1_agreement: float  # share of positions with the same most likely token
    kl: float  # nats, of the evaluated model's probabilities against these
    stops: int  # trained stops at which plain generation ends
    stops_of: int
    changed_prompts: int  # prompts that the folder's chat template writes otherwise
    bound: Bound

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        return (
            f"{name} eval_loss={self.eval_loss:.4f} (run {self.run_eval_loss:.4f}) on {self.rows} "
            f"rows top-1 agreement={self.top1_agreement:.3f} KL={self.kl:.1e} "
            f"(at most {self.bound.kl:g}) stops={self.stops}/{self.stops_of}"
        )

    def differences(self) -> list[str]:
        """Return the scores that are beyond the bound."""
        found = []
        if not self.kl <= self.bound.kl:
            found.append(f"KL={self.kl:.2e} is above {self.bound.kl:g}")
        if not abs(self.eval_loss - self.run_eval_loss) <= self.bound.loss:
            found.append(
                f"eval_loss={self.eval_loss:.4f} is not the run's {self.run_eval_loss:.4f} within "
                f"{self.bound.loss:g}"
            )
        return found

    @property
    def is_another_model(self) -> bool:
        """Return whether the scores differ by more than rounding of large models could explain."""
        is_far = abs(self.eval_loss - self.run_eval_loss) > max(OTHER_LOSS, self.bound.loss)
        return is_far or (self.top1_agreement < SAME_AGREEMENT and self.bound != FROM_FLOAT8)

    def faults(self) -> list[str]:
        """Return all that is not as in the evaluated model."""
        return self.differences() + self.broken()

    def broken(self) -> list[str]:
        """Return what is not as in the evaluated model, other than scores."""
        found = []
        missed = self.stops_of - self.stops
        if missed > 0:
            found.append(f"generation continues after the trained stop in {missed} rows")
        if self.changed_prompts:
            found.append(f"the chat template writes {self.changed_prompts} prompts otherwise")
        return found

    def as_json(self) -> Json:
        """Return the facts for a report."""
        facts = {**asdict(self), "kl_bound": self.bound.kl, "faults": self.faults()}
        del facts["bound"]
        return facts


def reopen(folder: Folder, reference: Reference) -> Reopened:
    """Score a folder in a fresh process without this project, against the evaluated model.

    Raises: CheckpointError if the folder cannot be opened.
    """
    return reopen_and_score(folder, reference)[0]


def reopen_and_score(
    folder: Folder, reference: Reference, *others: Mapping[str, Tensor]
) -> tuple[Reopened, list[Outputs]]:
    """Return the result of `reopen`, and the outputs for other sets of rows of the same opening."""
    if folder.offload_folder is not None:
        fitting = int((reference.rows["ends"] <= TOKENS_FROM_DISK).sum())
        reference = reference.shortened(max(1, fitting))
    first_prompt = {stop: prompt for prompt, stop in reversed(reference.stops)}
    stops = sorted(first_prompt)
    request = replace(
        folder,
        stops=[(first_prompt[stop], stop) for stop in stops],
        prompts=[messages for messages, _ in reference.prompts],
    )
    rows = {**reference.rows, "tokens": reference.outputs.tokens}
    (outputs, *of_others), facts = score_in_subprocess(request, rows, *others)
    by_stop = dict(zip(stops, facts.stops, strict=True))
    prompts = zip(facts.prompts, reference.prompts, strict=True)
    reopened = Reopened(
        rows=len(reference.rows["ends"]),
        eval_loss=float(outputs.nats.mean()),
        run_eval_loss=reference.loss,
        top1_agreement=float((outputs.best == reference.outputs.best).double().mean()),
        kl=divergence(reference.outputs, outputs),
        stops=sum(by_stop[stop] for _, stop in reference.stops),
        stops_of=len(reference.stops),
        changed_prompts=sum(found != ids for found, (_, ids) in prompts),
        bound=choose_bound(folder, reference),
    )
    return reopened, of_others


def choose_bound(folder: Folder, reference: Reference) -> Bound:
    """Return the bound: that of float32 if both sides computed in it on the CPU."""
    if reference.compute_dtype == FLOAT8:
        return FROM_FLOAT8
    on_cpu = set(folder.device_map.values()) <= {"cpu", "disk"} and reference.device == "cpu"
    in_float32 = reference.compute_dtype == "float32" and _stored_in_float32(folder)
    return EXACT if on_cpu and in_float32 else ROUNDED


def divergence(run: Outputs, other: Outputs) -> float:
    """Return the mean KL of a run's probabilities against others, nats.

    Over the run's most likely tokens, and all others as one.
    """
    kept = run.log_probs.exp() * (run.log_probs - other.log_probs)
    rest = run.rest.exp() * (run.rest - other.rest)
    return float((kept.sum(-1) + rest).mean())


def score_in_subprocess(
    folder: Folder, *row_sets: Mapping[str, Tensor]
) -> tuple[list[Outputs], Facts]:
    """Return the outputs of a folder for each set of rows, with their `tokens`, and its facts.

    Raises: CheckpointError with what the script could not do.
    """
    with tempfile.TemporaryDirectory() as temporary:
        names = ("request.json", "answer.safetensors", "printed.txt")
        asked, answered, printed = (Path(temporary) / name for name in names)
        paths = [Path(temporary) / f"rows-{number}.safetensors" for number in range(len(row_sets))]
        for rows, path in zip(row_sets, paths, strict=True):
            save_file({name: tensor.contiguous() for name, tensor in rows.items()}, path)
        request = replace(folder, rows=list(map(str, paths)))
        asked.write_text(json.dumps(vars(request), default=str), encoding="utf-8")
        code = opener.run_opener(asked, answered, printed)
        if code:
            lines = printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1] if lines and code > 0 else f"exit status {code}"
            raise CheckpointError(f"{folder.path}: transformers cannot open and use it: {why}")
        with safe_open(answered, framework="pt") as file:
            outputs = [
                Outputs(*(file.get_tensor(f"{number}.{name}") for name in Outputs._fields))
                for number in range(len(row_sets))
            ]
            return outputs, Facts(**json.loads(file.metadata()["facts"]))


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
