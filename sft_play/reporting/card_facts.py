"""What a model card says of a run: scores, chosen settings, hardware, energy, the base's licence.

Read from the run's folder and the base's. What was not measured or stated there is None, and not
guessed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.loader import environment
from sft_play.config.schema import Config, ModelSection
from sft_play.plan.model_shape import find_file, is_composite
from sft_play.reporting import answers
from sft_play.reporting.answers import answer_scores, read_losses
from sft_play.reporting.summary import loss_score, used_settings
from sft_play.reporting.verdict import Score
from sft_play.runs import metrics
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.metrics import MetricsLine
from sft_play.runs.report import RunReport
from sft_play.runs.resumed import AskedRun

LICENCE_LINE = re.compile(r"^licen[sc]e(?:_name)?:\s*(\S.*?)\s*$", re.MULTILINE)
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
JOULES_A_KWH = 3.6e6
CAUSAL = "AutoModelForCausalLM"
METHOD = "quant_method"
# else PEFT would put adapters over products in 8 bits
DEQUANTISED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
# They say nothing of the weights
OF_PLACES = ("data.cache_dir", "data.image_folder", "train.output_dir", "train.run_name")


@dataclass(frozen=True)
class ChosenSetting:
    """A setting that somebody chose, as the run used it, and where that was written."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Energy:
    """What the GPUs took while the run logged, by NVML."""

    kwh: float
    gpus: int


@dataclass(frozen=True)
class CardFacts:
    """What a run's folder says for its model card."""

    scores: list[Score]
    chosen: list[ChosenSetting]
    hardware: str | None
    energy: Energy | None
    licence: str | None
    has_soft_caps: bool = False  # of attention scores: transformers' sdpa leaves them out
    model_class: str = CAUSAL  # of transformers, that opens the base and what was trained on it
    dequantised_by: str | None = None  # transformers' config that reads the base as training did

    @classmethod
    def of(cls, folder: RunFolder, config: Config, report: RunReport) -> "CardFacts":
        """Return the facts of a run whose report may not be written yet."""
        before, after = (answers.read_answers(folder, when) for when in ("before", "after"))
        losses = [read_losses(folder, when) for when in ("before", "after")]
        scores = [loss_score(report, *losses), *answer_scores(report, before, after)]
        base = base_config(config.model)
        return cls(
            scores=[score for score in scores if score is not None],
            chosen=chosen_settings(folder, AskedRun.read(folder)),
            hardware=hardware_of(report),
            energy=energy_of(metrics.read(folder.metrics).lines),
            licence=licence_of(Path(config.model.name)),
            has_soft_caps=has_soft_caps(base),
            model_class=model_class_of(base) if not config.model.trust_remote_code else CAUSAL,
            dequantised_by=DEQUANTISED_BY.get((base.get("quantization_config") or {}).get(METHOD)),
        )


def chosen_settings(folder: RunFolder, asked: AskedRun) -> list[ChosenSetting]:
    """Return the settings that a user or a config chose."""
    used = used_settings(folder)
    return [
        ChosenSetting(name, used.get(name, setting.value), setting.origin)
        for name, setting in asked.settings.items()
        if setting.is_chosen and name not in OF_PLACES
    ]


def hardware_of(report: RunReport) -> str | None:
    """Return the devices of a run, such as `2 × NVIDIA H200`."""
    if not report.memory_by_rank:
        return None
    names = [rank.name for rank in report.memory_by_rank]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def energy_of(lines: Sequence[MetricsLine]) -> Energy | None:
    """Return the energy between a run's first and last line, None where NVML gave no watts."""
    joules = 0.0
    gpus = 0
    last: float | None = None
    for line in lines:
        watts = [sample.watts for sample in line.gpus if sample.watts is not None]
        if line.time is None:
            continue
        if watts and last is not None:
            joules += sum(watts) * (line.time - last)
            gpus = max(gpus, len(watts))
        last = line.time
    return Energy(joules / JOULES_A_KWH, gpus) if joules else None


def licence_of(base: Path) -> str | None:
    """Return what a base's folder says of its licence, None where it says nothing."""
    readme = base / "README.md"
    if readme.is_file():
        _, _, rest = readme.read_text(encoding="utf-8", errors="replace").partition("---\n")
        found = LICENCE_LINE.search(rest.partition("\n---")[0])
        if found is not None:
            return f"{found[1]} (README.md of the base)"
    for name in LICENCE_FILES:
        if (base / name).is_file():
            return f"{name} in the base's folder"
    return None


def base_config(model: ModelSection) -> Mapping[str, Any]:
    """Return the config.json of a base in its folder or the hub's cache, {} where there is none."""
    path = find_file(model.name, "config.json", model.revision, environment())
    return {} if path is None else read_json(path)


def has_soft_caps(base: Mapping[str, Any]) -> bool:
    """Return whether a base's config.json caps its attention scores."""
    text = base.get("text_config") or base
    return text.get("attn_logit_softcapping") is not None


def model_class_of(base: Mapping[str, Any]) -> str:
    """Return the class that a base's config.json declares, where an auto class may open another."""
    declared = base.get("architectures")
    return declared[0] if declared and is_composite(base) else CAUSAL
