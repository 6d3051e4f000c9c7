"""Traced steps of a run's model, where nobody has shown that the closed form fits it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sft_play.config.backends import backend_of
from sft_play.config.schema import Config
from sft_play.plan import counting
from sft_play.plan.model_shape import LLAMA_LIKE, ModelShape, known_config, load_model_config
from sft_play.plan.traced import Trace, TracedStep
from sft_play.runs.folder import cache_folder

TRACER = "sft_play.models.trace_points"
MODEL_SETTINGS = ("name", "revision", "dtype", "attn_implementation", "trust_remote_code")


@dataclass(frozen=True)
class Device:
    """What a step runs on, as far as it changes what the step holds."""

    kind: str  # cuda, cpu
    is_half: bool  # matrix products in 16 bits
    zero_stage: int


@dataclass(frozen=True)
class Tracer:
    """Where traces of a model are kept, and what tells it from others."""

    model_config: Mapping[str, Any]  # config.json
    folder: Path
    environ: Mapping[str, str]

    @classmethod
    def of(cls, config: Config, model: ModelShape, environ: Mapping[str, str]) -> Self | None:
        """Return the tracer of a run's model, None where the closed form has been shown to fit."""
        if model.model_type in LLAMA_LIKE:
            return None
        name = config.model.name
        known = None if Path(name).is_dir() else known_config(name)
        facts = known or load_model_config(name, config.model.revision, environ)
        return cls(facts, cache_folder(config) / "traces", environ)

    def trace(self, config: Config, device: Device) -> TracedStep:
        """Return the traced step of a config.

        Raises: counting.Uncounted with the reason why there is none.
        """
        if not backend_of(config).is_traceable:
            raise counting.Uncounted(f"tuning.backend={config.tuning.backend} cannot be traced")
        request = {
            "settings": _settings(config, device),
            "config": dict(self.model_config),
            "device": device.kind,
            "zero_stage": device.zero_stage,
        }
        told = (
            f"tracing a {config.tuning.mode} step of {config.model.name} without its weights, once"
        )
        facts = counting.answer(TRACER, request, told, self.folder, self.environ)
        return TracedStep.of(Trace.from_json(facts))


def _settings(config: Config, device: Device) -> dict[str, Any]:
    """Return the settings that change what a step holds beyond its rows."""
    model = config.model.model_dump(mode="json", include=set(MODEL_SETTINGS))
    if Path(model["name"]).is_dir():
        model["name"] = str(Path(model["name"]).resolve())
    return {
        "model": model,
        "tuning": config.tuning.model_dump(mode="json"),
        "train": {
            "fast_path": config.train.fast_path,
            "batch_size": 2,  # so that there is a mask where attention needs one
            "packing": False,
            "bf16": device.is_half,
            "fp16": False,
        },
    }
