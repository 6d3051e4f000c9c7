"""The scores of answers in run.json's metrics, by name, with their intervals. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

# Names that are no score of answers, and the ends of intervals
NO_SCORES = frozenset(
    {"eval_loss", "eval_loss_seconds", "answers", "cut_answers", "max_new_tokens"}
    | {"generation_seconds", "loss", "loss_seconds"}
)
BOUNDS = ("_low", "_high")


@dataclass(frozen=True)
class RecordedScore:
    """A score as run.json has it; `low` and `high` are None for a few rows."""

    name: str  # rougeL, or one of train.metrics
    mean: float
    low: float | None
    high: float | None

    def words(self) -> str:
        """Return `rougeL=0.812 [0.790, 0.834]`."""
        text = f"{self.name}={self.mean:.3f}"
        if self.low is None or self.high is None:
            return text
        return f"{text} [{self.low:.3f}, {self.high:.3f}]"


def recorded_scores(metrics: Mapping[str, float]) -> list[RecordedScore]:
    """Return the scores of answers in `metrics`, ROUGE-L first, then by name."""
    names = [name for name in metrics if name not in NO_SCORES and not _is_bound(name, metrics)]
    names.sort(key=lambda name: (name != "rougeL", name))
    return [
        RecordedScore(name, metrics[name], *(metrics.get(f"{name}{end}") for end in BOUNDS))
        for name in names
    ]


def _is_bound(name: str, metrics: Mapping[str, float]) -> bool:
    """Return whether it is an end of another score's interval; a function may be called so, too."""
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in BOUNDS)


def logged_scores(logged: Mapping[str, float], rows: str) -> list[RecordedScore]:
    """Return the scores of answers that a run logged as `<rows>_<name>`; `rows` is eval or test."""
    start = f"{rows}_"
    found = {name.removeprefix(start): logged[name] for name in logged if name.startswith(start)}
    return recorded_scores(found)
